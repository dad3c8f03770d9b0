"""The hooks that plugins implement.

A plugin is a module (or an object) with some of these functions, each marked ``@hookimpl``. Its distribution lists it
in the entry-point group ``specdec``: ``ngram = "specdec_ngram"``. Hooks return immutable specs and never change a
registry; ``specdec.registry`` handles ownership, duplicates and failures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from specdec.config import TargetConfig
    from specdec.contract import (
        BackendSpec,
        CycleRecord,
        DepthPolicySpec,
        DrafterSpec,
        ForwardPass,
        ModelSpec,
        ProcessorSpec,
        VerifierSpec,
    )

PROJECT = "specdec"
ENTRY_POINT_GROUP = "specdec"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def specdec_drafters() -> list[DrafterSpec]:
    """The drafters of this plugin."""
    return []


@hookspec
def specdec_verifiers() -> list[VerifierSpec]:
    """The verifiers of this plugin."""
    return []


@hookspec
def specdec_depth_policies() -> list[DepthPolicySpec]:
    """The depth policies of this plugin."""
    return []


@hookspec
def specdec_logits_processors() -> list[ProcessorSpec]:
    """The logits processors of this plugin: masks and biases that ``generation.processors`` names."""
    return []


@hookspec
def specdec_backends() -> list[BackendSpec]:
    """The backends of this plugin. Keep the import light: import heavy modules in the spec's ``factory``."""
    return []


@hookspec
def specdec_models() -> list[ModelSpec]:
    """The model families of this plugin."""
    return []


@hookspec(firstresult=True)
def specdec_forward_pass(target_config: TargetConfig) -> ForwardPass | None:
    """Another engine's model for this target, or None to leave it to others; the first result wins.

    A target that reads no checkpoint brings its own tokenizer (``ForwardPass.tokenizer``); ``target_config.model`` is
    then any text.

    An error from this hook ends the load, because continuing would run another engine than intended.
    """
    return None


@hookspec
def specdec_cycle(record: CycleRecord) -> None:
    """Observe a finished cycle. An observer that raises is switched off, and the generation continues."""


@hookspec
def specdec_commands(cli: click.Group) -> None:
    """Add commands to ``specdec``: ``cli.add_command(...)`` or ``@cli.command()``. Existing names are refused."""
