"""Tiny random Hugging Face checkpoints in the real layout, and targets and language models over them.

The weights are drawn so that mistakes show: logits are spread (the argmax is not one token for ever), norms stored as
an offset from 1 scatter around 0 (so that a missing ``1 +`` matters), decays run from fast to slow.

Nothing here is a test. ``conftest.py`` caches the folders per session.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("e", "r"), ("a", "n"))  # Ġ is byte-level BPE's space
TOKENIZER_SIZE = 256 + len(MERGES) + 3  # a byte each, the merges, the three special tokens
PRINTABLE = (*range(94), *range(256, 256 + len(MERGES)))  # ids of "!" to "~" and of the merges
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Draw:
    """Named random tensors from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std + mean

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(rows, columns, std=gain / math.sqrt(columns))

    def between(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator) * (high - low) + low


def _attention(draw: _Draw, hidden: int, heads: int, kv: int, dim: int, *, gated: bool) -> dict[str, torch.Tensor]:
    offset = 0.0 if gated else 1.0  # Qwen3.5 stores q/k norms as an offset from 1, Qwen3 as they are
    return {
        "self_attn.q_proj.weight": draw.matrix((2 if gated else 1) * heads * dim, hidden, 1.5),
        "self_attn.k_proj.weight": draw.matrix(kv * dim, hidden, 1.5),
        "self_attn.v_proj.weight": draw.matrix(kv * dim, hidden),
        "self_attn.o_proj.weight": draw.matrix(hidden, heads * dim, 1.5),
        "self_attn.q_norm.weight": draw.normal(dim, mean=offset + 0.3, std=0.4),
        "self_attn.k_norm.weight": draw.normal(dim, mean=offset + 0.3, std=0.4),
    }


def _mlp(draw: _Draw, hidden: int, intermediate: int) -> dict[str, torch.Tensor]:
    return {
        "mlp.gate_proj.weight": draw.matrix(intermediate, hidden, 1.5),
        "mlp.up_proj.weight": draw.matrix(intermediate, hidden, 1.5),
        "mlp.down_proj.weight": draw.matrix(hidden, intermediate, 1.5),
    }


def _norms(draw: _Draw, hidden: int, *names: str, mean: float) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": draw.normal(hidden, mean=mean, std=0.4) for name in names}


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def write_qwen3_5(
    folder: pathlib.Path,
    *,
    seed: int = 0,
    hidden: int = 48,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 1,
    head_dim: int = 16,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 12,
    value_dim: int = 16,
    kernel: int = 4,
    intermediate: int = 72,
    vocab: int = 277,
    tied: bool = True,
    mtp: bool = True,
    mtp_lm_head: bool = False,
    mtp_embeddings: bool = False,
    dtype: str = "float32",
    rotary_factor: float = 0.25,
    theta: float = 1e4,
    layer_types: Sequence[str] | None = None,
    max_positions: int = 512,
    vl: bool = False,
    shards: int = 1,
    logit_spread: float = 3.0,
    printable: bool = False,
    mlps: Callable[[_Draw, int], dict[str, torch.Tensor]] | None = None,
    grouped: bool = False,
    keys: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """A Qwen3.5 checkpoint; ``vl`` gives the vision-language layout (prefixes, ``text_config``, a vision tensor).

    ``printable`` (untied only) makes it generate ASCII, so that tests of text see characters, not stray bytes. Other
    families of its kind have other ``mlps`` (of layer i, -1 for the head), ``grouped`` projections as in Qwen3-Next,
    and other ``keys`` in the config.
    """
    draw = _Draw(seed)
    mlp = mlps or (lambda draw, i: _mlp(draw, hidden, intermediate))
    if layer_types is None:
        layer_types = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    text: dict[str, torch.Tensor] = {"embed_tokens.weight": draw.matrix(vocab, hidden, logit_spread)}
    text |= _norms(draw, hidden, "norm", mean=0.2)
    for i, kind in enumerate(layer_types):
        layer = _norms(draw, hidden, *_LAYER_NORMS, mean=0.0) | mlp(draw, i)
        if kind == "full_attention":
            layer |= _attention(draw, hidden, heads, kv_heads, head_dim, gated=True)
        else:
            values = value_heads * value_dim
            rows = {"qkv": channels, "z": values, "b": value_heads, "a": value_heads}
            if grouped:
                rows = {"qkvz": channels + values, "ba": 2 * value_heads}
            delta = {
                **{f"in_proj_{name}.weight": draw.matrix(count, hidden, 1.5) for name, count in rows.items()},
                "conv1d.weight": draw.normal(channels, 1, kernel, std=0.7),
                "A_log": torch.log(draw.between(0.05, 4.0, value_heads)),
                "dt_bias": draw.normal(value_heads, mean=-2.0),
                "norm.weight": draw.normal(value_dim, mean=1.0, std=0.3),
                "out_proj.weight": draw.matrix(hidden, value_heads * value_dim, 1.5),
            }
            layer |= _under("linear_attn.", delta)
        text |= _under(f"layers.{i}.", layer)
    tensors = _under("model.language_model." if vl else "model.", text)
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(vocab, hidden, logit_spread)
        if printable:  # small logits for bytes that are no text of their own
            tensors["lm_head.weight"] *= torch.tensor([1.0 if i in PRINTABLE else 0.1 for i in range(vocab)])[:, None]
    if mtp:
        head = _norms(draw, hidden, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", mean=0.2)
        head["fc.weight"] = draw.matrix(hidden, 2 * hidden, 1.5)
        layer = _norms(draw, hidden, *_LAYER_NORMS, mean=0.0) | mlp(draw, -1)
        layer |= _attention(draw, hidden, heads, kv_heads, head_dim, gated=True)
        head |= _under("layers.0.", layer)
        if mtp_lm_head:
            head["lm_head.weight"] = draw.matrix(vocab, hidden, logit_spread)
        if mtp_embeddings:
            head["embed_tokens.weight"] = draw.matrix(vocab, hidden, logit_spread)
        tensors |= _under("mtp.", head)
    half = int(head_dim * rotary_factor) // 2
    if vl:
        tensors["model.visual.patch_embed.proj.bias"] = draw.normal(8)
    text_config = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": kernel,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": max_positions,
        "mtp_num_hidden_layers": int(mtp),
        "mtp_use_dedicated_embeddings": mtp_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }
    text_config = {key: value for key, value in (text_config | dict(keys or {})).items() if value is not None}
    if vl:
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text_config,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": tied,
        }
    else:
        config = {"architectures": ["Qwen3_5ForCausalLM"]} | text_config
    return _write(folder, config, tensors, vocab, dtype, shards)


def write_llama(
    folder: pathlib.Path,
    *,
    model_type: str = "llama",
    seed: int = 0,
    hidden: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 12,
    intermediate: int = 72,
    vocab: int = 277,
    tied: bool = True,
    dtype: str = "float32",
    theta: float = 1e4,
    rope_scaling: Mapping[str, Any] | None = None,
    max_positions: int = 512,
    shards: int = 1,
    logit_spread: float = 3.0,
    edit: Callable[[_Draw, dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    more: Callable[[_Draw], dict[str, torch.Tensor]] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """A Llama 3 checkpoint; as ``model_type`` "qwen2" q, k and v have biases, as "qwen3" q and k have norms.

    Families like it ``edit`` the tensors of a layer, have ``more`` beside them, and other ``keys`` in the config.
    """
    draw = _Draw(seed)
    tensors = {"model.embed_tokens.weight": draw.matrix(vocab, hidden, logit_spread)}
    tensors |= _under("model.", _norms(draw, hidden, "norm", mean=1.2))
    for i in range(layers):
        layer = _norms(draw, hidden, *_LAYER_NORMS, mean=1.0) | _mlp(draw, hidden, intermediate)
        kinds = {"bias": model_type == "qwen2", "normed": model_type.startswith(("qwen3", "gemma"))}
        layer |= plain_attention(draw, hidden, heads, kv_heads, head_dim, **kinds)
        tensors |= _under(f"model.layers.{i}.", edit(draw, layer) if edit else layer)
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(vocab, hidden, logit_spread)
    if more is not None:
        tensors |= _under("model.", more(draw))
    config = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6 if model_type == "qwen3" else 1e-5,
        "max_position_embeddings": max_positions,
        "rope_theta": theta,
        **({} if rope_scaling is None else {"rope_scaling": dict(rope_scaling)}),
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }
    if model_type != "llama":
        config |= {"use_sliding_window": False}
    if model_type == "qwen2":
        config |= {"sliding_window": max_positions, "max_window_layers": layers}
        assert head_dim * heads == hidden, "the heads of Qwen2.5 fill the hidden size"
    else:
        config |= {"attention_bias": False, "mlp_bias": False, "head_dim": head_dim}
    return _write(folder, config | dict(keys or {}), tensors, vocab, dtype, shards)


def plain_attention(
    draw: _Draw, hidden: int, heads: int, kv: int, dim: int, *, bias: bool, normed: bool
) -> dict[str, torch.Tensor]:
    """Plain norms of q and k, or none; biases of q, k and v, or none."""
    tensors = _attention(draw, hidden, heads, kv, dim, gated=False)
    if not normed:
        tensors = {name: tensor for name, tensor in tensors.items() if "_norm." not in name}
    if bias:
        sizes = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
        tensors |= {f"self_attn.{name}_proj.bias": draw.normal(size, std=0.3) for name, size in sizes.items()}
    return tensors


def write_qwen3(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    """A Qwen3 checkpoint: plain norms, no gate, no MTP head."""
    return write_llama(folder, model_type="qwen3", **{"kv_heads": 1, **settings})


def shape(numbers: str = "", **others: Any) -> dict[str, Any]:
    """Settings of a writer: ``shape("hidden=40 rotary_factor=0.5", tied=False)``."""
    pairs = (pair.split("=") for pair in numbers.split())
    return {name: json.loads(value) for name, value in pairs} | others


# A tiny Qwen3.5: two kinds of layers, r = 3, GQA 3; few tokens of its own choice, so that n-grams match now and then.
HYBRID = shape(
    "hidden=36 layers=3 heads=3 kv_heads=1 head_dim=12 rotary_factor=0.5 "
    "key_heads=1 value_heads=3 key_dim=10 value_dim=14 intermediate=44",
    tied=False,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    printable=True,
)
# Odd on purpose: Hv/Hk of 1, 2 and 3, GQA of 1 to 4, tied and untied, nothing a power of two for long. 128-wide heads
# are what the real models have.
QWEN3_5_SHAPES: dict[str, dict[str, Any]] = {
    "r1-gqa4-tied": shape(
        "hidden=48 heads=4 kv_heads=1 key_heads=3 value_heads=3 key_dim=20 value_dim=12 intermediate=76"
    ),
    "r2-gqa1-untied": shape(
        "hidden=40 heads=3 kv_heads=3 head_dim=24 "
        "key_heads=2 value_heads=4 key_dim=12 value_dim=20 intermediate=72 vocab=301",
        tied=False,
    ),
    "r3-gqa3-untied": shape(
        "hidden=60 heads=6 kv_heads=2 head_dim=20 rotary_factor=0.5 "
        "key_heads=1 value_heads=3 key_dim=8 value_dim=28 intermediate=68",
        tied=False,
    ),
    "r3-wide-heads": shape(
        "hidden=36 heads=2 kv_heads=1 head_dim=40 "
        "key_heads=2 value_heads=6 key_dim=24 value_dim=18 intermediate=52 vocab=269 theta=1e7"
    ),
    "real-heads": shape(
        "hidden=72 layers=2 heads=1 kv_heads=1 head_dim=256 "
        "key_heads=1 value_heads=2 key_dim=128 value_dim=128 intermediate=100 theta=1e7",
        tied=False,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mixed-layers": shape(
        "hidden=44 heads=4 kv_heads=2 head_dim=16 rotary_factor=1.0 key_heads=2 value_heads=2 kernel=3 shards=3",
        vl=True,
        layer_types=["full_attention", "linear_attention", "full_attention"],
    ),
    "attention-only": shape(
        "hidden=52 heads=4 kv_heads=1 head_dim=12 rotary_factor=0.5",
        layer_types=["full_attention", "full_attention"],
        mtp_lm_head=True,
    ),
    "own-embedding-tied": {"hidden": 40, "mtp_embeddings": True},
    "own-embedding-untied": {"hidden": 44, "tied": False, "mtp_embeddings": True, "mtp_lm_head": True},
    "own-embedding-main-head": {"hidden": 36, "tied": False, "mtp_embeddings": True},
}
QWEN3_SHAPES: dict[str, dict[str, Any]] = {
    "gqa4-tied": shape("hidden=44 heads=4 kv_heads=1 head_dim=12"),
    "gqa1-untied": shape("hidden=60 heads=5 kv_heads=5 head_dim=20 vocab=283", tied=False),
    "gqa3-long-theta": shape("hidden=36 layers=3 heads=6 kv_heads=2 head_dim=28 theta=1e6"),
    "real-heads": shape("hidden=50 heads=2 kv_heads=1 head_dim=128 intermediate=90 shards=2"),
    "one-head": shape("hidden=30 heads=1 kv_heads=1 head_dim=10 intermediate=34", tied=False),
    "wide": shape("hidden=100 layers=1 heads=8 kv_heads=2 head_dim=6 intermediate=210 vocab=601"),
}

WRITERS = {"qwen3_5": write_qwen3_5, "qwen3": write_qwen3}

# --- files -----------------------------------------------------------------------------------------------------------


def _write(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    vocab: int,
    dtype: str,
    shards: int,
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    stays_float32 = ("A_log", "linear_attn.norm.weight")  # as in the Qwen3.5 releases
    stored = {
        name: tensor.contiguous().to(torch.float32 if name.endswith(stays_float32) else getattr(torch, dtype))
        for name, tensor in tensors.items()
    }
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(stored.items())[shard::shards])
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        metadata = {"total_size": sum(tensor.nbytes for tensor in stored.values())}
        write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    write_tokenizer(folder)
    eos = TOKENIZER_SIZE - 3
    write_json(folder / "generation_config.json", {"eos_token_id": [eos + 2, eos]})
    write_json(folder / "config.json", {**config, "eos_token_id": eos})
    if vocab < TOKENIZER_SIZE:
        raise ValueError(f"the tiny tokenizer has {TOKENIZER_SIZE} tokens, a vocabulary of {vocab} is too small")
    return folder


def write_tokenizer(folder: pathlib.Path) -> None:
    """A byte-level BPE with a few merges; special tokens behind them: end of text, start and end of a chat message."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, IM_START, IM_END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def edit_config(folder: pathlib.Path, **changes: Any) -> None:
    """Change keys of ``config.json``; a value of None removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in config.items() if value is not None})


# --- targets and language models -------------------------------------------------------------------------------------


def kernels_available() -> tuple[str, ...]:
    """The CPU kernels that this machine can run: "torch" (the reference), and "native" where they compile."""
    from specdec.backends.cpu.library import KernelsUnavailable, load_kernels

    return ("torch",) if isinstance(load_kernels(), KernelsUnavailable) else ("torch", "native")


def make_ops(kernels: str, dtype: str, *, activations: str = "float") -> Any:
    """The ops of the CPU backend with the kernels of that name; skips the test where they cannot be compiled."""
    from specdec.backends.cpu.packed import INT8
    from specdec.backends.cpu.reference import ReferenceOps

    if kernels == "torch":
        return ReferenceOps(getattr(torch, dtype), int8=INT8[activations])
    from specdec.backends.cpu.native import NativeOps
    from tests.instruction_sets import kernels_of

    return NativeOps(getattr(torch, dtype), kernels_of(), int8=INT8[activations])


def make_target(
    folder: pathlib.Path, *, kernels: str = "torch", dtype: str = "float32", ops: Any = None, weights: str = "auto"
) -> Any:
    """The checkpoint on the CPU with the kernels of that name (or on ``ops``), past ``load_target``'s choices."""
    from specdec.checkpoints import Checkpoint, StoredWeights, text_config
    from specdec.models.loading import build_target, checked_head, family_of
    from specdec.models.weights import Weights

    checkpoint = Checkpoint.open(folder)
    spec, family = family_of(text_config(checkpoint.config), folder)
    wanted, found = checked_head(checkpoint, spec, family)
    found.raise_for_errors()
    ops = make_ops(kernels, dtype) if ops is None else ops
    keeps = ops.capabilities.packed_formats
    stored = StoredWeights(checkpoint, dtype=getattr(torch, dtype), keeps=keeps, weights=weights)
    return build_target(spec, family, Weights(ops, stored, headless=wanted.headless), dtype=dtype)


def make_lm(folder: pathlib.Path, target: Any, drafter: Any = None, policy: Any = None, **generation: Any) -> Any:
    """A language model over ``target``; ``drafter(env)`` and ``policy()`` build plugins that nobody registered."""
    from specdec.config import GenerationConfig, RunConfig, TargetConfig
    from specdec.contract import DepthPolicySpec, DrafterSpec
    from specdec.drafters.none import NoDrafter
    from specdec.pipeline import LanguageModel
    from specdec.policies.fixed import FixedConfig, FixedPolicy
    from specdec.registry.parts import DepthPart, DrafterPart
    from specdec.verifiers.strict import StrictVerifier

    make_drafter = drafter or (lambda env: NoDrafter(None, env))
    make_policy = policy or (lambda: FixedPolicy(FixedConfig(depth=3)))
    config = RunConfig(target=TargetConfig(model=str(folder)), generation=GenerationConfig(**generation))
    return LanguageModel(
        config=config,
        target=target,
        tokenizer=_tokenizer(folder),
        drafter=DrafterPart(
            spec=DrafterSpec(
                name="tested", factory=lambda config, env: make_drafter(env), needs=needs_of(target, final_hidden=False)
            )
        ),
        verifier=StrictVerifier(None),
        depth=DepthPart(spec=DepthPolicySpec(name="tested", factory=lambda config: make_policy())),
    )


@functools.cache
def _tokenizer(folder: pathlib.Path) -> Any:
    from specdec.text import Tokenizer

    return Tokenizer.from_folder(folder)


def needs_of(target: Any, *, final_hidden: bool = True) -> Any:
    """Everything that a target can give but the states between its layers."""
    from specdec.contract import Needs

    return Needs(mtp=bool(target.info.mtp_layers), final_hidden=final_hidden)


def on_host(target: Any, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the arrays of a snapshot."""
    host = target.ops.to_host
    return {name: (array if isinstance(array, torch.Tensor) else host(array)).clone() for name, array in arrays.items()}


def state_arrays(target: Any, state: Any) -> dict[str, torch.Tensor]:
    """Everything committed in a state, by name, the MTP cache left out: it depends on what was drafted."""
    arrays = on_host(target, target.snapshot(state).arrays)
    return {name: array for name, array in arrays.items() if not name.startswith("mtp")}


def assert_same_bits(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same arrays, bit for bit (a NaN equals itself, -0 differs from 0)."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_equal_bits(got[name], array, name)


def assert_equal_bits(got: torch.Tensor, wanted: torch.Tensor, name: str = "the array") -> None:
    """As ``assert_same_bits``, for one array."""
    assert got.shape == wanted.shape, f"{name}: {tuple(got.shape)} and {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype, f"{name}: {got.dtype} and {wanted.dtype}"
    ints = {4: torch.int32, 2: torch.int16}[wanted.element_size()]
    differing = got.contiguous().view(ints) != wanted.contiguous().view(ints)
    assert not differing.any(), f"{name}: {differing.sum()} of {wanted.numel()} differ"


def plain_run(target: Any, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``prompt``, one row per pass: what every speculative run is compared with."""
    state, tokens = held(target, prompt), [prompt[-1]]
    for _ in range(count):
        tokens += target.decode(state, tokens[-1:]).need_logits().argmax()
        target.commit(state, 1)
    return tokens[1:]


def held(target: Any, prompt: Sequence[int], generated: Sequence[int] = ()) -> Any:
    """A fresh state that holds all tokens but the last: the prompt prefilled at once, the others row by row."""
    state = target.new_state(target.info.max_positions, needs_of(target))
    if len(prompt) > 1:
        target.prefill(state, prompt[:-1])
    for token in [prompt[-1], *generated][: len(generated)]:
        target.decode(state, [token])
        target.commit(state, 1)
    return state
