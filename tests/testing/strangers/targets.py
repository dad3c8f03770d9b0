"""Broken targets: each has one fault of those that the author of a forward pass makes, and otherwise works.

Every docstring quotes the sentence of the contract that the class breaks; "missing:" starts one that it ought to have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import torch

from specdec import ForwardOutput, Needs
from specdec.backends.arrays import HostLogits
from specdec.contract import NO_NEEDS, Choosing, Snapshot
from specdec.sampling import Purpose, gumbel, processed

from .toy import LAYERS, H, Toy, ToyHidden, ToyState, norm

BROKEN: dict[type[Toy], str] = {}


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> Toy:
    """The target itself, new."""
    made: Toy = kind(mtp=kind.with_head)
    return made


class OwnRows(Toy):
    """A right target with a class of logits of its own."""

    Rows: ClassVar[type[HostLogits]] = HostLogits

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().decode(state, tokens)
        return attrs.evolve(output, logits=self.Rows(output.need_logits().rows()))


class Noisy(OwnRows):
    """A right target that answers ``noisy_argmax``."""

    class Rows(HostLogits):
        def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
            values = self.rows()[row].astype(np.float64)
            return int((scale * values + gumbel(seed, position, np.arange(len(values)), Purpose.TOKEN)).argmax())


# --- faults that begin late -------------------------------------------------------------------------------------------


@broken("late")
class BytePositions(Toy):
    """Passes of several rows keep their positions in 8 bits.

    "BITWISE: the bits of a row do not depend on the number of rows of its pass" (F5).
    """

    many = False

    def run(self, state: ToyState, tokens: Sequence[int]) -> list[Any]:
        self.many = len(tokens) > 1
        return super().run(state, tokens)

    def embed(self, token: int, position: int) -> Any:
        return super().embed(token, position & 0xFF if self.many else position)


@broken("late")
class SevenRowMask(Toy):
    """Its mask covers seven rows of a pass: from the eighth on, a row sees nothing of the pass before it.

    "BITWISE: the bits of a row do not depend on the number of rows of its pass" (F5).
    """

    def look_up(self, state: ToyState, position: int, token: int) -> Any:
        if position - state.held < 7:
            return super().look_up(state, position, token)
        found = np.flatnonzero(state.tokens[: state.held - 1] == token)
        return self.embedding[state.tokens[found[-1] + 1]] if len(found) else np.zeros(H, np.float32)


@broken("late")
class LongChunks(Toy):
    """Takes prompt chunks of more than 64 tokens in double precision, and does not say so.

    "a backend whose longer chunks have other bits says so in ``info.parity_reason``" (``ForwardPass.prefill``; F6).
    """

    wide = False

    def prefill(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        self.wide = len(tokens) > 64
        try:
            return super().prefill(state, tokens)
        finally:
            self.wide = False

    def row(self, state: ToyState, position: int, token: int) -> list[Any]:
        rows = super().row(state, position, token)
        if self.wide and position:
            mixed = 0.6 * np.roll(state.memory[position - 1].astype(np.float64), 1) + rows[0]
            state.memory[position] = np.tanh(mixed)
        return rows


@broken("late")
class WindowByPass(Toy):
    """Keeps the last 300 tokens, counted from the end of a pass, so its first rows see fewer.

    "BITWISE: the bits of a row do not depend on the number of rows of its pass" (F5).
    """

    end = 0

    def run(self, state: ToyState, tokens: Sequence[int]) -> list[Any]:
        self.end = state.held + len(tokens)
        return super().run(state, tokens)

    def look_up(self, state: ToyState, position: int, token: int) -> Any:
        first = max(self.end - 300, 0)
        found = np.flatnonzero(state.tokens[first:position] == token)
        return self.embedding[state.tokens[first + found[-1] + 1]] if len(found) else np.zeros(H, np.float32)


@broken("late")
class KeepsAllRows(Toy):
    """Beyond 600 tokens a commit of a part keeps the recurrent state after all rows.

    "After any interleaving of prefill, decode and commit, the next logits are those of plain decoding" (F2).
    """

    def commit(self, state: Any, rows: int) -> None:
        drafted, end = len(state.drafted or ()), state.held
        super().commit(state, rows)
        if state.held > 600 and 0 < rows < drafted:
            state.memory[state.held - 1] = state.memory[end + drafted - 1]


@broken("late")
class ShortHistory(Toy):
    """Keeps recurrent states for 24 tokens; a longer rewind leaves the newest one and claims the length.

    "A rewind that claims more than it did leaves tokens in the state that are no longer in the text" (F3).
    """

    def rewind(self, state: Any, length: int) -> int:
        before = state.held
        reached = super().rewind(state, length)
        if reached and before - reached > 24:
            state.memory[reached - 1] = state.memory[before - 1]
        return reached


@broken("late")
class LongDrafts(Toy):
    """Drafts in one call; from the seventh token on it feeds the head with its state of the sixth.

    "A greedy draft in one call gives the same tokens and the same state as single steps" (F18).
    """

    with_head = True

    def draft_mtp(self, state: Any, pending: int, depth: int, *, head: Any = None, choose: Any = None) -> Any:
        if choose is not None or depth <= 6:
            return super().draft_mtp(state, pending, depth, head=head, choose=choose)
        tokens = list(super().draft_mtp(state, pending, 6, head=head))
        if not tokens:
            return ()
        hidden = ToyHidden(state.head[state.pairs.fed + state.chained - 1][None].copy())
        while len(tokens) < depth:
            output = self.decode_mtp(state, tokens[-1:], hidden, provisional=True)
            tokens += output.need_logits().argmax()
        return tuple(tokens)


# --- faults at edges --------------------------------------------------------------------------------------------------


@broken("edge")
class LastPlace(Toy):
    """Compares with ``>=``: a pass of several rows cannot fill the last place of a state.

    "A state ... can be filled completely" (F10).
    """

    def check(self, state: ToyState, tokens: Sequence[int]) -> None:
        super().check(state, tokens)
        if len(tokens) > 1 and state.held + len(tokens) >= state.capacity:
            super().check(state, [*tokens, 0])


@broken("edge")
class HighestTie(OwnRows):
    """``argmax`` takes the highest id among equal logits.

    "The best token id of every row, the lowest id where several are equal" (``Logits.argmax``; F8).
    """

    class Rows(HostLogits):
        def argmax(self) -> list[int]:
            rows = self.rows()
            return [int(row.shape[0] - 1 - row[::-1].argmax()) for row in rows]


@broken("edge")
class TopOfAll(OwnRows):
    """``topk`` partitions before it sorts, which fails where all tokens are asked for.

    "``argmax``, ``topk``, ``gather`` and ``logsumexp`` agree with ``rows``" (F8).
    """

    class Rows(HostLogits):
        def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
            np.argpartition(-self.rows(), k, axis=-1)
            return super().topk(k)


@broken("edge")
class Overflowing(OwnRows):
    """``logsumexp`` adds exponentials of the logits as they are, and this model's logits are large.

    "``argmax``, ``topk``, ``gather`` and ``logsumexp`` agree with ``rows``" (F8).
    """

    class Rows(HostLogits):
        def logsumexp(self) -> list[float]:
            with np.errstate(over="ignore"):
                return [float(value) for value in np.log(np.exp(self.rows()).sum(-1))]

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.scale = np.float32(9)


@broken("edge")
class RewindsToHere(Toy):
    """Clears dropped rows with ``memory[-n:] = 0``; a rewind to the present length clears all of them.

    "the state is then a plainly decoded one" (F3).
    """

    def rewind(self, state: Any, length: int) -> int:
        surplus = state.held - length
        reached = super().rewind(state, length)
        kept = state.memory[: reached + surplus]
        kept[-surplus:] = 0
        return reached


@broken("edge")
class RewindsToNothing(Toy):
    """A rewind to the start keeps the recurrent state.

    "``rewind(length)`` returns the length reached, at most ``length``; the state is then a plainly decoded one" (F3).
    """

    def rewind(self, state: Any, length: int) -> int:
        carried = state.memory[state.held - 1].copy() if state.held else None
        reached = super().rewind(state, length)
        if not reached and carried is not None:
            state.carried = carried
        return reached

    def row(self, state: ToyState, position: int, token: int) -> list[Any]:
        rows = super().row(state, position, token)
        if position == 0 and (carried := getattr(state, "carried", None)) is not None:
            state.memory[0] = np.tanh(np.float32(0.6) * np.roll(carried, 1) + rows[0])
        return rows


@broken("edge")
class EmptyStates(Toy):
    """Makes a state for no tokens.

    "PromptError if ``capacity`` is not 1 to ``info.max_positions``" (``ForwardPass.new_state``; F7).
    """

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> ToyState:
        return super().new_state(max(capacity, 1), needs) if capacity else ToyState(0, needs)


@broken("edge")
class ChecksOnTheWay(Toy):
    """Finds an invalid token when it reaches it, after it has taken in those before it.

    "Misuse raises ... and leaves the committed state unchanged" (F7).
    """

    def prefill(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        wrong = [at for at, token in enumerate(tokens) if not 0 <= token < self.info.vocab_size]
        if wrong and wrong[0]:
            super().prefill(state, tokens[: wrong[0]])
        return super().prefill(state, tokens)


@broken("edge")
class CommitsTwice(Toy):
    """Takes a second commit after one pass for a commit of no rows.

    "Raises: StateError when there is nothing to commit" (``ForwardPass.commit``; F7).
    """

    def commit(self, state: Any, rows: int) -> None:
        if state.drafted is not None:
            super().commit(state, rows)


@broken("edge")
class CutsCommits(Toy):
    """Commits all rows of a pass if more are named.

    "Raises: StateError when ... ``rows`` is above T" (``ForwardPass.commit``; F7).
    """

    def commit(self, state: Any, rows: int) -> None:
        super().commit(state, rows if state.drafted is None else min(rows, len(state.drafted)))


# --- faults in what is handed over ------------------------------------------------------------------------------------


@broken("handover")
class ViewsOfHidden(Toy):
    """Hidden states are views of a buffer that the next pass of the state overwrites.

    "Hidden states stay valid whatever passes run later" (F17).
    """

    def outcome(self, state: ToyState, layers: list[Any], logits: Any, *, prompt: bool = False) -> ForwardOutput:
        if not hasattr(state, "buffer"):
            state.buffer = np.zeros((LAYERS + 2, state.capacity, H), np.float32)  # type: ignore[attr-defined]
        kept = []
        for layer, buffer in zip(layers, state.buffer, strict=True):  # type: ignore[attr-defined]
            buffer[: len(layer)] = layer
            kept.append(buffer[: len(layer)])
        return super().outcome(state, kept, logits, prompt=prompt)


@broken("handover")
class ViewsOfLogits(Toy):
    """Logits are views of a buffer of the target that the next pass of any sequence overwrites.

    "Scratch buffers belong to the target, results to the sequence" (F12).
    """

    buffer: Any = None

    def logits(self, hidden: Any) -> Any:
        if self.buffer is None:
            self.buffer = np.zeros((self.info.max_rows, self.info.vocab_size), np.float32)
        self.buffer[: len(hidden)] = super().logits(hidden)
        return self.buffer[: len(hidden)]


@broken("handover")
class SharesAnswers(Toy):
    """Keeps the logits of a prefix for the next sequence that has it; a caller who writes into them spoils these.

    missing: "A caller may write into what ``rows`` returns; the target's later answers do not change".
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.answers: dict[tuple[int, ...], Any] = {}

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().decode(state, tokens)
        key = *state.tokens[: state.held].tolist(), *tokens, len(tokens)
        rows = self.answers.setdefault(key, output.need_logits().rows())
        return attrs.evolve(output, logits=HostLogits(rows))


@broken("handover")
class ConsumesTokens(Toy):
    """Takes prompt tokens off the list that it was given.

    missing: "A target leaves its arguments unchanged".
    """

    def prefill(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().prefill(state, tokens)
        if isinstance(tokens, list) and len(tokens) > self.info.max_rows:
            tokens.clear()
        return output


@broken("handover")
class KeepsTheList(Toy):
    """Writes the tokens of a pass into its cache at the commit, from the caller's own list.

    missing: "An argument belongs to the caller again when the call returns".
    """

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().decode(state, tokens)
        state.given = tokens
        return output

    def commit(self, state: Any, rows: int) -> None:
        start = state.held
        super().commit(state, rows)
        state.tokens[start : start + rows] = state.given[:rows]


# --- faults in snapshots ----------------------------------------------------------------------------------------------


@broken("snapshot")
class SharedArrays(Toy):
    """A snapshot holds views of the caches.

    "A copy of everything committed, independent of what happens to ``state`` later" (``ForwardPass.snapshot``; F4).
    """

    def snapshot(self, state: Any) -> Snapshot:
        saved = super().snapshot(state)
        return attrs.evolve(saved, arrays={**saved.arrays, "memory": state.memory[: state.held]})


@broken("snapshot")
class HalfMemory(Toy):
    """Saves the recurrent states in half precision.

    "A new state equal, bit for bit, to the one that ``snapshot`` was taken from" (``ForwardPass.restore``; F4).
    """

    def snapshot(self, state: Any) -> Snapshot:
        saved = super().snapshot(state)
        return attrs.evolve(saved, arrays={**saved.arrays, "memory": saved.arrays["memory"].astype(np.float16)})


@broken("snapshot")
class WithoutPairs(Toy):
    """Leaves the MTP pairs out of a snapshot, so a restored session drafts without them.

    "``state.pairs`` accounts for every committed token, fed or waiting, after any calls" (F22).
    """

    with_head = True

    def snapshot(self, state: Any) -> Snapshot:
        return attrs.evolve(super().snapshot(state), meta={})


@broken("snapshot")
class SavesProvisional(Toy):
    """Takes the rows of a pass that is not committed into a snapshot.

    "A copy of everything committed" (``ForwardPass.snapshot``; F4).
    """

    def snapshot(self, state: Any) -> Snapshot:
        end = state.held + len(state.drafted or ())
        arrays = {"tokens": state.tokens[:end].copy(), "memory": state.memory[:end].copy()}
        return attrs.evolve(super().snapshot(state), length=end, arrays=arrays)


@broken("snapshot")
class MetaObjects(Toy):
    """Puts the time and the last tokens into the metadata.

    "named arrays of the backend plus plain metadata": ``meta: Mapping[str, int]`` (``Snapshot``).
    """

    def snapshot(self, state: Any) -> Snapshot:
        saved = super().snapshot(state)
        meta: dict[str, Any] = {**saved.meta, "saved": time.time(), "last": state.tokens[max(state.held - 3, 0) :]}
        return attrs.evolve(saved, meta=meta)


@broken("snapshot")
class TensorsReturn(Toy):
    """Gives its arrays to a file as they are, and expects numpy arrays back where it gets torch tensors.

    "A torch tensor in host memory as ``restore`` takes it: the inverse of ``to_host``" (``ForwardPass.from_host``).
    """

    def from_host(self, tensor: Any) -> Any:
        return tensor

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> ToyState:
        arrays = {name: array.astype(array.dtype) for name, array in snapshot.arrays.items()}
        return super().restore(attrs.evolve(snapshot, arrays=arrays), needs)


@broken("snapshot")
class ForgetsNeeds(Toy):
    """Restores a state that gives no hidden states, whatever is asked for.

    "made for ``needs``" (``ForwardPass.restore``; F9).
    """

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> ToyState:
        return super().restore(snapshot, attrs.evolve(needs, final_hidden=False, boundaries=()))


# --- settings, randomness, resources ----------------------------------------------------------------------------------


@broken("settings")
class SmallSeedNoise(Noisy):
    """Its noise takes the lower 32 bits of the seed.

    "where it answers, it follows the formula of the contract" (F8).
    """

    class Rows(Noisy.Rows):
        def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
            return super().noisy_argmax(row, scale, seed & 0xFFFFFFFF, position)


@broken("randomness")
class Jitters(Toy):
    """Adds noise of a millionth to the logits of passes of eight rows and more, from numpy's global generator.

    "BITWISE: the bits of a row do not depend on the number of rows of its pass" (F5). missing: "No plugin reads or
    advances a global generator" (said of drafters and verifiers only).
    """

    def logits(self, hidden: Any) -> Any:
        rows = super().logits(hidden)
        return rows if len(rows) < 8 else rows + np.random.random(rows.shape).astype(np.float32) * np.float32(1e-6)


@broken("randomness")
class SeedsTorch(Toy):
    """Seeds torch's global generator for every state.

    missing: "No plugin reads or advances a global generator" (said of drafters and verifiers only).
    """

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> ToyState:
        torch.manual_seed(0)
        return super().new_state(capacity, needs)


@broken("resources")
class NoBytes(Toy):
    """Its states say that they occupy no memory.

    "Bytes that the state occupies" (``State.nbytes``).
    """

    class Light(ToyState):
        def nbytes(self) -> int:
            return 0

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> ToyState:
        super().new_state(capacity, needs)
        return self.Light(capacity, needs)


@broken("resources")
class KeepsStates(Toy):
    """Keeps every state that it made in a list.

    missing: "A state is freed with its sequence: a target keeps no reference to it".
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.states: list[ToyState] = []

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> ToyState:
        self.states.append(super().new_state(capacity, needs))
        return self.states[-1]


# --- other ------------------------------------------------------------------------------------------------------------


@broken("other")
class SharedScratch(Toy):
    """Keeps how many rows wait for a commit in the target, not in the state.

    "States of one target do not influence each other" (F12).
    """

    waiting: ClassVar[list[int]] = []

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().decode(state, tokens)
        self.waiting[:] = [*tokens]
        return output

    def commit(self, state: Any, rows: int) -> None:
        start = state.held
        super().commit(state, rows)
        state.tokens[start : start + len(self.waiting[:rows])] = self.waiting[:rows]


@broken("other")
class SeesStaleRows(Toy):
    """Looks tokens up in all rows that were ever written, if the rejected part of a pass was longer than four rows.

    "Uncommitted rows leave no trace" (F11).
    """

    def run(self, state: ToyState, tokens: Sequence[int]) -> list[Any]:
        state.reached = max(getattr(state, "reached", 0), state.held + len(tokens))  # type: ignore[attr-defined]
        return super().run(state, tokens)

    def look_up(self, state: ToyState, position: int, token: int) -> Any:
        end = state.reached  # type: ignore[attr-defined]
        stale = np.flatnonzero(state.tokens[position + 5 : end - 1] == token)
        if end - position <= 5 or not len(stale) or position < state.held:
            return super().look_up(state, position, token)
        return self.embedding[state.tokens[position + 5 + stale[-1] + 1]]

    def rewind(self, state: Any, length: int) -> int:
        state.reached = 0
        return super().rewind(state, length)


@broken("other")
class SeesLaterRows(Toy):
    """In passes of more than eight rows a row looks its token up in the whole pass.

    "The logits of a row do not depend on the rows after it" (F14).
    """

    def run(self, state: ToyState, tokens: Sequence[int]) -> list[Any]:
        if 8 < len(tokens) <= self.info.max_rows:
            state.tokens[state.held : state.held + len(tokens)] = tokens
            self.end = state.held + len(tokens)
        else:
            self.end = 0
        return super().run(state, tokens)

    end = 0

    def look_up(self, state: ToyState, position: int, token: int) -> Any:
        return super().look_up(state, max(position, self.end - 1) if self.end else position, token)


@broken("other")
class Continues(Toy):
    """A second ``decode`` before the commit continues after the first.

    "Calling it again before ``commit`` starts over from the committed prefix" (``ForwardPass.decode``; F2).
    """

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        if not state.drafted or state.held + len(state.drafted) + len(tokens) > state.capacity:
            return super().decode(state, tokens)
        held, before = state.held, state.drafted
        state.held += len(before)
        output = super().decode(state, tokens)
        state.held = held
        return output


@broken("other")
class NumbersByOrder(Toy):
    """Numbers boundaries by the order of asking: a drafter that asks for 1 and 2 gets 0 and 1 under these names.

    "Rows in another order, the last row in place of all, or boundaries numbered by the order of asking" (F21).
    """

    def outcome(self, state: ToyState, layers: list[Any], logits: Any, *, prompt: bool = False) -> ForwardOutput:
        output = super().outcome(state, layers, logits, prompt=prompt)
        kept = len(output.hidden or ()) or next((len(one) for one in output.boundaries.values()), 0)
        numbered = {k: ToyHidden(layers[at][-kept:]) for at, k in enumerate(state.needs.boundaries)}
        return attrs.evolve(output, boundaries=numbered)


@broken("other")
class BoundaryAfterNorm(Toy):
    """Gives the state after the final norm as the last boundary.

    "k = L is the output of the last layer", "before any norm" (``Needs``; F21).
    """

    def outcome(self, state: ToyState, layers: list[Any], logits: Any, *, prompt: bool = False) -> ForwardOutput:
        later = [*layers[:-2], np.stack([norm(row) for row in layers[-2]]), layers[-1]] if not prompt else layers
        return super().outcome(state, later, logits, prompt=prompt)


@broken("other")
class InfoChanges(Toy):
    """Names its kernels after the first pass, when they are compiled.

    "``info`` is filled in: ... and it does not change" (F16).
    """

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().decode(state, tokens)
        self.info = attrs.evolve(self.info, kernels="numpy, warm")
        return output


@broken("other")
class ChainedStay(Toy):
    """Chained entries stay in the head's cache when there are more than four.

    "with one, true pairs stay, provisional ones go" (F13).
    """

    with_head = True

    def decode_mtp(self, state: Any, tokens: Any, hidden: Any, *, provisional: bool = False, head: Any = None) -> Any:
        if not provisional and state.chained > 4:
            stale = state.head[state.pairs.fed : state.pairs.fed + 1].copy()
            output = super().decode_mtp(state, tokens, hidden, head=head)
            state.head[state.pairs.fed - 1] = stale[0]
            return output
        return super().decode_mtp(state, tokens, hidden, provisional=provisional, head=head)


@broken("other")
class AnotherOrder(Toy):
    """Adds products in another order in passes of several rows, and declares bitwise parity.

    "BITWISE: the bits of a row do not depend on the number of rows of its pass" (F5).
    """

    def logits(self, hidden: Any) -> Any:
        if len(hidden) < 5:
            return super().logits(hidden)
        return np.stack([(self.output * row)[:, ::-1].cumsum(-1)[:, -1] * self.scale for row in hidden])


# --- a second set, written from the contract alone -------------------------------------------------------------------


@broken("settings")
class ChoosesByCommitted(OwnRows):
    """Chooses on its device, with the penalties of the committed tokens for every row.

    "``choose`` and ``exponential_sum`` may give nothing; what they give are the reference's tokens and bits" (F8).
    """

    class Rows(HostLogits):
        def choose(self, choosing: Choosing) -> Sequence[int | None]:
            if choosing.sampling.temperature:
                return ()
            known = list(choosing.context)
            return [int(processed(row, known, choosing.context).argmax()) for row in self.rows()]


@broken("snapshot")
class SiblingsShare(Toy):
    """A restored state adopts the snapshot's array, so two that are made from one snapshot write into it in turn.

    "``restore(snapshot)`` gives the state at the snapshot, whatever happened to the original or to copies since" (F4).
    """

    def snapshot(self, state: Any) -> Snapshot:
        saved = super().snapshot(state)
        return attrs.evolve(saved, arrays={**saved.arrays, "memory": state.memory.copy()})

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> ToyState:
        cut = {**snapshot.arrays, "memory": snapshot.arrays["memory"][: snapshot.length]}
        state = super().restore(attrs.evolve(snapshot, arrays=cut), needs)
        state.memory = snapshot.arrays["memory"]
        return state


@broken("late")
class LastOfFirstBlock(Toy):
    """Takes a prompt in by blocks of 40, and gives the last row of the first one where only the last is wanted.

    "A pass returns exactly what its state was made for: hidden states" (F9).
    """

    def outcome(self, state: ToyState, layers: list[Any], logits: Any, *, prompt: bool = False) -> ForwardOutput:
        made = super().outcome(state, layers, logits, prompt=prompt)
        if not prompt or state.needs.prompt_rows != "last" or len(layers[-1]) <= 40:
            return made
        hidden = None if made.hidden is None else ToyHidden(layers[-1][39:40])
        return attrs.evolve(made, hidden=hidden, boundaries={k: ToyHidden(layers[k][39:40]) for k in made.boundaries})


@broken("other")
class PairsFromTheEnd(Toy):
    """Gives the ledger the last hidden states of a pass, also where only its first rows stay.

    "true pairs stay, provisional ones go" (F13).
    """

    with_head = True

    def commit(self, state: Any, rows: int) -> None:
        if rows and state.drafted is not None and rows < len(state.drafted) and state.hidden is not None:
            state.hidden = ToyHidden(np.concatenate([state.hidden.rows()[-rows:], state.hidden.rows()[rows:]]))
        super().commit(state, rows)


@broken("edge")
class GrowsWhenFull(Toy):
    """A full state takes more rows in: its arrays grow, and its capacity stays what was asked for.

    "Misuse raises StateError, ShapeError or PromptError as documented" (F7).
    """

    class Growing(ToyState):
        asked = 0

        @property
        def capacity(self) -> int:
            return self.asked

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> ToyState:
        super().new_state(capacity, needs)
        state = self.Growing(capacity + self.info.max_rows, needs)
        state.asked = capacity
        return state

    def check(self, state: Any, tokens: Sequence[int]) -> None:
        whole = self.Growing(len(state.tokens), NO_NEEDS)
        whole.asked, whole.held = len(state.tokens), state.held
        super().check(whole, tokens)
