"""Reading: tensors come back bit for bit and uncopied; every broken file is refused by name."""

import gc
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec.checkpoints import Checkpoint, write_checkpoint
from specdec.errors import CheckpointError

INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "toy"}
TENSORS = {
    "a": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0]),
    "c": torch.tensor(3.0, dtype=torch.float16),
    "d": torch.zeros(0, 5),
    "e": torch.tensor([[1, 2]], dtype=torch.uint8),
}


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def with_weights(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def safetensors(header, data=b""):
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype, shape, offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ONE = json.dumps(tensor("U8", [1], [0, 1]))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_what_was_written_is_read(tmp_path, shards):
    write_checkpoint(tmp_path, CONFIG, TENSORS, generation_config={"eos_token_id": 7}, shards=shards)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert checkpoint.config == CONFIG
        assert checkpoint.generation_config == {"eos_token_id": 7}
        assert set(checkpoint.tensors) == set(TENSORS)
        assert checkpoint.size_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
        for name, tensor in TENSORS.items():
            assert name in checkpoint.tensors
            assert checkpoint.tensors[name].shape == tensor.shape
            assert checkpoint.dtype(name) == tensor.dtype
            loaded = checkpoint.load(name)
            assert loaded.dtype == tensor.dtype
            assert torch.equal(loaded, tensor)


def test_tensors_are_mapped_not_copied_and_outlive_the_checkpoint(tmp_path):
    """A loaded tensor's address lies in a private mapping of the file; closing keeps it, writing spares the file."""
    big = torch.arange(1 << 18, dtype=torch.float32)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG, {"big": big}))
    loaded = checkpoint.load("big")
    assert checkpoint.load("big").data_ptr() == loaded.data_ptr()
    if Path("/proc/self/maps").exists():
        assert _mapped_file(loaded.data_ptr()).endswith("model.safetensors")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.load("big")
    del checkpoint
    gc.collect()
    assert torch.equal(loaded, big)
    loaded[0] = 5.0
    assert Checkpoint.open(tmp_path).load("big")[0] == 0.0


def _mapped_file(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line
    return ""


# --- configs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "facts"),
    [('{\n "a": 1,\n oops\n}', ["not valid JSON", "line:", "3"]), ("[1]", ["list", "not an object"]), ("", ["JSON"])],
)
def test_a_broken_config_names_its_line(tmp_path, file, text, facts):
    (write_checkpoint(tmp_path, CONFIG, TENSORS) / file).write_text(text)
    message = refusal(tmp_path)
    assert [fact for fact in [file, *facts] if fact not in message] == []


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path):
    (write_checkpoint(tmp_path, CONFIG, TENSORS) / "config.json").write_text("\ufeff{}")
    assert Checkpoint.open(tmp_path).config == {}


# --- weight files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"GGUF" + bytes(64), "GGUF"),
        (b"PK\x03\x04" + bytes(64), "pickled"),
        (b"<!DOCTYPE html><html>not found</html>", "web page"),
        (bytes(range(100, 200)), "64 65 66"),
        (struct.pack("<Q", 10_000) + b'{"a": 1}', "header takes 10008 bytes, the file has 16"),
        (struct.pack("<Q", 1 << 60) + b'{"a": 1}', "not a safetensors file"),
        (safetensors("{ nonsense"), "not valid JSON"),
        (safetensors('{"x": {"dtype": "F32"}}'), "no valid entry for the tensor x"),
        (safetensors({"x": tensor("F32", [2], [0, 4])}, bytes(4)), "tensor x (F32 [2])"),
        (safetensors({"x": tensor("F32", [2], [0, 8])}, bytes(5)), "the tensor x extends past its end"),
        (safetensors({"x": tensor("F32", [1], [4, 8])}, bytes(8)), "not a valid safetensors"),
        (safetensors(f'{{"x": {ONE}, "x": {ONE}}}', bytes(1)), "tensor x twice"),
    ],
)
def test_a_file_that_is_no_safetensors_says_what_it_is(tmp_path, content, fact):
    message = refusal(with_weights(tmp_path, content))
    assert fact in message
    assert "try:" in message
    assert str(tmp_path / "model.safetensors") in message


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_else(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("bytes")
    with pytest.raises(CheckpointError):
        Checkpoint.open(with_weights(folder, content))
    header = safetensors(f'{{"x": {ONE}}}', b"1")
    try:  # half right
        Checkpoint.open(with_weights(folder, header[: len(content)] + content))
    except CheckpointError:
        pass


def test_a_dtype_that_torch_lacks_names_the_tensor(tmp_path):
    content = safetensors({"x.weight": tensor("F4", [2, 2], [0, 2])}, b"ab")
    checkpoint = Checkpoint.open(with_weights(tmp_path, content))
    for read in (checkpoint.dtype, checkpoint.load):
        with pytest.raises(CheckpointError, match=r"x\.weight is stored as F4, which is not read"):
            read("x.weight")


@pytest.mark.parametrize(
    ("file", "fact"),
    [
        ("pytorch_model.bin", "pickles"),
        ("adapter_model.safetensors", "LoRA"),
        ("model-00001-of-00002.safetensors", INDEX),
        ("README.md", "download the weights"),
    ],
)
def test_a_folder_without_weights_says_what_is_there(tmp_path, file, fact):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"")
    message = refusal(tmp_path)
    assert file in message
    assert fact in message


# --- shards --------------------------------------------------------------------------------------------------------


def edit_index(folder, **changes):
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(content))
    return folder


def test_absent_shards_are_listed(tmp_path):
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards=4)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    (tmp_path / "model-00004-of-00004.safetensors").unlink()
    message = refusal(tmp_path)
    assert "names 4 files, of which 2 are absent" in message
    assert "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors" in message


def test_an_index_may_not_promise_what_a_shard_lacks(tmp_path):
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards=2)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert f"puts the tensor ghost into {first}, which lacks it" in refusal(edit_index(tmp_path, ghost=first))
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards=2)
    assert f"{second}, which lacks it, which {first} holds" in refusal(edit_index(tmp_path, a=second))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards=2)
    save_file({"a": torch.ones(1), "e": TENSORS["e"]}, tmp_path / "extra.safetensors")
    message = refusal(edit_index(tmp_path, e="extra.safetensors"))
    assert "the tensor a is in two files" in message
    assert "extra.safetensors" in message


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "../../x.safetensors"}}', "not a file in this folder"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
        ('{"weight_map":\n\n oops', "line"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, text, fact):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(text)
    message = refusal(tmp_path)
    assert INDEX in message
    assert fact in message


def test_an_index_left_behind_is_ignored_with_a_notice(tmp_path):
    """A conversion wrote model.safetensors beside the index of the shards it came from."""
    write_checkpoint(tmp_path, CONFIG, TENSORS)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(TENSORS)
    assert INDEX in checkpoint.notices[0]
