"""Draft with a second, smaller causal language model: of the same tokenizer, or of another one by way of text.

The draft model keeps a state of its own and takes nothing back in normal cycles. A draft is read off provisional rows:
step i decodes ``[waiting ..., x_1 .. x_i]`` from the committed prefix, and starts over from it. What the target then
decided is compared with the rows of the last decode, and exactly the rows that agree are committed. So every family
rolls back for free, recurrent ones too. The last drafted token has been in no decode: when it is accepted it waits.

A cycle without a draft costs the draft model nothing: its tokens wait until somebody asks for a draft.

Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. For another tokenizer: Timor et al.
2025, arXiv:2502.05202 (``specdec.drafters.retokenise``).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from specdec.config import FieldError, TargetConfig, between, one_of
from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    ForwardOutput,
    ForwardPass,
    Logits,
    ModelInfo,
    PrepareEnv,
    Snapshot,
    State,
    Verdict,
)
from specdec.drafters.gate import DraftGate
from specdec.drafters.retokenise import Transcript, common_prefix, continuation, differences
from specdec.errors import ConfigError, SpecdecError, UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.sampling import draft_token

if TYPE_CHECKING:
    from specdec.contract import Float32
    from specdec.text import Tokenizer

WAITING_ROWS = 8  # committed tokens that ride in a decode; more of them are prefilled first
OTHER_TOKENS = "the saved state holds other tokens"
_SHOWN = 3  # examples that an error gives


def _filled(owner: object, field: attrs.Attribute[Any], value: str) -> None:
    if not value:
        raise FieldError(owner, field.name, "a name", value)


@attrs.frozen(kw_only=True)
class DraftModelConfig:
    """Which model drafts, and what its tokens are to the target."""

    model: str = attrs.field(validator=_filled)  # a folder, a hub id, or "demo" (embedded)
    backend: str = attrs.field(default="auto", validator=_filled)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", "bfloat16", "float16", "float32"))
    tokenizers: str = attrs.field(default="ids", validator=one_of("ids", "text"))  # "text": the model has its own
    min_confidence: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # stop below this probability
    min_margin: float = attrs.field(
        default=0.0, validator=between(0.0, 1000.0)
    )  # stop below so many nats to the second


@attrs.frozen(kw_only=True)
class DraftModel:
    """What ``prepare`` gives: the loaded draft model. ``tokenizers`` are the target's and its own, for text only."""

    model: ForwardPass
    name: str = ""
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None


class DraftRow(Logits):
    """The last row of a draft model's logits, as wide as the target's vocabulary.

    Vocabularies of one tokenizer differ in their padding. Ids that only the target has get -inf; ids that only the
    draft model has are left out, so a law is that of the ids which are left.
    """

    def __init__(self, inner: Logits, inner_size: int, vocab_size: int) -> None:
        self._inner, self._inner_size, self._vocab_size = inner, inner_size, vocab_size

    def __len__(self) -> int:
        return 1

    def argmax(self) -> list[int]:
        best = self._inner.argmax()[-1]
        return [best] if best < self._vocab_size else [int(np.argmax(self.rows()[0]))]

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        if self._inner_size <= self._vocab_size:
            ids, values = self._inner.topk(k)
            return ids[-1:], values[-1:]
        row = self.rows()[0]
        best = np.lexsort((np.arange(len(row)), -row))[:k]
        return [best.tolist()], [row[best].tolist()]

    def gather(self, tokens: Sequence[int]) -> list[float]:
        row = self.rows()[0]
        return [float(row[token]) for token in tokens[:1]]

    def logsumexp(self) -> list[float]:
        return self._inner.logsumexp()[-1:] if self._inner_size <= self._vocab_size else super().logsumexp()

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
        token = self._inner.noisy_argmax(len(self._inner) - 1, scale, seed, position)
        return token if token is not None and token < self._vocab_size else None

    def rows(self) -> Float32:
        last = self._inner.rows()[-1:]
        if self._inner_size > self._vocab_size:
            return last[:, : self._vocab_size]
        if self._inner_size == self._vocab_size:
            return last
        padded = np.full((1, self._vocab_size), -np.inf, dtype=np.float32)
        padded[:, : self._inner_size] = last
        return padded


class Follower:
    """The draft model's own sequence: which tokens its state holds, and the provisional rows of the last decode.

    ``tokens`` in every method are all committed tokens in the draft model's ids; the state holds the first ``held``.
    """

    def __init__(self, model: ForwardPass, state: State) -> None:
        self.model = model
        self.state = state
        self._decoded: list[int] = []
        self.passes = 0
        self.prefilled = 0

    @property
    def held(self) -> int:
        """Tokens that the state holds."""
        return self.state.length

    @property
    def capacity(self) -> int:
        """Tokens that the state can hold."""
        return self.state.capacity

    @property
    def waits(self) -> bool:
        """Whether rows of a decode wait for a decision."""
        return bool(self._decoded)

    def settle(self, tokens: Sequence[int], stable: int) -> None:
        """Commit the rows of the last decode that agree with ``tokens``, none of them at or behind ``stable``."""
        if self._decoded:
            decided = tokens[self.held : min(stable, self.held + len(self._decoded))]
            self.model.commit(self.state, common_prefix(self._decoded, decided))
            self._decoded = []

    def cut(self, length: int) -> None:
        """Hold at most the first ``length`` tokens."""
        self._decoded = []
        if self.held > length:
            self.model.rewind(self.state, length)

    def prefill(self, tokens: Sequence[int], end: int) -> None:
        """Hold the first ``end`` tokens."""
        missing = tokens[self.held : end]
        if missing:
            self.model.prefill(self.state, missing)
            self.prefilled += len(missing)
        self._decoded = []

    def make_room(self, tokens: Sequence[int], stable: int, steps: int) -> None:
        """Prefill when too much waits for ``steps`` decodes in a row; something to decode always stays."""
        rows = min(WAITING_ROWS + steps - 1, self.model.info.max_rows)
        for end in (min(stable, len(tokens) - 1), len(tokens) - 1):
            if len(tokens) - self.held + steps - 1 > rows:
                self.prefill(tokens, end)

    def step(self, tokens: Sequence[int], drafted: Sequence[int]) -> Logits:
        """The logits behind ``tokens`` and ``drafted``, in the last row."""
        self._decoded = [*tokens[self.held :], *drafted]
        self.passes += 1
        return self.model.decode(self.state, self._decoded).need_logits()


class _SecondModelDrafter(Drafter):
    """What both kinds share: following the committed tokens, and saving the state."""

    tokenizers: ClassVar[str]
    tokens_per_token: ClassVar[int] = 1  # places in the draft model's state per token of the target

    def __init__(self, config: DraftModelConfig, env: DrafterEnv) -> None:
        shared: DraftModel = env.shared
        self._shared = shared
        self._vocab_size = env.target.info.vocab_size
        self._gate = DraftGate(config.min_confidence, config.min_margin)
        self._rebuilt = ""  # why a saved state was not taken up
        capacity = min(env.state.capacity * self.tokens_per_token, shared.model.info.max_positions)
        saved = self._restored(env.saved, capacity) if env.saved is not None else None
        self._follower = Follower(shared.model, shared.model.new_state(capacity) if saved is None else saved[0])
        self._saved_tokens = [] if saved is None else saved[1]
        self._skipped: dict[str, int] = {}

    @abc.abstractmethod
    def _follow(self, context: Context) -> tuple[Sequence[int], int]:
        """All committed tokens in the draft model's ids, and how many of them no later token can change.

        The follower holds nothing else afterwards.
        """

    @abc.abstractmethod
    def _held_tokens(self, context: Context) -> Sequence[int]:
        """The tokens that the follower holds, or more."""

    def _readable(self, tokens: Sequence[int], end: int) -> bool:
        """Whether the draft model can hold the first ``end`` tokens; counts why not."""
        follower = self._follower
        if end > follower.capacity:
            return self._skip("capacity")
        if max(tokens[follower.held : end], default=0) >= self._shared.model.info.vocab_size:
            return self._skip("vocabulary")
        return True

    def _skip(self, reason: str) -> bool:
        self._skipped[reason] = self._skipped.get(reason, 0) + 1
        return False

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        tokens, stable = self._follow(context)
        if self._readable(tokens, stable):
            self._follower.prefill(tokens, stable)

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        if self._follower.waits:
            self._follower.settle(*self._follow(context))

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        follower = self._follower
        # not _follow: the context may end with tokens that were fed and can still be taken back unseen
        kept = list(self._held_tokens(context)[: follower.held])
        if not kept or len(kept) != follower.held:
            return None
        snapshot = follower.model.snapshot(follower.state)
        arrays = {f"state.{name}": follower.model.to_host(array) for name, array in snapshot.arrays.items()}
        meta: dict[str, int | str] = {f"state.{name}": value for name, value in snapshot.meta.items()}
        return DrafterSnapshot({**arrays, "tokens": np.array(kept, dtype=np.int64)}, {**meta, **self._identity()})

    def _identity(self) -> dict[str, str]:
        info = self._shared.model.info
        names = ("fingerprint", "family", "backend", "dtype")
        return {**{name: getattr(info, name) for name in names}, "tokenizers": self.tokenizers}

    def _restored(self, saved: DrafterSnapshot, capacity: int) -> tuple[State, list[int]] | None:
        """A saved state and the tokens it holds, where it is of this model and whole."""
        for name, ours in self._identity().items():
            if saved.meta.get(name) != ours:
                self._rebuilt = f"saved with another {name}: {saved.meta.get(name)!r}, this one has {ours!r}"
                return None
        try:
            tokens = [int(token) for token in saved.arrays["tokens"].tolist()]
            model, own = self._shared.model, saved.arrays.items()
            arrays = {name[6:]: model.from_host(array) for name, array in own if name.startswith("state.")}
            meta = {name[6:]: int(value) for name, value in saved.meta.items() if name.startswith("state.")}
            snapshot = Snapshot(len(tokens), capacity, arrays, meta)
            state = model.restore(snapshot)
        except Exception as error:  # noqa: BLE001 - arrays of a damaged file; each backend fails in its own way
            self._rebuilt = f"the saved state cannot be restored: {type(error).__name__}: {error}"
            return None
        if state.length != len(tokens):
            self._rebuilt = f"the saved state holds {state.length} tokens, and {len(tokens)} belong to it"
            return None
        return state, tokens

    def report(self) -> Mapping[str, Any]:
        told: dict[str, Any] = {
            "model": self._shared.name,
            "tokenizers": self.tokenizers,
            "passes": self._follower.passes,
            "prefilled": self._follower.prefilled,
            **self._gate.report(),
        }
        if self._skipped:
            told["skipped"] = dict(self._skipped)  # drafts that were not made, by reason
        if self._rebuilt:
            told["rebuilt"] = self._rebuilt
        return told


class DraftModelDrafter(_SecondModelDrafter):
    """A draft model that reads and writes the target's own token ids."""

    tokenizers = "ids"

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        tokens, stable = self._follow(context)
        if self._readable(tokens, stable + 1):  # nothing is pending here
            self._follower.prefill(tokens, stable + 1)

    def propose(self, context: Context, depth: int) -> Draft:
        tokens, stable = self._follow(context)
        if depth < 1 or not self._readable(tokens, len(tokens)):
            return EMPTY_DRAFT
        follower = self._follower
        # the last drafted token is in no decode, so a draft of k tokens takes k - 1 places and k rows
        steps = min(depth, follower.capacity - len(tokens) + 1, follower.model.info.max_rows)
        follower.make_room(tokens, stable, steps)
        drafted: list[int] = []
        laws: list[Float32] = []
        while len(drafted) < steps:
            row = DraftRow(follower.step(tokens, drafted), follower.model.info.vocab_size, self._vocab_size)
            try:
                if self._gate.stops(row, context, drafted):  # before the draw: nothing may depend on the token
                    break
                token, law = draft_token(row, drafted, context)
            except ConfigError:
                if follower.model.info.vocab_size >= self._vocab_size:
                    raise
                self._skip("vocabulary")  # what is allowed here is none of the draft model's tokens
                break
            drafted.append(token)
            if law is not None:
                laws.append(law)
        return Draft(tuple(drafted), np.stack(laws) if laws else None)

    def rewind(self, length: int) -> None:
        self._follower.cut(length)

    def _follow(self, context: Context) -> tuple[Sequence[int], int]:
        if self._saved_tokens:
            shared = min(common_prefix(self._saved_tokens, context), max(len(context) - 1, 0))
            if shared < self._follower.held:
                self._follower.cut(shared)
                self._rebuilt = OTHER_TOKENS
            self._saved_tokens = []
        return context, len(context) - 1

    def _held_tokens(self, context: Context) -> Sequence[int]:
        return self._follow(context)[0]


class TextDraftModelDrafter(_SecondModelDrafter):
    """A draft model with a tokenizer of its own; drafts are point masses of its greedy text.

    Sampled drafts would help little here: the noise that decides a position belongs to the target's token ids.
    """

    tokenizers = "text"
    tokens_per_token = 2

    def __init__(self, config: DraftModelConfig, env: DrafterEnv) -> None:
        super().__init__(config, env)
        if self._shared.tokenizers is None:
            raise UnsupportedError('tokenizers = "text" needs the tokenizers of both models')
        self._target_tokenizer, self._draft_tokenizer = self._shared.tokenizers
        self._transcript = Transcript(self._target_tokenizer, self._draft_tokenizer, self._saved_tokens or None)
        self._dropped: dict[str, int] = {"boundary": 0, "incomplete": 0, "special": 0}

    def propose(self, context: Context, depth: int) -> Draft:
        tokens, stable = self._follow(context)
        if depth < 1 or not tokens or not self._readable(tokens, len(tokens)):
            return EMPTY_DRAFT
        follower = self._follower
        steps = min(2 * depth, follower.capacity - len(tokens) + 1, follower.model.info.max_rows)
        follower.make_room(tokens, stable, steps)
        said: list[int] = []  # drafted, in the draft model's tokens
        drafted: list[int] = []  # the same in the target's
        text, whole = "", True
        width = follower.model.info.vocab_size
        while len(said) < steps and len(drafted) < depth and whole:
            row = DraftRow(follower.step(tokens, said), width, width)
            # the target's settings are about its own token ids
            token = row.argmax()[0]
            if self._gate.stops(row, Context([])) or token in self._draft_tokenizer.special_ids:
                break
            said.append(token)
            text = self._transcript.spelt(said)
            if text:
                found = continuation(self._target_tokenizer, context, self._transcript.said, text, self._vocab_size)
                drafted, whole = found or [], found is not None
        if said and not drafted:
            self._dropped["boundary" if not whole else "special" if text else "incomplete"] += 1
        return Draft(tuple(drafted[:depth]))

    def rewind(self, length: int) -> None:
        self._transcript.restart()

    def _follow(self, context: Context) -> tuple[Sequence[int], int]:
        transcript = self._transcript
        kept = min(transcript.follow(context), max(len(transcript.ids) - 1, 0))  # one is always left to decode
        if kept < self._follower.held:
            if self._saved_tokens:
                self._rebuilt = OTHER_TOKENS
            self._follower.cut(kept)
        self._saved_tokens = []
        return transcript.ids, min(transcript.closed, len(transcript.ids) - 1)

    def _held_tokens(self, context: Context) -> Sequence[int]:
        return self._transcript.known

    def report(self) -> Mapping[str, Any]:
        return {**super().report(), "dropped": dict(self._dropped)}


# --- loading ---------------------------------------------------------------------------------------------------------


def _prepare(config: DraftModelConfig, env: PrepareEnv) -> DraftModel:
    """Load the draft model and compare its vocabulary with the target's.

    Raises: UnsupportedError when the two do not fit; the loader's own errors.
    """
    if env.load is None:
        raise UnsupportedError(
            "the drafter 'draft_model' loads a second model, and there is nothing here to load it with",
            try_="specdec.load; a check takes a DrafterSubject whose prepare gives a DraftModel",
        )
    asked = f"drafter.model = {config.model!r}"
    try:
        model, tokenizer = env.load(TargetConfig(model=config.model, backend=config.backend, dtype=config.dtype))
    except SpecdecError as error:
        for label, fact in error.facts.items():  # the loader knows the keys of a target
            error.facts[label] = fact.replace("target.", "drafter.") if label in ("asked for by", "try") else fact
        error.facts.setdefault("asked for by", asked)
        raise
    if env.tokenizer is None or tokenizer is None:
        raise UnsupportedError("a draft model needs the tokenizers of both models", asked_for_by=asked)
    found = differences(env.tokenizer, tokenizer)
    if config.tokenizers == "text":
        if not found and tokenizer.vocab_size <= model.info.vocab_size:
            env.notices.append(
                f'{config.model} has the target\'s own vocabulary: drafter.tokenizers = "ids" drafts without text'
            )
        return DraftModel(model=model, name=config.model, tokenizers=(env.tokenizer, tokenizer))
    check_vocabularies(found, env, model.info, asked)
    return DraftModel(model=model, name=config.model)


def check_vocabularies(
    found: Sequence[tuple[int, str | None, str | None]], env: PrepareEnv, draft: ModelInfo, asked: str
) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    Ids that only the target's tokenizer knows are no harm where the draft model has rows for them: it was not trained
    on them, and drafts badly behind them. They give a notice.

    Args:
        found: what ``differences`` gave.
    Raises: UnsupportedError that names the first ids that differ.
    """
    needed = env.tokenizer.vocab_size
    wrong = [entry for entry in found if entry[2] is not None]
    if wrong:
        examples = "; ".join(
            f"{i} is {'no token' if ours is None else repr(ours)} to the target and {theirs!r} to the draft model"
            for i, ours, theirs in wrong[:_SHOWN]
        )
        raise UnsupportedError(
            f"the draft model has another vocabulary: {len(wrong)} token ids differ",
            asked_for_by=asked,
            ids=examples + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""),
            try_='drafter.tokenizers = "text", or a draft model of the same family',
        )
    if needed > draft.vocab_size:
        raise UnsupportedError(
            f"the draft model has a vocabulary of {draft.vocab_size}, and the target's tokenizer has {needed} tokens",
            asked_for_by=asked,
            try_='drafter.tokenizers = "text", or a draft model of the same family',
        )
    if found:
        ids = ", ".join(f"{i} {ours!r}" for i, ours, _ in found[:_SHOWN])
        env.notices.append(f"the draft model does not know {len(found)} tokens of the target: {ids}")


def _make(config: DraftModelConfig, env: DrafterEnv) -> Drafter:
    made = TextDraftModelDrafter if config.tokenizers == "text" else DraftModelDrafter
    return made(config, env)


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="draft_model", factory=_make, config=DraftModelConfig, prepare=_prepare, help="a second, smaller model"
        )
    ]
