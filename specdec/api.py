"""The entry points of the Python API: load a model, inspect a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.checking import checked
from specdec.checkpoints import holds_weights, locate, naming_keys, open_checkpoint, read_json, text_config
from specdec.checkpoints.description import CheckpointReport, describe, describe_config, describe_foreign
from specdec.config import Choice, RunConfig, TargetConfig, structure_options
from specdec.drafters.heads.describe import HeadReport, describe_head
from specdec.drafters.heads.files import is_head
from specdec.errors import UnknownNameError
from specdec.models.loading import checked_head, family_of, with_head
from specdec.models.weights import dry_run
from specdec.pipeline import LanguageModel, build
from specdec.registry import PUBLISHED, Kind, registry


@checked()
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    config: RunConfig | None = None,
    drafter: str | Mapping[str, Any] | None = None,
    verifier: str | Mapping[str, Any] | None = None,
    depth: int | str | Mapping[str, Any] | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    capacity: int | None = None,
    activations: str | None = None,
    threads: int | None = None,
    instruction_set: str | None = None,
) -> LanguageModel:
    """Load a model and compose its pipeline.

    Args:
        model: a folder, a hub id, or "demo" (the embedded model, the default). A ``pathlib.Path`` is a folder.
        config: a complete configuration (``specdec.load_config``); the other arguments override it.
        drafter: a name, or a mapping with ``name`` and the plugin's options. The default is "ngram" alone, or, if the
            checkpoint has an MTP head, for long matches, and the head elsewhere; with ``model`` and no name, that draft
            model in place of the head.
        verifier: likewise; the default is "strict".
        depth: tokens to draft per cycle (policy "fixed"), or a policy like the two above. The default is "adaptive"
            if the depth cannot change the output, else "fixed" at depth 2, with the reason in a notice.
        backend: "auto" or a backend's name.
        dtype: "auto", "bfloat16", "float32", or "float16" if the backend supports it.
        weights: "auto" (as stored), "decoded" (quantised weights become ``dtype``), or "int8" or "int4": plain weights
            are quantised when they are loaded.
        capacity: tokens that a session holds at most, such as 8192; less takes less memory. The default is the model's
            own limit, or what the device has room for.
        activations: of products with packed integers on the CPU backend: "float", "int8" (rounded to int8), or "auto"
            (int8 with the weights of GGUF files).
        threads: threads of a pass on the CPU backend. The default is torch's number, at most the processors that the
            affinity mask and the control group's quota leave to this process.
        instruction_set: what the CPU backend's kernels may use, such as "avx2"; "auto" is the widest that the processor
            has.

    Raises: SpecdecError (CheckpointError, ConfigError, UnknownNameError, PluginError, UnsupportedError); a ConfigError
        names an argument of the wrong type.
    """
    config = config or RunConfig()
    target: dict[str, Any] = {
        "model": model,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "capacity": capacity,
        "activations": activations,
        "threads": threads,
        "instruction_set": instruction_set,
    }
    changes = {name: value for name, value in target.items() if value is not None}
    config = attrs.evolve(config, target=attrs.evolve(config.target, **changes))
    if isinstance(depth, int):
        depth = {"name": "fixed", "depth": depth}
    choices: dict[str, Any] = {
        table: _choice(table, given)
        for table, given in (("drafter", drafter), ("verifier", verifier), ("depth", depth))
        if given is not None
    }
    return build(attrs.evolve(config, **choices).check_auto())


def _choice(table: str, given: str | Mapping[str, Any]) -> Choice:
    named = {"name": given} if isinstance(given, str) else given
    return structure_options({"name": "auto", **named} if table == "drafter" else named, Choice, table)


@checked()
def inspect_checkpoint(
    model: str | os.PathLike[str] = "demo", *, revision: str | None = None, mtp: str | None = None
) -> CheckpointReport | HeadReport:
    """Describe a checkpoint without running it; ``mtp`` is a file or folder with its MTP head (``target.mtp``).

    A trained draft head (EAGLE-3 and others) gives a ``HeadReport``.

    A folder with ``config.json`` and no weights is described from the config alone. For a model_type that no family
    reads, the report's ``taken_by`` says what would run it.

    Raises: CheckpointError when it is not a checkpoint, or its family refuses the config.
    """
    target = TargetConfig(model=model, revision=revision)
    folder = locate(target.model, revision=target.revision)
    checkpoint = open_checkpoint(folder) if folder.is_file() else None
    config = read_json(folder / "config.json") if checkpoint is None else checkpoint.config
    if is_head(config):
        return describe_head(folder)
    if checkpoint is None and holds_weights(folder):
        checkpoint = open_checkpoint(folder)
    with naming_keys(folder):
        try:
            spec, family = family_of(text_config(config), folder)
        except UnknownNameError:
            return describe_foreign(str(folder), config, _taken_by(config), checkpoint)
        if checkpoint is None:
            return describe_config(str(folder), config, spec, family, dry_run(spec, family).tensors)
        checkpoint, family, refused_head = with_head(checkpoint, spec, family, mtp)
        wanted, found = checked_head(checkpoint, spec, family, refused_head)
        return describe(checkpoint, spec, family, wanted.tensors, found, wanted.headless)


def _taken_by(config: Mapping[str, Any]) -> str:
    """Which plugin would run a checkpoint that no family reads."""
    if config.get("is_encoder_decoder"):
        return "nothing: it is an encoder-decoder model, and drafts are verified by decoders only"
    plugin, _ = PUBLISHED[Kind.MODEL, None]
    installed = registry().has_distribution(plugin)
    return f"the plugin {plugin}, if transformers has a causal language model for it" + (
        " (installed)" if installed else " (plugins/ in specdec's repository)"
    )
