"""Draft with a second, smaller causal language model, with the target's tokenizer or its own.

Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. For another tokenizer: Timor et al.
2025, arXiv:2502.05202 (``specdec.drafters.retokenise``).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from specdec.checking import between, filled, one_of
from specdec.config import TargetConfig
from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    ForwardOutput,
    ForwardPass,
    ModelInfo,
    Passes,
    PrepareEnv,
    Verdict,
    run_passes,
)
from specdec.drafters.follower import Follower
from specdec.drafters.gate import DraftGate, Drawing
from specdec.drafters.logits import last_row
from specdec.drafters.retokenise import Transcript, continuation, differences
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.text import Tokenizer

_SHOWN = 3  # examples in an error


@attrs.frozen(kw_only=True)
class DraftModelConfig:
    """The draft model, and how its tokens become the target's."""

    example: ClassVar[Mapping[str, Any]] = {"model": "table"}  # a small model of the conformance kit

    model: str = attrs.field(validator=filled)  # a folder, a hub id, or "demo" (embedded)
    backend: str = attrs.field(default="auto", validator=filled)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", "bfloat16", "float16", "float32"))
    weights: str = attrs.field(default="auto", validator=one_of("auto", "decoded", "int8", "int4"))  # as target.weights
    activations: str = attrs.field(default="auto", validator=one_of("auto", "float", "int8"))  # as target.activations
    tokenizers: str = attrs.field(default="ids", validator=one_of("ids", "text"))  # "text": the model has its own
    min_confidence: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # stop below this probability
    min_margin: float = attrs.field(default=0.0, validator=between(0.0, 1000.0))  # nats from the best to the second


@attrs.frozen(kw_only=True)
class DraftModel:
    """The loaded draft model, shared by all sequences. ``tokenizers``: the target's and its own (text mode only)."""

    model: ForwardPass
    name: str = ""
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None


class _SecondModelDrafter(Drafter):
    """What both kinds share: following the committed tokens."""

    tokenizers: ClassVar[str]
    places: ClassVar[int] = 1  # capacity of the draft model's state per target token

    def __init__(self, config: DraftModelConfig, env: DrafterEnv) -> None:
        shared: DraftModel = env.shared
        self._shared, self._info = shared, shared.model.info
        self._vocab_size = env.target.info.vocab_size
        self._gate = DraftGate(config.min_confidence, config.min_margin)
        self._skipped: dict[str, int] = {}  # drafts that were not made, by reason
        capacity = min(env.state.capacity * self.places, self._info.max_positions)
        self._follower = Follower(shared.model, shared.model.new_state(capacity))

    @abc.abstractmethod
    def _follow(self, context: Context) -> tuple[Sequence[int], int]:
        """All committed tokens in the draft model's ids, and how many of them later tokens cannot change.

        Afterwards the follower's state holds a prefix of these tokens.
        """

    def _readable(self, tokens: Sequence[int], end: int) -> bool:
        """Whether the draft model can hold the first ``end`` tokens; if not, counts the reason."""
        follower = self._follower
        if end > follower.state.capacity:
            self._skip("capacity")
        elif max(tokens[follower.held : end], default=0) >= self._info.vocab_size:
            self._skip("vocabulary")
        else:
            return True
        return False

    def _skip(self, reason: str) -> None:
        self._skipped[reason] = self._skipped.get(reason, 0) + 1

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        tokens, stable = self._follow(context)
        end = stable + (tokens is context)  # the target's own tokens: none is pending here
        if self._readable(tokens, end):
            self._follower.prefill(tokens, end)

    def propose(self, context: Context, depth: int) -> Draft:
        return run_passes(self.drafting(context, depth))

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        if self._follower.waits:
            self._follower.settle(*self._follow(context))

    def report(self) -> Mapping[str, Any]:
        return {
            "model": self._shared.name,
            "weights": self._info.weights,
            "tokenizers": self.tokenizers,
            "passes": self._follower.passes,
            "prefilled": self._follower.prefilled,
            **self._gate.report(),
            **({"skipped": dict(self._skipped)} if self._skipped else {}),
        }


class DraftModelDrafter(_SecondModelDrafter):
    """A draft model that uses the target's token ids."""

    tokenizers = "ids"

    def drafting(self, context: Context, depth: int) -> Passes[Draft]:
        tokens, stable = self._follow(context)
        if depth < 1 or not self._readable(tokens, len(tokens)):
            return EMPTY_DRAFT
        steps = self._follower.make_room(tokens, stable, depth)
        drawing = Drawing(self._gate, context, reduced=self._info.vocab_size < self._vocab_size)
        while len(drawing.tokens) < steps:
            logits = yield from self._follower.step(tokens, drawing.tokens)
            if drawing.next(last_row(logits, self._info.vocab_size, self._vocab_size)) is None:
                break
        if drawing.dead_end:
            self._skip("vocabulary")  # the draft model has none of the allowed tokens
        return drawing.draft()

    def rewind(self, length: int) -> None:
        self._follower.cut(length)

    def _follow(self, context: Context) -> tuple[Sequence[int], int]:
        return context, len(context) - 1


class TextDraftModelDrafter(_SecondModelDrafter):
    """A draft model with its own tokenizer; drafts are point masses of its greedy text.

    Sampled drafts would help little: the noise that decides a position is keyed by the target's token ids.
    """

    tokenizers = "text"
    places = 2

    def __init__(self, config: DraftModelConfig, env: DrafterEnv) -> None:
        super().__init__(config, env)
        if self._shared.tokenizers is None:
            raise UnsupportedError('tokenizers = "text" needs the tokenizers of both models')
        self._target_tokenizer, self._draft_tokenizer = self._shared.tokenizers
        self._transcript = Transcript(self._target_tokenizer, self._draft_tokenizer)
        self._dropped: dict[str, int] = {"boundary": 0, "incomplete": 0, "special": 0}

    def drafting(self, context: Context, depth: int) -> Passes[Draft]:
        tokens, stable = self._follow(context)
        if depth < 1 or not tokens or not self._readable(tokens, len(tokens)):
            return EMPTY_DRAFT
        steps = self._follower.make_room(tokens, stable, 2 * depth)
        own: list[int] = []  # drafted, in the draft model's tokens
        drafted: list[int] = []  # the same in the target's
        text, whole = "", True
        width = self._info.vocab_size
        while len(own) < steps and len(drafted) < depth and whole:
            row = last_row((yield from self._follower.step(tokens, own)), width, width)
            token = row.argmax()[0]
            # an empty context: sampling settings refer to the target's token ids
            if self._gate.stops(row, Context([])) or token in self._draft_tokenizer.special_ids:
                break
            own.append(token)
            text = self._transcript.spelt(own)
            if text:
                tokens_of_text = continuation(
                    self._target_tokenizer, context, self._transcript.text, text, self._vocab_size
                )
                drafted, whole = tokens_of_text or [], tokens_of_text is not None
        if own and not drafted:
            self._dropped["boundary" if not whole else "special" if text else "incomplete"] += 1
        return Draft(tuple(drafted[:depth]))

    def rewind(self, length: int) -> None:
        self._transcript.restart()

    def _follow(self, context: Context) -> tuple[Sequence[int], int]:
        transcript = self._transcript
        unchanged = min(transcript.follow(context), max(len(transcript.ids) - 1, 0))  # one is always left to decode
        if unchanged < self._follower.held:
            self._follower.cut(unchanged)
        return transcript.ids, min(transcript.closed, len(transcript.ids) - 1)

    def report(self) -> Mapping[str, Any]:
        return {**super().report(), "dropped": dict(self._dropped)}


# --- loading ---------------------------------------------------------------------------------------------------------


def _prepare(config: DraftModelConfig, env: PrepareEnv) -> DraftModel:
    """Load the draft model and compare its vocabulary with the target's.

    Raises: UnsupportedError when the two do not fit; the loader's own errors.
    """
    if env.load is None:
        raise UnsupportedError(
            "the drafter 'draft_model' loads a second model, and no loader is available here",
            try_="specdec.load; a check takes a PluginSubject whose prepare gives a DraftModel",
        )
    asked = f"drafter.model = {config.model!r}"
    target = TargetConfig(
        model=config.model,
        backend=config.backend,
        dtype=config.dtype,
        weights=config.weights,
        activations=config.activations,
    )
    try:
        model, tokenizer = env.load(target)
    except SpecdecError as error:
        for label, fact in error.facts.items():  # the loader knows the keys of a target
            error.facts[label] = fact.replace("target.", "drafter.") if label in ("asked for by", "try") else fact
        error.facts.setdefault("asked for by", asked)
        raise
    if env.tokenizer is None or tokenizer is None:
        raise UnsupportedError("a draft model needs the tokenizers of both models", asked_for_by=asked)
    differing = differences(env.tokenizer, tokenizer)
    if config.tokenizers == "text":
        if not differing and tokenizer.vocab_size <= model.info.vocab_size:
            env.notices.append(
                f'{config.model} has the target\'s own vocabulary: drafter.tokenizers = "ids" drafts without text'
            )
        return DraftModel(model=model, name=config.model, tokenizers=(env.tokenizer, tokenizer))
    check_vocabularies(differing, env, model.info, asked)
    return DraftModel(model=model, name=config.model)


def check_vocabularies(
    differing: Sequence[tuple[int, str | None, str | None]], env: PrepareEnv, draft: ModelInfo, asked: str
) -> None:
    """Refuse a draft model whose token ids mean different text than the target's.

    Ids that only the target's tokenizer has are harmless if the draft model has rows for them: it merely drafts badly
    after them. They give a notice.

    Args:
        differing: the result of ``differences``.
    Raises: UnsupportedError that names the first ids that differ.
    """
    needed = env.tokenizer.vocab_size
    wrong = [entry for entry in differing if entry[2] is not None]
    if wrong:
        examples = "; ".join(
            f"{i} is {'no token' if ours is None else repr(ours)} to the target and {theirs!r} to the draft model"
            for i, ours, theirs in wrong[:_SHOWN]
        )
        raise UnsupportedError(
            f"{len(wrong)} token ids differ between the draft model and the target",
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
    if differing:
        ids = ", ".join(f"{i} {ours!r}" for i, ours, _ in differing[:_SHOWN])
        env.notices.append(f"the draft model does not know {len(differing)} tokens of the target: {ids}")


def _make(config: DraftModelConfig, env: DrafterEnv) -> Drafter:
    kind = TextDraftModelDrafter if config.tokenizers == "text" else DraftModelDrafter
    return kind(config, env)


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="draft_model", factory=_make, config=DraftModelConfig, prepare=_prepare, help="a second, smaller model"
        )
    ]
