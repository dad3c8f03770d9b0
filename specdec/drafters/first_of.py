"""Chain several drafters: the first one that returns a draft wins.

A typical chain is a look-up that demands a long match, then a model: the look-up gives long, free drafts in repetitive
text, and the model drafts elsewhere.

For ratio tests to be exact, the choice of the drafter must depend on the prefix alone, never on the token whose
verification it affects. The length of a match, a confidence before the draw and the room in a state depend on the
prefix alone. A drafter that withholds a draft because of the tokens it sampled cannot be used with any ratio test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs

from specdec.config import Choice, FieldError
from specdec.contract import (
    EMPTY_DRAFT,
    NO_NEEDS,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    ForwardOutput,
    Hidden,
    Needs,
    PrepareEnv,
    Verdict,
)
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.registry import Kind, calling, checked_draft, checked_snapshot, reason, registry

_TRY = 'drafters = [{ name = "ngram", min_order = 4 }, { name = "mtp" }]'
_PATH = "drafter.drafters[{}]"


def _some(owner: object, field: attrs.Attribute[Any], value: tuple[Choice, ...]) -> None:
    if not value:
        raise FieldError(owner, field.name, "one drafter or more", list(value), try_=_TRY)


@attrs.frozen(kw_only=True)
class FirstOfConfig:
    """The drafters, in the order they are asked."""

    example: ClassVar[Mapping[str, Any]] = {"drafters": [{"name": "ngram", "min_order": 2}, {"name": "mtp"}]}

    drafters: tuple[Choice, ...] = attrs.field(converter=tuple, validator=_some)  # [[drafter.drafters]] tables


@attrs.frozen
class Child:
    """One prepared drafter. ``label`` is its name, numbered if it occurs twice."""

    label: str
    spec: DrafterSpec
    config: Any
    shared: Any
    needs: Needs


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

    def ask(self, method: str, *arguments: Any, vocab_size: int = 0) -> Any:
        """Call the drafter; None once it has failed. With ``vocab_size`` the answer is a draft, and is checked.

        Raises: the error of a logits processor, as the engine does.
        """
        if self.failure:
            return None
        try:
            answer = getattr(self.drafter, method)(*arguments)
            if method == "snapshot":
                return checked_snapshot(answer)
            return checked_draft(answer, arguments[1], vocab_size, arguments[0])[0] if vocab_size else answer
        except Exception as error:
            if isinstance(error, SpecdecError) and error.plugin and error.plugin[0] == Kind.PROCESSOR.value:
                raise
            self.failure = reason(self.spec, method, error)
            return None

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
        children: tuple[Child, ...] = env.shared
        self._vocab_size = env.target.info.vocab_size
        self._members: list[_Member] = []
        for child in children:
            own = attrs.evolve(env, shared=child.shared, saved=_part(env.saved, child.label))
            with calling(child.spec, "factory"):
                drafter = child.spec.factory(child.config, own)
            self._members.append(_Member(child.label, child.spec, child.needs, drafter))
        self._drafting: _Member | None = None  # whose draft is being verified

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        for member in self._members:
            member.ask("prefill", context, _declared(output, member.needs, prompt=True))

    def propose(self, context: Context, depth: int) -> Draft:
        for member in self._members:
            own = 0 if member.failure else context.depth_of(member.label, depth)
            draft: Draft | None = member.ask("propose", context, own, vocab_size=self._vocab_size) if own else None
            if draft is not None and draft.tokens:
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


def _declared(output: ForwardOutput, needs: Needs, *, prompt: bool = False) -> ForwardOutput:
    """The part of ``output`` that ``needs`` requests: the pass served all drafters of the chain at once."""
    last = prompt and needs.prompt_rows == "last"

    def rows(hidden: Hidden) -> Hidden:
        return hidden[-1:] if last else hidden

    return attrs.evolve(
        output,
        hidden=rows(output.hidden) if needs.final_hidden and output.hidden is not None else None,
        boundaries={at: rows(hidden) for at, hidden in output.boundaries.items() if at in needs.boundaries},
    )


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


def _prepare(config: FirstOfConfig, env: PrepareEnv) -> tuple[Child, ...]:
    """Look up, check and prepare every drafter.

    Raises: the error of the first unusable one, with its place in the list.
    """
    chosen = []
    for index, choice in enumerate(config.drafters):  # check all names and options first: a model may take long to load
        path = _PATH.format(index)
        spec = registry().drafter(choice.name, asked_by=f"{path}.name")
        own = registry().options(spec, choice, path)
        if isinstance(spec.needs, Needs):
            _check_needs(spec, spec.needs, env, path)
        chosen.append((spec, own))
    made: list[Child] = []
    for index, (spec, own) in enumerate(chosen):
        number = sum(child.spec.name == spec.name for child in made) + 1
        with _placed(index):
            with calling(spec, "prepare"):
                shared = None if spec.prepare is None else spec.prepare(own, env)
            needs = registry().needs_of(spec, own, shared)
        _check_needs(spec, needs, env, _PATH.format(index))
        made.append(Child(spec.name if number == 1 else f"{spec.name}#{number}", spec, own, shared, needs))
    return tuple(made)


def _check_needs(spec: DrafterSpec, needs: Needs, env: PrepareEnv, path: str) -> None:
    unmet = needs.unmet(env.target.info)
    if unmet is not None:
        raise UnsupportedError(
            f"the drafter {spec.name!r} needs {unmet}", asked_for_by=path, try_=f"the list without {spec.name!r}"
        )


def _needs(config: FirstOfConfig, children: tuple[Child, ...]) -> Needs:
    """The union of all drafters' needs."""
    needs = NO_NEEDS
    for child in children:
        needs |= child.needs
    return needs


@contextmanager
def _placed(index: int) -> Iterator[None]:
    """Rewrite errors about a key of ``drafter`` to name the key in the list's table."""
    path = _PATH.format(index)
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
