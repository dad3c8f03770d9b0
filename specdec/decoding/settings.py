"""Turns generation settings into the ``Sampling`` of one sequence."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.config import Choice, GenerationConfig
from specdec.contract import LogitsProcessor, ProcessorEnv, Sampling, SamplingSettings
from specdec.decoding.guarded_processor import GuardedProcessor
from specdec.decoding.parts import Parts
from specdec.errors import PromptError, SpecdecError, did_you_mean, shown
from specdec.registry import answers, registry


def override_generation(config: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """``config`` with every setting that is not None. Raises: PromptError for an unknown or unusable setting."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return config
    known = [field.name for field in attrs.fields(GenerationConfig)]
    for name in given:
        if name not in known:
            raise PromptError(
                f"generation has no setting {name!r}.{did_you_mean(name, known)}", available=", ".join(known)
            )
    try:
        return attrs.evolve(config, **given)
    except SpecdecError as error:
        raise PromptError(error.message, **{k.replace(" ", "_"): v for k, v in error.facts.items()}) from None


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
        logit_bias=types.MappingProxyType(bias),
        end_tokens=end_tokens,
        processors=tuple(_processor(choice, env) for choice in settings.processors),
    )


def _processor(choice: Choice, env: ProcessorEnv) -> LogitsProcessor:
    spec = registry().processor(choice.name, asked_by="generation.processors")
    config = registry().options(spec, choice, "generation.processors")
    made: LogitsProcessor = registry().call(spec, "factory", config, env, check=answers.an(LogitsProcessor))
    return GuardedProcessor(made, registry().guard(spec))


def _token_id(token: str | int, vocab: int, setting: str) -> int:
    """A token id; as a TOML or JSON key it is a string."""
    spelled = isinstance(token, str) and len(token) < 20 and token.isdecimal() and token.isascii()
    value = int(token) if spelled or isinstance(token, int) else -1
    if not 0 <= value < vocab or str(value) != str(token):
        raise PromptError(f"generation.{setting} takes token ids of 0 to {vocab - 1}, got {shown(token)}")
    return value
