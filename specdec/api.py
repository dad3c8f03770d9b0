"""The two functions that a program starts with: load a model, look into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.checkpoints import Checkpoint, audit, locate, text_config
from specdec.config import Choice, RunConfig
from specdec.errors import ConfigError
from specdec.pipeline import LanguageModel, build, family_of
from specdec.report import CheckpointReport, describe


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
        config: a whole configuration (``specdec.load_config``); the other arguments change it.
        drafter: a name, or a mapping with ``name`` and the plugin's options. The default is the checkpoint's MTP head
            where it has one and "ngram" where not.
        verifier: likewise; the default is "strict".
        depth: tokens to draft per cycle (policy "fixed"), or a policy like the two above.
        backend: "auto" or a backend's name.
        dtype: "auto", "bfloat16" or "float32".

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
    """What is in a checkpoint, without running it. Raises: CheckpointError when it is none."""
    checkpoint = Checkpoint.open(locate(model, revision=revision))
    model_config = text_config(checkpoint.config)
    spec = family_of(model_config, checkpoint)
    family = spec.parse(model_config)
    expected = spec.tensors(family)
    return describe(checkpoint, spec, family, expected, audit(checkpoint, expected))
