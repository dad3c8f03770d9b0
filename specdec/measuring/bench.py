"""Compare plain and speculative decoding: interleaved in one process, outputs compared, cycle time broken down.

Every prompt runs plain, speculative, speculative, plain (A B B A), so that slow changes of the machine's speed favour
neither arm. Rates are ratios of sums over all runs: tokens over seconds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import attrs
import numpy as np

from specdec.checking import between, checked
from specdec.contract import CycleRecord
from specdec.decoding.cycle_timing import measure_costs
from specdec.errors import ConfigError
from specdec.measuring.intervals import Interval, interval, left_out, ratio
from specdec.measuring.prompts import Prompt, PromptSet
from specdec.measuring.runs import Measurement, Report, Run, cycle_seconds, plain
from specdec.measuring.synthetic import SyntheticVerifier
from specdec.pipeline import LanguageModel
from specdec.records.cost_table import CostTable
from specdec.text.tokenizer import common_prefix

EXPLAINED = 0.03  # the phases must account for the cycles' time to within this share
WARM = 0.05  # warm-up ends when a round is within this share of the previous one
WARM_ROUNDS = 5  # at most
TERMS = {"verification": "verify_seconds", "drafting": "draft_seconds", "bookkeeping": "commit_seconds"}  # by phase
ARMS = ("plain", "speculative")


@attrs.frozen(kw_only=True)
class PromptBench:
    """One prompt: all its runs, and whether their outputs agree."""

    prompt: str
    kind: str
    plain: tuple[Run, ...]
    speculative: tuple[Run, ...]
    differs_at: int | None  # first generated position where a run differs from the first plain run

    def sums(self) -> tuple[float, float, float, float]:
        """Tokens and seconds, plain and speculative, over all runs."""
        return (*_sums(self.plain), *_sums(self.speculative))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The runs for JSON."""
        for arm in ARMS:
            for number, run in enumerate(getattr(self, arm)):
                yield {
                    "class": self.kind,
                    "prompt": self.prompt,
                    "prompt_tokens": len(run.prompt_tokens),
                    "arm": arm,
                    "run": number,
                    "tokens": len(run.tokens),
                    "seconds": run.seconds,
                    "tokens_per_second": run.rate,
                    "cycles": len(run.cycles),
                    "prefill_seconds": run.prefill_seconds,
                    **{phase: sum(getattr(cycle, phase) for cycle in run.cycles) for phase in TERMS.values()},
                    "differs_at": self.differs_at,
                }


@attrs.frozen(kw_only=True)
class ClassBench:
    """Speeds of one class of prompts."""

    name: str
    prompts: int
    plain: float  # tokens per second
    speculative: float
    speedup: float
    interval: Interval  # of the speed-up, over prompts
    tokens_per_cycle: float
    offered: tuple[int, ...]  # by lookahead position, speculative runs
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    depths: dict[int, int]  # drafted tokens -> cycles


@attrs.frozen(kw_only=True)
class Timing:
    """Milliseconds of one kind of step, over the cycles that contain it."""

    what: str  # "plain step", "verify 3 rows", "draft 2 tokens", "commit", ...
    cycles: int
    median_ms: float
    low_ms: float  # quartiles
    high_ms: float
    in_plain_steps: float  # median relative to the median plain step


@attrs.frozen(kw_only=True)
class Term:
    """One part of a mean speculative cycle, as predicted from the measured costs and as measured."""

    name: str
    predicted_ms: float
    measured_ms: float
    speedup_if_free: float  # the speed-up if this part cost no more than in a plain step


@attrs.frozen(kw_only=True)
class BenchReport(Report):
    """The result of a comparison."""

    depth_policy: str
    repeats: int  # A B B A rounds per prompt
    synthetic: tuple[float, ...] | None  # imposed cumulative acceptance: a timing, not a result
    warm_up: tuple[float, ...]  # tokens per second of the warm-up rounds, both arms together
    prompts: tuple[PromptBench, ...] = attrs.field(repr=False)
    classes: tuple[ClassBench, ...]
    overall: ClassBench | None  # None: no prompt was finished
    timings: tuple[Timing, ...]
    plain_step_ms: float | None  # the mean, as the terms are means
    terms: tuple[Term, ...]
    predicted_speedup: float | None  # from the cost table, with the depths and acceptance of the runs
    speedup_if_accepted: float | None  # if every drafted token were accepted
    explained: dict[str, float]  # arm -> share of the time covered by the phases
    reasons: dict[str, int]  # why speculation ended off -> number of speculative runs

    @property
    def equal(self) -> bool:
        """Whether every run of a prompt gave the same tokens."""
        return all(prompt.differs_at is None for prompt in self.prompts)

    @property
    def broken_promise(self) -> bool:
        """Whether outputs differ although verifier and backend promise that they cannot."""
        return self.promised and self.synthetic is None and not self.equal

    @property
    def blame(self) -> Term | None:
        """The part of a cycle that differs most from its prediction."""
        return max(self.terms, key=lambda term: abs(term.measured_ms - term.predicted_ms), default=None)

    @property
    def limit(self) -> str:
        """The part with the most to gain if it were free, or the acceptance; "" if nothing was measured."""
        gains = {term.name: term.speedup_if_free for term in self.terms}
        if self.speedup_if_accepted is not None:
            gains["acceptance"] = self.speedup_if_accepted
        return max(gains, key=lambda name: gains[name], default="")

    def to_dict(self) -> dict[str, Any]:
        """The object that ``bench --json`` prints; runs are summed."""
        return attrs.asdict(attrs.evolve(self, prompts=())) | {
            "prompts": [row for prompt in self.prompts for row in prompt.rows()],
            "equal": self.equal,
            "broken_promise": self.broken_promise,
            "limit": self.limit,
            "blame": None if self.blame is None else self.blame.name,
        }


class BenchMeasurement(Measurement):
    """Compares both arms; after ``stop`` the report covers the finished prompts.

    Args:
        lm: the pipeline, compared with its own plain decoding.
        prompts: by class.
        repeats: A B B A rounds per prompt.
        synthetic: cumulative acceptance by position to impose (``specdec.measuring.synthetic``).
        **options: as for ``Measurement``. End tokens are ignored, so that both arms generate equally many tokens.

    Raises: ConfigError, PromptError or UnsupportedError for settings, prompts, or a drafter that drafts nothing.
    """

    @checked()
    def __init__(
        self,
        lm: LanguageModel,
        prompts: PromptSet,
        *,
        repeats: Annotated[int, between(1, 10**6)] = 1,
        synthetic: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        if "ignore_eos" in options:
            raise ConfigError("a comparison always ignores end tokens, so it takes no ignore_eos")
        super().__init__(lm, **options, ignore_eos=True)
        self._prompts = [prompt for members in prompts.values() for prompt in members]
        longest = max((len(prompt.encode(lm.tokenizer)) for prompt in self._prompts), default=0)
        if longest + self._generation.max_new_tokens >= lm.capacity:
            raise ConfigError(
                f"a prompt of {longest} tokens and {self._generation.max_new_tokens} generated tokens do not fit",
                limit=f"{lm.capacity} tokens",
                try_="fewer new tokens, or shorter prompts",
            )
        self._repeats = repeats
        self._synthetic = None if synthetic is None else tuple(synthetic)
        self._arms = {"plain": plain(lm), "speculative": lm}
        if self._synthetic is not None:
            self._arms["speculative"] = attrs.evolve(lm, verifier=SyntheticVerifier(lm.verifier, self._synthetic))

    def run(self) -> BenchReport:
        """Measure."""
        warm_up = self._warm_up()
        costs = measure_costs(self._lm)
        self._plan(4 * self._repeats * len(self._prompts))
        done: list[PromptBench] = []
        for prompt in self._prompts:
            runs = self._rounds(prompt)
            if runs is None:
                break
            done.append(self._compared(prompt, runs))
        return self._report(done, costs, warm_up)

    def _rounds(self, prompt: Prompt) -> dict[str, list[Run]] | None:
        """Runs of both arms, A B B A; None once the measurement is stopped."""
        runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
        for arm in (*ARMS, *reversed(ARMS)) * self._repeats:
            run = self._generate(self._arms[arm], prompt)
            if run is None:
                return None
            runs[arm].append(run)
        return runs

    def _warm_up(self) -> tuple[float, ...]:
        """Run both arms on the first prompt until the speed is steady: caches, clocks, recorded passes."""
        rates: list[float] = []
        while len(rates) < WARM_ROUNDS and self._prompts:
            runs = [run for lm in self._arms.values() if (run := self._generate(lm, self._prompts[0]))]
            if len(runs) < 2:
                break
            tokens, seconds = _sums(runs)
            rates.append(tokens / seconds)
            if len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) < WARM:
                break
        return tuple(rates)

    def _compared(self, prompt: Prompt, runs: dict[str, list[Run]]) -> PromptBench:
        first, *others = [run.tokens for run in (*runs["plain"], *runs["speculative"])]
        places = [common_prefix(first, tokens) for tokens in others if tokens != first]
        return PromptBench(
            prompt=prompt.name,
            kind=prompt.kind,
            plain=tuple(runs["plain"]),
            speculative=tuple(runs["speculative"]),
            differs_at=min(places, default=None) if self._synthetic is None else None,
        )

    def _report(self, done: Sequence[PromptBench], costs: CostTable, warm_up: tuple[float, ...]) -> BenchReport:
        arms: dict[str, list[Run]] = {arm: [run for prompt in done for run in getattr(prompt, arm)] for arm in ARMS}
        plain_cycles, cycles = ([cycle for run in arms[arm] for cycle in run.cycles] for arm in ARMS)
        kinds = dict.fromkeys(prompt.kind for prompt in done)
        report = BenchReport(
            **self._facts(),
            depth_policy=self._lm.depth.spec.name,
            repeats=self._repeats,
            synthetic=self._synthetic,
            warm_up=warm_up,
            prompts=tuple(done),
            classes=tuple(_class(kind, [prompt for prompt in done if prompt.kind == kind]) for kind in kinds),
            overall=_class("all", done) if done else None,
            timings=tuple(_timings(cycles, plain_cycles)) if done else (),
            plain_step_ms=1e3 * _mean(plain_cycles) if done else None,
            terms=_terms(cycles, plain_cycles, costs) if done else (),
            predicted_speedup=_predicted(cycles, costs) if done else None,
            speedup_if_accepted=_if_accepted(cycles, plain_cycles) if done else None,
            explained={arm: _explained(runs) for arm, runs in arms.items() if runs},
            reasons=dict(Counter(run.inactive_reason for run in arms["speculative"] if run.inactive_reason)),
        )
        return attrs.evolve(report, notices=tuple(self._notices(report)))

    def _notices(self, report: BenchReport) -> Iterator[str]:
        yield from self._common_notices("both arms were disturbed, and the figures spread more")
        for arm, share in report.explained.items():
            if abs(1 - share) > EXPLAINED:
                yield (
                    f"the phases account for {share:.1%} of the time of the {arm} cycles: more than {EXPLAINED:.0%} "
                    "went elsewhere, to the depth policy, counters and observers, or to other programs"
                )


@checked()
def compare(lm: LanguageModel, prompts: PromptSet, **options: Any) -> BenchReport:
    """``BenchMeasurement(lm, prompts, **options).run()``."""
    return BenchMeasurement(lm, prompts, **options).run()


def _sums(runs: Sequence[Run]) -> tuple[float, float]:
    return float(sum(len(run.tokens) for run in runs)), sum(run.seconds for run in runs)


def _explained(runs: Sequence[Run]) -> float:
    return sum(cycle_seconds(cycle) for run in runs for cycle in run.cycles) / _sums(runs)[1]


def _mean(cycles: Sequence[CycleRecord]) -> float:
    return statistics.fmean(map(cycle_seconds, cycles))


def _class(name: str, done: Sequence[PromptBench]) -> ClassBench:
    sums = np.array([prompt.sums() for prompt in done])

    def speedup(totals: Any) -> Any:
        return ratio(totals[..., 2] * totals[..., 1], totals[..., 3] * totals[..., 0])

    total = sums.sum(axis=0)
    runs = [run for prompt in done for run in prompt.speculative]
    cycles = [cycle for run in runs for cycle in run.cycles]
    deepest = max((cycle.offered for cycle in cycles), default=0)
    _, offered, reached, accepted = (
        tuple(row) for row in np.sum([run.counts(deepest) for run in runs], axis=0).tolist()
    )
    return ClassBench(
        name=name,
        prompts=len(done),
        plain=total[0] / total[1],
        speculative=total[2] / total[3],
        speedup=float(speedup(total)),
        interval=interval(float(speedup(total)), speedup(left_out(sums))),
        tokens_per_cycle=total[2] / len(cycles),
        offered=offered,
        reached=reached,
        accepted=accepted,
        depths=dict(sorted(Counter(cycle.offered for cycle in cycles).items())),
    )


def _timings(cycles: Sequence[CycleRecord], plain_cycles: Sequence[CycleRecord]) -> Iterator[Timing]:
    passes = [*plain_cycles, *cycles]
    lengths = sorted({cycle.offered for cycle in passes})
    seconds: dict[str, Sequence[float]] = {"plain step": list(map(cycle_seconds, plain_cycles))}
    for n in lengths:
        what = f"verify {n + 1} row{'s' if n else ''}"
        seconds[what] = [cycle.verify_seconds for cycle in passes if cycle.offered == n]
    for n in filter(None, lengths):
        drafting = [cycle.draft_seconds for cycle in cycles if cycle.offered == n]
        seconds[f"draft {n} token{'s' if n > 1 else ''}"] = drafting
        seconds[f"draft step, {n} in a row"] = [each / n for each in drafting]
    seconds["commit"] = [cycle.commit_seconds for cycle in cycles]
    step = statistics.median(seconds["plain step"])
    for what, values in seconds.items():
        low, middle, high = (float(1e3 * value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
        yield Timing(
            what=what,
            cycles=len(values),
            median_ms=middle,
            low_ms=low,
            high_ms=high,
            in_plain_steps=middle / (1e3 * step),
        )


def _predicted(cycles: Sequence[CycleRecord], costs: CostTable) -> float:
    """The predicted speed-up of these cycles from the cost table."""
    tokens = sum(len(cycle.emitted) for cycle in cycles)
    return tokens * costs.cycle(0) / sum(costs.cycle(cycle.offered) for cycle in cycles)


def _terms(cycles: Sequence[CycleRecord], plain_cycles: Sequence[CycleRecord], costs: CostTable) -> tuple[Term, ...]:
    """Means over the speculative cycles. A free part costs what it costs in a plain step."""
    predicted = {
        "verification": statistics.fmean(costs.pass_seconds(cycle.offered + 1) for cycle in cycles),
        "drafting": statistics.fmean(costs.draft_seconds(cycle.offered) for cycle in cycles),
        "bookkeeping": costs.commit,
    }
    tokens = statistics.fmean(len(cycle.emitted) for cycle in cycles)
    terms = []
    for name, phase in TERMS.items():
        measured, in_plain_steps = (
            statistics.fmean(getattr(cycle, phase) for cycle in arm) for arm in (cycles, plain_cycles)
        )
        saved = max(0.0, measured - (0.0 if name == "drafting" else in_plain_steps))
        terms.append(
            Term(
                name=name,
                predicted_ms=1e3 * predicted[name],
                measured_ms=1e3 * measured,
                speedup_if_free=tokens * _mean(plain_cycles) / (_mean(cycles) - saved),
            )
        )
    return tuple(terms)


def _if_accepted(cycles: Sequence[CycleRecord], plain_cycles: Sequence[CycleRecord]) -> float:
    return _mean(plain_cycles) * statistics.fmean(cycle.offered + 1 for cycle in cycles) / _mean(cycles)
