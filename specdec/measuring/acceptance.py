"""Measure acceptance by prompt class and lookahead position, and say whether speculation pays.

The depth is fixed: a policy that adapts drafts deep only where drafts are good, and the counters of the deeper
positions would describe those places alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import Guarantee, Parity
from specdec.decoding.cycle_timing import measure_costs
from specdec.decoding.settings import override_generation
from specdec.errors import ConfigError, UnsupportedError
from specdec.measuring.ablations import AblationReport, ablated, ablation_report, check_ablations
from specdec.measuring.environment import Environment, current_environment
from specdec.measuring.intervals import interval, ratio, resampled
from specdec.measuring.patterns import Mismatch, commonest
from specdec.measuring.recording import PromptRun, Recording
from specdec.measuring.speed_model import NOT_WORTH_IT, TURN_ON, Prediction, Verdict, best, break_even, judge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.measuring.prompts import Prompt, PromptSet
    from specdec.pipeline import LanguageModel
    from specdec.records.cost_table import CostTable

    Float64 = NDArray[np.float64]

DEPTH = 4
NEW_TOKENS = 48
MISMATCHES = 10  # in a report
OTHER_CLOCK = 1.5  # a notice is due when the cycles of the run differ from the measured costs by this factor
PHASES = ("draft", "verify", "commit")

Interval = tuple[float, float] | None


@attrs.frozen(kw_only=True)
class PositionReport:
    """Counters and rates at one lookahead position, summed over the prompts of a class; 0 is the next token."""

    position: int
    offered: int  # drafts that had a token here
    reached: int  # of them, those whose earlier tokens were all accepted
    accepted: int  # of those, the ones whose token here was accepted too
    cumulative: float | None  # accepted / offered; None without any
    cumulative_interval: Interval  # over prompts
    conditional: float | None  # accepted / reached
    conditional_interval: Interval


@attrs.frozen(kw_only=True)
class ClassReport:
    """One class of prompts: acceptance, predicted speed-up, verdict."""

    name: str
    prompts: int  # measured to the end
    chat: int  # of them, those that went through the chat template
    tokens: int  # generated
    cycles: int
    tokens_per_cycle: float | None
    tokens_per_cycle_interval: Interval
    positions: tuple[PositionReport, ...]
    seconds_per_cycle: dict[str, float]  # by phase: medians over the cycles of full depth, by this run's clock
    cycle_seconds: float | None  # the median of their sums
    predictions: tuple[Prediction, ...]  # by depth, from 1
    best: Prediction | None  # None where nothing was measured
    clocked: float | None  # speed-up at the measured depth with cycle_seconds in place of t(depth)
    verdict: Verdict | None
    decided_by: str


@attrs.frozen(kw_only=True)
class DepthReport:
    """What a depth costs and must earn."""

    depth: int
    seconds: float  # t(depth)
    cost: float  # in plain steps, t(depth) / t(0)
    break_even: float | None  # conditional acceptance, the same at every position; None: it cannot pay


@attrs.frozen(kw_only=True)
class AcceptanceReport:
    """Everything that a measurement found."""

    environment: Environment
    drafter: str
    verifier: str
    guarantee: str
    depth: int
    max_new_tokens: int
    temperature: float
    seed: int
    partial: bool  # it was interrupted; the counters are of the prompts that were done
    done: int  # prompts measured to the end
    planned: int  # prompts asked for
    classes: tuple[ClassReport, ...]
    overall: ClassReport  # all prompts as one class
    costs: tuple[DepthReport, ...]
    ablations: tuple[AblationReport, ...]
    mismatches: tuple[Mismatch, ...]
    notices: tuple[str, ...]

    @property
    def broken_promise(self) -> bool:
        """Whether a switch changed the output although verifier and backend promise that no draft can."""
        exact = self.guarantee == Guarantee.EXACT.value and self.environment.parity == Parity.BITWISE.value
        return exact and any(ablation.equal < ablation.prompts for ablation in self.ablations)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``accept --json`` prints."""
        told = attrs.asdict(self, value_serializer=lambda _, __, value: getattr(value, "value", value))
        told["thresholds"] = {"turn_on": TURN_ON, "not_worth_it": NOT_WORTH_IT}
        told["broken_promise"] = self.broken_promise
        return told

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of ``accept --csv``: one per class and position; ``speedup`` is of the depth ``position + 1``."""
        for group in (*self.classes, self.overall):
            name = "(all)" if group is self.overall else group.name
            by_depth = {prediction.depth: prediction for prediction in group.predictions}
            for place in group.positions:
                prediction = by_depth.get(place.position + 1)
                yield {
                    "class": name,
                    "prompts": group.prompts,
                    "position": place.position,
                    "offered": place.offered,
                    "reached": place.reached,
                    "accepted": place.accepted,
                    "conditional": place.conditional,
                    **_ends("conditional", place.conditional_interval),
                    "cumulative": place.cumulative,
                    **_ends("cumulative", place.cumulative_interval),
                    "depth": place.position + 1,
                    "expected_tokens": None if prediction is None else prediction.tokens,
                    "speedup": None if prediction is None else prediction.speedup,
                    **_ends("speedup", None if prediction is None else prediction.interval),
                    "best_depth": None if group.best is None else group.best.depth,
                    "verdict": None if group.verdict is None else group.verdict.value,
                }


def _ends(name: str, found: Interval) -> dict[str, float | None]:
    low, high = found or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


class AcceptanceRun:
    """A measurement under way; ``stop`` ends it early, and the report then is of what was done.

    Args:
        lm: its drafter, verifier and generation settings are measured; its depth policy is not used.
        prompts: by class.
        depth: drafted per cycle, the same everywhere.
        ablations: switches of ``specdec.models.ablation`` to measure the MTP head with as well.
        costs: what a cycle costs; measured first where None.
        progress: called with the generations done and those planned.
        on_run: called with every finished run of the unablated drafter.
        model: its name, for the record.
        **settings: fields of ``specdec.config.GenerationConfig``; the configuration's where not given.

    Raises: ConfigError, PromptError or UnsupportedError for settings, prompts, or a drafter that cannot be measured.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: PromptSet,
        *,
        depth: int = DEPTH,
        ablations: Sequence[str] = (),
        costs: CostTable | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_run: Callable[[PromptRun], None] | None = None,
        model: str = "",
        **settings: Any,
    ) -> None:
        if not 1 <= depth < lm.info.max_rows:
            raise ConfigError(f"the depth is 1 to {lm.info.max_rows - 1} on this backend, got {depth}")
        if lm.drafter.spec.name == "none":
            raise UnsupportedError(
                "the drafter 'none' drafts nothing, so there is no acceptance to measure",
                try_="drafter.name = mtp or ngram (specdec plugins lists them)",
            )
        check_ablations(lm, ablations)
        self._lm = lm
        self._depth = depth
        self._costs = costs
        self._progress = progress or (lambda done, planned: None)
        self._on_run = on_run or (lambda run: None)
        self._settings = settings
        self._generation = override_generation(lm.config.generation, settings)
        self._environment = current_environment(lm.info, model)  # before the measurement makes its own load
        self._prompts = dict(prompts)
        self._ablations = tuple(ablations)
        self._recording: Recording | None = None
        self.stopping = False

    def stop(self) -> None:
        """End after the present cycle; safe from a signal handler."""
        self.stopping = True
        if self._recording is not None:
            self._recording.stream.stop()

    def run(self) -> AcceptanceReport:
        """Measure. The prompts of the classes take turns, so that a part has something of each."""
        lm = self._lm
        order = list(_turns(self._prompts))
        costs = self._costs if self._costs is not None else measure_costs(lm)
        planned = len(order) * (1 + len(self._ablations))
        runs: list[PromptRun] = []
        without: dict[str, list[PromptRun]] = {switch: [] for switch in self._ablations}
        models = {switch: ablated(lm, (switch,)) for switch in self._ablations}
        self._progress(0, planned)
        for prompt in order:
            run = self._one(lm, prompt)
            if run is None:
                break
            runs.append(run)
            self._on_run(run)
            self._progress(len(runs), planned)
        for done, prompt in enumerate(order[: len(runs)]):
            for number, (switch, model) in enumerate(models.items(), start=1):
                run = self._one(model, prompt)
                if run is not None:
                    without[switch].append(run)
                    self._progress(len(order) + done * len(models) + number, planned)
        return self._report(runs, without, costs, len(order))

    def _one(self, lm: LanguageModel, prompt: Prompt) -> PromptRun | None:
        if self.stopping:
            return None
        self._recording = Recording(lm, prompt, self._depth, **self._settings)
        if self.stopping:  # the signal came before there was a stream to stop
            self._recording.stream.stop()
        try:
            return self._recording.run()
        finally:
            self._recording = None

    def _report(
        self, runs: Sequence[PromptRun], without: Mapping[str, Sequence[PromptRun]], costs: CostTable, planned: int
    ) -> AcceptanceReport:
        lm, generation, depth = self._lm, self._generation, self._depth
        cycle_seconds = [costs.cycle(k) for k in range(depth + 1)]
        chat = lm.tokenizer.has_chat_template
        classes = [
            summarise(name, [run for run in runs if run.prompt.kind == name], cycle_seconds, chat=chat)
            for name in self._prompts
        ]
        ablations = [
            ablation_report(switch, runs[: len(found)], found, depth) for switch, found in without.items() if found
        ]
        report = AcceptanceReport(
            environment=self._environment,
            drafter=lm.drafter.spec.name,
            verifier=lm.config.verifier.name,
            guarantee=lm.verifier.guarantee.value,
            depth=depth,
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            seed=generation.seed,
            partial=self.stopping,
            done=len(runs),
            planned=planned,
            classes=tuple(classes),
            overall=summarise("all", runs, cycle_seconds, chat=chat),
            costs=tuple(
                DepthReport(
                    depth=k,
                    seconds=cycle_seconds[k],
                    cost=cycle_seconds[k] / cycle_seconds[0],
                    break_even=break_even(cycle_seconds[k] / cycle_seconds[0], k),
                )
                for k in range(1, depth + 1)
            ),
            ablations=tuple(ablations),
            mismatches=tuple(commonest(runs, lm.tokenizer, MISMATCHES)),
            notices=(),
        )
        return attrs.evolve(report, notices=tuple(self._notices(report, runs)))

    def _notices(self, report: AcceptanceReport, runs: Iterable[PromptRun]) -> Iterator[str]:
        yield from self._lm.notices
        for reason in sorted({run.inactive_reason for run in runs if run.inactive_reason}):
            yield f"the drafter was switched off: {reason}"
        if self._environment.busy:
            yield (
                f"the machine was busy (load {self._environment.load_1min:.2f} in the minute before): the acceptance "
                "is not affected, the costs and what follows from them are"
            )
        clocked, expected = report.overall.cycle_seconds, report.costs[-1].seconds
        if clocked is not None and not expected / OTHER_CLOCK < clocked < expected * OTHER_CLOCK:
            yield (
                f"cycles of this run took {clocked / expected:.1f} times what the costs say: something else changed "
                "the speed of the machine meanwhile, so the predicted speed-ups are doubtful"
            )
        messages = any(prompt.chat for prompts in self._prompts.values() for prompt in prompts)
        if messages and not self._lm.tokenizer.has_chat_template:
            yield "the checkpoint has no chat template: messages were continued as plain text"
        if report.guarantee not in (Guarantee.EXACT.value, Guarantee.DISTRIBUTION.value):
            yield f"the verifier is lossy ({report.guarantee}): it accepts tokens that plain decoding does not choose"


def measure_acceptance(lm: LanguageModel, prompts: PromptSet, **options: Any) -> AcceptanceReport:
    """``AcceptanceRun(lm, prompts, **options).run()``."""
    return AcceptanceRun(lm, prompts, **options).run()


def _turns(prompts: PromptSet) -> Iterator[Prompt]:
    """The first prompt of every class, then the second, ..."""
    for number in range(max(map(len, prompts.values()), default=0)):
        for members in prompts.values():
            if number < len(members):
                yield members[number]


def summarise(
    name: str, runs: Sequence[PromptRun], cycle_seconds: Sequence[float], *, chat: bool = False
) -> ClassReport:
    """Counters, rates, intervals and predictions over some runs.

    Args:
        cycle_seconds: t(0) to t(depth).
        chat: whether messages went through a chat template.
    """
    depth = len(cycle_seconds) - 1
    counts = np.array([run.counts(depth) for run in runs], dtype=np.int64).reshape(len(runs), 4, depth)
    asked, offered, reached, accepted = counts.sum(axis=0)
    costs = np.array([_draft_costs(run, cycle_seconds) for run in runs]).reshape(len(runs), depth)
    sums = resampled(counts.reshape(len(runs), -1)).reshape(-1, 4, depth) if runs else np.zeros((0, 4, depth))
    cost_sums = resampled(costs) if runs else np.zeros((0, depth))
    per_cycle = np.array([[len(run.tokens), len(run.cycles)] for run in runs], dtype=np.float64).reshape(len(runs), 2)
    cycle_sums = resampled(per_cycle) if runs else np.zeros((0, 2))

    positions = tuple(
        PositionReport(
            position=i,
            offered=int(offered[i]),
            reached=int(reached[i]),
            accepted=int(accepted[i]),
            cumulative=_rate(accepted[i], offered[i]),
            cumulative_interval=interval(ratio(sums[:, 3, i], sums[:, 1, i]), len(runs)),
            conditional=_rate(accepted[i], reached[i]),
            conditional_interval=interval(ratio(sums[:, 3, i], sums[:, 2, i]), len(runs)),
        )
        for i in range(depth)
    )
    tokens, speedups = _predict(asked, accepted, costs.sum(axis=0), cycle_seconds[0])
    _, spread = _predict(sums[:, 0], sums[:, 3], cost_sums, cycle_seconds[0])
    predictions = tuple(
        Prediction(
            depth=k,
            tokens=float(tokens[k - 1]),
            speedup=float(speedups[k - 1]),
            interval=interval(spread[:, k - 1], len(runs)),
        )
        for k in range(1, depth + 1)
        if np.isfinite(speedups[k - 1])
    )
    found = best(predictions) if predictions else None
    verdict, decided_by = judge(found) if found else (None, "nothing was measured")
    total_tokens, cycles = int(per_cycle[:, 0].sum()), int(per_cycle[:, 1].sum())
    clock = np.array([cycle.seconds for run in runs for cycle in run.cycles if cycle.asked == depth]).reshape(-1, 3)
    clocked = float(np.median(clock.sum(axis=1))) if len(clock) else None
    return ClassReport(
        name=name,
        prompts=len(runs),
        chat=sum(run.prompt.chat for run in runs) if chat else 0,
        tokens=total_tokens,
        cycles=cycles,
        tokens_per_cycle=_rate(total_tokens, cycles),
        tokens_per_cycle_interval=interval(ratio(cycle_sums[:, 0], cycle_sums[:, 1]), len(runs)),
        positions=positions,
        seconds_per_cycle=dict(zip(PHASES, np.median(clock, axis=0).tolist(), strict=True)) if len(clock) else {},
        cycle_seconds=clocked,
        predictions=predictions,
        best=found,
        clocked=float(tokens[-1]) * cycle_seconds[0] / clocked if clocked else None,
        verdict=verdict,
        decided_by=decided_by,
    )


def _draft_costs(run: PromptRun, cycle_seconds: Sequence[float]) -> list[float]:
    """By depth k from 1: seconds of the cycles that were asked for k tokens, had they drafted k at most.

    A drafter that always has an opinion makes this t(k) per cycle; one that is often silent pays less.
    """
    return [
        sum(cycle_seconds[min(len(cycle.drafted), k)] for cycle in run.cycles if cycle.asked >= k)
        for k in range(1, len(cycle_seconds))
    ]


def _predict(asked: Any, accepted: Any, seconds: Float64, plain: float) -> tuple[Float64, Float64]:
    """E(k) and S(k) by depth ``[..., K]`` from counters ``[..., K]`` and the seconds of those cycles."""
    tokens = 1.0 + np.cumsum(ratio(accepted, asked), axis=-1)
    return tokens, tokens * plain / ratio(seconds, asked)


def _rate(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
