"""Audit a server from outside: the same requests plain and with speculation, and what each difference is.

Up to the first token that differs, both answers have the same context, so their log-probabilities there should be the
same up to rounding. A control asks the plain server a second time, which shows its own noise.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from specdec.errors import SpecdecError, UnsupportedError, shown
from specdec.measuring.prompts import Prompt
from specdec.measuring.runs import Generations
from specdec.measuring.server import TOP, Answer, Request, ServerEngine, Step

END = "(end)"  # in place of a token, where an answer has ended
SAMPLED = 1.0  # temperature of the requests that are sent beside greedy ones
PARTIAL = "\ufffd"  # what servers write for bytes that are no whole character
GAP_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Edges of the gap histogram in nats; the first bin starts at 0 (a tie), the last is open."""
ROUNDING: Mapping[str, float] = {"float32": 1e-3, "float16": 2**-5, "bfloat16": 2**-2}
"""Nats between two logits that rounding may exchange, by the format of the activations.

For the 16-bit formats, two steps of a number from 16 to 32, where the best logits of a row usually are. For float32,
what sums in another order differ by (1e-4 or less in the runs of ``docs/how-to/audit-another-engine.md``), with room.
"""


class Verdict(enum.Enum):
    """What a difference is."""

    TIE = "tie within rounding"
    REAL = "other token with a real gap"
    UNKNOWN = "cannot tell"


@attrs.frozen
class Rounding:
    """Which gaps rounding explains.

    Attributes:
        tie: nats; up to here, rounding explains a gap.
        real: nats, at least ``tie``; above, it does not. Between them nobody can tell.
    """

    tie: float
    real: float

    @classmethod
    def of(cls, tolerance: float | None) -> Rounding:
        """From nats that rounding explains; if they are not known, what any of ``ROUNDING`` allows."""
        explained = ROUNDING.values() if tolerance is None else [tolerance]
        return cls(min(explained), max(explained))

    def verdict(self, gap: float) -> Verdict:
        """The verdict on a token ``gap`` nats below the best one."""
        if math.isnan(gap):
            return Verdict.UNKNOWN
        return Verdict.TIE if gap <= self.tie else Verdict.REAL if gap > self.real else Verdict.UNKNOWN


@attrs.frozen(kw_only=True)
class Difference:
    """A token at which two answers to the same text differ: its id, or its text where a server gives no ids.

    ``gap`` is taken from the plain answer's row; it is NaN if that row does not say, or if the request was sampled.
    """

    position: int  # in the answer; 0 is the first token after the prompt
    token: int | str  # of the answer that is compared
    chosen: int | str  # of the plain answer
    request: int  # the prompt's number, from 0
    prompt: str  # its file and line
    at_least: bool = False  # the token is not among the row's listed ones, so the gap is at least ``gap``
    gap: float = math.nan  # nats that the token is below the best of the plain row
    top_two: float = math.nan  # nats between the two best of the plain row
    chosen_gap: float = math.nan  # nats that the plain answer's token is below the best of its row
    own_gap: float = math.nan  # nats that the differing answer's own row has its token below its best
    apart: float = math.nan  # nats, at most, between log-probabilities of the same token in the two rows
    why: str = ""  # what decides without the gap
    verdict: Verdict = Verdict.UNKNOWN
    reason: str = ""  # for the verdict

    @property
    def known_gap(self) -> float:
        """``gap``; of a token that the plain row does not list, the answer's own row tells too, in the same context."""
        return max(self.gap, self.own_gap) if self.at_least else self.gap


@attrs.frozen
class Text:
    """A text that both servers continue: a prompt, and what was forced after it.

    Attributes:
        request, prompt: the prompt's number, from 0, and its file and line.
        text: to continue.
        position: tokens of the answer that are in ``text`` already.
    """

    request: int
    prompt: str
    text: str
    position: int = 0


@attrs.define
class Pairing:
    """What comparing the answers of two servers found.

    Attributes:
        differences: by request; several where a request was continued after a tie.
        apart: the largest difference between log-probabilities of the same token, in nats, where all tokens so far are
            equal, the first different token's row left out; 0 without a row.
    """

    differences: tuple[Difference, ...] = ()
    apart: float = 0.0

    @property
    def requests(self) -> int:
        """How many requests differ."""
        return len({difference.request for difference in self.differences})

    def add(self, text: Text, plain: Answer, other: Answer, *, greedy: bool) -> Difference | None:
        """Compare one more pair of answers; returns their difference."""
        difference, common = compare(text, plain, other, greedy=greedy)
        self.differences += () if difference is None else (difference,)
        for row in zip(plain.steps[:common], other.steps[:common], strict=True):
            self.apart = max(self.apart, _apart(*row))  # NaN is never larger
        return difference


def compare(text: Text, plain: Answer, other: Answer, *, greedy: bool) -> tuple[Difference | None, int]:
    """The first difference of two answers to one text, None if there is none, and how many tokens are before it.

    Raises: UnsupportedError if the servers name the same tokens differently, which would make everything differ.
    """
    pairs = list(zip(plain.steps, other.steps, strict=False))
    at = next((n for n, (left, right) in enumerate(pairs) if left.token != right.token), len(pairs))
    where: dict[str, Any] = {"position": text.position + at, "request": text.request, "prompt": text.prompt}
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
    equal_texts = plain.text == other.text and not (plain.spelled and other.spelled)
    if type(row.token) is not type(others.token) or (isinstance(row.token, str) and equal_texts):
        names = " and ".join(shown(step.token, 40) for step in (row, others))
        raise UnsupportedError(
            f"the servers name their tokens differently ({names}), so equal tokens would count as different ones",
            prompt=text.prompt,
            try_="two servers of one engine and version",
        )
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
class ComparisonReport:
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
        batch: requests that were sent together.
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
    batch: int = 1
    failure: SpecdecError | None = None

    @property
    def partial(self) -> bool:
        """Whether requests are missing."""
        return self.done < self.planned

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Those under speculation, with their verdicts."""
        judged = ((one, *self._judge(one)) for one in self.speculation.differences)
        return tuple(attrs.evolve(one, verdict=verdict, reason=reason) for one, verdict, reason in judged)

    @property
    def limits(self) -> Rounding:
        """What counts as rounding, and what does not.

        Nobody can tell up to twice what plain decoding differs from itself by: two logits move against each other by
        two such steps at most.
        """
        rounding = Rounding.of(self.tolerance)
        return attrs.evolve(rounding, real=max(rounding.real, 2 * self.control.apart))

    @property
    def logprobs_verdict(self) -> Verdict:
        """Whether rounding explains how far the log-probabilities of equal tokens are apart."""
        return self.limits.verdict(self.speculation.apart)

    def verdicts(self) -> Counter[Verdict]:
        """How many differences have each verdict."""
        return Counter(difference.verdict for difference in self.differences)

    def histogram(self) -> list[tuple[float, float, int, int]]:
        """Bins of the top-two gap: from, to (inf at last), positions, differences."""
        everywhere = Counter(bisect_right(GAP_EDGES, gap) for gap in self.gaps)
        differing = Counter(bisect_right(GAP_EDGES, difference.top_two) for difference in self.differences)
        edges = itertools.pairwise((0.0, *GAP_EDGES, math.inf))
        return [(low, high, everywhere[i], differing[i]) for i, (low, high) in enumerate(edges)]

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
        gap = difference.known_gap
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
            if gap > Rounding.of(self.tolerance).real:
                noise = f"plain against plain has log-probabilities {self.control.apart:.3g} nats apart"
                return Verdict.UNKNOWN, f"{size} below the best, and {noise}"
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
            return {"count": pairing.requests, "share": pairing.requests / self.done}

        verdicts = self.verdicts()
        return {
            "plain": self.plain,
            "speculative": self.speculative,
            **attrs.asdict(self.request, filter=lambda field, _: field.name != "ids"),
            "batch": self.batch,
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
            "logprobs_verdict": self.logprobs_verdict.value,
            "rounding": {"tie_up_to": self.limits.tie, "real_above": self.limits.real},
            "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
            "differences": [_described(difference, "why") for difference in self.differences],
            "gap_histogram": [
                dict(zip(("from", "to", "positions", "differences"), map(_finite, row), strict=True))
                for row in self.histogram()
            ],
        }


def _described(difference: Difference, *left_out: str) -> dict[str, Any]:
    fields = attrs.asdict(difference) | {"verdict": difference.verdict.value}
    return {name: _finite(value) for name, value in fields.items() if name not in left_out}


def _finite(value: Any) -> Any:
    """The value for JSON, which has no number for infinity and NaN: None instead."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- the measurement -------------------------------------------------------------------------------------------------


@attrs.define
class Comparison(Generations):
    """An audit that can be stopped between requests.

    After a difference that rounding may explain, both servers go on from the plain answer's token.

    Args:
        plain, speculative: the servers; the same one twice shows its own noise only.
        prompts: the texts to continue; chat templates are the servers' business.
        request: how to generate.
        tolerance: nats that count as rounding; if None, those between what the finest and the coarsest number format
            explain are not judged.
        batch: requests sent together to the server with speculation, and in the control, each beside one that is
            sampled if ``request`` is greedy, and greedy if it is sampled. Plain answers are asked for one at a time.
        progress: called with the requests done and their total.
    """

    _plain: ServerEngine
    _speculative: ServerEngine
    _prompts: Sequence[Prompt]
    _request: Request
    _tolerance: float | None = None
    _batch: int = 1
    _progress: Callable[[int, int], object] = lambda done, planned: None

    def run(self) -> ComparisonReport:
        """Ask. Raises: SpecdecError if no request was answered; a later failure ends the audit, and is reported."""
        greedy = self._request.temperature == 0
        speculation, control = Pairing(), Pairing()
        gaps: list[float] = []
        tokens = done = 0
        failure: SpecdecError | None = None
        waiting = [Text(number, prompt.name, prompt.text) for number, prompt in enumerate(self._prompts)]
        while waiting and not (self.stopping and done):
            texts, waiting = waiting[: self._batch], waiting[self._batch :]
            try:
                answers = self._answers(texts)
                forced: list[Text] = []
                for text, plain, other, again in zip(texts, *answers, strict=True):
                    difference = speculation.add(text, plain, other, greedy=greedy)
                    control.add(text, plain, again, greedy=greedy)
                    done += not text.position
                    steps = plain.steps
                    if following := self._forced(text, plain, difference):
                        steps = steps[: following.position - text.position]  # the rest is answered again
                        forced.append(following)
                    tokens += len(steps)
                    gaps += [best - second for best, second in map(_two_best, steps) if second > -math.inf]
            except SpecdecError as error:
                if not done:
                    raise
                failure = error
                break
            waiting = forced + waiting
            self._progress(done, len(self._prompts))
        return ComparisonReport(
            plain=self._plain.name,
            speculative=self._speculative.name,
            request=self._request,
            done=done,
            planned=len(self._prompts),
            tokens=tokens,
            gaps=tuple(gaps),
            speculation=speculation,
            control=control,
            tolerance=self._tolerance,
            batch=self._batch,
            failure=failure,
        )

    def _answers(self, texts: Sequence[Text]) -> tuple[list[Answer], list[Answer], list[Answer]]:
        """Plain answers, those under speculation, and plain ones again, with tokens in one form."""
        answers = (
            [self._plain.answer(text.text, self._left(text)) for text in texts],
            self._together(self._speculative, texts),
            self._together(self._plain, texts),
        )
        forms = {type(step.token) for group in answers for answer in group for step in answer.steps}
        if len(forms) > 1 and self._request.ids:
            self._request = attrs.evolve(self._request, ids=False)
            return self._answers(texts)
        return answers

    def _left(self, text: Text) -> Request:
        """The request for the tokens that are not in the text already."""
        return attrs.evolve(self._request, max_new_tokens=self._request.max_new_tokens - text.position)

    def _together(self, engine: ServerEngine, texts: Sequence[Text]) -> list[Answer]:
        if self._batch == 1:
            return [engine.answer(text.text, self._left(text)) for text in texts]
        temperature = SAMPLED if self._request.temperature == 0 else 0.0
        with ThreadPoolExecutor(2 * len(texts)) as pool:
            pending = [
                pool.submit(engine.answer, text.text, request)
                for text in texts
                for request in (self._left(text), attrs.evolve(self._left(text), temperature=temperature))
            ]
            return [future.result() for future in pending][::2]

    def _forced(self, text: Text, plain: Answer, difference: Difference | None) -> Text | None:
        """The text up to and with plain decoding's token, if rounding may explain a difference there."""
        if difference is None or difference.why or difference.position + 1 >= self._request.max_new_tokens:
            return None
        if Rounding.of(self._tolerance).verdict(difference.known_gap) is Verdict.REAL:
            return None
        length = difference.position + 1 - text.position
        again = self._plain.answer(text.text, attrs.evolve(self._request, max_new_tokens=length))
        same = [step.token for step in again.steps] == [step.token for step in plain.steps[:length]]
        if not same or again.ended or again.text.endswith(PARTIAL):
            return None
        return Text(text.request, text.prompt, text.text + again.text, difference.position + 1)
