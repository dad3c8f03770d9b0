"""Take an MTP head from a file or folder beside the checkpoint's weights, or from another checkpoint.

llama.cpp's converter writes such a file too, ``mtp-NAME.gguf``: the head, the embedding and the metadata of its model.
A head in speculators' layout has other names. It was trained on the target's states before the final norm, whereas a
model's own head reads those after it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoints.gguf.checkpoint import open_gguf
from specdec.checkpoints.locate import is_gguf, listed
from specdec.checkpoints.names import SPECULATORS_LAYER, canonical_name, text_config
from specdec.checkpoints.reader import Checkpoint, HeadSource, StoredTensor, read_header, read_json, read_tensors
from specdec.checkpoints.weight_check import converted_by_mlx_lm
from specdec.errors import CheckpointError, shown

HEAD_FILE = "mtp.safetensors"
_FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # copies of the target's
_SAME = (
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
)


def unlisted_head(checkpoint: Checkpoint) -> Path | None:
    """``mtp.safetensors`` beside the weights if no index lists it."""
    file = checkpoint.path / HEAD_FILE
    return file if os.path.isfile(file) and file not in checkpoint.files else None


def join_head(
    checkpoint: Checkpoint, path: Path, prefixes: tuple[str, ...], model_types: tuple[str, ...]
) -> Checkpoint:
    """The checkpoint with the MTP head of another file or folder in place of its own.

    Args:
        checkpoint: the open checkpoint.
        path: a safetensors or GGUF file, or a folder with ``mtp.safetensors``, one safetensors file, or a whole
            checkpoint. Of its tensors, those of the head are taken, in any layout and format of a checkpoint.
        prefixes: what the head's canonical names begin with.
        model_types: of the model's family.

    Raises: CheckpointError if there is no head, or one whose config is another model's, with both figures.
    """
    tensors, config = _read(path, prefixes)
    if is_gguf(path) and config is not None and config["model_type"] not in model_types:
        raise _other_model(path, "model_type", config["model_type"], text_config(checkpoint.config).get("model_type"))
    residual, config = _of_speculators(path, tensors, config)
    head = {name: tensor for name, tensor in tensors.items() if canonical_name(name).startswith(prefixes)}
    if not head:
        raise CheckpointError(
            f"{path} holds no MTP head for this model: none of its {len(tensors)} tensors is named "
            + " or ".join(f"{prefix}*" for prefix in prefixes),
            found=listed(tensors),
            try_="the file, or the original checkpoint's folder, with these tensors",
        )
    told, target = text_config(config or {}), text_config(checkpoint.config)
    for key in _SAME:
        if None not in (told.get(key), target.get(key)) and told[key] != target[key]:
            raise _other_model(path, key, told[key], target[key])
    own = [name for name in checkpoint.tensors if canonical_name(name).startswith(prefixes)]
    return checkpoint.joined(
        head,
        without=own,
        config=config,
        source=HeadSource(path, _converted(path, tensors, config, prefixes), residual),
        notices=[
            f"the MTP head is taken from {path} ({len(head)} of its {len(tensors)} tensors)",
            *([f"the {len(own)} tensors of the checkpoint's own MTP head are not used"] if own else []),
            *([_LAYOUT] if residual else []),
        ],
    )


_LAYOUT = (
    "the MTP head is in speculators' layout, which trains on the target's states before the final norm; vLLM serves "
    'such a head with those after it (target.mtp_states = "normed")'
)


def _of_speculators(
    path: Path, tensors: Mapping[str, StoredTensor], config: dict[str, Any] | None
) -> tuple[bool, dict[str, Any] | None]:
    """Whether the files are in speculators' layout, and the config of the model that the head belongs to.

    Raises: CheckpointError for tensors that such a head cannot have.
    """
    said = None if config is None else config.get("speculators_model_type")
    if config is None or said is None:
        return any(name.startswith(SPECULATORS_LAYER) for name in tensors), config
    if said != "mtp":
        raise CheckpointError(
            f"{path} holds a draft head of the kind {shown(said)}, not an MTP head",
            try_="drafter.name and drafter.model for such a head",
        )
    for name, tensor in tensors.items():
        if not name.startswith(SPECULATORS_LAYER) and name not in _FROZEN:
            raise CheckpointError(
                f"the tensor {name} {list(tensor.shape)} is not used: an MTP head in speculators' layout has one "
                f"layer, {SPECULATORS_LAYER}*",
                file=path,
            )
    inner = config.get("transformer_layer_config")
    return True, {**config, "text_config": text_config(inner)} if isinstance(inner, Mapping) else config


def _read(path: Path, prefixes: tuple[str, ...]) -> tuple[dict[str, StoredTensor], dict[str, Any] | None]:
    """The tensors of a file or folder, and its config if it has one."""
    if is_gguf(path):
        source = open_gguf(path)
        return dict(source.tensors), source.config
    if os.path.isfile(path):
        return read_header(path), None
    if not os.path.isdir(path):
        raise CheckpointError(
            f"target.mtp names no file or folder: {path}",
            try_="a safetensors or GGUF file or a folder on this machine; a hub id is not taken here",
        )
    config = path / "config.json"
    single = path / HEAD_FILE
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not (path / "model.safetensors.index.json").is_file():
        tensors = read_header(files[0])
    else:
        tensors = {} if files == [] and single.is_file() else read_tensors(path)[0]
        if single.is_file() and not any(canonical_name(name).startswith(prefixes) for name in tensors):
            tensors = read_header(single)
    return tensors, read_json(config) if os.path.lexists(config) else None


def _other_model(path: Path, key: str, got: Any, wanted: Any) -> CheckpointError:
    return CheckpointError(
        f"the MTP head in {path} belongs to another model: its {key} is {shown(got)}, this model's is {shown(wanted)}",
        try_="the head of this checkpoint, or of one that was fine-tuned from the same model",
    )


def _converted(
    path: Path, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any] | None, prefixes: tuple[str, ...]
) -> bool | None:
    """Whether mlx-lm converted the files; None if they hold nothing but the head, which does not show it."""
    rest = {name: tensor for name, tensor in tensors.items() if not canonical_name(name).startswith(prefixes)}
    if not rest:
        return None
    return converted_by_mlx_lm(Checkpoint(path, dict(config or {}), {}, rest))
