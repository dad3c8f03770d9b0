"""GGUF: every format has the values of the `gguf` package, and a file is the checkpoint that it was made from."""

import contextlib
import gc
import itertools
import random
import re
import struct
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

import specdec
from specdec.checkpoints import Checkpoint, StoredWeights, open_checkpoint
from specdec.checkpoints.gguf.blocks import BLOCKS
from specdec.checkpoints.gguf.checkpoint import generation_config, tokenizer_notices
from specdec.checkpoints.gguf.file import GgufFile
from specdec.cli import main
from specdec.config import RunConfig, TargetConfig
from specdec.contract import Logits, Needs
from specdec.errors import CheckpointError
from specdec.text import Tokenizer
from specdec.text.gguf import joins, tokenizer_parts
from tests import tiny
from tests.checkpoints.gguf_files import copied, random_blocks, saved, write_gguf
from tests.fuzz.mutations import mutate_gguf
from tests.selection import cases
from tests.tiny import kernels_available, make_ops
from tests.tiny_families import ALL_SHAPES, SHAPES, llama3, write_llama, write_qwen2

KINDS = gguf.GGMLQuantizationType
BLOCK_TYPES = [block.name for block in BLOCKS.values() if block.group]


def with_matrix(file: Path, kind: str, blocks: np.ndarray, columns: int) -> Path:
    """A file with the metadata of a tiny model and one matrix, ``layers.0.mlp.up_proj.weight``."""
    writer = gguf.GGUFWriter(file, "qwen2")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, columns),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 1),
        (writer.add_layer_norm_rms_eps, 1e-6),
    ):
        add(value)
    rows = blocks.reshape(-1, columns // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] * blocks.shape[1])
    writer.add_tensor("token_embd.weight", np.ones((4, columns), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    return saved(writer, file)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9) | st.integers(60, 70), blocks=st.integers(1, 3))
@settings(max_examples=6)
def test_values_are_those_of_the_format(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, rows: int, blocks: int
) -> None:
    """Decoded, and packed by every kernel: any bits of a block give what ``gguf.quants.dequantize`` gives."""
    values = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    raw = random_blocks(kind, rows * blocks, seed)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])).view(rows, -1)
    file = with_matrix(tmp_path_factory.mktemp("gguf") / "one.gguf", kind, raw, values * blocks)
    name = "layers.0.mlp.up_proj.weight"
    with open_checkpoint(file) as checkpoint:
        stored = StoredWeights(checkpoint, dtype=torch.float32)
        assert torch.equal(stored[name], expected)
        packed = StoredWeights(checkpoint, dtype=torch.float32, keeps={"gguf"}).matrix(name)
        assert not isinstance(packed, torch.Tensor)
        assert torch.equal(packed.decode(), expected)
        for kernels in kernels_available():
            ops = make_ops(kernels, "float32")
            weights = StoredWeights(checkpoint, dtype=torch.float32, keeps=ops.capabilities.packed_formats)
            matrix, backwards = weights.matrix(name), torch.arange(rows - 1, -1, -2)
            for some, wanted in ((matrix, expected), (matrix[backwards], expected[backwards])):
                got = ops.to_host(ops.embed(ops.weight(some), range(len(wanted))))
                assert torch.equal(got, wanted), kernels


def test_a_file_holds_the_tokenizer_of_the_checkpoint_that_it_was_made_from(tmp_path: Path) -> None:
    """Its ids, the chat template, and the tokens that end a text."""
    folder = write_llama(tmp_path / "folder")
    one = Tokenizer.from_folder(folder)
    other = Tokenizer.from_checkpoint(write_gguf(tmp_path / "one.gguf", folder))
    for text in ("def add(a, b):\n    return a + b", "1234 naïve 漢字 \x00 🙂", "<|im_start|>user\nhello<|im_end|>"):
        assert one.encode(text) == other.encode(text)
        assert one.decode(one.encode(text), skip_special=False) == other.decode(one.encode(text), skip_special=False)
    messages = [{"role": "user", "content": "hello"}]
    assert one.apply_chat_template(messages) == other.apply_chat_template(messages)
    assert one.eos_ids == other.eos_ids


CONVERTED = {
    "llama": "plain",
    "qwen3": "gqa4-tied",
    "gemma3": "as-converted",
    "qwen3_5": "r3-wide-heads",
    "qwen3_5_moe": "mixed-layouts",
    "qwen3_next": "r3-fused",
    "qwen3_moe": "normed",
    "glm4_moe": "no-bias-groups",
    "deepseek_v3": "yarn-groups",
    "gpt_oss": "released",
    "granite": "factors",
    "ministral3": "released",
    "mistral": "none",
    "olmo2": "gqa2",
    "phi3": "longrope",
    "qwen2": "gqa2",
    "smollm3": "every-fourth",
}
FUSED = [f"{family} fused" for family in CONVERTED if family not in ("deepseek_v3", "phi3")]


@pytest.mark.parametrize(
    "case",
    cases(
        [*CONVERTED, *FUSED],
        sample="llama, qwen3, gemma3, qwen3_5, qwen3_next, deepseek_v3, llama fused, qwen3_5_moe fused".split(", "),
        mark="slow",
    ),
)
def test_the_converters_changes_are_undone(tmp_path: Path, case: str) -> None:
    """Tensors bit for bit in bfloat16, greedy tokens, and what the MTP head drafts."""
    family, _, fused = case.partition(" ")
    shape = {key: value for key, value in ALL_SHAPES[family][CONVERTED[family]].items() if key != "shards"}
    folder = tiny.WRITERS[family](tmp_path / "folder", dtype="bfloat16", **shape)
    file = write_gguf(tmp_path / "one.gguf", folder, matrices="BF16", fused=bool(fused))
    with Checkpoint.open(folder) as ours, open_checkpoint(file) as theirs:
        stored, converted = StoredWeights(ours), StoredWeights(theirs)
        for name in converted:
            block, _, part = name.partition("switch_mlp.")
            if part:
                experts = [one for one in stored if one.startswith(f"{block}experts.")]
                assert experts, name
            elif fused and "qkv_proj" in name:
                parts = [stored[name.replace("qkv_proj", f"{part}_proj")] for part in "qkv"]
                assert torch.equal(torch.cat(parts).bfloat16(), converted[name].bfloat16()), name
            elif fused and "gate_up_proj" in name:
                assert name in stored or f"{name.removesuffix('gate_up_proj')}0.gate_proj.weight" in stored
            elif not name.endswith(("embed_q.weight", "unembed_out.weight", "in_proj_qkv.weight", "in_proj_z.weight")):
                assert torch.equal(stored[name].bfloat16(), converted[name].bfloat16()), name
    targets = [specdec.load(str(path), dtype="float32").target for path in (folder, file)]
    tokens = [tiny.plain_run(target, [7, 9, 7, 9, 1], 24) for target in targets]
    assert tokens[0] == tokens[1]
    if family == "deepseek_v3":  # whose head the converter leaves out
        assert targets[1].info.mtp_layers == 0
    elif targets[0].info.mtp_layers:
        assert drafts(targets[0], tokens[0]) == drafts(targets[1], tokens[0])


def drafts(target: Any, tokens: list[int]) -> tuple[tuple[int, ...], list[bytes]]:
    """What its MTP head drafts after nine tokens, and the bits of the logits."""
    state, logits = target.new_state(40, Needs(mtp=True)), []

    def best(step: Logits, _: object) -> int:
        logits.append(step.rows().tobytes())
        return step.argmax()[0]

    target.prefill(state, tokens[:9])
    return target.draft_mtp(state, tokens[9], 5, choose=best), logits


def with_head(model: Path, head: Path | None = None) -> specdec.LanguageModel:
    return specdec.load(config=RunConfig(target=TargetConfig(model=str(model), mtp=head and str(head))))


@pytest.mark.parametrize(
    "family", cases(["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe"], sample=["qwen3_5"], mark="slow")
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_side_file_drafts_as_the_whole_file_does(tmp_path: Path, family: str, fused: bool) -> None:
    """Bit for bit, beside a GGUF target and beside the original; a whole file is taken likewise."""
    folder = tiny.WRITERS[family](tmp_path / "folder", mtp=1)
    whole, trunk, side = (
        write_gguf(tmp_path / f"{part}.gguf", folder, fused=fused, part=part) for part in ("whole", "trunk", "head")
    )
    assert with_head(trunk).info.mtp_layers == 0
    tokens = tiny.plain_run(with_head(whole).target, [7, 9, 7, 9, 1], 12)
    expected = drafts(with_head(whole).target, tokens)
    for model, head in ((trunk, side), (trunk, whole), (whole, side), (folder, side)):
        lm = with_head(model, head)
        assert drafts(lm.target, tokens) == expected
        assert lm.drafter.title == "ngram, mtp"
        assert f"from {head}" in specdec.inspect_checkpoint(str(model), mtp=str(head)).mtp


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("glm4_moe", {}, "its model_type is 'glm4_moe', this model's is 'qwen3_5_text'"),
        ("qwen3_5_moe", {}, "its model_type is 'qwen3_5_moe_text', this model's is 'qwen3_5_text'"),
        ("qwen3_5", {"hidden": 64}, "its hidden_size is 64, this model's is 48"),
        ("qwen3_5", {"vocab": 300}, "its vocab_size is 300, this model's is 277"),
        ("qwen3_5", {"heads": 6}, "its num_attention_heads is 6, this model's is 4"),
        ("qwen3_5", {"intermediate": 64}, r"has the shape \[64, 48\], config.json implies"),
        ("qwen3_5", {"without": "eh_proj"}, r"mtp.fc.weight \[48, 96\] is missing"),
        ("qwen3_5", {"part": "trunk"}, r"holds no MTP head for this model: none of its \d+ tensors"),
        ("llama", {}, "its model_type is 'llama', this model's is 'qwen3_5_text'"),
    ],
)
def test_a_side_file_of_another_model_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    ours = {key: settings.pop(key) for key in ("part", "without") if key in settings}
    model = tiny.write_qwen3_5(tmp_path / "model")
    other = write_gguf(
        tmp_path / "mtp-other.gguf",
        tiny.WRITERS[family](tmp_path / "other", **settings),
        **{"part": "whole" if family == "llama" else "head", **ours},
    )
    for target in (model, write_gguf(tmp_path / "model.gguf", model)):
        with pytest.raises(CheckpointError, match=message.replace("config.json", r"(config.json|model.gguf)")):
            with_head(target, other)


def test_the_config_of_a_head_keeps_its_name(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", tiny.write_qwen3_5(tmp_path / "folder"))
    (tmp_path / "folder" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"^config\.json is not valid JSON"):
        with_head(model, tmp_path / "folder")


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_XS", "Q5_1"])
def test_blocks_of_several_value_heads_are_brought_into_order(tmp_path: Path, kind: str) -> None:
    """Those of ``ssm_out``, decoded and packed: the values of the format, with every head's columns in its group."""
    keys, ratio, width = 2, 4, 96
    shape = {"key_heads": keys, "value_heads": keys * ratio, "value_dim": width, "layer_types": ["linear_attention"]}
    whole = write_gguf(tmp_path / "whole.gguf", tiny.WRITERS["qwen3_5"](tmp_path / "folder", **shape, mtp=False))
    reader, rows = gguf.GGUFReader(whole), 48
    blocks = random_blocks(kind, rows * keys * ratio * width // gguf.GGML_QUANT_SIZES[getattr(KINDS, kind)][0], 7)
    writer = copied(reader, tmp_path / "one.gguf", arch="qwen35")
    for tensor in reader.tensors:
        if tensor.name.endswith("ssm_out.weight"):
            writer.add_tensor(tensor.name, blocks.reshape(rows, -1), raw_dtype=getattr(KINDS, kind))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    dealt = gguf.quants.dequantize(blocks, getattr(KINDS, kind)).reshape(rows, ratio, keys, width)
    expected = torch.from_numpy(dealt.swapaxes(1, 2).reshape(rows, -1).copy())
    name = "layers.0.linear_attn.out_proj.weight"
    file = saved(writer, tmp_path / "one.gguf")
    with open_checkpoint(file) as checkpoint:
        assert torch.equal(StoredWeights(checkpoint, dtype=torch.float32)[name], expected)
        for kernels in kernels_available():
            ops = make_ops(kernels, "float32")
            stored = StoredWeights(checkpoint, dtype=torch.float32, keeps=ops.capabilities.packed_formats)
            got = ops.to_host(ops.embed(ops.weight(stored.matrix(name)), range(rows)))
            assert torch.equal(got, expected), kernels


@pytest.mark.parametrize("name", ["qwen2", None])
def test_a_guessed_pre_tokenizer_is_a_notice(tmp_path: Path, name: str | None) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    if name is not None:
        writer.add_tokenizer_pre(name)
    notices = list(tokenizer_notices(GgufFile.open(saved(writer, tmp_path / "one.gguf"))))
    assert len(notices) == (name is None)


def test_a_file_without_kinds_of_tokens_is_a_notice(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_token_list(["a", "b"])
    notices = list(tokenizer_notices(GgufFile.open(saved(writer, tmp_path / "one.gguf"))))
    assert [("token_type" in notice) for notice in notices] == [True]


def test_columns_of_several_heads_with_one_scale_are_refused(tmp_path: Path) -> None:
    """The columns of ``ssm_out`` are in another order, and a group cannot be cut."""
    shape = {**tiny.QWEN3_5_SHAPES["r3-gqa3-untied"], "value_dim": 16, "value_heads": 4, "key_heads": 2}
    folder = tiny.WRITERS["qwen3_5"](tmp_path / "folder", **shape)
    file = write_gguf(tmp_path / "one.gguf", folder, matrices="Q8_0")
    with pytest.raises(CheckpointError, match="ssm_out is stored as Q8_0"):
        specdec.load(str(file))


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|endoftext|>", "<|end|>", "<|call|>"], [0, 1]),
        (["<|return|>", "<|endoftext|>", "<|end|>", "<|call|>"], [0, 1, 3]),
        (["<|return|>", "<|im_end|>", "<|end|>"], [0, 1, 2]),
    ],
)
def test_a_message_is_no_text_in_the_format_of_gpt_oss(tmp_path: Path, special: list[str], ends: list[int]) -> None:
    """``<|end|>`` ends a generation but where ``<|return|>`` and ``<|call|>`` do."""
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "gpt-oss")
    writer.add_token_list(special)
    writer.add_eos_token_id(0)
    assert generation_config(GgufFile.open(saved(writer, tmp_path / "one.gguf"))) == {"eos_token_id": ends}


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "gpt-4o": ["Hello", "World", " DON'T", " it's", " ", "123", "45", " x", "/\n", " ", " é"],
        "tekken": ["Hello", "World", " DON", "'T", " it", "'s", " ", *"12345", " x", "/\n", " ", " é"],
        "llama-bpe": ["HelloWorld", " DON", "'T", " it", "'s", " ", "123", "45", " x", "/\n", " ", " é"],
    }.items(),
)
def test_the_named_rules_split_words(tmp_path: Path, name: str, words: list[str]) -> None:
    text, alphabet = "HelloWorld DON'T it's 12345 x/\n  é", [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * len(alphabet))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    core, *_ = tokenizer_parts(GgufFile.open(saved(writer, tmp_path / "one.gguf")))
    assert [text[first:last] for _, (first, last) in core.pre_tokenizer.pre_tokenize_str(text)] == words


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SCORED = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "bb", "bc", "▁b", "cab", "▁abc", "é"]


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text(alphabet="ab c é漢\n", max_size=24), order=st.permutations(range(len(SCORED))))
@settings(max_examples=25)
def test_sentencepiece_joins_the_best_neighbours_first(
    tmp_path_factory: pytest.TempPathFactory, prefix: bool, text: str, order: list[int]
) -> None:
    """Characters without a piece are their bytes, runs of spaces user-defined tokens, and the text comes back."""
    folder = tmp_path_factory.mktemp("pieces")
    file, tokens = folder / "one.gguf", [*PIECES, *SCORED, "  ", "\n\n"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(PIECES) + [-float(rank) for rank in order] + [-1000.0] * 2)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(SCORED), 4, 4])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    tokenizer = Tokenizer.from_checkpoint(saved(writer, file))
    ids = [1]
    for part in re.split("(\n\n)", text):
        if part == "\n\n":
            ids.append(tokens.index(part))
        elif part:
            ids += _joined(("▁" if prefix else "") + part.replace(" ", "▁"), tokens, order)
    assert tokenizer.encode(text) == ids
    if not prefix:
        assert tokenizer.decode(ids) == text


def _joined(text: str, tokens: list[str], order: list[int]) -> list[int]:
    """The oracle: join the best pair, the leftmost of equal ones, until none makes a token."""
    ranks = {piece: rank for piece, rank in zip(SCORED, order, strict=True)} | {"▁▁": -1}
    symbols = list(text)
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ranks]:
        at = min(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    known = {**{token: i for i, token in enumerate(tokens)}, "▁▁": tokens.index("  ")}
    found: list[int] = []
    for symbol in symbols:
        found += [known[symbol]] if symbol in known else [3 + byte for byte in symbol.encode()]
    return found


MODELS = ["qwen2 Q5_1", "gpt_oss MXFP4", "qwen3_5_moe Q8_0", "qwen3_5 Q8_0", "qwen2 Q4_0", "qwen2 Q8_0"]


@pytest.mark.parametrize("model", cases(MODELS, sample=3, mark="slow"))
def test_a_quantised_file_is_the_model_of_its_decoded_values(tmp_path: Path, model: str) -> None:
    """With packed weights: plain and speculative tokens agree, and plain ones with those of the decoded model.

    Weights that the file holds in one tensor are packed as those that it holds apart are.
    """
    family, matrices = model.split()
    shapes = {"qwen2": {"heads": 4, "head_dim": 16}, "gpt_oss": SHAPES["gpt_oss"]["released"]}
    shape = shapes.get(family, {"value_dim": 32, "value_heads": 6, "inner": 32, "shared": 32})
    shape = {key: size for key, size in shape.items() if family.endswith("moe") or key not in ("inner", "shared")}
    folder = tiny.WRITERS[family](tmp_path / "folder", **shape | {"hidden": 64, "intermediate": 96})
    files = [write_gguf(tmp_path / f"{fused}.gguf", folder, matrices=matrices, fused=fused) for fused in (False, True)]
    runs = ((0, "none", "auto"), (1, "none", "auto"), (1, "ngram", "auto"), (0, "none", "decoded"))
    models = [
        specdec.load(str(files[file]), drafter=drafter, weights=weights, activations="float", dtype="float32")
        for file, drafter, weights in runs
    ]
    assert "decoded" not in models[1].info.weights
    tokens = [lm.generate("one two one two", max_new_tokens=32).tokens for lm in models]
    assert all(one == tokens[0] for one in tokens)


@pytest.mark.parametrize("model", ["demo", "file"])
def test_a_model_is_freed_with_its_last_reference(tmp_path: Path, model: str) -> None:
    """At once: the collector does not count a model's gigabytes, so it may not run for a long time."""
    lm = specdec.load(model if model == "demo" else str(write_gguf(tmp_path / "one.gguf", write_qwen2(tmp_path / "f"))))
    lm.generate("one two one two", max_new_tokens=8)
    target = weakref.ref(lm.target)
    gc.collect()
    gc.disable()
    try:
        del lm
        assert target() is None
    finally:
        gc.enable()


def test_weights_stay_as_a_file_has_them_with_a_notice_and_its_traffic_is_judged(tmp_path: Path) -> None:
    folder = write_qwen2(tmp_path / "folder", hidden=64, heads=4, head_dim=16, intermediate=96)
    file, trace = write_gguf(tmp_path / "one.gguf", folder, matrices="Q8_0"), tmp_path / "trace.jsonl"
    lm = specdec.load(str(file), weights="int4")
    assert "weights = 'int4' leaves quantised weights as they are stored" in lm.notices
    assert lm.info.weights.startswith("q8_0 (")
    assert "rounded" not in lm.info.weights
    for command in (["generate", "-p", "one two", "-n", "4", "--trace"], ["accept", "--drafter", "ngram", "--trace"]):
        done = CliRunner().invoke(main, [*command, str(trace), "-m", str(file)])
        assert done.exit_code == 0, done.stderr


def test_a_split_file_is_the_whole_one(tmp_path: Path) -> None:
    """Parts are found by name, also when the first one holds the metadata alone; a missing one is named."""
    folder = write_llama(tmp_path / "folder")
    whole = write_gguf(tmp_path / "whole.gguf", folder)
    parts = split(whole, tmp_path / "parts")
    tokens = [specdec.load(str(path)).generate("def add", max_new_tokens=12).tokens for path in (whole, parts[0])]
    assert tokens[0] == tokens[1]
    with pytest.raises(CheckpointError, match=r"part 1 \(from 0\) of 3"):
        specdec.load(str(parts[1]))
    parts[2].unlink()
    with pytest.raises(CheckpointError, match="part 3 of 3 is missing"):
        specdec.load(str(parts[0]))


def split(file: Path, folder: Path) -> list[Path]:
    """Three parts: the metadata, and half of the tensors each."""
    folder.mkdir()
    reader = gguf.GGUFReader(file)
    parts = []
    for number, tensors in enumerate(([], reader.tensors[::2], reader.tensors[1::2])):
        path = folder / f"m-{number + 1:05}-of-00003.gguf"
        writer = copied(reader, path, fields=number == 0)
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", 3, gguf.GGUFValueType.UINT16)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        parts.append(saved(writer, path))
    return parts


def test_llama_3_scaling_is_found_from_its_divisors(tmp_path: Path) -> None:
    scaling = llama3(8.0, 4.0, 8192)
    folder = write_llama(tmp_path / "folder", theta=5e5, rope_scaling=scaling)
    file = write_gguf(tmp_path / "plain.gguf", folder)
    assert "rope_scaling" not in open_checkpoint(file).config
    from specdec.backends.ops import Rope

    divisors = np.array(Rope.of(5e5, 12).inv_freq) / np.array(Rope.llama3(5e5, 12, factor=8.0, original=8192).inv_freq)
    reader, scaled = gguf.GGUFReader(file), tmp_path / "scaled.gguf"
    writer = copied(reader, scaled)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    saved(writer, scaled)
    assert open_checkpoint(scaled).config["rope_scaling"] == scaling
    tokens = [specdec.load(str(path)).generate("def add", max_new_tokens=12).tokens for path in (folder, scaled)]
    assert tokens[0] == tokens[1]


# --- broken files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    return write_gguf(folder / "one.gguf", write_llama(folder / "folder", layers=1), matrices="BF16").read_bytes()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_broken_file_is_refused_by_name_or_read(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, seed: int
) -> None:
    """One sentence that names the file, and never another error."""
    file = tmp_path_factory.mktemp("broken") / "one.gguf"
    file.write_bytes(mutate_gguf(random.Random(seed), whole).data)
    with contextlib.suppress(specdec.SpecdecError):  # nothing else may be raised
        specdec.load(str(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1"),
        ({"version": 3 << 24}, "big-endian"),
        ({"tensors": 2**40}, "one.gguf"),
        ({"metadata": 2**60}, "one.gguf"),
        ({"tensors": 0, "metadata": 0}, "lacks the key general.architecture"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, whole: bytes, change: dict[str, int], message: str) -> None:
    numbers = dict(zip(("version", "tensors", "metadata"), struct.unpack_from("<IQQ", whole, 4), strict=True)) | change
    file = tmp_path / "one.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", *numbers.values()) + whole[24:])
    with pytest.raises(CheckpointError, match=message):
        specdec.load(str(file))


def test_a_tensor_that_leaves_a_gap_is_refused(tmp_path: Path, whole: bytes) -> None:
    """Its type or shape is not what was written."""
    at = whole.index(name := b"blk.0.attn_norm.weight") + len(name) + 12
    assert whole[at : at + 4] == bytes(4)  # F32
    file = tmp_path / "one.gguf"
    file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    with pytest.raises(CheckpointError, match=f"leaves [0-9]+ bytes out between '{name.decode()}' and"):
        specdec.load(str(file))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.eos_token_id", [1, 2]),
        ("tokenizer.ggml.add_bos_token", "yes"),
        ("llama.rope.scaling.factor", 4.0),
        ("llama.rope.scale_linear", 4.0),
        ("llama.attention.sliding_window", 4),
        ("llama.attention.value_length", 8),
        ("general.type", "adapter"),
        ("general.type", [1, 2]),
        ("general.alignment", 4),
        ("tokenizer.ggml.eos_token_id", 10**6),
        ("tokenizer.ggml.eot_token_id", 277),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", 20),
        ("llama.attention.layer_norm_rms_epsilon", -1e-6),
        ("llama.block_count", 2**20),
        ("llama.context_length", 0),
        ("llama.rope.freq_base", 0.5),
    ],
)
def test_a_key_that_is_refused_is_named(tmp_path: Path, key: str, value: object) -> None:
    """In one sentence that begins with the file, by ``load`` and by ``info``, which reads no tokenizer."""
    file = write_gguf(tmp_path / "one.gguf", write_llama(tmp_path / "folder"), **{key: value})
    for read in (specdec.load, specdec.inspect_checkpoint)[: 1 if "add_bos" in key else 2]:
        with pytest.raises(CheckpointError) as caught:
            read(str(file))
        assert str(caught.value).startswith("one.gguf")
        assert "config.json" not in str(caught.value)
        assert key.removesuffix(".factor") in str(caught.value) or value == "adapter"


@given(st.lists(st.text("ab\0é😀", max_size=6), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_the_joins_of_a_vocabulary_are_all_that_there_are(tokens: list[str], order: random.Random) -> None:
    ranked, known = order.sample(range(len(tokens)), len(tokens)), set(tokens)
    ways = [(tokens[at][:end], tokens[at][end:]) for at in ranked for end in range(1, len(tokens[at]))]
    assert joins(tokens, np.array(ranked)) == [way for way in ways if known.issuperset(way)]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("llama.feed_forward_length", r"has the shape .*, one\.gguf implies \[60, "),
        ("llama.block_count", r"layers.\d+.self_attn.q_proj.weight .* is missing"),
    ],
)
def test_a_size_that_its_tensors_contradict_is_the_files_own(tmp_path: Path, key: str, message: str) -> None:
    file = write_gguf(tmp_path / "one.gguf", write_llama(tmp_path / "folder"), **{key: 60})
    with pytest.raises(CheckpointError, match=message) as caught:
        specdec.load(str(file))
    assert caught.value.facts["file"] == str(file)
    assert "config.json" not in str(caught.value)


def test_advice_on_a_key_names_the_files_own(tmp_path: Path) -> None:
    folder, key = tiny.WRITERS["qwen3_5"](tmp_path / "folder", mtp=1), "qwen35.nextn_predict_layers"
    settings = {key: 2, "qwen35.block_count": 60, "qwen35.attention.recurrent_layers": None}
    with pytest.raises(CheckpointError, match=f"^one.gguf: '{key}' is 2") as caught:
        specdec.load(str(write_gguf(tmp_path / "one.gguf", folder, **settings)))
    assert caught.value.facts["try"].startswith(f"a copy with '{key}' = 0")


def test_an_unknown_tokenizer_or_architecture_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "folder")
    file = write_gguf(tmp_path / "one.gguf", folder)
    content = file.read_bytes()
    for old, new, message in ((b"gpt-2", b"gpt-9", "rules 'gpt-9'"), (b"llama", b"lamma", "architecture 'lamma'")):
        file.write_bytes(content.replace(old, new))
        with pytest.raises(CheckpointError, match=message):
            specdec.load(str(file))
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"one\.gguf is empty"):
        specdec.load(str(file))
