"""A small exact language model in numpy, for targets of another engine: honest caches, hidden states and an MTP head.

A recurrent layer, a layer that looks up what followed the last occurrence of the token, a norm and an output head in
which some tokens are always equally good. Every row is computed alone, so its bits depend on its prefix only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec import ForwardOutput, ForwardPass, ModelInfo, MtpPairs, Needs, Parity
from specdec.backends.arrays import ArrayHidden, HostLogits
from specdec.contract import NO_NEEDS, Hidden, Snapshot, State
from specdec.errors import PromptError, ShapeError, StateError, UnsupportedError

H = 16  # hidden size
LAYERS = 2


class ToyHidden(ArrayHidden):
    """``[T, H]`` float32."""

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return np.concatenate(arrays)

    def rows(self) -> Any:
        return self.array.copy()


class ToyState(State):
    """Caches with a row per token. Rows from ``length`` on are provisional or stale."""

    def __init__(self, capacity: int, needs: Needs) -> None:
        self.needs = needs
        self.pairs = MtpPairs() if needs.mtp else None
        self.held = 0  # committed rows
        self.drafted: list[int] | None = None  # the tokens of the last pass, until they are committed
        self.hidden: ToyHidden | None = None  # of the last pass, for the pairs
        self.chained = 0  # provisional entries of the head's cache
        self.tokens = np.zeros(capacity, np.int64)
        self.memory = np.zeros((capacity, H), np.float32)
        self.head = np.zeros((capacity + 64 if needs.mtp else 0, H), np.float32)

    @property
    def length(self) -> int:
        return self.held

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    def nbytes(self) -> int:
        return self.tokens.nbytes + self.memory.nbytes + self.head.nbytes


def norm(x: Any) -> Any:
    return x / np.sqrt((x * x).mean() + np.float32(1e-6))


class Toy(ForwardPass):
    """The model. Broken targets change one method."""

    with_head = False  # whether the fault is one of the MTP head

    def __init__(self, vocab: int = 97, *, max_positions: int = 2048, max_rows: int = 16, mtp: bool = False) -> None:
        noise = np.random.default_rng(20)
        self.embedding = noise.standard_normal((vocab, H)).astype(np.float32)
        self.output = self.embedding[:, ::-1].copy()
        ids = np.arange(vocab)
        twins = (ids % 5 == 4) | (ids == vocab - 1)
        self.output[twins] = self.output[ids[twins] - 1]  # exact ties
        self.scale = np.float32(1.5)
        self.info = ModelInfo(
            family="toy",
            vocab_size=vocab,
            hidden_size=H,
            max_positions=max_positions,
            mtp_layers=int(mtp),
            layers=LAYERS,
            max_rows=max_rows,
            parity=Parity.BITWISE,
            parity_reason="every row is computed alone",
            backend="toy",
            device="host",
            dtype="float32",
            kernels="numpy",
            fingerprint=f"toy-{vocab}-{max_positions}-{int(mtp)}",
        )

    # one row

    def embed(self, token: int, position: int) -> Any:
        return self.embedding[token] + np.float32(0.2) * np.sin(np.float32(position) * np.arange(1, H + 1, dtype="f4"))

    def look_up(self, state: ToyState, position: int, token: int) -> Any:
        """The embedding of the token after the last earlier occurrence of ``token``; zeros without one."""
        found = np.flatnonzero(state.tokens[:position] == token)
        return self.embedding[state.tokens[found[-1] + 1]] if len(found) else np.zeros(H, np.float32)

    def row(self, state: ToyState, position: int, token: int) -> list[Any]:
        """Write the caches at ``position`` and return the boundaries 0, 1, 2 of the row."""
        before = state.memory[position - 1] if position else np.zeros(H, np.float32)
        start = self.embed(token, position)
        state.tokens[position] = token
        state.memory[position] = np.tanh(np.float32(0.6) * np.roll(before, 1) + start)
        middle = start + state.memory[position]
        return [start, middle, middle + 2 * self.look_up(state, position, token)]

    def logits(self, hidden: Any) -> Any:
        """``[T, V]`` of ``[T, H]``, row by row."""
        return np.stack([(self.output * row).sum(-1) * self.scale for row in hidden])

    def run(self, state: ToyState, tokens: Sequence[int]) -> list[Any]:
        """Boundaries ``[T, H]``, and the state after the final norm as the last one."""
        rows = [self.row(state, state.held + at, token) for at, token in enumerate(tokens)]
        final = np.stack([norm(row[-1]) for row in rows])
        return [*(np.stack(boundary) for boundary in zip(*rows, strict=True)), final]

    def outcome(self, state: ToyState, layers: list[Any], logits: Any, *, prompt: bool = False) -> ForwardOutput:
        rows = len(layers[-1])
        kept = slice(rows - 1, rows) if prompt and state.needs.prompt_rows == "last" else slice(0, rows)
        return ForwardOutput(
            rows=rows,
            logits=logits,
            hidden=ToyHidden(layers[-1][kept]) if state.needs.final_hidden else None,
            boundaries={k: ToyHidden(layers[k][kept]) for k in state.needs.boundaries},
        )

    def check(self, state: ToyState, tokens: Sequence[int]) -> None:
        if wrong := [token for token in tokens if not 0 <= token < self.info.vocab_size]:
            raise PromptError(f"token {wrong[0]} is outside the vocabulary of {self.info.vocab_size}")
        if state.held + len(tokens) > state.capacity:
            raise StateError(f"{len(tokens)} more tokens do not fit into a state of {state.capacity}")

    # the contract

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> ToyState:
        if not 1 <= capacity <= self.info.max_positions:
            raise PromptError(f"a state holds 1 to {self.info.max_positions} tokens, not {capacity}")
        if missing := needs.unmet(self.info):
            raise UnsupportedError(f"the drafter needs {missing}")
        return ToyState(capacity, needs)

    def prefill(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        if not len(tokens):
            raise ShapeError("a prompt chunk has at least one token")
        self.check(state, tokens)
        layers = self.run(state, tokens)
        before, state.held, state.drafted = state.held, state.held + len(tokens), None
        if state.pairs is not None:
            state.pairs.add(list(tokens), ToyHidden(layers[-1]), before)
            self.feed_mtp(state)
        return self.outcome(state, layers, None, prompt=True)

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        if not 1 <= len(tokens) <= self.info.max_rows:
            raise ShapeError(f"a pass has 1 to {self.info.max_rows} rows, not {len(tokens)}")
        self.check(state, tokens)
        layers = self.run(state, tokens)
        state.drafted, state.hidden = list(tokens), ToyHidden(layers[-1])
        return self.outcome(state, layers, HostLogits(self.logits(layers[-1])))

    def commit(self, state: Any, rows: int) -> None:
        if state.drafted is None or not 0 <= rows <= len(state.drafted):
            raise StateError(f"there are not {rows} rows to commit")
        if rows and state.pairs is not None:
            state.pairs.add(state.drafted[:rows], state.hidden[:rows], state.held)
        state.held += rows
        state.drafted = state.hidden = None

    def rewind(self, state: Any, length: int) -> int:
        if not 0 <= length <= state.held:
            raise StateError(f"a state of {state.held} tokens cannot go back to {length}")
        if state.pairs is not None and state.pairs.length == state.held and not state.pairs.knows(length):
            length = max(length - 1, 0)
        if state.pairs is not None:
            state.pairs.cut(length)
        state.held, state.drafted, state.chained = length, None, 0
        return length

    def snapshot(self, state: Any) -> Snapshot:
        arrays = {"tokens": state.tokens[: state.held].copy(), "memory": state.memory[: state.held].copy()}
        meta = {}
        if state.pairs is not None and state.pairs.length == state.held:
            self.feed_mtp(state)  # all but the last pair, whose token is pending
            fed = meta["fed"] = max(state.held - 1, 0)
            arrays["head"] = state.head[:fed].copy()
            arrays["last"] = np.zeros((min(state.held, 1), H), np.float32)
            if state.held:
                arrays["last"][0] = norm(self.row(state, fed, int(state.tokens[fed]))[-1])
        return Snapshot(length=state.held, capacity=state.capacity, arrays=arrays, meta=meta)

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> ToyState:
        state = self.new_state(snapshot.capacity, needs)
        state.held, arrays = snapshot.length, snapshot.arrays
        state.tokens[: state.held], state.memory[: state.held] = arrays["tokens"], arrays["memory"]
        if state.pairs is not None and "fed" in snapshot.meta:
            fed = snapshot.meta["fed"]
            state.head[:fed] = arrays["head"]
            if state.held:
                state.pairs.resume(fed, [], ToyHidden(np.array(arrays["last"])))
        return state

    def from_host(self, tensor: Any) -> Any:
        return tensor.numpy().copy()

    # the MTP head

    def head_pass(self, state: ToyState, start: int, tokens: Sequence[int], hidden: Any) -> Any:
        """Entries ``start ..`` of the head's cache, ``[T, H]``."""
        for at, token in enumerate(tokens):
            before = state.head[start + at - 1] if start + at else np.zeros(H, np.float32)
            mixed = self.embedding[token] + np.float32(0.5) * np.roll(hidden[at], 3) + np.float32(0.3) * before
            state.head[start + at] = norm(np.tanh(mixed))
        return state.head[start : start + len(tokens)].copy()

    def prefill_mtp(self, state: Any, tokens: Sequence[int], hidden: Hidden) -> None:
        if state.pairs is not None and len(tokens):
            state.chained = 0
            self.head_pass(state, state.pairs.fed, tokens, hidden.rows())
            state.pairs.fed += len(tokens)

    def decode_mtp(
        self, state: Any, tokens: Sequence[int], hidden: Hidden, *, provisional: bool = False, head: Any = None
    ) -> ForwardOutput:
        if not provisional:
            state.chained = 0
        start = state.pairs.fed + state.chained
        after = self.head_pass(state, start, tokens, hidden.rows())
        if provisional:
            state.chained += len(tokens)
        else:
            state.pairs.fed += len(tokens)
        logits = HostLogits(self.logits(after[-1:]))
        return ForwardOutput(rows=len(tokens), logits=logits, hidden=ToyHidden(after), boundaries={})


def loaded(snapshot: Snapshot, target: ForwardPass) -> Snapshot:
    """What a session's file gives back: torch tensors on the host, through ``to_host`` and ``from_host``."""
    import torch

    arrays: Mapping[str, Any] = {
        name: target.from_host(torch.as_tensor(target.to_host(array)).clone())
        for name, array in snapshot.arrays.items()
    }
    return Snapshot(snapshot.length, snapshot.capacity, arrays, dict(snapshot.meta))
