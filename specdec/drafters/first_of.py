"""Chain several drafters: the first one that returns a draft wins.

A typical chain is a look-up that demands a long match, then a model: the look-up gives long, free drafts in repetitive
text, and the model drafts elsewhere.

For ratio tests to be exact, the choice of the drafter must depend on the prefix alone, never on the token whose
verification it affects. The length of a match, a confidence before the draw and the room in a state depend on the
prefix alone. A drafter that withholds a draft because of the tokens it sampled cannot be used with any ratio test.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs

from specdec.config import Choice, FieldError
from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    ForwardOutput,
    Needs,
    Passes,
    PrepareEnv,
    Verdict,
    run_passes,
)
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.registry import checked_draft, reason
from specdec.registry.parts import DrafterPart

_TRY = 'drafters = [{ name = "ngram", min_order = 4 }, { name = "mtp" }]'


def _some(owner: object, field: attrs.Attribute[Any], value: tuple[Choice, ...]) -> None:
    if not value:
        raise FieldError(owner, field.name, "one drafter or more", list(value), try_=_TRY)


@attrs.frozen(kw_only=True)
class FirstOfConfig:
    """The drafters, in the order they are asked."""

    example: ClassVar[Mapping[str, Any]] = {"drafters": [{"name": "ngram", "min_order": 2}, {"name": "mtp"}]}

    drafters: tuple[Choice, ...] = attrs.field(converter=tuple, validator=_some)  # [[drafter.drafters]] tables


@attrs.define
class _Member:
    """One drafter of a chain, and its counters."""

    label: str
    spec: DrafterSpec
    needs: Needs
    drafter: Drafter
    failure: str = ""  # why it was switched off
    drafts: int = 0
    offered: int = 0  # tokens that were verified
    accepted: int = 0  # tokens of those that stayed

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the drafter; None once it has failed. Raises: as ``reason``."""
        if self.failure:
            return None
        try:
            return getattr(self.drafter, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the others go on
            self.failure = reason(self.spec, method, error)
            return None

    def drafting(self, context: Context, depth: int, vocab_size: int) -> Passes[Draft]:
        """Ask for a draft, likewise; empty if that fails."""
        try:
            draft = yield from self.drafter.drafting(context, depth)
            return checked_draft(draft, depth, vocab_size, context)[0]
        except Exception as error:  # noqa: BLE001 - the others go on
            self.failure = reason(self.spec, "propose", error)
            return EMPTY_DRAFT

    def report(self) -> dict[str, Any]:
        """Its counters, what it reports itself, and why it was switched off."""
        counters: dict[str, Any] = {"drafts": self.drafts, "offered": self.offered, "accepted": self.accepted}
        own = self.ask("report") or {}
        return counters | own | ({"failed": self.failure} if self.failure else {})


class FirstOfDrafter(Drafter):
    """Asks its drafters in order. All of them see every prefill, outcome and rewind.

    One that fails is left out from then on, with its reason in ``report``; the chain fails when all have failed.
    """

    def __init__(self, config: FirstOfConfig, env: DrafterEnv) -> None:
        parts: Mapping[str, DrafterPart] = env.shared
        self._vocab_size = env.target.info.vocab_size
        self._members = [
            _Member(label, part.spec, part.needs, part.make(env.target, env.state, _part(env.saved, label)))
            for label, part in parts.items()
        ]
        self._drafting: _Member | None = None  # whose draft is being verified

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        for member in self._members:
            member.ask("prefill", context, _declared(output, member.needs))

    def propose(self, context: Context, depth: int) -> Draft:
        return run_passes(self.drafting(context, depth))

    def drafting(self, context: Context, depth: int) -> Passes[Draft]:
        for member in self._members:
            own = 0 if member.failure else context.depth_of(member.label, depth)
            draft = (yield from member.drafting(context, own, self._vocab_size)) if own else EMPTY_DRAFT
            if draft.tokens:
                self._drafting = member
                return attrs.evolve(draft, drafter=member.label)
        failures = [member.failure for member in self._members]
        if all(failures):
            raise UnsupportedError(f"every drafter of the chain failed: {'; '.join(failures)}")
        return EMPTY_DRAFT

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        if self._drafting is not None:
            self._drafting.drafts += 1
            self._drafting.offered += output.rows - 1  # the engine may have cut the draft
            self._drafting.accepted += verdict.accepted
            self._drafting = None
        for member in self._members:
            member.ask("observe", verdict, _declared(output, member.needs), context)

    def rewind(self, length: int) -> None:
        for member in self._members:
            member.ask("rewind", length)

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        arrays: dict[str, Any] = {}
        meta: dict[str, int | str] = {}
        for member in self._members:
            label, own = member.label, member.ask("snapshot", context)
            if own is not None:
                meta |= {f"{label}/{name}": value for name, value in own.meta.items()} | {label: "saved"}
                arrays |= {f"{label}/{name}": array for name, array in own.arrays.items()}
        return DrafterSnapshot(arrays, meta) if meta else None

    def report(self) -> Mapping[str, Any]:
        return {"drafters": {member.label: member.report() for member in self._members}}


def _declared(output: ForwardOutput, needs: Needs) -> ForwardOutput:
    """The boundaries that ``needs`` requests: the pass served all drafters of the chain at once."""
    if tuple(output.boundaries) == needs.boundaries:
        return output  # none is cut out, which would cost every cycle of an idle head
    return attrs.evolve(output, boundaries={at: output.boundaries[at] for at in needs.boundaries})


def _part(saved: DrafterSnapshot | None, label: str) -> DrafterSnapshot | None:
    """The snapshot of the drafter with this label; None if it saved nothing."""
    if saved is None or label not in saved.meta:
        return None
    prefix = f"{label}/"
    return DrafterSnapshot(
        {name.removeprefix(prefix): array for name, array in saved.arrays.items() if name.startswith(prefix)},
        {name.removeprefix(prefix): value for name, value in saved.meta.items() if name.startswith(prefix)},
    )


# --- building ---------------------------------------------------------------------------------------------------------


def _prepare(config: FirstOfConfig, env: PrepareEnv) -> dict[str, DrafterPart]:
    """Look up, check and prepare every drafter; by name, numbered if it occurs twice.

    Raises: the error of the first unusable one, with its place in the list.
    """
    chosen = []
    for index, choice in enumerate(config.drafters):  # check all names and options first: a model may take long to load
        path = choice.sources.get("", f"drafter.drafters[{index}]")
        part = DrafterPart.of(attrs.evolve(choice, sources={}), path)
        if isinstance(part.spec.needs, Needs):
            _check_needs(part, env, path)
        chosen.append((path, part))
    parts: dict[str, DrafterPart] = {}
    for path, part in chosen:
        number = sum(other.spec.name == part.spec.name for other in parts.values()) + 1
        with _placed(path):
            part = part.prepared(env)
        _check_needs(part, env, path)
        parts[part.spec.name if number == 1 else f"{part.spec.name}#{number}"] = part
    return parts


def _check_needs(part: DrafterPart, env: PrepareEnv, path: str) -> None:
    unmet = part.needs.unmet(env.target.info)
    if unmet is not None:
        name = part.spec.name
        raise UnsupportedError(
            f"the drafter {name!r} needs {unmet}", asked_for_by=path, try_=f"the list without {name!r}"
        )


def _needs(config: FirstOfConfig, parts: Mapping[str, DrafterPart]) -> Needs:
    """The union of all drafters' needs."""
    return functools.reduce(operator.or_, (part.needs for part in parts.values()))


@contextmanager
def _placed(path: str) -> Iterator[None]:
    """Rewrite errors about a key of ``drafter`` to name the key in the table at ``path``."""
    try:
        yield
    except SpecdecError as error:
        facts, label = error.facts, "asked for by"
        asked = facts.get(label, "")
        facts[label] = path + asked.removeprefix("drafter") if asked.startswith("drafter.") else path
        if "try" in facts:
            facts["try"] = facts["try"].replace("drafter.", f"{path}.")
        raise


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="first_of",
            factory=FirstOfDrafter,
            config=FirstOfConfig,
            prepare=_prepare,
            needs=_needs,
            help="a chain of drafters: the first one that returns a draft wins",
        )
    ]
