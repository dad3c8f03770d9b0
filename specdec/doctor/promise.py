"""The doctor's verdict: exact or numeric parity, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.contract import ForwardPass, Needs, Parity, State
from specdec.models.causal_lm import CausalLM
from specdec.models.parity import probe_parts
from specdec.records.bits import Comparison, Finding, on_host

CONTEXTS = (0, 250, 1018, 4090)  # rows before the blocks of a layer; the blocks cross 256, 1024 and 4096 rows
CONTEXT = 40  # tokens before whole passes
DRAWS = 2  # of random rows for each layer and context


def probe_bits(target: ForwardPass, context: int | None = None) -> list[Finding]:
    """Compare blocks of 2 rows up to the longest pass with single rows: each kind of layer, and whole passes.

    Args:
        context: also compare after this many rows.
    """
    findings: list[Finding] = []
    more = () if context is None else (context,)
    if isinstance(target, CausalLM):
        counts = range(2, min(target.info.max_rows, target.info.max_positions) + 1)
        findings += probe_parts(target, [counts] * DRAWS, (*CONTEXTS, *more))
    for before in (CONTEXT, *more):
        findings += _probe_passes(target, before)
    return findings


def _probe_passes(target: ForwardPass, context: int) -> list[Finding]:
    """Compare logits of whole passes, and the state after all and all but one of their rows are committed."""
    info = target.info
    most = min(info.max_rows, max(info.max_positions - 2, 1))
    context = max(min(context, info.max_positions - most), 1)
    tokens = [(37 * i + 11) % info.vocab_size for i in range(context + most)]
    needs = Needs(mtp=bool(info.mtp_layers), final_hidden=bool(info.mtp_layers))
    state = target.new_state(len(tokens), needs)
    target.prefill(state, tokens[:context])
    start = target.snapshot(state)

    def run(state: State, start: int, count: int, kept: int) -> tuple[Any, dict[str, Any]]:
        """Logits of a pass, and the state after ``kept`` of its rows are committed."""
        output = target.decode(state, tokens[context + start : context + start + count])
        logits = on_host(target, output.need_logits())
        target.commit(state, kept)
        arrays = target.snapshot(state).arrays
        return logits, {name: on_host(target, array) for name, array in arrays.items()}

    singly = [run(state, row, 1, 1) for row in range(most)]
    rows = np.concatenate([row for row, _ in singly])
    logits = Comparison(f"logits of whole passes after {context} tokens")
    states = Comparison(f"the state after commit, after {context} tokens")
    for count in range(2, most + 1):
        for kept in (count - 1, count):
            block, arrays = run(target.restore(start, needs), 0, count, kept)
            logits.rows(count, block, rows[:count])
            states.arrays(count, arrays, singly[kept - 1][1])
    return [logits.finding(), states.finding()]


def promise(target: ForwardPass, findings: Sequence[Finding]) -> dict[str, Any]:
    """The guarantee that this machine can give for a loaded target, as plain JSON data.

    Returns: ``exact``, ``reason``; ``claimed``: whether the backend declares equal bits; ``broken``: it does, and gave
    others.
    """
    declared = target.ops.capabilities if isinstance(target, CausalLM) else target.info
    claimed = declared.parity is Parity.BITWISE
    differing = [finding for finding in findings if not finding.equal]
    if differing:
        others = len(differing) - 1
        reason = f"{differing[0]}{f' (and {others} more)' if others else ''}"
    elif not claimed:
        why = declared.parity_reason or "it gives no reason"
        reason = f"all compared bits are equal, but the backend does not promise them: {why}"
    else:
        reason = f"all {len(findings)} comparisons gave equal bits in blocks of up to {target.info.max_rows} rows"
    exact = claimed and not differing
    return {"exact": exact, "reason": reason, "claimed": claimed, "broken": claimed and not exact}
