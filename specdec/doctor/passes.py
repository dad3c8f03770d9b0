"""Compare whole passes with one-row passes: their logits, and the state after each accept count.

Cycles of a device executor are compared with the same cycles on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import (
    Context,
    DeviceDraft,
    DrafterEnv,
    Executor,
    ForwardPass,
    Hidden,
    Needs,
    NoConfig,
    Snapshot,
    State,
)
from specdec.decoding.cycle import HostExecutor, LiveSequence
from specdec.decoding.result import RunStats
from specdec.doctor.comparing import Comparison, on_host, one_by_one
from specdec.drafters.mtp import MtpConfig, MtpDrafter
from specdec.drafters.none import NoDrafter
from specdec.models.causal_lm import CausalLM
from specdec.records.probes import Finding
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = list[NDArray[Any]]

CONTEXT = 40  # tokens before the compared passes
CYCLE_DEPTHS = (1, 3, 0, 2, 4) * 4  # many, because drafts after an arbitrary prompt are rarely accepted


class PassProbe:
    """Passes of one target over one prompt of arbitrary tokens."""

    def __init__(self, target: ForwardPass, context: int = CONTEXT) -> None:
        self._target = target
        room = target.info.max_positions
        self.rows = min(target.info.max_rows, max(room - 2, 1))
        self.context = max(min(context, room - self.rows), 1)
        tokens = [(37 * i + 11) % target.info.vocab_size for i in range(self.context + self.rows)]
        self._tokens = tokens[self.context :]
        head = bool(target.info.mtp_layers)
        self._needs = Needs(mtp=head, final_hidden=head)
        state = target.new_state(self.context + self.rows, self._needs)
        target.prefill(state, tokens[: self.context])
        self._start = target.snapshot(state)

    def findings(self) -> list[Finding]:
        """Compare logits, states, repeated passes, the MTP head (if any) and device cycles (if supported)."""
        target, rows, tokens = self._target, self.rows, self._tokens
        after = f"after {self.context} tokens"
        logits = Comparison("pass", f"logits of whole passes {after}", rows)
        states = Comparison("state", f"the state after commit, {after}", rows)
        repeats = Comparison("pass", f"one row at a time, twice, {after}", rows)
        alone = self._chain()
        chain = self._fresh()
        self._compare_state(states, 2, self._block(2, 0, alone, logits), self._start)
        for kept in range(1, rows + 1):
            again = on_host(target, target.decode(chain, tokens[kept - 1 : kept]).need_logits())
            repeats.rows([again], [alone[kept - 1 : kept]])
            target.commit(chain, 1)
            wanted = target.snapshot(chain)
            for block in sorted({max(kept, 2), rows if kept % 2 == 0 else min(kept + 1, rows)}):
                self._compare_state(states, block, self._block(block, kept, alone, logits), wanted)
        findings = [logits.finding(), states.finding(), repeats.finding()]
        return [*findings, *self._draft_findings(after), *self._cycle_findings(after)]

    def _fresh(self) -> State:
        return self._target.restore(self._start, self._needs)

    def _chain(self) -> NDArray[Any]:
        """Logits ``[T, V]`` of one-row passes."""
        state, rows = self._fresh(), []
        for token in self._tokens:
            rows.append(on_host(self._target, self._target.decode(state, [token]).need_logits()))
            self._target.commit(state, 1)
        return np.concatenate(rows)

    def _block(self, block: int, kept: int, alone: NDArray[Any], logits: Comparison) -> Snapshot:
        state = self._fresh()
        got = on_host(self._target, self._target.decode(state, self._tokens[:block]).need_logits())
        logits.rows([got], [alone])
        self._target.commit(state, kept)
        return self._target.snapshot(state)

    def _compare_state(self, states: Comparison, block: int, got: Snapshot, wanted: Snapshot) -> None:
        states.state(block, self._arrays(got), self._arrays(wanted))

    # --- the MTP head ----------------------------------------------------------------------------------------------

    def _draft_findings(self, after: str) -> list[Finding]:
        """Compare true pairs in blocks with single pairs: hidden states, logits of the last row, cache."""
        target, rows = self._target, self.rows
        if not target.info.mtp_layers:
            return []
        hidden = target.decode(self._fresh(), self._tokens).need_hidden()
        drafts = Comparison("draft", f"the MTP head {after}", rows)
        chain = self._fresh()
        alone: list[Rows] = []
        for block in range(1, rows + 1):
            alone.append(self._mtp(chain, block - 1, block, hidden))
            if block < 2:
                continue
            state = self._fresh()
            logits, *states = self._mtp(state, 0, block, hidden)
            drafts.state(block, {"logits of the last row": logits}, {"logits of the last row": alone[-1][0]})
            drafts.rows(states, one_by_one(pair[1:] for pair in alone), ["hidden states"])
            drafts.state(block, self._arrays(target.snapshot(state)), self._arrays(target.snapshot(chain)))
        return [drafts.finding()]

    # --- cycles on the device --------------------------------------------------------------------------------------

    def _cycle_findings(self, after: str) -> list[Finding]:
        """Compare cycles on the device with cycles on the host: drafted and emitted tokens, and the state after."""
        depths = [depth for depth in CYCLE_DEPTHS if depth < self.rows]
        room = sum(depths) + len(depths) + 1
        if self.context < 2 or len(depths) < 2 or self.context + room > self._target.info.max_positions:
            return []
        device, host = (self._cycles(depths, room, on_device=where) for where in (True, False))
        if device is None or host is None:
            return []
        comparison = Comparison("cycle", f"cycles on the device {after}", max(depths) + 1)
        comparison.state(max(depths) + 1, device, host)
        return [comparison.finding()]

    def _cycles(self, depths: list[int], room: int, *, on_device: bool) -> dict[str, NDArray[Any]] | None:
        target, mtp = self._target, self._needs.mtp
        needs = Needs(mtp=mtp)
        state = target.restore(attrs.evolve(self._start, capacity=self.context + room), needs)
        env, tokens = DrafterEnv(target=target, state=state), [*range(self.context), self._tokens[0]]
        context = Context(tokens)
        executor: Executor | None
        if on_device:
            executor = target.device_executor(state, context, DeviceDraft(mtp=mtp), stop_tokens=(), limit=room)
        else:
            drafter = MtpDrafter(MtpConfig(), env) if mtp else NoDrafter(NoConfig(), env)
            sequence = LiveSequence(
                target=target, state=state, drafter=drafter, verifier=StrictVerifier(), tokens=tokens, context=context
            )
            executor = HostExecutor(sequence, RunStats())
        if executor is None:
            return None
        numbers: list[int] = []
        for depth in depths:
            executor.submit(depth)
            outcome = executor.collect()
            tokens += outcome.emitted
            executor.keep(len(outcome.emitted))
            numbers += [*outcome.drafted, outcome.accepted, *outcome.emitted]
        executor.close()
        return {"drafted and emitted tokens": np.array(numbers), **self._arrays(target.snapshot(state))}

    def _mtp(self, state: State, start: int, stop: int, hidden: Hidden) -> Rows:
        """Return logits ``[1, V]`` of the last row, and hidden states if they are accessible."""
        target = self._target
        output = target.decode_mtp(state, self._tokens[start:stop], hidden[start:stop])
        found = [on_host(target, output.need_logits())]
        if isinstance(target, CausalLM) and output.hidden is not None:
            found.append(on_host(target.ops, target.ops.array(output.hidden)))
        return found

    def _arrays(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        return {name: on_host(self._target, array) for name, array in snapshot.arrays.items()}
