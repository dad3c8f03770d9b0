"""Plugins chosen by a configuration, ready to make what they register; and checks of what that returns."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from specdec.config import Choice
from specdec.contract import (
    Context,
    DepthPolicy,
    DepthPolicySpec,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    DraftNoise,
    ForwardPass,
    Needs,
    PrepareEnv,
    State,
    Verdict,
    Verifier,
)
from specdec.errors import ContractError, typed
from specdec.registry.kinds import Kind
from specdec.registry.lookup import calling, registry


@attrs.frozen(kw_only=True)
class _Part:
    """A spec with its configuration and what its ``prepare`` returned."""

    kind: ClassVar[Kind]
    table: ClassVar[str]
    spec: Any
    config: Any = None
    shared: Any = None

    @classmethod
    def of(cls, choice: Choice, table: str = "") -> Self:
        """The plugin that ``choice`` names, not prepared yet; ``table`` is the choice's, by default the kind's own.

        Raises: ConfigError, UnknownNameError, PluginError.
        """
        spec, config = registry().chosen(cls.kind, choice, table or cls.table)
        return cls(spec=spec, config=config)

    def prepared(self, env: PrepareEnv) -> Self:
        """Run the spec's ``prepare``, which may load a second model. Raises: SpecdecError."""
        if self.spec.prepare is None:
            return self
        with calling(self.spec, "prepare"):
            return attrs.evolve(self, shared=self.spec.prepare(self.config, env))


@attrs.frozen(kw_only=True)
class DrafterPart(_Part):
    """A configured drafter; makes one drafter object per sequence."""

    kind = Kind.DRAFTER
    table = "drafter"
    spec: DrafterSpec

    @property
    def title(self) -> str:
        """Its name; of a chain, the names of its drafters in the order they are asked."""
        parts = self.shared if isinstance(self.shared, Mapping) else {}
        return ", ".join(name for name, part in parts.items() if isinstance(part, DrafterPart)) or self.spec.name

    @property
    def needs(self) -> Needs:
        """What the drafter needs from its target; where that is a function, known after ``prepared``."""
        if isinstance(self.spec.needs, Needs):
            return self.spec.needs
        with calling(self.spec, "needs"):
            return self.spec.needs(self.config, self.shared)

    def make(self, target: ForwardPass, state: State, saved: DrafterSnapshot | None = None) -> Drafter:
        """A drafter for the sequence with ``state``. Raises: PluginError when its factory fails."""
        env = DrafterEnv(target=target, state=state, shared=self.shared, saved=saved)
        with calling(self.spec, "factory"):
            return self.spec.factory(self.config, env)


@attrs.frozen(kw_only=True)
class DepthPart(_Part):
    """A configured depth policy; makes one policy object per generation."""

    kind = Kind.DEPTH_POLICY
    table = "depth"
    spec: DepthPolicySpec

    def make(self) -> DepthPolicy:
        """A policy for one generation. Raises: PluginError when its factory fails."""
        arguments = (self.config,) if self.spec.prepare is None else (self.config, self.shared)
        with calling(self.spec, "factory"):
            return self.spec.factory(*arguments)


def make_verifier(choice: Choice) -> Verifier:
    """The verifier that ``choice`` names. Raises: ConfigError, UnknownNameError, PluginError."""
    spec, options = registry().chosen(Kind.VERIFIER, choice, "verifier")
    with calling(spec, "factory"):
        verifier: Verifier = spec.factory(options)
        verifier.guarantee  # noqa: B018 - a class without one is named here, not in the middle of a load
    return verifier


# --- what drafters and verifiers return -------------------------------------------------------------------------------

SUM_TOLERANCE = 1e-4  # of a draft distribution


def checked_draft(draft: Draft, depth: int, vocab_size: int, context: Context) -> tuple[Draft, str]:
    """A draft of plain ints, cut to ``depth`` tokens and before the first id outside the vocabulary.

    Returns it with the fault for which it was cut, or "".
    Raises: ContractError for what is no Draft, has ``probs`` of another shape, or, where a ratio test reads them,
        ``probs`` that its tokens cannot have been drawn from.
    """
    if not isinstance(draft, Draft):
        raise ContractError(f"propose returned {typed(draft)}", takes="a specdec.Draft")
    tokens = tuple(map(operator.index, draft.tokens[:depth]))
    probs, fault = draft.probs, "draft longer than asked for" if len(draft.tokens) > depth else ""
    outside = next((place for place, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    if outside is not None:
        tokens, fault = tokens[:outside], "draft token outside the vocabulary"
    if probs is None:
        return Draft(tokens, None, draft.drafter), fault
    shape = list(getattr(probs, "shape", ()))
    if shape[1:] != [vocab_size] or shape[0] < len(tokens):
        raise ContractError(
            f"propose returned {len(tokens)} tokens with probs {f'of the shape {shape}' if shape else typed(probs)}",
            takes=f"probs of shape [K, {vocab_size}] and dtype float32, or None",
        )
    probs = probs[: len(tokens)]
    if tokens and context.draft_noise is DraftNoise.INDEPENDENT and context.sampling.temperature > 0:
        drawn = probs[range(len(tokens)), tokens]
        fits = (probs >= 0).all(axis=1) & (abs(probs.sum(axis=1, dtype="float64") - 1) <= SUM_TOLERANCE) & (drawn > 0)
        if not fits.all():
            raise ContractError(
                f"propose returned probs from whose row {fits.argmin()} its token cannot have been drawn",
                takes="rows of probs that are not negative, sum to 1, and give every drafted token more than 0",
            )
    return Draft(tokens, probs, draft.drafter), fault


def checked_verdict(verdict: Verdict, drafted: int, vocab_size: int) -> Verdict:
    """``verdict`` on a draft of ``drafted`` tokens, with plain numbers. Raises: ContractError when it is not one."""
    if not isinstance(verdict, Verdict):
        raise ContractError(f"verify returned {typed(verdict)}", takes="a specdec.Verdict")
    accepted, token = operator.index(verdict.accepted), operator.index(verdict.next_token)
    if not (0 <= accepted <= drafted and 0 <= token < vocab_size):
        raise ContractError(
            f"verify returned {typed(verdict)}",
            takes=f"a Verdict with 0 to {drafted} accepted tokens and a next_token of 0 to {vocab_size - 1}",
        )
    return Verdict(accepted, token, tuple((operator.index(at), float(gap)) for at, gap in verdict.deviations))
