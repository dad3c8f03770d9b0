"""Wrong targets, derived from ``TableModel``."""

from __future__ import annotations

import attrs
import numpy as np

from specdec.contract import NO_NEEDS, DraftHead, MtpPairs
from specdec.errors import StateError
from specdec.sampling import Purpose, gumbel
from specdec.testing.table_model import Memory, TableHead, TableHidden, TableLogits, TableModel


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
        return attrs.evolve(output, logits=TableLogits(output.logits.rows() * np.float32(1 + 2**-22)))


class TakesTheNeighboursRows(TableModel):
    def decode_batch(self, batch):
        outputs = super().decode_batch(batch)
        return [outputs[-1], *outputs[:-1]]


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
        return attrs.evolve(output, logits=_HighTies(output.logits.rows()))


class _HighTies(TableLogits):
    def topk(self, k):
        order = [np.lexsort((-np.arange(len(row)), -row))[:k] for row in self._rows]
        return [o.tolist() for o in order], [r[o].tolist() for r, o in zip(self._rows, order, strict=True)]


class LogitsFromPrefill(TableModel):
    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        return attrs.evolve(output, logits=TableLogits(self._row(state.point)[None]))


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
    def draft_mtp(self, state, pending, depth, **options):
        return super().draft_mtp(state, pending, depth, **options) if state.pairs else state.pairs.fed


class KeepsProvisionalPairs(TableModel):
    """The last pair fed becomes that of a provisional step."""

    def _mtp(self, state, tokens, hidden, *, provisional):
        if not provisional and len(state.mtp) > state.pairs.fed:
            state.mtp[state.pairs.fed - 1] = state.mtp[-1]
        return super()._mtp(state, tokens, hidden, provisional=provisional)


class DraftsTheRunnerUp(TableModel):
    """A draft in one call whose chained steps take the second best token."""

    def draft_mtp(self, state, pending, depth, *, head=None, choose=None):
        def runner_up(logits, drafted):
            return logits.topk(2)[0][0][1 if drafted else 0]

        return super().draft_mtp(state, pending, depth, head=head, choose=choose or runner_up)


class SeesTheFuture(TableModel):
    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        rows = output.logits.rows().copy()
        rows[0, tokens[-1]] += np.float32(0.5) * (len(tokens) == 4)
        return attrs.evolve(output, logits=TableLogits(rows))


class OneRowOnly(TableModel):
    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **{**options, "max_rows": 1})


class HiddenStatesOverwritten(TableModel):
    """Hidden states are views on one buffer that the next pass of the same length writes to."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        buffers = self.__dict__.setdefault("buffers", {})
        for hidden in (output.hidden, *output.boundaries.values()):
            if hidden is not None:
                buffers.setdefault((len(tokens), hidden.boundary), hidden).points = hidden.points
        boundaries = {k: buffers[len(tokens), k] for k in output.boundaries}
        return attrs.evolve(output, hidden=output.hidden and buffers[len(tokens), None], boundaries=boundaries)


class GivesHiddenStatesUnasked(TableModel):
    def decode(self, state, tokens):
        return attrs.evolve(super().decode(state, tokens), hidden=TableHidden(self, state.provisional))


class KeepsALedgerUnasked(TableModel):
    def new_state(self, capacity, needs=NO_NEEDS):
        state = super().new_state(capacity, needs)
        state.pairs = MtpPairs() if self.info.mtp_layers else None
        return state


class RepeatsTheLastPromptRow(TableModel):
    """Every row of a prompt chunk is given the hidden states of the last one."""

    def prefill(self, state, tokens):
        output = super().prefill(state, tokens)
        for hidden in (output.hidden, *output.boundaries.values()):
            if hidden is not None:
                hidden.points = hidden.points[-1:] * len(hidden)
        return output


class BoundariesByPlace(TableModel):
    """The n-th boundary that is asked for is given the n-th boundary of the model."""

    def _output(self, state, points, rows, logits=None):
        output = super()._output(state, points, rows, logits)
        return attrs.evolve(
            output, boundaries={k: TableHidden(self, points, n) for n, k in enumerate(output.boundaries)}
        )


class LosesCommittedPairs(TableModel):
    """A commit of three rows adds only the first one to the ledger."""

    def _keep(self, state, tokens, points):
        before = state.pairs.length if state.pairs else 0
        super()._keep(state, tokens, points)
        if state.pairs and len(points) == 3:
            state.pairs.cut(before + 1)


class RestoresWithoutPairs(TableModel):
    def restore(self, snapshot, needs=NO_NEEDS):
        return super().restore(attrs.evolve(snapshot, meta={}), needs)


class RewindsWithoutTheLedger(TableModel):
    def rewind(self, state, length):
        pairs, state.pairs = state.pairs, None
        reached = super().rewind(state, length)
        state.pairs = pairs
        return reached


class NoiseOfAnotherRow(TableModel):
    """Rows behind the first one are decided with other noise, in texts longer than single calls try."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        return attrs.evolve(output, logits=_LateNoise(output.logits.rows()))


class _LateNoise(TableLogits):
    def choose(self, choosing):
        sampling = choosing.sampling
        if not sampling.temperature:
            return ()
        tokens = []
        for row in range(len(self)):
            position = len(choosing.context) + choosing.first + row
            seed = sampling.seed + (row > 0 and position > 8)
            noise = gumbel(seed, position, np.arange(self._rows.shape[1]), Purpose.TOKEN)
            tokens.append(int((self._rows[row] / sampling.temperature + noise).argmax()))
        return tokens


class AddressesByPlace(TableModel):
    """The logits of a draft head stand at the places of its ids, not at the ids."""

    def decode_mtp(self, state, tokens, hidden, *, provisional=False, head=None):
        output = super().decode_mtp(state, tokens, hidden, provisional=provisional)
        if head is None:
            return output
        placed = np.full((1, self.vocab), -np.inf, np.float32)
        placed[:, : len(head.tokens)] = output.logits.rows()[:, list(head.tokens)]
        return attrs.evolve(output, logits=TableLogits(placed))


class ZeroOutsideTheHead(TableModel):
    def decode_mtp(self, state, tokens, hidden, *, provisional=False, head=None):
        output = super().decode_mtp(state, tokens, hidden, provisional=provisional, head=head)
        return attrs.evolve(output, logits=TableLogits(np.maximum(output.logits.rows(), np.float32(-1e4))))


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
        return attrs.evolve(output, logits=_NoSum(output.logits.rows()))


class _NoSum(TableLogits):
    def logsumexp(self):
        return self._rows.max(axis=1).tolist()


class BytePositions(TableModel):
    """In passes of several rows, a row at a position that is a multiple of 256 is off."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        rows = output.logits.rows().copy()
        rows[[len(tokens) > 1 and (state.held + row) % 256 == 0 and state.held > 0 for row in range(len(rows))]] += 1
        return attrs.evolve(output, logits=TableLogits(rows))


class ForgetsWhenFarBack(TableModel):
    def rewind(self, state, length):
        far = state.held - length > 24
        reached = super().rewind(state, length)
        if far and reached:
            state.point = attrs.evolve(state.point, accumulator=state.point.accumulator ^ 1)
        return reached


class TakesOnlyNumpy(TableModel):
    """A file gives torch tensors back."""

    def restore(self, snapshot, needs=NO_NEEDS):
        for array in snapshot.arrays.values():
            array.astype(array.dtype)
        return super().restore(snapshot, needs)


class AnswersFromMemory(TableModel):
    """Gives the same array again where the same rows are asked for."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        kept = self.__dict__.setdefault("kept", {})
        rows = output.logits.rows()
        return attrs.evolve(output, logits=TableLogits(kept.setdefault((rows.tobytes(), state.held), rows)))


class KeepsTheCallersTokens(TableModel):
    """Reads the caller's list of tokens again at the commit, for the MTP head's pairs alone."""

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        state.fed = tokens
        return output


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


class ScaleOfZero(TableModel):
    def shared_weights(self):
        return attrs.evolve(super().shared_weights(), embed_scale=0.0)


class WeightsAreScratch(TableModel):
    """A pass writes into the table that it has handed out."""

    table = None

    def shared_weights(self):
        if self.table is None:
            self.table = super().shared_weights()
        return self.table

    def decode(self, state, tokens):
        if self.table is not None:
            self.table.embed_tokens[0] += 1
        return super().decode(state, tokens)


class PaddedVocabulary(TableModel):
    def shared_weights(self):
        shared = super().shared_weights()
        return attrs.evolve(shared, embed_tokens=np.concatenate([shared.embed_tokens, shared.embed_tokens[:3]]))


BROKEN = {
    (ForgetsInLongPrompts, ()): "F2",
    (GoesOnFromProvisionalRows, ()): "F2",
    (ClaimsTheRewind, (("memory", Memory.RECURRENT),)): "F3",
    (SharesItsSnapshot, ()): "F4",
    (OtherBitsInWidePasses, ()): "F5",
    (TakesTheNeighboursRows, ()): "F30",
    (OtherBitsInLongPrompts, ()): "F6",
    (IgnoresMisuse, ()): "F7",
    (TiesToTheHighestId, ()): "F8",
    (LogitsFromPrefill, ()): "F9",
    (LastPlaceUnusable, ()): "F10",
    (TraceOfRejectedRows, ()): "F2",
    (SharedScratch, ()): "F12",
    (HeadlessCrash, ()): "F13",
    (KeepsProvisionalPairs, (("mtp", True),)): "F13",
    (SeesTheFuture, ()): "F5",
    (NoiseOfAnotherRow, ()): "F15",
    (OneRowOnly, ()): "F16",
    (HiddenStatesOverwritten, ()): "F17",
    (GivesHiddenStatesUnasked, ()): "F9",
    (KeepsALedgerUnasked, (("mtp", True),)): "F9",
    (RepeatsTheLastPromptRow, ()): "F21",
    (BoundariesByPlace, ()): "F21",
    (LosesCommittedPairs, (("mtp", True),)): "F22",
    (RestoresWithoutPairs, (("mtp", True),)): "F22",
    (RewindsWithoutTheLedger, (("mtp", True),)): "F22",
    (BestInPlaceOfTheSum, ()): "F8",
    (AddressesByPlace, (("mtp", True),)): "F19",
    (ZeroOutsideTheHead, (("mtp", True),)): "F19",
    (ExtendsWithoutTheFormer, (("mtp", True),)): "F19",
    (ExtendsInPlace, (("mtp", True),)): "F19",
    (TakesAnyIdIntoAHead, (("mtp", True),)): "F19",
    (DraftsTheRunnerUp, (("mtp", True),)): "F18",
    (BytePositions, ()): "F2",
    (ForgetsWhenFarBack, ()): "F3",
    (TakesOnlyNumpy, ()): "F25",
    (AnswersFromMemory, ()): "F26",
    (KeepsTheCallersTokens, (("mtp", True),)): "F26",
    (DrawsFromNumpy, ()): "F27",
    (KeepsStates, ()): "F28",
    (HeadTransposed, ()): "F29",
    (ScaleOfZero, ()): "F29",
    (WeightsAreScratch, ()): "F29",
    (PaddedVocabulary, ()): "F29",
}
