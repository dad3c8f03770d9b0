"""Run all bit comparisons on one loaded target."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.contract import ForwardPass
from specdec.doctor.operations import CONTEXTS, probe_operations
from specdec.doctor.passes import CONTEXT, PassProbe
from specdec.models.causal_lm import CausalLM
from specdec.records.probes import Finding


def probe_bits(target: ForwardPass, contexts: Sequence[int] = CONTEXTS) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Compare blocks of rows with single rows, for every operation and then for whole passes.

    Args:
        contexts: rows in the cache before each block, for operations with a cache. Whole passes are compared after
            ``CONTEXT`` tokens, and after the largest context that is not in ``CONTEXTS``.
    Returns: the findings, and notes on what could not be compared.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    if isinstance(target, CausalLM):
        findings, notes = probe_operations(target, contexts)
    else:
        notes.append("another engine's model: its operations cannot be looked at, only whole passes")
    asked = [context for context in contexts if context not in CONTEXTS]
    for context in (CONTEXT, *([max(asked)] if asked else ())):
        findings += PassProbe(target, context).findings()
    return tuple(findings), tuple(notes)
