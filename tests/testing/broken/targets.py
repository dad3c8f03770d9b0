"""Wrong targets, derived from ``TableModel``."""

from __future__ import annotations

import attrs
import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import NO_NEEDS
from specdec.errors import StateError
from specdec.sampling import Purpose, gumbel
from specdec.testing.table_model import Memory, TableModel


def table(kind: type[TableModel], **options) -> TableModel:
    """A small chain of that class."""
    return kind.random(5, seed=2, tilt=0.6, **options)


class ForgetsInLongPrompts(TableModel):
    """The state after a long prompt chunk is another one."""

    longest = 3

    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        if len(tokens) > self.longest:
            state.points[-1] = state.last._replace(accumulator=state.last.accumulator ^ 1)
        return output


class ClaimsTheRewind(TableModel):
    def rewind(self, state, length):
        reached = super().rewind(state, length)
        state.points += [self.start] * (length - reached)
        return length


class SharesItsSnapshot(TableModel):
    def snapshot(self, state):
        self.kept = state
        return super().snapshot(state)

    def restore(self, snapshot):
        return self.kept


class OtherBitsInWidePasses(TableModel):
    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        if len(tokens) < 9:
            return output
        return attrs.evolve(output, logits=HostLogits(output.logits.rows() * np.float32(1 + 2**-22)))


class TakesTheNeighboursRows(TableModel):
    def decode_batch(self, batch):
        outputs = super().decode_batch(batch)
        return [outputs[-1], *outputs[:-1]]


class SharesTheHeadsCache(TableModel):
    def draft_mtp_batch(self, drafts):
        results = super().draft_mtp_batch(drafts)
        drafts[-1].state.mtp = drafts[0].state.mtp
        return results


class OtherBitsInLongPrompts(ForgetsInLongPrompts):
    longest = 24


class IgnoresMisuse(TableModel):
    def commit(self, state, rows):
        if state.provisional is not None:
            super().commit(state, min(rows, len(state.provisional)))


class TiesToTheHighestId(TableModel):
    """Every logit twice."""

    def _rows(self, points):
        rows = super()._rows(points)
        rows[:, 1::2] = rows[:, : self.vocab - 1 : 2]
        return rows

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        return attrs.evolve(output, logits=_HighTies(output.logits.rows()))


class _HighTies(HostLogits):
    def topk(self, k):
        order = [np.lexsort((-np.arange(len(row)), -row))[:k] for row in self.rows()]
        return [o.tolist() for o in order], [r[o].tolist() for r, o in zip(self.rows(), order, strict=True)]


class LogitsFromPrefill(TableModel):
    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        return attrs.evolve(output, logits=HostLogits(self._rows([state.last])))


class LastPlaceUnusable(TableModel):
    def decode(self, state, tokens):
        if state.length + len(tokens) >= state.capacity:
            raise StateError("full")
        return super().decode(state, tokens)


class SharedScratch(TableModel):
    """Provisional rows belong to the model: two sequences in flight overwrite each other's."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        self.scratch = state.provisional
        return output

    def commit(self, state, rows):
        if state.provisional is not None and len(state.provisional) == len(self.scratch):
            state.provisional = self.scratch
        super().commit(state, rows)


class DraftsTheRunnerUp(TableModel):
    """A draft in one call whose chained steps take the second best token."""

    def draft_mtp(self, state, pending, depth, *, head=None, choose=None):
        def runner_up(logits, drafted):
            return logits.topk(2)[0][0][1 if drafted else 0]

        return super().draft_mtp(state, pending, depth, head=head, choose=choose or runner_up)


class OneRowOnly(TableModel):
    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **{**options, "max_rows": 1})


class HiddenStatesOverwritten(TableModel):
    """Hidden states are views on one buffer that the next pass of the same length writes to."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        buffers = self.__dict__.setdefault("buffers", {})
        for place, hidden in {None: output.hidden, **output.boundaries}.items():
            if hidden is not None:
                buffers.setdefault((len(tokens), place), hidden).array = hidden.array
        boundaries = {k: buffers[len(tokens), k] for k in output.boundaries}
        return attrs.evolve(output, hidden=output.hidden and buffers[len(tokens), None], boundaries=boundaries)


class NoiseOfAnotherRow(TableModel):
    """Rows behind the first one are decided with other noise, in texts longer than single calls try."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        return attrs.evolve(output, logits=_LateNoise(output.logits.rows()))


class _LateNoise(HostLogits):
    def choose(self, choosing):
        sampling = choosing.sampling
        if not sampling.temperature:
            return ()
        tokens = []
        for row in range(len(self)):
            position = len(choosing.context) + choosing.first + row
            seed = sampling.seed + (row > 0 and position > 8)
            noise = gumbel(seed, position, np.arange(self.rows().shape[1]), Purpose.TOKEN)
            tokens.append(int((self.rows()[row] / sampling.temperature + noise).argmax()))
        return tokens


class KeepsTheCallersTokens(TableModel):
    """The ledger gets what the list holds at the commit, not what it held at the pass."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        state.fed = tokens
        return output


class AddressesByPlace(TableModel):
    """The logits of a draft head stand at the places of its ids, not at the ids."""

    def decode_mtp(self, state, tokens, hidden, *, provisional=False, head=None):
        output = super().decode_mtp(state, tokens, hidden, provisional=provisional)
        if head is None:
            return output
        placed = np.full((1, self.vocab), -np.inf, np.float32)
        placed[:, : len(head.tokens)] = output.logits.rows()[:, list(head.tokens)]
        return attrs.evolve(output, logits=HostLogits(placed))


class DrawsFromNumpy(TableModel):
    def new_state(self, capacity, needs=NO_NEEDS):
        np.random.random_sample()
        return super().new_state(capacity, needs)


class KeepsStates(TableModel):
    def new_state(self, capacity, needs=NO_NEEDS):
        state = super().new_state(capacity, needs)
        self.__dict__.setdefault("kept", []).append(state)
        return state


class HeadTransposed(TableModel):
    def shared_weights(self):
        shared = super().shared_weights()
        return attrs.evolve(shared, lm_head=np.ascontiguousarray(shared.lm_head.T))


BROKEN = {
    (ForgetsInLongPrompts, ()): "F2",
    (ClaimsTheRewind, (("memory", Memory.RECURRENT),)): "F3",
    (SharesItsSnapshot, ()): "F4",
    (OtherBitsInWidePasses, ()): "F5",
    (TakesTheNeighboursRows, ()): "F30",
    (SharesTheHeadsCache, (("mtp", True),)): "F31",
    (OtherBitsInLongPrompts, ()): "F6",
    (IgnoresMisuse, ()): "F7",
    (TiesToTheHighestId, ()): "F8",
    (LogitsFromPrefill, ()): "F9",
    (LastPlaceUnusable, ()): "F10",
    (SharedScratch, ()): "F12",
    (NoiseOfAnotherRow, ()): "F15",
    (OneRowOnly, ()): "F16",
    (HiddenStatesOverwritten, ()): "F21",
    (KeepsTheCallersTokens, (("mtp", True),)): "F22",
    (AddressesByPlace, (("mtp", True),)): "F19",
    (DraftsTheRunnerUp, (("mtp", True),)): "F13",
    (DrawsFromNumpy, ()): "F27",
    (KeepsStates, ()): "F28",
    (HeadTransposed, ()): "F29",
}
