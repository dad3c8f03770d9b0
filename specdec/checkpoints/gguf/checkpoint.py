"""Open a GGUF file as a checkpoint: its metadata as the family's ``config.json``, its tensors by canonical name.

llama.cpp's converter renames tensors and changes some of them; ``architectures.py`` has what undoes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from specdec.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    DERIVED,
    KEYS,
    LAYER,
    REALS,
    REQUIRED,
    SQUEEZED,
    TOP,
    YARN,
    Columns,
)
from specdec.checkpoints.gguf.file import GgufFile, GgufTensor
from specdec.checkpoints.locate import is_gguf
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError, shown

# Keys that say what the tensors or other keys say too, or that a reader of the whole file needs not know
_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SILENT = ("vocab_size", "rope.dimension_count", "attention.value_length")
_JSON = re.compile(r"\b(config|tokenizer)\.json\b")
_NAME = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>.+)")
# Ends of a turn or text that a file may not name as its end token; llama.cpp stops at them by their text too
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_HARMONY = ("<|return|>", "<|call|>")  # the ends of gpt-oss's format, in which "<|end|>" ends a message of several
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")  # of tokens that a file names


def open_gguf(path: Path) -> Checkpoint:
    """Open a file, or the first part of a split one. Raises: CheckpointError naming the file and the key or tensor."""
    file = GgufFile.open(path)
    reader = _Reader(file)
    config = reader.config()
    checkpoint = Checkpoint(
        path, config, generation_config(file), reader.tensors(config), tuple(tokenizer_notices(file))
    )
    checkpoint.derived["gguf"] = file
    return checkpoint


def tokenizer_notices(file: GgufFile) -> Iterator[str]:
    """What the user should know of a file's tokenizer."""
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in file.metadata:
        yield f"{file.path.name} does not say how text is split (tokenizer.ggml.pre): as for GPT-2"
    if "tokenizer.ggml.tokens" in file.metadata and "tokenizer.ggml.token_type" not in file.metadata:
        yield f"{file.path.name} does not say which tokens are special (tokenizer.ggml.token_type): none is"


def special_tokens(file: GgufFile) -> dict[str, int]:
    """The tokens that a file names by role: "bos", "eos", ... Raises: CheckpointError for one that it does not have."""
    metadata, tokens = file.metadata, file.metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    named = {role: metadata[key] for role in _ROLES if (key := f"tokenizer.ggml.{role}_token_id") in metadata}
    for role, value in named.items():
        if type(value) is not int or not 0 <= value < count:
            raise CheckpointError(
                f"{file.path.name} has {shown(value)} under tokenizer.ggml.{role}_token_id, and {count} tokens, "
                "counted from 0",
                file=file.path,
            )
    return named


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The tokens that end a generation, as generation_config.json names them."""
    tokens, ends = file.metadata.get("tokenizer.ggml.tokens"), {*_ENDS, *_HARMONY}
    ids = [token for role, token in special_tokens(file).items() if role in ("eos", "eot", "eom")]
    if isinstance(tokens, list):
        known = {token: index for index, token in enumerate(tokens) if token in ends}
        others = {"<|end|>"} if known.keys() >= set(_HARMONY) else set(_HARMONY)
        ids += [index for token, index in known.items() if token not in others]
    return {"eos_token_id": list(dict.fromkeys(ids))} if ids else {}


def with_gguf_keys(path: Path, message: str, file: GgufFile | None = None) -> str:
    """A message about ``config.json``, of a GGUF file about its metadata: with its name and its own keys.

    ``file``: what is at ``path``, if it has been parsed.
    """
    message, count = _JSON.subn(lambda _: path.name, message) if is_gguf(path) else (message, 0)
    if not count:
        return message
    reader = _Reader(file or GgufFile.open(path))
    keys = {**DERIVED, **reader.keys, reader.architecture.mtp: "nextn_predict_layers"}
    return re.sub(r"'(\w+)'", lambda key: f"'{reader.prefix}.{keys[key[1]]}'" if key[1] in keys else key[0], message)


class _Reader:
    """Translates the metadata and the tensors of one file."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            other = f"is of the architecture {shown(name)}, which is not read from GGUF"
            raise CheckpointError(
                f"{file.path.name} {'lacks the key general.architecture' if name is None else other}",
                file=file.path,
                read=", ".join(ARCHITECTURES),
                try_="the safetensors checkpoint, if the family is one that `specdec plugins` lists",
            )
        self.prefix, self.architecture = str(name), ARCHITECTURES[name]
        start = f"{name}."
        self.own = {k.removeprefix(start): value for k, value in file.metadata.items() if k.startswith(start)}
        self.keys = {**KEYS, **self.architecture.keys}

    def config(self) -> dict[str, Any]:
        """``config.json`` as the family reads it. Raises: CheckpointError for a key that is missing."""
        tensors, architecture = self.file.tensors, self.architecture
        config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.fixed}
        for key, name in self.keys.items():
            value = self.own.get(name)
            if value is None and key in REQUIRED:
                raise self._error(f"lacks the key {self.prefix}.{name}")
            if not isinstance(value, (int | float if key.endswith(REALS) else int) | None):
                raise self._error(f"has {shown(value)} under {self.prefix}.{name}, which takes a number")
            if value is not None:
                config[key] = value
        if "token_embd.weight" not in tensors:
            raise self._error("lacks the tensor token_embd.weight")
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
        config["tie_word_embeddings"] = "output.weight" not in tensors
        self._count_mtp(config)
        width = self._head_width(config)
        self._rope(config, width)
        parts = {parts["part"] for name in tensors if (parts := _NAME.fullmatch(name))}
        architecture.complete(config, self.own, parts)
        self._refuse_the_rest()
        return config

    def _whole(self, name: str, default: int | None = None) -> int | None:
        """The whole number under a key of the architecture."""
        value = self.own.get(name, default)
        if value is not None and type(value) is not int:
            raise self._error(f"has {shown(value)} under {self.prefix}.{name}, which takes a whole number")
        return value

    def _count_mtp(self, config: dict[str, Any]) -> None:
        """MTP layers are counted among the others."""
        count, layers = self._whole("nextn_predict_layers", 0), config["num_hidden_layers"]
        if not self.architecture.mtp or not count:
            return
        if not 0 < count < layers:
            raise self._error(f"has {count} under {self.prefix}.nextn_predict_layers, of {layers} layers")
        config["num_hidden_layers"] = layers - count
        config[self.architecture.mtp] = count

    def _head_width(self, config: dict[str, Any]) -> int:
        """The number of rotated values, or of all values of a head."""
        rotary, heads = self._whole("rope.dimension_count"), config["num_attention_heads"]
        if "qk_rope_head_dim" in self.architecture.keys:
            return rotary or 0
        width: int = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
        if self.architecture.partial and rotary is not None and 0 < rotary < width:
            config["partial_rotary_factor"] = rotary / width
        elif width and rotary not in (None, width):
            size = f"{self.prefix}.attention.{'key_length' if 'head_dim' in config else 'head_count'}"
            raise self._error(
                f"rotates {rotary} ({self.prefix}.rope.dimension_count) of {width} values of a head ({size})"
            )
        if self._whole("attention.value_length", width) != width:
            raise self._error(f"has values of another width than keys ({self.prefix}.attention.value_length)")
        return width

    def _refuse_the_rest(self) -> None:
        """Raises: CheckpointError for a key of the architecture that nobody reads, unless its value says nothing."""
        kind = self.file.metadata.get("general.type", "model")
        if kind != "model":
            raise self._error(f"is no model but of the type {shown(kind)}")
        read = {*KEYS.values(), *self.keys.values(), *self.architecture.silent, *_SILENT}
        read |= {"nextn_predict_layers"} if self.architecture.mtp else set()
        for key, value in self.own.items():
            if key in read or key.startswith("rope.scaling."):
                continue
            if not isinstance(value, int | float | str) or value not in (0, "none", ""):
                name = f"{self.prefix}.{key}"
                raise self._error(
                    f"has {name} = {shown(value)}, which may change what the model computes and is not read"
                )

    def _rope(self, config: dict[str, Any], width: int) -> None:
        """Add scaled rotary frequencies, which a file names by kind or, for Llama 3, holds as divisors."""
        start, prefix = "rope.scaling.", f"{self.prefix}.rope.scaling."
        scaling = {key.removeprefix(start): value for key, value in self.own.items() if key.startswith(start)}
        kind = scaling.get("type", "none")
        if not isinstance(kind, str):
            raise self._error(f"has {shown(kind)} under {prefix}type, which takes a name")
        if "rope_freqs.weight" in self.file.tensors:
            config["rope_scaling"] = {"rope_type": "llama3", **self._llama3(config, width)}
        elif "rope_factors_short.weight" in self.file.tensors:
            config["rope_scaling"] = {"rope_type": "longrope", **self._longrope(scaling)}
        elif kind == "linear":
            config["rope_scaling"] = {"rope_type": "linear", "factor": scaling.get("factor")}
        elif kind == "yarn":
            names = {name: key for key, name in YARN.items()}
            if isinstance(multiplier := scaling.pop("yarn_log_multiplier", None), float):  # 0.1 mscale_all_dim
                scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier)
                names |= {name: name for name in ("mscale", "mscale_all_dim")}
            unknown = scaling.keys() - names.keys() - {"type", "finetuned"}
            if unknown:
                raise self._error(f"has {prefix}{min(unknown)}, which is not read")
            config["rope_scaling"] = {"rope_type": "yarn"} | {
                names[key]: value for key, value in scaling.items() if key in names
            }
        elif kind == "none" and (rest := scaling.keys() - {"type", "finetuned", "original_context_length"}):
            raise self._error(f"has {prefix}{min(rest)} without {prefix}type")
        elif kind != "none":
            raise self._error(
                f"scales its rotary embedding by {shown(kind)}; read are none, linear, yarn and Llama 3's"
            )

    def _longrope(self, scaling: Mapping[str, Any]) -> dict[str, Any]:
        """LongRoPE's parameters, as far as short contexts need them."""
        tensor = self.file.tensors["rope_factors_short.weight"]
        divisors = tensor.read(tensor.open(), "rope_factors_short.weight").flatten().tolist()
        names = {"original_context_length": "original_max_position_embeddings", "attn_factor": "attention_factor"}
        return {"short_factor": divisors} | {names[key]: value for key, value in scaling.items() if key in names}

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
            if name in _ROTARY:
                continue
            canonical, part = self._canonical(name, config["num_hidden_layers"])
            if part in SQUEEZED:
                at, shape = SQUEEZED[part], tensor.shape
                tensor = attrs.evolve(tensor, shape=(*shape[:at], 1, *shape[at:]))
            change = self.architecture.changes(part, config, tensor.dtype)
            if canonical in found:
                raise self._error(f"holds the tensor {canonical} under two names, {shown(name)} the second")
            undo: dict[str, Any] = {"columns" if isinstance(change, Columns) else "change": change}
            found[canonical] = attrs.evolve(tensor, **undo)
        return found

    def _canonical(self, name: str, layers: int) -> tuple[str, str]:
        """The canonical name, and what is left of it within a layer or at the top; an unknown one stays as it is."""
        stem, _, kind = name.rpartition(".")
        if stem in TOP:
            return (f"{TOP[stem]}.{kind}",) * 2
        parts = _NAME.fullmatch(name)
        if parts is None:
            return name, name
        part, layer = self._part(**parts.groupdict()), int(parts["layer"])
        if layer < layers or not self.architecture.head:
            return f"layers.{layer}.{part}", part
        head = {key: name.format(layer=layer) for key, name in self.architecture.head.items()}
        word, _, kind = part.removeprefix("nextn.").rpartition(".")
        if part.startswith("nextn.") and word in head:
            return f"{head[word]}.{kind}", part
        return f"{head['']}.{part}", part

    def _part(self, layer: str, part: str) -> str:
        """Our name of a layer's tensor."""
        names, (stem, _, kind) = {**LAYER, **self.architecture.names}, part.rpartition(".")
        if f"blk.{layer}.attn_output.weight" in self.file.tensors:
            names["attn_qkv"] = LAYER["attn_qkv"]  # a delta rule has the name too
        return names.get(part) or (f"{names[stem]}.{kind}" if stem in names else part)

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path.name} {message}", file=self.file.path)
