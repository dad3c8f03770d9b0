"""The entry points of the Python API: load a model, inspect a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.checkpoints import Checkpoint, StoredWeights, check_weights, holds_weights, locate, read_json, text_config
from specdec.checkpoints.description import CheckpointReport, describe, describe_config, describe_foreign
from specdec.config import Choice, RunConfig
from specdec.errors import ConfigError, UnknownNameError
from specdec.models.loading import family_of
from specdec.models.weights import dry_run
from specdec.pipeline import LanguageModel, build
from specdec.registry import PUBLISHED, Kind, registry


def load(
    model: str | None = None,
    *,
    config: RunConfig | None = None,
    drafter: str | Mapping[str, Any] | None = None,
    verifier: str | Mapping[str, Any] | None = None,
    depth: int | str | Mapping[str, Any] | None = None,
    backend: str | None = None,
    dtype: str | None = None,
) -> LanguageModel:
    """Load a model and compose its pipeline.

    Args:
        model: a folder, a hub id, or "demo" (the embedded model, the default).
        config: a complete configuration (``specdec.load_config``); the other arguments override it.
        drafter: a name, or a mapping with ``name`` and the plugin's options. The default is the checkpoint's MTP head
            if it has one, else "ngram".
        verifier: likewise; the default is "strict".
        depth: tokens to draft per cycle (policy "fixed"), or a policy like the two above. The default is "adaptive"
            if the depth cannot change the output, else "fixed" with 2 tokens and a notice with the reason.
        backend: "auto" or a backend's name.
        dtype: "auto", "bfloat16", "float32", or "float16" if the backend supports it.

    Raises: SpecdecError (CheckpointError, ConfigError, UnknownNameError, PluginError, UnsupportedError).
    """
    config = config or RunConfig()
    target: dict[str, Any] = {"model": model, "backend": backend, "dtype": dtype}
    changes = {name: value for name, value in target.items() if value is not None}
    config = attrs.evolve(config, target=attrs.evolve(config.target, **changes))
    if isinstance(depth, int):
        depth = {"name": "fixed", "depth": depth}
    choices: dict[str, Any] = {
        table: _choice(table, given)
        for table, given in (("drafter", drafter), ("verifier", verifier), ("depth", depth))
        if given is not None
    }
    return build(attrs.evolve(config, **choices))


def _choice(table: str, given: str | Mapping[str, Any]) -> Choice:
    if isinstance(given, str):
        return Choice(given)
    if "name" not in given:
        raise ConfigError(f"{table} takes a name or a mapping with 'name', got {dict(given)!r}")
    return Choice(given["name"], {key: value for key, value in given.items() if key != "name"})


def inspect_checkpoint(model: str = "demo", *, revision: str | None = None) -> CheckpointReport:
    """Describe a checkpoint without running it.

    A folder with ``config.json`` and no weights is described from the config alone. For a model_type that no family
    reads, the report's ``taken_by`` says what would run it.

    Raises: CheckpointError when it is not a checkpoint, or its family refuses the config.
    """
    folder = locate(model, revision=revision)
    checkpoint = Checkpoint.open(folder) if holds_weights(folder) else None
    config = read_json(folder / "config.json") if checkpoint is None else checkpoint.config
    model_config = text_config(config)
    try:
        spec, family = family_of(model_config, folder)
    except UnknownNameError:
        return describe_foreign(str(folder), config, _taken_by(config), checkpoint)
    wanted = dry_run(spec, family, None if checkpoint is None else StoredWeights(checkpoint))
    if checkpoint is None:
        return describe_config(str(folder), config, spec, family, wanted.tensors)
    found = check_weights(checkpoint, wanted.tensors, wanted.headless)
    return describe(checkpoint, spec, family, wanted.tensors, found, wanted.headless)


def _taken_by(config: Mapping[str, Any]) -> str:
    """Which plugin would run a checkpoint that no family reads."""
    if config.get("is_encoder_decoder"):
        return "nothing: it is an encoder-decoder model, and drafts are verified by decoders only"
    plugin, _ = PUBLISHED[Kind.MODEL, None]
    installed = registry().has_distribution(plugin)
    return f"the plugin {plugin}, if transformers has a causal language model for it" + (
        " (installed)" if installed else f" (pip install {plugin})"
    )
