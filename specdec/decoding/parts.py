"""The parts that a session works with: target, tokenizer, drafter, verifier and depth policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

import attrs

from specdec.checking import Before, Mismatch, checked
from specdec.config import Choice, RunConfig
from specdec.contract import (
    DepthPolicy,
    DepthPolicySpec,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    ForwardPass,
    ModelInfo,
    Needs,
    PrepareEnv,
    State,
    Verifier,
)
from specdec.errors import ConfigError, PromptError, shown, typed
from specdec.registry import Guard, answers, registry
from specdec.text import Tokenizer


def _one_prompt(value: object) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, Sequence) and value and not isinstance(value, bytes | bytearray | memoryview):
        if isinstance(value[0], Mapping):
            raise Mismatch("text or token ids", value, "lm.chat(messages) for a conversation")
        if isinstance(value[0], str | Sequence):
            raise Mismatch("one prompt", value, "a loop over the prompts: one generation runs at a time")


Prompt: TypeAlias = Annotated[str | Sequence[int], Before(_one_prompt)]
"""A prompt: text or token ids."""


@attrs.frozen(kw_only=True)
class _Part:
    """A spec with its configuration and what its ``prepare`` returned."""

    spec: Any
    config: Any = None
    shared: Any = None

    def prepared(self, env: PrepareEnv) -> Self:
        """Run the spec's ``prepare``, which may load a second model. Raises: SpecdecError."""
        if self.spec.prepare is None:
            return self

        def checked(shared: Any) -> Any:
            answers.sentences(env.notices)
            return shared

        return attrs.evolve(self, shared=registry().call(self.spec, "prepare", self.config, env, check=checked))


@attrs.frozen(kw_only=True)
class DrafterPart(_Part):
    """A configured drafter; makes one drafter object per sequence."""

    spec: DrafterSpec

    @classmethod
    def of(cls, choice: Choice) -> DrafterPart:
        """The drafter that ``choice`` names, not prepared yet. Raises: ConfigError, UnknownNameError, PluginError."""
        spec = registry().drafter(choice.name, asked_by=_asked_by(choice, "drafter"))
        return cls(spec=spec, config=registry().options(spec, choice, "drafter"))

    @property
    def needs(self) -> Needs:
        """What the drafter needs from its target; known after ``prepared``."""
        return registry().needs_of(self.spec, self.config, self.shared)

    def make(self, target: ForwardPass, state: State, saved: DrafterSnapshot | None = None) -> Drafter:
        """A drafter for the sequence with ``state``. Raises: PluginError when its factory fails."""
        env = DrafterEnv(target=target, state=state, shared=self.shared, saved=saved)
        made: Drafter = registry().call(self.spec, "factory", self.config, env, check=answers.an(Drafter))
        return made


@attrs.frozen(kw_only=True)
class DepthPart(_Part):
    """A configured depth policy; makes one policy object per generation."""

    spec: DepthPolicySpec

    @classmethod
    def of(cls, choice: Choice) -> DepthPart:
        """The policy that ``choice`` names, not prepared yet. Raises: ConfigError, UnknownNameError, PluginError."""
        spec = registry().depth_policy(choice.name, asked_by=_asked_by(choice, "depth"))
        return cls(spec=spec, config=registry().options(spec, choice, "depth"))

    def make(self) -> DepthPolicy:
        """A policy for one generation. Raises: PluginError when its factory fails."""
        arguments = (self.config,) if self.spec.prepare is None else (self.config, self.shared)
        made: DepthPolicy = registry().call(self.spec, "factory", *arguments, check=answers.an(DepthPolicy))
        return made


def make_verifier(choice: Choice) -> Verifier:
    """The verifier that ``choice`` names. Raises: ConfigError, UnknownNameError, PluginError."""
    spec = registry().verifier(choice.name, asked_by=_asked_by(choice, "verifier"))
    made: Verifier = registry().call(
        spec, "factory", registry().options(spec, choice, "verifier"), check=answers.verifier
    )
    return made


def target_guard(target: ForwardPass) -> Guard:
    """A guard of calls into a target, for one sequence."""
    return Guard("target", target.info.family, target.info.backend)


def _asked_by(choice: Choice, table: str) -> str:
    return f"{choice.source}, key {table}.name" if choice.source else f"{table}.name"


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


def language_model(lm: Parts, who: str) -> Parts:
    """``lm``, which ``who`` works with. Raises: ConfigError if it is something else."""
    if not isinstance(lm, Parts):
        raise ConfigError(f"{who} takes a language model, got {typed(lm)}", try_="specdec.load(...), and its methods")
    return lm
