"""Canonical names for the tensors and the config of text-only and vision-language checkpoints and their MTP heads.

Canonical names are ``embed_tokens.weight``, ``layers.{i}.…``, ``norm.weight``, ``lm_head.weight`` and ``mtp.…``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec.errors import CheckpointError, shown

# Text models sit under "model.", "model.language_model." or "language_model.model."; MTP and output heads at the top
# or under any of these. No canonical name starts with either word, so stripping both repeatedly is safe.
_WRAPPERS = ("model.", "language_model.")
# First words, after stripping, of parts that a text model does not use.
_OTHER_TOWERS = frozenset(
    """visual vision_tower vision_model vision_encoder vision_embed_tokens embed_vision multi_modal_projector
    mm_projector image_newline audio_tower audio_model embed_audio talker code2wav""".split()
)

# An MTP head in speculators' layout: its one layer, and what the names in it are in a model's own head.
SPECULATORS_LAYER = "mtp_layers.0."
_SPECULATORS = {
    "input_proj.": "mtp.fc.",
    "final_layernorm.": "mtp.norm.",
    "hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "token_layernorm.": "mtp.pre_fc_norm_embedding.",
}


_MIDLAYER = "midlayer."  # the one layer of an EAGLE-3 head in its authors' layout


class Names(dict[str, str]):
    """Canonical name -> name in the files, for everything that may belong to the text model."""

    ignored: tuple[str, ...]  # file names of vision and audio tensors


def canonical_name(name: str) -> str:
    """The canonical form of a tensor name; an unknown name only loses its wrappers."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    if name.startswith(_MIDLAYER):
        return "layers.0." + name.removeprefix(_MIDLAYER)
    if not name.startswith(SPECULATORS_LAYER):
        return name
    rest = name.removeprefix(SPECULATORS_LAYER)
    word = next((word for word in _SPECULATORS if rest.startswith(word)), "")
    return _SPECULATORS.get(word, "mtp.layers.0.") + rest.removeprefix(word)


def canonical_names(names: Iterable[str]) -> Names:
    """Map canonical names to the given ones. Raises: CheckpointError if two names share a canonical name."""
    found, ignored = Names(), []
    for name in names:
        canonical = canonical_name(name)
        if canonical.split(".", 1)[0] in _OTHER_TOWERS:
            ignored.append(name)
        elif canonical in found:
            raise CheckpointError(
                f"the tensors {found[canonical]!r} and {name!r} mean the same weight ({canonical})",
                try_="a checkpoint that stores it once",
            )
        else:
            found[canonical] = name
    found.ignored = tuple(ignored)
    return found


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model: the fields of ``text_config``, if present, over those at the root.

    ``tie_word_embeddings``, ``quantization_config`` and the like may stand in either; ``text_config`` wins, except that
    a null there does not hide a root value. ``model_type`` is the text model's.
    Raises: CheckpointError if ``text_config`` is not an object.
    """
    inner = config.get("text_config")
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config.json: 'text_config' takes an object, got {shown(inner)}")
    towers = ("text_config", "vision_config", "audio_config")
    merged = {key: value for key, value in config.items() if key not in towers}
    merged.update({key: value for key, value in inner.items() if value is not None or key not in merged})
    return merged
