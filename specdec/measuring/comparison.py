"""Audit a server from outside: the same requests plain and with speculation, and what each difference is.

Up to the first token that differs, both answers have the same context, so their log-probabilities there should be the
same up to rounding. A control asks the plain server a second time, which shows its own noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from specdec.errors import SpecdecError
from specdec.measuring.divergences import Divergence, GapReport, Rounding, Verdict, finite
from specdec.measuring.prompts import Prompt
from specdec.measuring.server import TOP, Answer, Engine, Request, Step

END = "(end)"  # in place of a token, where an answer has ended
PARTIAL = "\ufffd"  # what servers write for bytes that are no whole character


@attrs.frozen(kw_only=True)
class Difference(Divergence):
    """The first token of a request at which two answers differ.

    ``gap`` is taken from the plain answer's row; it is NaN if that row does not say, or if the request was sampled.
    """

    request: int  # the prompt's number, from 0
    prompt: str  # its file and line
    at_least: bool = False  # the token is not among the row's listed ones, so the gap is at least ``gap``
    gap: float = math.nan
    top_two: float = math.nan
    chosen_gap: float = math.nan  # nats that the plain answer's token is below the best of its row
    own_gap: float = math.nan  # nats that the differing answer's own row has its token below its best
    apart: float = math.nan  # nats, at most, between log-probabilities of the same token in the two rows
    why: str = ""  # what decides without the gap
    verdict: Verdict = Verdict.UNKNOWN
    reason: str = ""  # for the verdict


@attrs.frozen(kw_only=True)
class Pairing:
    """What comparing the answers of two servers found.

    Attributes:
        differences: the requests that differ, at most one each.
        apart: the largest difference between log-probabilities of the same token, in nats, where all tokens so far are
            equal, the first different token's row left out; 0 without a row.
    """

    differences: tuple[Difference, ...] = ()
    apart: float = 0.0

    def after(self, request: int, prompt: str, plain: Answer, other: Answer, *, greedy: bool) -> Pairing:
        """With one more request."""
        difference, common = compare(request, prompt, plain, other, greedy=greedy)
        rows = zip(plain.steps[:common], other.steps[:common], strict=True)
        apart = [value for row in rows if not math.isnan(value := _apart(*row))]
        return Pairing(
            differences=(*self.differences, *([difference] if difference else [])), apart=max(self.apart, *apart, 0.0)
        )


def compare(request: int, prompt: str, plain: Answer, other: Answer, *, greedy: bool) -> tuple[Difference | None, int]:
    """The first difference of two answers to one prompt, None if there is none, and how many tokens are before it."""
    pairs = list(zip(plain.steps, other.steps, strict=False))
    at = next((n for n, (left, right) in enumerate(pairs) if left.token != right.token), len(pairs))
    where: dict[str, Any] = {"position": at, "request": request, "prompt": prompt}
    if at == len(plain.steps) == len(other.steps):
        if plain.text == other.text and plain.ended == other.ended:
            return None, at
        why = "the listed tokens are the same, and text or end differs"
        return Difference(**where, token=END, chosen=END, why=why), at
    if at == len(pairs):
        chosen, token = (answer.steps[at].token if at < len(answer.steps) else END for answer in (plain, other))
        why = "one answer ends here, and the end has no log-probability"
        return Difference(**where, chosen=chosen, token=token, why=why), at
    row, others = pairs[at]
    best, second = _two_best(row)
    below = row.known.get(others.token)
    why = ""
    if any(isinstance(step.token, str) and PARTIAL in step.token for step in (*plain.steps[: at + 1], others)):
        why = "tokens that are parts of characters cannot be told apart by their text"
    elif not greedy:
        why = "the seed of a sampled answer fixes the tokens of its own server only"
    elif not row.top:
        why = "plain decoding lists no alternatives here"
    difference = Difference(
        **where,
        chosen=row.token,
        token=others.token,
        gap=best - (min(row.known.values()) if below is None else below),
        top_two=best - second,
        at_least=below is None,
        chosen_gap=best - row.logprob,
        own_gap=_two_best(others)[0] - others.logprob,
        apart=_apart(row, others),
        why=why,
    )
    return difference, at


def _two_best(step: Step) -> tuple[float, float]:
    ordered = sorted(step.known.values(), reverse=True)
    return ordered[0], ordered[1] if len(ordered) > 1 else -math.inf


def _apart(left: Step, right: Step) -> float:
    """The largest difference between two rows, among tokens that both list; NaN if there is none."""
    shared = [(left.known[token], right.known[token]) for token in left.known.keys() & right.known.keys()]
    return max((abs(a - b) for a, b in shared if math.isfinite(a) and math.isfinite(b)), default=math.nan)


# --- the report ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ComparisonReport(GapReport):
    """What an audit of servers found.

    Attributes:
        plain, speculative: the servers' names.
        request: how the answers were generated.
        done, planned: requests.
        tokens: of the plain answers.
        gaps: the top-two gap of each, where the server lists alternatives.
        speculation: plain against speculative.
        control: plain against plain.
        tolerance: nats that rounding may explain; None if the servers' number format is not known.
        failure: why the audit ended early; None if it did not, or was interrupted.
    """

    plain: str
    speculative: str
    request: Request
    done: int
    planned: int
    tokens: int
    gaps: tuple[float, ...]
    speculation: Pairing
    control: Pairing
    tolerance: float | None = None
    failure: SpecdecError | None = None

    @property
    def partial(self) -> bool:
        """Whether requests are missing."""
        return self.done < self.planned

    @property
    def divergences(self) -> tuple[Difference, ...]:  # type: ignore[override]
        """Those under speculation, with their verdicts."""
        return tuple(map(self._judged, self.speculation.differences))

    @property
    def positions(self) -> int:
        return self.request.max_new_tokens

    @property
    def title(self) -> str:  # type: ignore[override]
        return (
            f"{len(self.divergences)} of {self.done} requests differ, {len(self.control.differences)} plain against "
            f"plain\n{self.plain}  |  {self.speculative}"
        )

    @property
    def limits(self) -> Rounding:
        """What counts as rounding here: at least twice what plain decoding differs from itself by.

        Two logits move against each other by two such steps at most.
        """
        rounding = Rounding.of("") if self.tolerance is None else Rounding(self.tolerance, self.tolerance)
        noise = 2 * self.control.apart
        return Rounding(max(rounding.tie, noise), max(rounding.real, noise))

    def verdict(self, divergence: Difference) -> Verdict:
        return divergence.verdict

    def verdicts(self) -> Counter[Verdict]:
        """How many differences have each verdict."""
        return Counter(difference.verdict for difference in self.divergences)

    def _judged(self, difference: Difference) -> Difference:
        verdict, reason = self._judge(difference)
        return attrs.evolve(difference, verdict=verdict, reason=reason)

    def _judge(self, difference: Difference) -> tuple[Verdict, str]:
        limits = self.limits
        apart = f"the log-probabilities in the same context are {difference.apart:.3g} nats apart"
        if difference.why:
            if self.request.temperature > 0 and difference.apart > limits.real:
                return Verdict.REAL, apart
            return Verdict.UNKNOWN, difference.why
        if difference.chosen_gap > limits.real:
            size = f"{difference.chosen_gap:.3g} nats"
            return Verdict.UNKNOWN, f"plain decoding's own token is {size} below its best: it is not greedy"
        unlisted = difference.at_least
        # the context is the same, so the differing answer's own row tells too
        gap = max(difference.gap, difference.own_gap) if unlisted else difference.gap
        verdict = limits.verdict(gap)
        size = f"{'at least ' if unlisted and gap == difference.gap else ''}{gap:.3g} nats"
        if verdict is Verdict.TIE and not unlisted:
            return verdict, f"{size} below the best"
        if verdict is not Verdict.REAL and unlisted:
            why = f"{size} below the best: it is not among the {TOP} that are listed"
            if difference.apart > limits.real:
                return Verdict.REAL, f"{why}, and {apart}"
            return Verdict.UNKNOWN, why
        if verdict is not Verdict.REAL:
            return (
                Verdict.UNKNOWN,
                f"{size} is rounding in one number format and not in another: say which with --tolerance",
            )
        if any(not control.gap < gap for control in self.control.differences):
            return Verdict.UNKNOWN, f"plain against plain differs by as much as {size}"
        if difference.own_gap > limits.real:
            why = f"its own log-probabilities have it {difference.own_gap:.3g} below their best"
        else:
            why = apart if difference.apart > limits.real else "its own log-probabilities agree with plain decoding's"
        return Verdict.REAL, f"{size} below the best; {why}"

    def to_dict(self) -> dict[str, Any]:
        """The object that ``audit --json`` prints; a number that is not known or not finite is null."""

        def counted(pairing: Pairing) -> dict[str, Any]:
            return {"count": len(pairing.differences), "share": len(pairing.differences) / self.done}

        verdicts = self.verdicts()
        return {
            "plain": self.plain,
            "speculative": self.speculative,
            **attrs.asdict(self.request),
            "requests": self.done,
            "planned": self.planned,
            "partial": self.partial,
            "tokens": self.tokens,
            "differ": counted(self.speculation),
            "control": {
                **counted(self.control),
                "logprobs_apart": self.control.apart,
                "differences": [
                    _described(difference, "why", "verdict", "reason") for difference in self.control.differences
                ],
            },
            "logprobs_apart": self.speculation.apart,
            "rounding": {"tie_up_to": self.limits.tie, "real_above": self.limits.real},
            "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
            "differences": [_described(difference, "why") for difference in self.divergences],
            "gap_histogram": self.histogram_dict(),
        }


def _described(difference: Difference, *left_out: str) -> dict[str, Any]:
    fields = finite(attrs.asdict(difference)) | {"verdict": difference.verdict.value}
    return {name: value for name, value in fields.items() if name not in left_out}


# --- the measurement -------------------------------------------------------------------------------------------------


class Comparison:
    """An audit that can be stopped between requests.

    Args:
        plain, speculative: the servers; the same one twice shows its own noise only.
        prompts: the texts to continue; chat templates are the servers' business.
        request: how to generate.
        tolerance: nats that count as rounding; if None, those between what the finest and the coarsest number format
            explain are not judged.
        progress: called with the requests done and their total.
    """

    def __init__(
        self,
        plain: Engine,
        speculative: Engine,
        prompts: Sequence[Prompt],
        request: Request,
        *,
        tolerance: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._plain, self._speculative = plain, speculative
        self._prompts, self._request, self._tolerance = prompts, request, tolerance
        self._progress = progress or (lambda done, planned: None)
        self._stopped = False

    def stop(self) -> None:
        """End after the current request."""
        self._stopped = True

    def run(self) -> ComparisonReport:
        """Ask. Raises: SpecdecError if no request was answered; a later failure ends the audit, and is reported."""
        request, greedy = self._request, self._request.temperature == 0
        speculation, control = Pairing(), Pairing()
        gaps: list[float] = []
        tokens = done = 0
        failure: SpecdecError | None = None
        for number, prompt in enumerate(self._prompts):
            if self._stopped and done:
                break
            try:
                plain, other, again = (
                    engine.answer(prompt.text, request) for engine in (self._plain, self._speculative, self._plain)
                )
            except SpecdecError as error:
                if not done:
                    raise
                failure = error
                break
            speculation = speculation.after(number, prompt.name, plain, other, greedy=greedy)
            control = control.after(number, prompt.name, plain, again, greedy=greedy)
            tokens += len(plain.steps)
            gaps += [best - second for best, second in map(_two_best, plain.steps) if second > -math.inf]
            done += 1
            self._progress(done, len(self._prompts))
        return ComparisonReport(
            plain=self._plain.name,
            speculative=self._speculative.name,
            request=request,
            done=done,
            planned=len(self._prompts),
            tokens=tokens,
            gaps=tuple(gaps),
            speculation=speculation,
            control=control,
            tolerance=self._tolerance,
            failure=failure,
        )
