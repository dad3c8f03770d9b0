"""Wrong targets, derived from ``TableModel``."""

from __future__ import annotations

import attrs
import numpy as np

from specdec.contract import DraftHead, ForwardOutput
from specdec.errors import StateError
from specdec.sampling import Purpose, gumbel
from specdec.testing.models import Memory, TableHead, TableLogits, TableModel
from tests.decoding.fake_device import FakeExecutor


def table(kind: type[TableModel], **options) -> TableModel:
    """A small chain of that class."""
    return kind.random(5, seed=2, tilt=0.6, **options)


class ForgetsInLongPrompts(TableModel):
    """A prompt chunk of more than 3 tokens loses its first one."""

    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        if len(tokens) > 3:
            state.point = attrs.evolve(state.point, accumulator=state.point.accumulator ^ 1)
        return output


class GoesOnFromProvisionalRows(TableModel):
    """A second decode before commit continues the first one."""

    def decode(self, state, tokens):
        point = state.point
        if state.provisional:
            state.point = state.provisional[0]
        output = super().decode(state, tokens)
        state.point = point
        return output


class ClaimsTheRewind(TableModel):
    def rewind(self, state, length):
        reached = super().rewind(state, length)
        state.held = length
        return length if reached < length else reached


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
        return ForwardOutput(TableLogits(output.logits.rows() * np.float32(1 + 2**-22)), output.hidden)


class OtherBitsInLongPrompts(TableModel):
    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        if len(tokens) > 24:
            state.point = attrs.evolve(state.point, accumulator=state.point.accumulator ^ 1)
        return output


class IgnoresMisuse(TableModel):
    def commit(self, state, rows):
        if state.provisional is not None:
            super().commit(state, min(rows, len(state.provisional)))


class TiesToTheHighestId(TableModel):
    """Every logit twice."""

    def _row(self, point):
        row = super()._row(point)
        row[1::2] = row[: len(row) - 1 : 2]
        return row

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        return ForwardOutput(_HighTies(output.logits.rows()), output.hidden)


class _HighTies(TableLogits):
    def topk(self, k):
        order = [np.lexsort((-np.arange(len(row)), -row))[:k] for row in self._rows]
        return [o.tolist() for o in order], [r[o].tolist() for r, o in zip(self._rows, order, strict=True)]


class LogitsFromPrefill(TableModel):
    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        return ForwardOutput(TableLogits(self._row(state.point)[None]), output.hidden)


class LastPlaceUnusable(TableModel):
    def decode(self, state, tokens):
        if state.held + len(tokens) >= state.capacity:
            raise StateError("full")
        return super().decode(state, tokens)


class TraceOfRejectedRows(TableModel):
    def commit(self, state, rows):
        points = state.provisional
        super().commit(state, rows)
        if points is not None and len(points) > 12 and rows < len(points):
            state.point = attrs.evolve(state.point, accumulator=points[-1].accumulator)


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


class HeadlessCrash(TableModel):
    def decode_mtp(self, state, tokens, hidden, *, provisional=False):
        return self._mtp(state, tokens, hidden, provisional=provisional).nothing


class KeepsProvisionalPairs(TableModel):
    def decode_mtp(self, state, tokens, hidden, *, provisional=False, head=None):
        if not provisional and len(state.mtp) > state.mtp_true:
            state.mtp[state.mtp_true - 1] = state.mtp[-1]
        return super().decode_mtp(state, tokens, hidden, provisional=provisional, head=head)


class DraftsTheRunnerUp(TableModel):
    """A draft in one call whose chained steps take the second best token."""

    def draft_greedy(self, state, tokens, hidden, depth):
        step = self.decode_mtp(state, tokens, hidden)
        drafted = step.logits.argmax()
        while len(drafted) < depth:
            step = self.decode_mtp(state, drafted[-1:], step.hidden[-1:], provisional=True)
            drafted.append(step.logits.topk(2)[0][0][1])
        return tuple(drafted)


class SeesTheFuture(TableModel):
    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        rows = output.logits.rows().copy()
        rows[0, tokens[-1]] += np.float32(0.5) * (len(tokens) == 4)
        return ForwardOutput(TableLogits(rows), output.hidden)


class OneRowOnly(TableModel):
    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **{**options, "max_rows": 1})


class HiddenStatesOverwritten(TableModel):
    """Hidden states are views on one buffer that the next pass of the same length writes to."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        buffers = self.__dict__.setdefault("buffers", {})
        old = buffers.get(len(tokens))
        if old is not None:
            old.points = output.hidden.points
            return ForwardOutput(output.logits, old)
        buffers[len(tokens)] = output.hidden
        return output


class NoiseOfAnotherRow(TableModel):
    """Rows behind the first one are decided with other noise, in texts longer than single calls try."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        return ForwardOutput(_LateNoise(output.logits.rows()), output.hidden)


class _LateNoise(TableLogits):
    def noisy_argmax(self, row, scale, seed, position):
        shifted = seed + 1 if row > 0 and position > 8 else seed
        noise = gumbel(shifted, position, np.arange(self._rows.shape[1]), Purpose.TOKEN)
        return int((scale * self._rows[row].astype(np.float64) + noise).argmax())


class AddressesByPlace(TableModel):
    """The logits of a draft head stand at the places of its ids, not at the ids."""

    def decode_mtp(self, state, tokens, hidden, *, provisional=False, head=None):
        output = super().decode_mtp(state, tokens, hidden, provisional=provisional)
        if head is None:
            return output
        placed = np.full((1, self.vocab), -np.inf, np.float32)
        placed[:, : len(head.tokens)] = output.logits.rows()[:, list(head.tokens)]
        return ForwardOutput(TableLogits(placed), output.hidden)


class ZeroOutsideTheHead(TableModel):
    def decode_mtp(self, state, tokens, hidden, *, provisional=False, head=None):
        output = super().decode_mtp(state, tokens, hidden, provisional=provisional, head=head)
        return ForwardOutput(TableLogits(np.maximum(output.logits.rows(), np.float32(-1e4))), output.hidden)


class ExtendsWithoutTheFormer(TableModel):
    def draft_head(self, tokens):
        made = super().draft_head(tokens)
        return _Forgetful(made.ids, self)


class _Forgetful(TableHead):
    def extended(self, tokens):
        return self.owner.draft_head(tokens or self.ids)


class ExtendsInPlace(TableModel):
    """Extending a head gives the same head with more ids: whoever held the former one has them too."""

    def draft_head(self, tokens):
        return _Growing(super().draft_head(tokens))


class _Growing(DraftHead):
    def __init__(self, head):
        self.head = head

    @property
    def tokens(self):
        return self.head.tokens

    def extended(self, tokens):
        self.head = self.head.extended(tokens)
        return self


class TakesAnyIdIntoAHead(TableModel):
    def draft_head(self, tokens):
        return super().draft_head([token for token in tokens if 0 <= token < self.vocab])


class BestInPlaceOfTheSum(TableModel):
    """logsumexp gives the best logit: every best token looks certain."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        return ForwardOutput(_NoSum(output.logits.rows()), output.hidden)


class _NoSum(TableLogits):
    def logsumexp(self):
        return self._rows.max(axis=1).tolist()


class _GoesOnBehindTheEnd(FakeExecutor):
    def submit(self, depth):
        self.over, self.left = False, max(self.left, 1)
        super().submit(depth)


class _LosesWhatIsTakenBack(FakeExecutor):
    def keep(self, tokens):
        pass


class _IgnoresStopTokens(FakeExecutor):
    def __init__(self, target, state, context, draft, *, stop_tokens, limit):
        super().__init__(target, state, context, draft, stop_tokens=(), limit=limit)


class _KeepsARowTooFew(FakeExecutor):
    def settle(self):
        if len(self.emitted) > 1:
            self.emitted = self.emitted[:-1]
        super().settle()


class RunsCycles(TableModel):
    """As it should be."""

    executor = FakeExecutor

    def device_executor(self, state, context, draft, **options):
        return self.executor(self, state, context, draft, **options)


class GoesOnBehindTheEnd(RunsCycles):
    executor = _GoesOnBehindTheEnd


class LosesWhatIsTakenBack(RunsCycles):
    executor = _LosesWhatIsTakenBack


class IgnoresStopTokens(RunsCycles):
    executor = _IgnoresStopTokens


class KeepsARowTooFew(RunsCycles):
    executor = _KeepsARowTooFew


BROKEN = {
    (ForgetsInLongPrompts, ()): ("F1", "F2", "F3", "F4", "F5", "F6", "F7", "F10", "F12"),
    (GoesOnFromProvisionalRows, ()): ("F2", "F7"),
    (ClaimsTheRewind, (("memory", Memory.RECURRENT),)): ("F3",),
    (SharesItsSnapshot, ()): ("F4",),
    (OtherBitsInWidePasses, ()): ("F5",),
    (OtherBitsInLongPrompts, ()): ("F6",),
    (IgnoresMisuse, ()): ("F7",),
    (TiesToTheHighestId, ()): ("F8",),
    (LogitsFromPrefill, ()): ("F9",),
    (LastPlaceUnusable, ()): ("F10", "F7"),
    (TraceOfRejectedRows, ()): ("F11",),
    (SharedScratch, ()): ("F12",),
    (HeadlessCrash, ()): ("F13",),
    (KeepsProvisionalPairs, (("mtp", True),)): ("F13",),
    (SeesTheFuture, ()): ("F14", "F5"),
    (NoiseOfAnotherRow, ()): ("F15",),
    (OneRowOnly, ()): ("F16",),
    (HiddenStatesOverwritten, (("mtp", True),)): ("F17",),
    (BestInPlaceOfTheSum, ()): ("F8",),
    (AddressesByPlace, (("mtp", True),)): ("F19",),
    (ZeroOutsideTheHead, (("mtp", True),)): ("F19",),
    (ExtendsWithoutTheFormer, (("mtp", True),)): ("F19",),
    (ExtendsInPlace, (("mtp", True),)): ("F19",),
    (TakesAnyIdIntoAHead, (("mtp", True),)): ("F19",),
    (DraftsTheRunnerUp, (("mtp", True),)): ("F18",),
    (GoesOnBehindTheEnd, (("mtp", True),)): ("F20",),
    (LosesWhatIsTakenBack, (("mtp", True),)): ("F20",),
    (IgnoresStopTokens, (("mtp", True),)): ("F20",),
    (KeepsARowTooFew, (("mtp", True),)): ("F20",),
}
