"""Audit an engine from outside: the same requests plain and with speculation, and what each difference is.

Up to the first token that differs, both answers have the same context, so their log-probabilities there should be the
same up to rounding. A control asks the plain engine a second time, which shows the engine's own noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from specdec.errors import SpecdecError
from specdec.measuring.divergences import Divergence, GapReport, Rounding, Verdict, finite
from specdec.measuring.engines.engine import TOP, Answer, Asked, Engine, Step
from specdec.measuring.prompts import Prompt

END = "(end)"  # in place of a token, where an answer has ended
PARTIAL = "\ufffd"  # what servers write for bytes that are no whole character


@attrs.frozen
class Difference(Divergence):
    """The first token of a request at which two answers differ.

    ``gap`` is taken from the plain answer's row; it is NaN if that row does not say, or if the request was sampled.
    """

    request: int  # the prompt's number, from 0
    prompt: str  # its file and line
    at_least: bool  # the token is not among the row's listed ones, so the gap is at least ``gap``
    chosen_gap: float  # nats that the plain answer's token is below the best of its row; NaN if it does not say
    own_gap: float  # nats that the differing answer's own row has its token below its best; NaN if it does not say
    apart: float  # nats, at most, between log-probabilities of the same token in the two rows; NaN if there is none
    why: str = ""  # what decides without the gap


@attrs.frozen
class Judged:
    """A difference with its verdict and the reason."""

    found: Difference
    verdict: Verdict
    reason: str


@attrs.frozen(kw_only=True)
class Pairing:
    """What comparing the answers of two engines found.

    Attributes:
        differences: the requests that differ, at most one each.
        apart: the largest difference between log-probabilities of the same token, in nats, where all tokens so far are
            equal, the first different token's row left out; 0 without a row.
    """

    differences: tuple[Difference, ...] = ()
    apart: float = 0.0

    def after(self, request: int, prompt: str, plain: Answer, other: Answer, *, greedy: bool) -> Pairing:
        """With one more request."""
        found, common = compare(request, prompt, plain, other, greedy=greedy)
        rows = zip(plain.steps[:common], other.steps[:common], strict=True)
        apart = max((_apart(one, two) for one, two in rows), default=0.0)
        return Pairing(
            differences=(*self.differences, *([found] if found else [])),
            apart=max(self.apart, 0.0 if math.isnan(apart) else apart),
        )


def compare(request: int, prompt: str, plain: Answer, other: Answer, *, greedy: bool) -> tuple[Difference | None, int]:
    """The first difference of two answers to one prompt, None if there is none, and how many tokens are before it."""
    pairs = list(zip(plain.steps, other.steps, strict=False))
    at = next((n for n, (one, two) in enumerate(pairs) if one.token != two.token), len(pairs))
    where: dict[str, Any] = {"position": at, "request": request, "prompt": prompt}
    nothing: dict[str, Any] = dict.fromkeys(("gap", "top_two", "chosen_gap", "own_gap", "apart"), math.nan)
    nothing["at_least"] = False
    if at == len(plain.steps) == len(other.steps):
        if plain.text == other.text and plain.ended == other.ended:
            return None, at
        why = "the listed tokens are the same, and text or end differs"
        return Difference(**where, **nothing, token=END, chosen=END, why=why), at
    if at == len(pairs):
        names = [answer.steps[at].token if at < len(answer.steps) else END for answer in (plain, other)]
        why = "one answer ends here, and the end has no log-probability"
        return Difference(**where, **nothing, chosen=names[0], token=names[1], why=why), at
    row, others = pairs[at]
    best, second = _two_best(row)
    below = row.known.get(others.token)
    own, _ = _two_best(others)
    why = ""
    if any(isinstance(step.token, str) and PARTIAL in step.token for step in (*plain.steps[: at + 1], others)):
        why = "tokens that are parts of characters cannot be told apart by their text"
    elif not greedy:
        why = "the seed of a sampled answer fixes the tokens of its own engine only"
    elif not row.top:
        why = "plain decoding lists no alternatives here"
    found = Difference(
        **where,
        chosen=row.token,
        token=others.token,
        gap=best - (min(row.known.values()) if below is None else below),
        top_two=best - second,
        at_least=below is None,
        chosen_gap=best - row.logprob,
        own_gap=own - others.logprob,
        apart=_apart(row, others),
        why=why,
    )
    return found, at


def _two_best(step: Step) -> tuple[float, float]:
    ordered = sorted(step.known.values(), reverse=True)
    return ordered[0], ordered[1] if len(ordered) > 1 else -math.inf


def _apart(one: Step, two: Step) -> float:
    """The largest difference between two rows, among tokens that both list; NaN if there is none."""
    values = [(one.known[token], two.known[token]) for token in one.known.keys() & two.known.keys()]
    known = [abs(left - right) for left, right in values if math.isfinite(left) and math.isfinite(right)]
    return max(known, default=math.nan)


# --- the report ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ComparisonReport(GapReport):
    """What an audit of an engine found.

    Attributes:
        plain, speculative: the engines' names.
        asked: how the answers were generated.
        done, planned: requests.
        tokens: of the plain answers.
        drafted: tokens that were drafted for the others; None if the engine does not say.
        gaps: the top-two gap of each, where the engine lists alternatives.
        speculation: plain against speculative.
        control: plain against plain.
        rounding: what the formats or the user's tolerance allow.
        failure: why the audit ended early; None if it did not, or was interrupted.
    """

    plain: str
    speculative: str
    asked: Asked
    done: int
    planned: int
    tokens: int
    drafted: int | None
    gaps: tuple[float, ...]
    speculation: Pairing
    control: Pairing
    rounding: Rounding
    failure: SpecdecError | None = None

    @property
    def partial(self) -> bool:
        """Whether requests are missing."""
        return self.done < self.planned

    @property
    def divergences(self) -> tuple[Difference, ...]:  # type: ignore[override]
        """Those under speculation."""
        return self.speculation.differences

    @property
    def positions(self) -> int:
        return self.asked.max_new_tokens

    @property
    def title(self) -> str:
        return (
            f"{len(self.divergences)} of {self.done} requests differ, {len(self.control.differences)} plain against "
            f"plain\n{self.plain}  |  {self.speculative}"
        )

    @property
    def limits(self) -> Rounding:
        """What counts as rounding here: at least twice what plain decoding differs from itself by.

        Two logits move against each other by two such steps at most.
        """
        noise = 2 * self.control.apart
        return Rounding(max(self.rounding.tie, noise), max(self.rounding.real, noise))

    def judged(self) -> list[Judged]:
        """Every difference under speculation with its verdict."""
        return [self._judge(found) for found in self.speculation.differences]

    def verdicts(self) -> Counter[Verdict]:
        """How many differences have each verdict."""
        return Counter(one.verdict for one in self.judged())

    def _judge(self, found: Difference) -> Judged:
        limits = self.limits
        sampled = self.asked.temperature > 0
        apart = f"the log-probabilities in the same context are {found.apart:.3g} nats apart"
        if found.why:
            if sampled and found.apart > limits.real:
                return Judged(found, Verdict.REAL, apart)
            return Judged(found, Verdict.UNKNOWN, found.why)
        if found.chosen_gap > limits.real:
            why = f"plain decoding's own token is {found.chosen_gap:.3g} nats below its best: it is not greedy"
            return Judged(found, Verdict.UNKNOWN, why)
        unlisted = found.at_least
        gap = max(found.gap, found.own_gap) if unlisted else found.gap  # the context is the same, so its own row tells
        beyond = limits.verdict(gap)
        size = f"{'at least ' if unlisted and gap == found.gap else ''}{gap:.3g} nats"
        if beyond is Verdict.TIE and not unlisted:
            return Judged(found, beyond, f"{size} below the best")
        if beyond is not Verdict.REAL:
            why = f"{size} is rounding in one number format and not in another: say which with --tolerance"
            if unlisted:
                why = f"{size} below the best: it is not among the {TOP} that are listed"
                if found.apart > limits.real:
                    return Judged(found, Verdict.REAL, f"{why}, and {apart}")
            return Judged(found, Verdict.UNKNOWN, why)
        if any(not one.gap < gap for one in self.control.differences):
            return Judged(found, Verdict.UNKNOWN, f"plain against plain differs by as much as {size}")
        if found.own_gap > limits.real:
            why = f"its own log-probabilities have it {found.own_gap:.3g} below their best"
        elif found.apart > limits.real:
            why = apart
        else:
            why = "its own log-probabilities agree with plain decoding's"
        return Judged(found, Verdict.REAL, f"{size} below the best; {why}")

    def to_dict(self) -> dict[str, Any]:
        """The object that ``audit --json`` prints; a number that is not known or not finite is null."""
        counted = self.verdicts()
        return {
            "plain": self.plain,
            "speculative": self.speculative,
            **attrs.asdict(self.asked),
            "requests": self.done,
            "planned": self.planned,
            "partial": self.partial,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "differ": {"count": len(self.divergences), "share": len(self.divergences) / self.done},
            "control": {
                "count": len(self.control.differences),
                "share": len(self.control.differences) / self.done,
                "logprobs_apart": self.control.apart,
                "differences": [_described(one) for one in self.control.differences],
            },
            "logprobs_apart": self.speculation.apart,
            "rounding": {"tie_up_to": self.limits.tie, "real_above": self.limits.real},
            "verdicts": {verdict.value: counted[verdict] for verdict in Verdict},
            "differences": [
                {**_described(one.found), "verdict": one.verdict.value, "reason": one.reason} for one in self.judged()
            ],
            "gap_histogram": self.histogram_dict(),
        }


def _described(found: Difference) -> dict[str, Any]:
    fields = attrs.asdict(found)
    fields.pop("why")
    return {name: finite(value) if isinstance(value, float) else value for name, value in fields.items()}


# --- the measurement -------------------------------------------------------------------------------------------------


class Comparison:
    """An audit that can be stopped between requests.

    Args:
        plain, speculative: the engines; the same one twice shows its own noise only.
        prompts: the texts to continue; chat templates are the engines' business.
        asked: how to generate.
        tolerance: nats that count as rounding; what the engines' formats allow if None.
        progress: called with the requests done and their total.
    """

    def __init__(
        self,
        plain: Engine,
        speculative: Engine,
        prompts: Sequence[Prompt],
        asked: Asked,
        *,
        tolerance: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._plain, self._speculative = plain, speculative
        self._prompts, self._asked, self._progress = prompts, asked, progress
        self._rounding = Rounding.of(plain.dtype) if tolerance is None else Rounding(tolerance, tolerance)
        self._stopped = False

    def stop(self) -> None:
        """End after the current request."""
        self._stopped = True

    def run(self) -> ComparisonReport:
        """Ask. Raises: SpecdecError if no request was answered; a later failure ends the audit, and is reported."""
        asked, greedy = self._asked, self._asked.temperature == 0
        speculation, control = Pairing(), Pairing()
        gaps: list[float] = []
        tokens = done = 0
        drafted: int | None = 0
        failure: SpecdecError | None = None
        for number, prompt in enumerate(self._prompts):
            if self._stopped and done:
                break
            try:
                plain = self._plain.answer(prompt.text, asked)
                other = self._speculative.answer(prompt.text, asked)
                again = self._plain.answer(prompt.text, asked)
            except SpecdecError as error:
                if not done:
                    raise
                failure = error
                break
            speculation = speculation.after(number, prompt.name, plain, other, greedy=greedy)
            control = control.after(number, prompt.name, plain, again, greedy=greedy)
            tokens += len(plain.steps)
            drafted = None if drafted is None or other.drafted is None else drafted + other.drafted
            gaps += [best - second for best, second in map(_two_best, plain.steps) if second > -math.inf]
            done += 1
            if self._progress is not None:
                self._progress(done, len(self._prompts))
        return ComparisonReport(
            plain=self._plain.name,
            speculative=self._speculative.name,
            asked=asked,
            done=done,
            planned=len(self._prompts),
            tokens=tokens,
            drafted=drafted,
            gaps=tuple(gaps),
            speculation=speculation,
            control=control,
            rounding=self._rounding,
            failure=failure,
        )
