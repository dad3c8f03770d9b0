"""Turns generation settings into the ``Sampling`` of one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.config import Choice, GenerationConfig, structure_choice
from specdec.contract import LogitsProcessor, ProcessorEnv, Sampling
from specdec.decoding.parts import Parts
from specdec.errors import PromptError, SpecdecError, did_you_mean
from specdec.registry import registry


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
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    try:
        return attrs.evolve(config, **given)
    except SpecdecError as error:
        raise PromptError(error.message, **{k.replace(" ", "_"): v for k, v in error.facts.items()}) from None


def make_sampling(lm: Parts, settings: GenerationConfig, *, generated_from: int) -> Sampling:
    """The sampling of one generation: ids checked against the vocabulary, processors built.

    Raises: PromptError for a token id outside the vocabulary; ConfigError or PluginError for a processor.
    """
    vocab, end_tokens = lm.info.vocab_size, tuple(sorted(lm.tokenizer.eos_ids))
    bias = {_token_id(token, vocab, "logit_bias"): float(value) for token, value in settings.logit_bias.items()}
    env = ProcessorEnv(tokenizer=lm.tokenizer, vocab_size=vocab, end_tokens=end_tokens, generated_from=generated_from)
    processors = tuple(_processor(choice, env) for choice in settings.processors)
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        logit_bias=bias,
        banned=tuple(_token_id(token, vocab, "banned") for token in settings.banned),
        min_new_tokens=settings.min_new_tokens,
        end_tokens=end_tokens,
        processors=processors,
        logprobs=settings.logprobs,
        seed=settings.seed,
    )


def _processor(choice: Choice, env: ProcessorEnv) -> LogitsProcessor:
    spec = registry().processor(choice.name, asked_by="generation.processors")
    config: Any = structure_choice(choice, spec.config, "generation.processors")
    made: LogitsProcessor = registry().build(spec, lambda: spec.factory(config, env), LogitsProcessor)
    return made


def _token_id(token: str | int, vocab: int, setting: str) -> int:
    """A token id; as a TOML or JSON key it is a string."""
    try:
        value = int(token)
    except ValueError:
        value = -1
    if not 0 <= value < vocab:
        raise PromptError(f"generation.{setting} takes token ids of 0 to {vocab - 1}, got {token!r}")
    return value
