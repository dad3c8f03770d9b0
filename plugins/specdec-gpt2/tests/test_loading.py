"""What a checkpoint must have, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import random_gpt2
import specdec
from safetensors.torch import load_file, save_file
from specdec.errors import CheckpointError


@pytest.fixture
def changed(checkpoint, tmp_path):
    """``changed(**keys)``: a checkpoint with other keys in its config.json; None removes one."""

    def made(**keys) -> Path:
        folder = Path(shutil.copytree(checkpoint(), tmp_path / "model"))
        config = json.loads((folder / "config.json").read_text()) | keys
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return made


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"activation_function": "relu"}, ["activation_function", "relu", "gelu_new"]),
        ({"activation_function": "gelu"}, ["activation_function", "'gelu'", "gelu_new"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"n_head": 5}, ["n_embd", "36", "n_head", "5"]),
        ({"n_embd": None}, ["n_embd"]),
        ({"n_layer": 3}, ["h.2."]),
        ({"n_inner": 10}, ["c_fc", "[36, 144]", "[36, 10]"]),
        ({"n_positions": 95}, ["wpe", "[96, 36]", "[95, 36]"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed, keys, words):
    with pytest.raises(CheckpointError) as refused:
        specdec.load(str(changed(**keys)))
    for word in words:
        assert word in str(refused.value)


def test_masks_in_old_files_are_reported_and_not_used(checkpoint):
    lm = specdec.load(str(checkpoint(prefix=False)), drafter="none", depth=0)
    assert lm.notices == ("2 tensors not used: h.*.attn.bias (2)",)
    assert specdec.load(str(checkpoint()), drafter="none", depth=0).notices == ()


def test_a_missing_tensor_is_named(changed):
    folder = changed()
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_proj.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"transformer\.h\.1\.mlp\.c_proj\.bias"):
        specdec.load(str(folder))


def test_info_counts_the_parameters(checkpoint):
    report = specdec.inspect_checkpoint(str(checkpoint()))
    assert report.total_parameters == sum(one.numel() for one in random_gpt2.model().parameters())
    assert (report.family, report.missing, report.unused) == ("gpt2", [], [])


def test_text_comes_back_from_byte_level_tokens(checkpoint):
    lm = specdec.load(str(checkpoint()), drafter="none", depth=0)
    text = "the thing in 北 the Ü"
    assert lm.tokenizer.decode(lm.tokenizer.encode(text)) == text
    assert lm.generate(text, max_new_tokens=5).text is not None


def test_a_folder_with_the_old_tokenizer_files_gets_a_remedy(changed):
    folder = changed()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(random_gpt2.TOKENS))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in random_gpt2.MERGES))
    with pytest.raises(CheckpointError) as refused:
        specdec.load(str(folder))
    for word in ("tokenizer.json", "vocab.json, merges.txt", "save_pretrained"):
        assert word in str(refused.value)
