"""Open a GGUF file as a checkpoint: its metadata as the family's ``config.json``, its tensors by canonical name.

llama.cpp's converter renames tensors and changes some of them; the tables here undo it.
Sources: ``convert_hf_to_gguf.py`` and ``gguf-py/gguf/constants.py`` in llama.cpp.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from specdec.checkpoints.gguf.file import GgufFile, GgufTensor
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError, shown

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# config.json key -> metadata key behind the architecture's name
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
# Keys that say what the tensors or other keys say too, or that a reader of the whole file needs not know
_SILENT = ("vocab_size", "rope.dimension_count", "attention.value_length")
_OPTIONAL = frozenset({"num_key_value_heads", "head_dim", "rope_theta"})
_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
# Ends of a turn or text that a file may not name as its end token; llama.cpp stops at them by their text too
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


@attrs.frozen
class Architecture:
    """What the converter did to a family.

    Attributes:
        model_type: of the family.
        interleaved: rows of query and key heads are in the order of adjacent rotary pairs.
    """

    model_type: str
    interleaved: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}


def open_gguf(path: Path) -> Checkpoint:
    """Open a file, or the first part of a split one. Raises: CheckpointError naming the file and the key or tensor."""
    file = read_gguf(path)
    reader = _Reader(file)
    config = reader.config()
    return Checkpoint(path, config, generation_config(file), reader.tensors(config))


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` that a file's metadata amount to. Raises: CheckpointError."""
    return _Reader(read_gguf(path)).config()


def read_gguf(path: Path) -> GgufFile:
    """Parse a file once as long as it does not change. Raises: CheckpointError."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}", file=path) from error
    file = _parsed(path, status.st_size, status.st_mtime_ns)
    if file.metadata.get("split.count", 1) != 1:
        _parsed.cache_clear()  # its other parts may change
    return file


@functools.lru_cache(1)
def _parsed(path: Path, size: int, changed: int) -> GgufFile:
    return GgufFile.open(path)


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The tokens that end a generation, as generation_config.json names them."""
    metadata, tokens = file.metadata, file.metadata.get("tokenizer.ggml.tokens")
    keys = ("eos", "eot", "eom")
    named = {name: metadata[name] for key in keys if (name := f"tokenizer.ggml.{key}_token_id") in metadata}
    for name, value in named.items():
        if type(value) is not int:
            raise CheckpointError(
                f"{file.path.name} has {shown(value)} under {name}, which takes a token", file=file.path
            )
    ids = list(named.values())
    if isinstance(tokens, list):
        ends = set(_ENDS)
        ids += [index for index, token in enumerate(tokens) if token in ends]
    return {"eos_token_id": list(dict.fromkeys(ids))} if ids else {}


class _Reader:
    """Translates the metadata and the tensors of one file."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path.name} is of the architecture {shown(name)}, which is not read from GGUF",
                file=file.path,
                read=", ".join(ARCHITECTURES),
                try_="the safetensors checkpoint, if the family is one that `specdec plugins` lists",
            )
        self.prefix, self.architecture = str(name), ARCHITECTURES[name]

    def config(self) -> dict[str, Any]:
        """``config.json`` as the family reads it. Raises: CheckpointError for a key that is missing."""
        metadata, tensors = self.file.metadata, self.file.tensors
        config: dict[str, Any] = {"model_type": self.architecture.model_type}
        for key, name in _KEYS.items():
            value = metadata.get(f"{self.prefix}.{name}")
            if value is None and key not in _OPTIONAL:
                raise self._error(f"lacks the key {self.prefix}.{name}")
            if not isinstance(value, int | float | type(None)):
                raise self._error(f"has {shown(value)} under {self.prefix}.{name}, which takes a number")
            if value is not None:
                config[key] = value
        if "token_embd.weight" not in tensors:
            raise self._error("lacks the tensor token_embd.weight")
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
        config["tie_word_embeddings"] = "output.weight" not in tensors
        rotary = metadata.get(f"{self.prefix}.rope.dimension_count")
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
        if rotary not in (None, width):
            raise self._error(f"rotates {rotary} of {width} values of a head ({self.prefix}.rope.dimension_count)")
        if metadata.get(f"{self.prefix}.attention.value_length", width) != width:
            raise self._error(f"has values of another width than keys ({self.prefix}.attention.value_length)")
        self._rope(config, width)
        self._refuse_the_rest()
        return config

    def _refuse_the_rest(self) -> None:
        """Raises: CheckpointError for a key of the architecture that nobody reads, unless its value says nothing."""
        kind = self.file.metadata.get("general.type", "model")
        if kind != "model":
            raise self._error(f"is no model but of the type {shown(kind)}")
        read = {f"{self.prefix}.{name}" for name in (*_KEYS.values(), *_SILENT)}
        for key, value in self.file.metadata.items():
            if not key.startswith(f"{self.prefix}.") or key in read or key.startswith(f"{self.prefix}.rope.scaling."):
                continue
            if not isinstance(value, int | float | str) or value not in (0, "none", ""):
                raise self._error(
                    f"has {key} = {shown(value)}, which may change what the model computes and is not read"
                )

    def _rope(self, config: dict[str, Any], width: int) -> None:
        """Add scaled rotary frequencies, which a file names by kind or, for Llama 3, holds as divisors."""
        metadata, prefix = self.file.metadata, f"{self.prefix}.rope.scaling."
        scaling = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        kind = scaling.get("type", "none")
        if "rope_freqs.weight" in self.file.tensors:
            config["rope_scaling"] = {"rope_type": "llama3", **self._llama3(config, width)}
        elif kind == "yarn":
            names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
            names |= {
                "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow",
                "yarn_attn_factor": "attention_factor",
            }
            unknown = scaling.keys() - names.keys() - {"type", "finetuned"}
            if unknown:
                raise self._error(f"has {prefix}{min(unknown)}, which is not read")
            config["rope_scaling"] = {"rope_type": "yarn"} | {
                names[key]: value for key, value in scaling.items() if key in names
            }
        elif kind == "none" and (rest := scaling.keys() - {"type", "finetuned"}):
            raise self._error(f"has {prefix}{min(rest)} without {prefix}type")
        elif kind != "none":
            raise self._error(f"scales its rotary embedding by {shown(kind)}; read are none, yarn and Llama 3's")

    def _llama3(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        """Llama 3's scaling parameters, which the converter left out: those that give the file's divisors."""
        tensor = self.file.tensors["rope_freqs.weight"]
        stored = tensor.read(tensor.open(), "rope_freqs.weight").to(torch.float64)
        theta = float(config.get("rope_theta", 10000.0))
        if stored.shape == (width // 2,) and theta > 1 and bool((stored > 0).all()):
            frequencies = theta ** (-2.0 * torch.arange(width // 2, dtype=torch.float64) / width)
            factor, low, high = float(stored.max()), 1.0, 4.0
            for original in (8192, 4096, 16384, 32768):
                kept = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
                if torch.allclose(1 / ((1 - kept) / factor + kept), stored, rtol=1e-5):
                    told = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
                    return {**told, "original_max_position_embeddings": original}
        raise self._error("holds rotary divisors (rope_freqs.weight) that are not those of a Llama 3")

    def tensors(self, config: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """The tensors by canonical name, with what undoes the converter's changes."""
        found: dict[str, GgufTensor] = {}
        for name, tensor in self.file.tensors.items():
            if name == "rope_freqs.weight":
                continue
            canonical = self._canonical(name)
            heads = self._heads(canonical, config)
            rows = tensor.shape[0]
            if heads:
                if rows % (2 * heads):
                    raise self._error(f"gives the tensor {name} {rows} rows for {heads} heads")
                tensor = attrs.evolve(tensor, change=functools.partial(_halves_of_heads, heads=heads))
            found[canonical] = tensor
        return found

    def _canonical(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        parts = _NAME.fullmatch(name)
        if parts and parts["part"] in _LAYER:
            return f"layers.{parts['layer']}.{_LAYER[parts['part']]}.{parts['kind']}"
        return name  # the weight check says that nothing uses it

    def _heads(self, name: str, config: Mapping[str, Any]) -> int:
        """The number of heads whose rows the converter put into another order; 0 for none."""
        if not self.architecture.interleaved or ".self_attn." not in name:
            return 0
        if ".q_proj." in name:
            return int(config["num_attention_heads"])
        return int(config.get("num_key_value_heads", config["num_attention_heads"])) if ".k_proj." in name else 0

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path.name} {message}", file=self.file.path)


def _halves_of_heads(stored: torch.Tensor, *, heads: int) -> torch.Tensor:
    """Bring rows of rotary pairs (a0 b0 a1 b1 ...) into halves (a0 a1 ... b0 b1 ...), head by head."""
    rows = stored.view(heads, -1, 2, *stored.shape[1:])
    return rows.transpose(1, 2).reshape(stored.shape)
