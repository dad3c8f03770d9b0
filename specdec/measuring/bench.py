"""Plain against speculative decoding: interleaved in one process, outputs compared, the time taken apart.

Every prompt runs plain, speculative, speculative, plain (A B B A), so that a machine that slowly changes its speed
favours neither arm. Rates are ratios of sums: tokens over seconds, both added up.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import CycleRecord, Guarantee, Parity
from specdec.decoding.cycle_timing import measure_costs
from specdec.decoding.settings import override_generation
from specdec.errors import ConfigError, UnsupportedError
from specdec.measuring.arms import Arm, ArmRun, plain
from specdec.measuring.environment import Environment, current_environment
from specdec.measuring.frontiers import FrontierReport, measure_frontiers
from specdec.measuring.intervals import interval, ratio, resampled
from specdec.measuring.synthetic import SyntheticVerifier
from specdec.records.cost_table import CostTable

if TYPE_CHECKING:
    from specdec.measuring.acceptance import Interval
    from specdec.measuring.prompts import Prompt, PromptSet
    from specdec.pipeline import LanguageModel

NEW_TOKENS = 128
REPEATS = 1
EXPLAINED = 0.03  # the phases must account for the time of the cycles to within this share
WARM = 0.05  # warm-up ends when a round is within this share of the one before
WARM_ROUNDS = 5  # at most
TERMS = ("verification", "drafting", "bookkeeping")


@attrs.frozen(kw_only=True)
class PromptBench:
    """One prompt: all its runs, and whether their outputs agree."""

    prompt: str
    kind: str
    prompt_tokens: int
    plain: tuple[ArmRun, ...]
    speculative: tuple[ArmRun, ...]
    differs_at: int | None  # the first generated position at which any run differs from the first plain one

    def sums(self) -> tuple[float, float, float, float]:
        """Tokens and seconds, plain and speculative, over all runs."""
        return (*_sums(self.plain), *_sums(self.speculative))


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
    """Milliseconds of one kind of step, over the cycles that had it."""

    what: str  # "plain step", "verify 3 rows", "draft 2 tokens", "commit", ...
    cycles: int
    median_ms: float
    low_ms: float  # quartiles
    high_ms: float
    in_plain_steps: float  # median over the median plain step


@attrs.frozen(kw_only=True)
class Term:
    """One part of a mean speculative cycle, predicted from the measured costs and as it was."""

    name: str
    predicted_ms: float
    measured_ms: float
    speedup_if_free: float  # what the speed-up would be if this part cost what a plain step needs of it


@attrs.frozen(kw_only=True)
class BenchReport:
    """Everything that a comparison found."""

    environment: Environment
    drafter: str
    verifier: str
    depth_policy: str
    guarantee: str
    max_new_tokens: int
    repeats: int  # A B B A rounds per prompt
    temperature: float
    seed: int
    synthetic: tuple[float, ...] | None  # cumulative acceptance that was imposed: a timing, not a result
    partial: bool
    warm_up: tuple[float, ...]  # tokens per second of the warm-up's rounds, both arms together
    prompts: tuple[PromptBench, ...] = attrs.field(repr=False)
    classes: tuple[ClassBench, ...]
    overall: ClassBench | None  # None: nothing was measured to the end
    timings: tuple[Timing, ...]
    plain_step_ms: float | None  # the mean, as the terms are means
    terms: tuple[Term, ...]
    predicted_speedup: float | None  # from the costs measured before, with the depths and acceptance of the runs
    speedup_if_accepted: float | None  # if every drafted token had been accepted
    explained: dict[str, float]  # arm -> share of the time that the phases account for
    frontiers: tuple[FrontierReport, ...]
    reasons: dict[str, int]  # why speculation was off at the end of a run -> speculative runs
    notices: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every run of a prompt gave the same tokens."""
        return all(one.differs_at is None for one in self.prompts) and all(one.equal for one in self.frontiers)

    @property
    def broken_promise(self) -> bool:
        """Whether outputs differ although verifier and backend promise that they cannot."""
        exact = self.guarantee == Guarantee.EXACT.value and self.environment.parity == Parity.BITWISE.value
        return exact and self.synthetic is None and not self.equal

    @property
    def blame(self) -> Term | None:
        """The part of a cycle that differs most from its prediction."""
        return max(self.terms, key=lambda term: abs(term.measured_ms - term.predicted_ms), default=None)

    @property
    def limit(self) -> str:
        """What would gain most if it were free: a term, or the acceptance; "" where terms cannot be told apart."""
        gains = {term.name: term.speedup_if_free for term in self.terms}
        if self.terms and self.speedup_if_accepted is not None:
            gains["acceptance"] = self.speedup_if_accepted
        return max(gains, key=lambda name: gains[name], default="")

    def to_dict(self) -> dict[str, Any]:
        """The object that ``bench --json`` prints; of the single runs their sums only."""
        told = attrs.asdict(attrs.evolve(self, prompts=()), value_serializer=lambda _, __, value: value)
        told["prompts"] = list(self.rows())
        told |= {"equal": self.equal, "broken_promise": self.broken_promise, "limit": self.limit}
        told["blame"] = None if self.blame is None else self.blame.name
        return told

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of ``bench --csv``: one per prompt, arm and run."""
        for one in self.prompts:
            for arm, runs in (("plain", one.plain), ("speculative", one.speculative)):
                for number, run in enumerate(runs):
                    yield {
                        "class": one.kind,
                        "prompt": one.prompt,
                        "prompt_tokens": one.prompt_tokens,
                        "arm": arm,
                        "run": number,
                        "tokens": len(run.tokens),
                        "seconds": run.seconds,
                        "tokens_per_second": run.rate,
                        "cycles": len(run.cycles),
                        "prefill_seconds": run.prefill_seconds,
                        "draft_seconds": sum(cycle.draft_seconds for cycle in run.cycles),
                        "verify_seconds": sum(cycle.verify_seconds for cycle in run.cycles),
                        "commit_seconds": sum(cycle.commit_seconds for cycle in run.cycles),
                        "differs_at": one.differs_at,
                    }


class BenchRun:
    """A comparison under way; ``stop`` ends it early, and the report then is of what was done.

    Args:
        lm: the pipeline to compare with its own plain decoding.
        prompts: by class.
        repeats: A B B A rounds per prompt.
        synthetic: cumulative acceptance by position to impose (``specdec.measuring.synthetic``).
        contexts: lengths at which to measure prefill and generation as well; ``frontiers`` says how.
        progress: called with the generations done and those planned.
        model: its name, for the record.
        **settings: fields of ``specdec.config.GenerationConfig``; the configuration's where not given. End tokens are
            ignored, so that both arms generate as much.

    Raises: ConfigError, PromptError or UnsupportedError for settings, prompts, or a drafter that drafts nothing.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: PromptSet,
        *,
        repeats: int = REPEATS,
        synthetic: Sequence[float] | None = None,
        contexts: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
        model: str = "",
        **settings: Any,
    ) -> None:
        if lm.drafter.spec.name == "none":
            raise UnsupportedError(
                "the drafter 'none' drafts nothing, so there is nothing to compare with plain decoding",
                try_="drafter.name = mtp or ngram (specdec plugins lists them)",
            )
        self._settings = {**settings, "ignore_eos": True}
        self._generation = override_generation(lm.config.generation, self._settings)
        self._lm = lm
        self._prompts = [prompt for members in prompts.values() for prompt in members]
        self._ids = [prompt.encode(lm.tokenizer) for prompt in self._prompts]
        longest = max(map(len, self._ids), default=0) + self._generation.max_new_tokens
        for asked in (longest, *(length + self._generation.max_new_tokens for length in contexts)):
            if asked >= lm.capacity:
                raise ConfigError(
                    f"{asked} tokens do not fit: a context and {self._generation.max_new_tokens} generated tokens",
                    limit=f"{lm.capacity} tokens",
                    try_="fewer new tokens, or shorter contexts",
                )
        self._repeats = repeats
        self._synthetic = None if synthetic is None else tuple(synthetic)
        self._contexts = tuple(contexts)
        self._progress = progress or (lambda done, planned: None)
        self._environment = current_environment(lm.info, model)  # before the measurement makes its own load
        self._plain = Arm(plain(lm))
        if self._synthetic is not None:
            lm = attrs.evolve(lm, verifier=SyntheticVerifier(lm.verifier, self._synthetic))
        self._speculative = Arm(lm)
        self.stopping = False

    def stop(self) -> None:
        """End after the present generation; safe from a signal handler."""
        self.stopping = True

    def run(self) -> BenchReport:
        """Measure."""
        warm_up = self._warm_up()
        costs = measure_costs(self._lm)
        planned = 4 * (self._repeats * len(self._ids) + len(self._contexts))
        generated = 0

        def advance() -> None:
            nonlocal generated
            generated += 1
            self._progress(generated, planned)

        done: list[PromptBench] = []
        for prompt, ids in zip(self._prompts, self._ids, strict=True):
            arms: dict[Arm, list[ArmRun]] = {self._plain: [], self._speculative: []}
            for _ in range(self._repeats):
                for arm in (self._plain, self._speculative, self._speculative, self._plain):
                    if self.stopping:
                        break
                    arms[arm].append(arm.run(ids, **self._settings))
                    advance()
            if sum(map(len, arms.values())) < 4 * self._repeats:
                break
            done.append(self._compared(prompt, len(ids), arms[self._plain], arms[self._speculative]))
        frontiers: tuple[FrontierReport, ...] = ()
        if self._contexts and not self.stopping:
            frontiers = tuple(
                measure_frontiers(
                    self._plain,
                    self._speculative,
                    self._contexts,
                    self._text(),
                    compare=self._synthetic is None,
                    stopping=lambda: self.stopping,
                    advance=advance,
                    **self._settings,
                )
            )
        return self._report(done, costs, warm_up, frontiers)

    def _warm_up(self) -> tuple[float, ...]:
        """Both arms on the first prompt until the speed stands still: caches, clocks, recorded passes."""
        rates: list[float] = []
        while len(rates) < WARM_ROUNDS and not self.stopping and self._ids:
            runs = [arm.run(self._ids[0], **self._settings) for arm in (self._plain, self._speculative)]
            rates.append(sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs))
            if len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) < WARM:
                break
        return tuple(rates)

    def _compared(
        self, prompt: Prompt, prompt_tokens: int, without: Sequence[ArmRun], with_: Sequence[ArmRun]
    ) -> PromptBench:
        differs = None
        if self._synthetic is None:
            places = (_first_difference(without[0].tokens, run.tokens) for run in (*without, *with_))
            differs = min((place for place in places if place is not None), default=None)
        return PromptBench(
            prompt=prompt.name,
            kind=prompt.kind,
            prompt_tokens=prompt_tokens,
            plain=tuple(without),
            speculative=tuple(with_),
            differs_at=differs,
        )

    def _text(self) -> list[int]:
        """All prompts after one another, as often as the longest context needs: text, not random tokens."""
        tokens = [token for ids in self._ids for token in ids]
        return (tokens * (max(self._contexts) // len(tokens) + 1))[: max(self._contexts)]

    def _report(
        self,
        done: Sequence[PromptBench],
        costs: CostTable,
        warm_up: tuple[float, ...],
        frontiers: tuple[FrontierReport, ...],
    ) -> BenchReport:
        lm, generation = self._lm, self._generation
        runs = [run for one in done for run in one.speculative]
        cycles = [cycle for run in runs for cycle in run.cycles]
        plain_cycles = [cycle for one in done for run in one.plain for cycle in run.cycles]
        overall = _class("all", done) if done else None
        predicted = _predicted(cycles, costs) if cycles else None
        apart = bool(cycles) and not any(cycle.on_device for cycle in cycles)
        terms = _terms(cycles, plain_cycles, costs) if apart and plain_cycles else ()
        report = BenchReport(
            environment=self._environment,
            drafter=lm.drafter.spec.name,
            verifier=lm.config.verifier.name,
            depth_policy=lm.depth.spec.name,
            guarantee=lm.verifier.guarantee.value,
            max_new_tokens=generation.max_new_tokens,
            repeats=self._repeats,
            temperature=generation.temperature,
            seed=generation.seed,
            synthetic=self._synthetic,
            partial=self.stopping,
            warm_up=warm_up,
            prompts=tuple(done),
            classes=tuple(_class(kind, [one for one in done if one.kind == kind]) for kind in _kinds(done)),
            overall=overall,
            timings=tuple(_timings(cycles, plain_cycles)),
            plain_step_ms=1e3 * statistics.fmean(map(_seconds, plain_cycles)) if plain_cycles else None,
            terms=terms,
            predicted_speedup=predicted,
            speedup_if_accepted=_if_accepted(cycles, plain_cycles) if cycles and plain_cycles else None,
            explained={
                name: sum(run.explained * run.seconds for run in arm) / sum(run.seconds for run in arm)
                for name, arm in (("plain", [run for one in done for run in one.plain]), ("speculative", runs))
                if arm
            },
            frontiers=frontiers,
            reasons=dict(Counter(run.reason for run in runs if run.reason)),
            notices=(),
        )
        return attrs.evolve(report, notices=tuple(self._notices(report)))

    def _notices(self, report: BenchReport) -> Iterator[str]:
        yield from self._lm.notices
        if self._environment.busy:
            yield (
                f"the machine was busy (load {self._environment.load_1min:.2f} in the minute before): both arms were "
                "disturbed, and the figures spread more"
            )
        for arm, share in report.explained.items():
            if abs(1 - share) > EXPLAINED:
                yield (
                    f"the phases account for {share:.1%} of the time of the {arm} cycles: more than {EXPLAINED:.0%} "
                    "went elsewhere, to the depth policy, counters and observers, or to other programs"
                )


def compare(lm: LanguageModel, prompts: PromptSet, **options: Any) -> BenchReport:
    """``BenchRun(lm, prompts, **options).run()``."""
    return BenchRun(lm, prompts, **options).run()


def _sums(runs: Iterable[ArmRun]) -> tuple[float, float]:
    kept = list(runs)
    return float(sum(len(run.tokens) for run in kept)), sum(run.seconds for run in kept)


def _kinds(done: Iterable[PromptBench]) -> list[str]:
    return list(dict.fromkeys(one.kind for one in done))


def _first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    if wanted == got:
        return None
    places = (place for place, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1])
    return next(places, min(len(wanted), len(got)))


def _class(name: str, done: Sequence[PromptBench]) -> ClassBench:
    sums = np.array([one.sums() for one in done])

    def speedup(totals: Any) -> Any:
        return ratio(ratio(totals[..., 2], totals[..., 3]), ratio(totals[..., 0], totals[..., 1]))

    total = sums.sum(axis=0)
    cycles = [cycle for one in done for run in one.speculative for cycle in run.cycles]
    deepest = max((cycle.offered for cycle in cycles), default=0)
    places = range(deepest)
    return ClassBench(
        name=name,
        prompts=len(done),
        plain=total[0] / total[1],
        speculative=total[2] / total[3],
        speedup=float(speedup(total)),
        interval=interval(speedup(resampled(sums)), len(done)),
        tokens_per_cycle=total[2] / len(cycles),
        offered=tuple(sum(cycle.offered > place for cycle in cycles) for place in places),
        reached=tuple(sum(cycle.offered > place <= cycle.accepted for cycle in cycles) for place in places),
        accepted=tuple(sum(cycle.accepted > place for cycle in cycles) for place in places),
        depths=dict(sorted(Counter(cycle.offered for cycle in cycles).items())),
    )


def _seconds(cycle: CycleRecord) -> float:
    return cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds


def _timings(cycles: Sequence[CycleRecord], plain_cycles: Sequence[CycleRecord]) -> Iterator[Timing]:
    if not plain_cycles:
        return
    step = statistics.median(map(_seconds, plain_cycles))

    def timing(what: str, seconds: Sequence[float]) -> Timing:
        low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
        return Timing(
            what=what,
            cycles=len(seconds),
            median_ms=1e3 * middle,
            low_ms=1e3 * low,
            high_ms=1e3 * high,
            in_plain_steps=middle / step,
        )

    yield timing("plain step", [_seconds(cycle) for cycle in plain_cycles])
    rows = {1: [cycle.verify_seconds for cycle in plain_cycles]}
    drafts: dict[int, list[float]] = {}
    whole: dict[int, list[float]] = {}
    for cycle in cycles:
        if cycle.on_device:
            whole.setdefault(cycle.offered, []).append(cycle.verify_seconds)
            continue
        rows.setdefault(cycle.offered + 1, []).append(cycle.verify_seconds)
        if cycle.offered:
            drafts.setdefault(cycle.offered, []).append(cycle.draft_seconds)
    for count, seconds in sorted(rows.items()):
        yield timing(f"verify {count} row{'s' if count > 1 else ''}", seconds)
    for count, seconds in sorted(drafts.items()):
        yield timing(f"draft {count} token{'s' if count > 1 else ''}", seconds)
        yield timing(f"draft step, {count} in a row", [one / count for one in seconds])
    for count, seconds in sorted(whole.items()):
        yield timing(f"whole cycle, {count} draft{'s' if count > 1 else ''}", seconds)
    if apart := [cycle.commit_seconds for cycle in cycles if not cycle.on_device]:
        yield timing("commit", apart)


def _predicted(cycles: Sequence[CycleRecord], costs: CostTable) -> float:
    """The speed-up that these cycles should have had by the cost table."""
    tokens = sum(len(cycle.emitted) for cycle in cycles)
    return tokens * costs.cycle(0) / sum(costs.cycle(cycle.offered) for cycle in cycles)


def _terms(cycles: Sequence[CycleRecord], plain_cycles: Sequence[CycleRecord], costs: CostTable) -> tuple[Term, ...]:
    """Means over the speculative cycles. A part that is free costs what a plain step needs of it."""
    measured = {
        "verification": statistics.fmean(cycle.verify_seconds for cycle in cycles),
        "drafting": statistics.fmean(cycle.draft_seconds for cycle in cycles),
        "bookkeeping": statistics.fmean(cycle.commit_seconds for cycle in cycles),
    }
    predicted = {
        "verification": statistics.fmean(costs.pass_seconds(cycle.offered + 1) for cycle in cycles),
        "drafting": statistics.fmean(costs.draft_seconds(cycle.offered) for cycle in cycles),
        "bookkeeping": costs.commit,
    }
    needed = {
        "verification": statistics.fmean(cycle.verify_seconds for cycle in plain_cycles),
        "drafting": 0.0,
        "bookkeeping": statistics.fmean(cycle.commit_seconds for cycle in plain_cycles),
    }
    step = statistics.fmean(map(_seconds, plain_cycles))
    tokens = statistics.fmean(len(cycle.emitted) for cycle in cycles)
    whole = sum(measured.values())
    return tuple(
        Term(
            name=name,
            predicted_ms=1e3 * predicted[name],
            measured_ms=1e3 * measured[name],
            speedup_if_free=tokens * step / (whole - max(0.0, measured[name] - needed[name])),
        )
        for name in TERMS
    )


def _if_accepted(cycles: Sequence[CycleRecord], plain_cycles: Sequence[CycleRecord]) -> float:
    step = statistics.fmean(map(_seconds, plain_cycles))
    return step * statistics.fmean(cycle.offered + 1 for cycle in cycles) / statistics.fmean(map(_seconds, cycles))
