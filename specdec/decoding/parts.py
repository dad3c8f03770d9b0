"""The parts that a session works with: target, tokenizer, drafter, verifier, depth policy, and settings."""

from __future__ import annotations

import operator
import secrets
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import attrs

from specdec.checking import Before, Mismatch, checked
from specdec.config import Choice, GenerationConfig, GenerationSettings, RunConfig
from specdec.contract import (
    ForwardPass,
    LogitsProcessor,
    ModelInfo,
    ProcessorEnv,
    ProcessorSpec,
    Sampling,
    SamplingSettings,
    Verifier,
)
from specdec.errors import ConfigError, PromptError, SpecdecError, did_you_mean, shown, typed
from specdec.registry import Kind, calling, registry
from specdec.registry.parts import DepthPart, DrafterPart
from specdec.text import Tokenizer

if TYPE_CHECKING:
    from specdec.contract import Float32


def _one_prompt(value: object) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, Sequence) and value and not isinstance(value, bytes | bytearray | memoryview):
        if isinstance(value[0], Mapping):
            raise Mismatch("text or token ids", value, "messages=[...] for a conversation")
        if isinstance(value[0], str | Sequence):
            raise Mismatch("one prompt", value, "a loop over the prompts: one generation runs at a time")


Prompt: TypeAlias = Annotated[str | Sequence[int], Before(_one_prompt)]
"""A prompt: text or token ids."""


class CallSettings(GenerationSettings, total=False):
    """What one generation can be given by keyword: a configuration's settings, and what only a call has."""

    prediction: Prompt | None
    """A text that the output is expected to repeat; drafted from where it does, before the drafter is asked."""
    depth: int | None
    """Draft tokens per cycle, at most, in place of the depth policy; 0 is plain decoding."""


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """A target with its tokenizer, drafter, verifier and depth policy.

    Make a variant over the same weights with ``attrs.evolve``.

    Attributes:
        config: the configuration it was built from.
        target: the loaded model.
        tokenizer: text to token ids and back.
        notices: notices about this load (a downgrade, unused tensors, a fallback), one sentence each.
        room: tokens of one session that the device's memory had room for at the load; None: no such limit.
    """

    config: RunConfig
    target: ForwardPass
    tokenizer: Tokenizer
    drafter: DrafterPart
    verifier: Verifier
    depth: DepthPart
    notices: tuple[str, ...] = ()
    room: int | None = None

    @property
    def info(self) -> ModelInfo:
        """Facts about the target and its backend's guarantees."""
        return self.target.info

    @property
    def capacity(self) -> int:
        """Tokens that a session can hold: the least of the model's limit, ``target.capacity`` and ``room``."""
        limits = (self.info.max_positions, self.config.target.capacity, self.room)
        return min(limit for limit in limits if limit is not None)

    @checked(PromptError)
    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises: PromptError when it is empty or has ids outside the vocabulary."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise PromptError("the prompt is empty", try_="at least one character, or one token id")
        for token in tokens:
            if not 0 <= token < self.info.vocab_size:
                raise PromptError(
                    f"token id {shown(token)} is outside the vocabulary (0 to {self.info.vocab_size - 1})"
                )
        return tokens

    def check_fits(self, total: int) -> None:
        """Raises: PromptError unless a session can hold ``total`` tokens and one more."""
        capacity = self.capacity
        if total >= capacity:
            most = self.info.max_positions
            reason = {most: f"max_position_embeddings {most}", self.config.target.capacity: "target.capacity"}
            raise PromptError(
                f"the prompt is too long: {total} tokens, and at least one more must fit",
                limit=f"{capacity} tokens ({reason.get(capacity, 'the free memory of the device')})",
                try_=f"a prompt of at most {capacity - 1} token{'' if capacity == 2 else 's'}",
            )


def language_model(lm: Parts, who: str) -> Parts:
    """``lm``, which ``who`` works with. Raises: ConfigError if it is something else."""
    if not isinstance(lm, Parts):
        raise ConfigError(f"{who} takes a language model, got {typed(lm)}", try_="specdec.load(...), and its methods")
    return lm


# --- settings of one generation ---------------------------------------------------------------------------------------


def override_generation(config: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """``config`` with every setting that is not None. Raises: PromptError for an unknown or unusable setting."""
    if not settings:
        return config
    known = [field.name for field in attrs.fields(GenerationConfig)]
    for name in settings:
        if name not in known:
            raise PromptError(
                f"generation has no setting {name!r}.{did_you_mean(name, known)}", available=", ".join(known)
            )
    try:
        return attrs.evolve(config, **{name: value for name, value in settings.items() if value is not None})
    except SpecdecError as error:
        facts = {k.replace(" ", "_"): v.replace("GenerationConfig.", "generation.") for k, v in error.facts.items()}
        raise PromptError(error.message.replace("GenerationConfig.", "generation."), **facts) from None


def with_seed(settings: GenerationConfig) -> GenerationConfig:
    """``settings``, with a random seed where tokens are sampled and none is set, so that the text can be had again."""
    if settings.temperature == 0 or settings.seed is not None:
        return settings
    return attrs.evolve(settings, seed=secrets.randbits(32))


def unused_filters(settings: GenerationConfig) -> list[str]:
    """A notice, if filters of the distribution are set and no token is drawn from it."""
    usual = attrs.fields_dict(GenerationConfig)
    filters = [name for name in ("top_k", "top_p", "min_p") if getattr(settings, name) != usual[name].default]
    if settings.temperature > 0 or not filters:
        return []
    return [f"{' and '.join(filters)}: without effect at temperature 0, which is greedy decoding"]


def make_sampling(lm: Parts, settings: GenerationConfig, *, generated_from: int) -> Sampling:
    """The sampling of one generation: ids checked against the vocabulary, processors built.

    Raises: PromptError for a token id outside the vocabulary, or a number above what limits it; ConfigError or
        PluginError for a processor.
    """
    vocab, end_tokens = lm.info.vocab_size, tuple(sorted(lm.tokenizer.eos_ids))
    for name, most, limit in (
        ("min_new_tokens", settings.max_new_tokens, "generation.max_new_tokens"),
        ("logprobs", vocab, "the size of the vocabulary"),
    ):
        asked = getattr(settings, name)
        if asked is not None and asked > most:
            raise PromptError(f"generation.{name} is at most {limit} ({most}), got {asked}")
    for token in settings.banned:
        _token_id(token, vocab, "banned")
    bias = {_token_id(token, vocab, "logit_bias"): value for token, value in settings.logit_bias.items()}
    if len(bias) < len(settings.logit_bias):
        raise PromptError("generation.logit_bias names a token id twice, as a number and as a string")
    env = ProcessorEnv(tokenizer=lm.tokenizer, vocab_size=vocab, end_tokens=end_tokens, generated_from=generated_from)
    return Sampling(
        **{field.name: getattr(settings, field.name) for field in attrs.fields(SamplingSettings)},
        seed=settings.seed or 0,
        logit_bias=types.MappingProxyType(bias),
        end_tokens=end_tokens,
        processors=tuple(_processor(choice, env) for choice in settings.processors),
    )


def _processor(choice: Choice, env: ProcessorEnv) -> LogitsProcessor:
    spec, options = registry().chosen(Kind.PROCESSOR, choice, "generation.processors")
    with calling(spec, "factory"):
        return NamedProcessor(spec, spec.factory(options, env))


class NamedProcessor(LogitsProcessor):
    """A processor whose failures name it, wherever logits are processed."""

    def __init__(self, spec: ProcessorSpec, processor: LogitsProcessor) -> None:
        self._spec = spec
        self._processor = processor

    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        with calling(self._spec, "process"):
            return self._processor.process(logits, history)

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        with calling(self._spec, "legal"):
            return max(0, min(operator.index(self._processor.legal(draft, history)), len(draft)))

    def forced(self, history: Sequence[int]) -> Sequence[int]:
        with calling(self._spec, "forced"):
            return self._processor.forced(history)


def _token_id(token: str | int, vocab: int, setting: str) -> int:
    """A token id; as a TOML or JSON key it is a string."""
    spelled = isinstance(token, str) and len(token) < 20 and token.isdecimal() and token.isascii()
    value = int(token) if spelled or isinstance(token, int) else -1
    if not 0 <= value < vocab or str(value) != str(token):
        raise PromptError(f"generation.{setting} takes token ids of 0 to {vocab - 1}, got {shown(token)}")
    return value
