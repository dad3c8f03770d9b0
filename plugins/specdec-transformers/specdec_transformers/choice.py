"""Decides which targets this plugin takes; imports transformers only if no family of specdec reads the model_type."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import CheckpointError, PluginError, UnknownNameError, UnsupportedError

if TYPE_CHECKING:
    from specdec.config import TargetConfig

BACKEND = "transformers"


def chosen_folder(target: TargetConfig) -> Path | None:
    """The checkpoint's folder if this plugin takes the target, else None.

    Taken: ``target.backend = "transformers"``; or ``"auto"``, no family of specdec reads the model_type, and
    transformers has a causal language model for it. Whatever else is wrong with an "auto" target is left to specdec's
    own reader, which says it.

    Raises: UnsupportedError for an encoder-decoder model, PluginError when transformers is not installed.
    """
    from specdec.checkpoints import locate

    if target.backend == BACKEND:
        if not _installed():
            raise PluginError(
                "the backend 'transformers' needs the package transformers", try_="pip install 'transformers>=5'"
            )
        return locate(target.model, revision=target.revision)
    if target.backend != "auto" or target.model == "demo":
        return None
    try:
        config = _peek(target)
    except CheckpointError:
        return None
    if config is None or _has_family(config) or not _installed():
        return None
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _has_causal_model(model_type, config):
        return None
    return locate(target.model, revision=target.revision)


def _installed() -> bool:
    """Whether transformers is installed; also keeps it from fetching kernels, which are code, from the hub."""
    if "transformers" not in sys.modules:
        os.environ.setdefault("USE_HUB_KERNELS", "NO")  # read once, when transformers is imported
    return importlib.util.find_spec("transformers") is not None


def _peek(target: TargetConfig) -> Mapping[str, Any] | None:
    """``config.json``, offline if the hub's cache has it. Raises: CheckpointError, like ``locate``."""
    from specdec.checkpoints import locate, read_json
    from specdec.checkpoints.locate import is_hub_id

    if is_hub_id(target.model):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(target.model, "config.json", revision=target.revision)
        except HFValidationError:
            cached = None  # locate reports what is wrong with the name
        if isinstance(cached, str):
            return read_json(Path(cached))
    return read_json(locate(target.model, revision=target.revision) / "config.json")


def _has_family(config: Mapping[str, Any]) -> bool:
    """Whether specdec reads this model itself, or would with a plugin that is broken (specdec then reports that)."""
    from specdec.checkpoints import text_config
    from specdec.registry import registry

    model_type = text_config(dict(config)).get("model_type")
    try:
        registry().model(str(model_type))
    except UnknownNameError:
        return False
    except PluginError:
        return True
    return True


def _has_causal_model(model_type: str, config: Mapping[str, Any]) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.get("is_encoder_decoder") is True:
        raise encoder_decoder(model_type)
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def encoder_decoder(model_type: str) -> UnsupportedError:
    """The error for an encoder-decoder model."""
    return UnsupportedError(
        f"{model_type} is an encoder-decoder model: its decoder reads an encoder's output beside its own tokens, and "
        "specdec generates from one sequence of tokens",
        try_="a decoder-only model (a causal language model)",
    )
