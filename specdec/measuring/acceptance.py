"""Measure acceptance by prompt class and lookahead position, and advise whether to speculate.

The depth is fixed: an adaptive policy drafts deep only where drafts are good, which would bias the deeper positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.checking import checked
from specdec.contract import EMPTY_DRAFT, Context, Draft, Drafter, Guarantee, Passes
from specdec.decoding.cycle_timing import measure_costs
from specdec.errors import ConfigError, UnsupportedError, shown
from specdec.measuring.ablations import AblationReport, ablated, ablation_report
from specdec.measuring.drafts import KindReport, Mismatch, by_kind, commonest
from specdec.measuring.intervals import Interval, interval, left_out, ratio
from specdec.measuring.prompts import Prompt, PromptSet
from specdec.measuring.runs import Measurement, Report, Run, at_depth, cycle_seconds
from specdec.measuring.speed_model import NOT_WORTH_IT, TURN_ON, Advice, Prediction, advise, break_even
from specdec.pipeline import LanguageModel
from specdec.records.cost_table import CostTable
from specdec.text.tokenizer import common_prefix

if TYPE_CHECKING:
    from specdec.exchange import Float64

DEPTH = 4
MISMATCHES = 10  # listed in a report
OTHER_CLOCK = 1.5  # report cycles that differ from the cost table by this factor


@attrs.frozen(kw_only=True)
class PositionReport:
    """Counters and rates at one lookahead position, summed over the prompts of a class; 0 is the next token."""

    position: int
    offered: int  # drafts that had a token here
    reached: int  # of these, drafts whose earlier tokens were all accepted
    accepted: int  # of these, drafts whose token here was accepted too
    cumulative: float | None  # accepted / offered; None if none were offered
    cumulative_interval: Interval  # over prompts
    conditional: float | None  # accepted / reached
    conditional_interval: Interval


@attrs.frozen(kw_only=True)
class ClassReport:
    """One class of prompts: acceptance, predicted speed-up, verdict."""

    name: str
    prompts: int  # measured to the end
    chat: int  # of them, those in the chat template
    tokens: int  # generated
    cycles: int
    tokens_per_cycle: float | None
    tokens_per_cycle_interval: Interval
    positions: tuple[PositionReport, ...]
    cycle_seconds: float | None  # the median over the cycles of full depth, as they ran
    predictions: tuple[Prediction, ...]  # by depth, from 1
    best: Prediction | None  # None if nothing was measured
    verdict: Advice | None
    decided_by: str


@attrs.frozen(kw_only=True)
class DepthReport:
    """The cost of a depth, and the acceptance it needs."""

    depth: int
    seconds: float  # t(depth)
    cost: float  # in plain steps, t(depth) / t(0)
    break_even: float | None  # conditional acceptance, equal at every position; None: it cannot pay


@attrs.frozen(kw_only=True)
class AcceptanceReport(Report):
    """The result of a measurement."""

    depth: int
    passive: bool  # drafts at every plain step, none of them verified
    done: int  # prompts measured to the end
    planned: int
    classes: tuple[ClassReport, ...]
    overall: ClassReport  # all prompts as one class
    costs: tuple[DepthReport, ...]
    ablations: tuple[AblationReport, ...]
    kinds: tuple[KindReport, ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def broken_promise(self) -> bool:
        """Whether a mistake changed the output although verifier and backend promise that no draft can."""
        return self.promised and any(ablation.equal < ablation.prompts for ablation in self.ablations)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``accept --json`` prints."""
        return {
            **attrs.asdict(self, value_serializer=lambda _, __, value: getattr(value, "value", value)),
            "thresholds": {"turn_on": TURN_ON, "not_worth_it": NOT_WORTH_IT},
            "broken_promise": self.broken_promise,
        }


class AcceptanceMeasurement(Measurement):
    """Measures acceptance; after ``stop`` the report covers the finished prompts.

    Args:
        lm: its drafter, verifier and generation settings are measured; its depth policy is not used.
        prompts: by class.
        depth: tokens drafted per cycle.
        ablations: switches of ``specdec.measuring.ablations`` to measure as well.
        passive: draft at every plain step and verify nothing.
        costs: the cost table; measured first if None.
        on_run: called with every finished run of the unablated drafter.
        **options: as for ``Measurement``.

    Raises: ConfigError, PromptError or UnsupportedError for settings, prompts, or a drafter that cannot be measured.
    """

    @checked()
    def __init__(
        self,
        lm: LanguageModel,
        prompts: PromptSet,
        *,
        depth: int = DEPTH,
        ablations: Sequence[str] = (),
        passive: bool = False,
        costs: CostTable | None = None,
        on_run: Callable[[Run], None] = lambda run: None,
        **options: Any,
    ) -> None:
        if passive:
            passive_lm(lm)
        if not 1 <= depth < lm.info.max_rows:
            raise ConfigError(f"the depth is 1 to {lm.info.max_rows - 1} on this backend, got {shown(depth)}")
        super().__init__(lm, **options)
        self._right = at_depth(lm, depth)
        self._wrong = {switch: ablated(self._right, switch) for switch in ablations}
        self._prompts = dict(prompts)
        self._depth = depth
        self._costs = costs
        self._on_run = on_run
        self._passive = passive

    def run(self) -> AcceptanceReport:
        """Measure. Prompts of the classes alternate, so that an interrupted run has some of each."""
        costs = self._costs if self._costs is not None else measure_costs(self._lm)
        generate = self._watched if self._passive else self._generate
        turns = itertools.zip_longest(*self._prompts.values())
        order = [prompt for turn in turns for prompt in turn if prompt is not None]
        self._plan(len(order) * (1 + len(self._wrong)))
        runs: list[Run] = []
        for prompt in order:
            if run := generate(self._right, prompt):
                runs.append(run)
                self._on_run(run)
        wrong: dict[str, list[Run]] = {switch: [] for switch in self._wrong}
        for prompt in order:
            for switch, model in self._wrong.items():
                if run := generate(model, prompt):
                    wrong[switch].append(run)
        return self._report(runs, wrong, costs, len(order))

    def _watched(self, lm: LanguageModel, prompt: Prompt) -> Run | None:
        watched, with_drafts = passive_lm(lm)
        run = self._generate(watched, prompt)
        return None if run is None else with_drafts(run)

    def _report(
        self, runs: Sequence[Run], wrong: Mapping[str, Sequence[Run]], costs: CostTable, planned: int
    ) -> AcceptanceReport:
        lm, depth = self._lm, self._depth
        seconds = [costs.cycle(k) for k in range(depth + 1)]
        how = {"chat": lm.tokenizer.has_chat_template, "passive": self._passive}

        def of_class(name: str) -> list[Run]:
            return [run for run in runs if run.prompt is not None and run.prompt.kind == name]

        report = AcceptanceReport(
            **self._facts(),
            depth=depth,
            passive=self._passive,
            done=len(runs),
            planned=planned,
            classes=tuple(summarise(name, of_class(name), seconds, **how) for name in self._prompts),
            overall=summarise("all", runs, seconds, **how),
            costs=tuple(
                DepthReport(depth=k, seconds=seconds[k], cost=cost, break_even=break_even(cost, k))
                for k in range(1, depth + 1)
                for cost in [seconds[k] / seconds[0]]
            ),
            ablations=tuple(
                ablation_report(switch, runs[: len(ablated_runs)], ablated_runs, depth)
                for switch, ablated_runs in wrong.items()
                if ablated_runs
            ),
            kinds=by_kind(runs, lm.tokenizer.special_ids),
            mismatches=tuple(commonest(runs, lm.tokenizer, MISMATCHES)),
        )
        return attrs.evolve(report, notices=tuple(self._notices(report, runs)))

    def _notices(self, report: AcceptanceReport, runs: Iterable[Run]) -> Iterator[str]:
        yield from self._common_notices("the acceptance is not affected, the costs and predictions are")
        for reason in sorted({run.inactive_reason for run in runs if run.inactive_reason}):
            yield f"the drafter was switched off: {reason}"
        clocked, expected = report.overall.cycle_seconds, report.costs[-1].seconds
        if clocked is not None and not expected / OTHER_CLOCK < clocked < expected * OTHER_CLOCK:
            yield (
                f"cycles of this run took {clocked / expected:.1f} times what the costs say: the machine changed its "
                "speed in between, so the predicted speed-ups are doubtful"
            )
        messages = any(prompt.chat for prompts in self._prompts.values() for prompt in prompts)
        if messages and not self._lm.tokenizer.has_chat_template:
            yield "the checkpoint has no chat template: messages are continued as text"
        if report.guarantee not in (Guarantee.EXACT.value, Guarantee.DISTRIBUTION.value):
            yield f"the verifier is lossy ({report.guarantee}): it accepts tokens that plain decoding does not choose"


def passive_lm(lm: LanguageModel) -> tuple[LanguageModel, Callable[[Run], Run]]:
    """The pipeline with its drafter watched, and a function that adds the drafts to a run of it.

    The drafter drafts at every plain step, and nothing is verified: the target runs one row per pass, so the output is
    that of plain decoding even where a pass of several rows has other bits. Each draft is compared with the tokens that
    were then generated.

    Raises: UnsupportedError unless the verifier is exact: only then is an accepted token one that equals the output.
    """
    if lm.verifier.guarantee is not Guarantee.EXACT:
        raise UnsupportedError(
            f"a passive measurement counts drafts that equal the output, and the verifier {lm.config.verifier.name!r} "
            "accepts others too",
            try_='verifier.name = "strict", or an active measurement',
        )
    spec = lm.drafter.spec
    drafts: dict[int, tuple[int, ...]] = {}  # of the last session: committed tokens before the draft -> draft

    def factory(config: Any, env: Any) -> Drafter:
        drafter = spec.factory(config, env)
        drafting = drafter.drafting
        drafts.clear()

        def keep(context: Context, depth: int) -> Passes[Draft]:
            draft = yield from drafting(context, depth)
            drafts[len(context)] = tuple(draft.tokens[:depth])
            return EMPTY_DRAFT

        drafter.drafting = keep  # type: ignore[method-assign]
        return drafter

    def with_drafts(run: Run) -> Run:
        tokens = (*run.prompt_tokens, *run.tokens)
        cycles = []
        for cycle in run.cycles:
            following = tokens[cycle.position :]
            drafted = drafts.get(cycle.position, ())[: len(following)]
            accepted = common_prefix(drafted, following)
            cycles.append(attrs.evolve(cycle, drafted=drafted, offered=len(drafted), accepted=accepted))
        return attrs.evolve(run, cycles=tuple(cycles))

    part = attrs.evolve(lm.drafter, spec=attrs.evolve(spec, factory=factory))
    return attrs.evolve(lm, drafter=part), with_drafts


@checked()
def measure_acceptance(lm: LanguageModel, prompts: PromptSet, **options: Any) -> AcceptanceReport:
    """``AcceptanceMeasurement(lm, prompts, **options).run()``."""
    return AcceptanceMeasurement(lm, prompts, **options).run()


def summarise(
    name: str, runs: Sequence[Run], seconds: Sequence[float], *, chat: bool = False, passive: bool = False
) -> ClassReport:
    """Counters, rates, intervals and predictions over some runs.

    Args:
        seconds: seconds of a cycle by depth, t(0) to t(depth).
        chat: whether messages went through a chat template.
        passive: whether the drafts were not verified, so that cycles took the time, and gave the token, of plain ones.
    """
    depth, measured = len(seconds) - 1, len(runs)
    counts = np.array([run.counts(depth) for run in runs], dtype=np.float64).reshape(measured, 4, depth)
    costs = np.array([_draft_costs(run, seconds) for run in runs]).reshape(measured, depth)
    sizes = np.array([[len(run.tokens), len(run.cycles)] for run in runs], dtype=np.float64).reshape(measured, 2)
    requested, offered, reached, accepted = totals = counts.sum(axis=0)
    others = left_out(counts)  # [prompts, 4, depth]
    tokens, cycles = sizes.sum(axis=0)

    def rate(name: str, whole: int, position: int) -> dict[str, Any]:
        """Accepted over offered (1) or reached (2), and its interval."""
        if not totals[whole, position]:
            return {name: None, f"{name}_interval": None}
        value = float(totals[3, position] / totals[whole, position])
        ends = interval(value, ratio(others[:, 3, position], others[:, whole, position]), high=1.0)
        return {name: value, f"{name}_interval": ends}

    positions = tuple(
        PositionReport(
            position=i,
            offered=int(offered[i]),
            reached=int(reached[i]),
            accepted=int(accepted[i]),
            **rate("cumulative", 1, i),
            **rate("conditional", 2, i),
        )
        for i in range(depth)
    )
    expected, speedups = _predict(requested, accepted, costs.sum(axis=0), seconds[0])
    _, spread = _predict(others[:, 0], others[:, 3], left_out(costs), seconds[0])
    predictions = tuple(
        Prediction(
            depth=k,
            tokens=float(expected[k - 1]),
            speedup=float(speedups[k - 1]),
            interval=interval(float(speedups[k - 1]), spread[:, k - 1]),
        )
        for k in range(1, depth + 1)
        if np.isfinite(speedups[k - 1])
    )
    best_depth = max(predictions, key=lambda one: one.speedup, default=None)  # the shallowest on a tie
    verdict, decided_by = advise(best_depth) if best_depth else (None, "nothing was measured")
    full = [cycle for run in runs for cycle in run.cycles if cycle.depth == depth and not passive]
    clocked = float(np.median([cycle_seconds(cycle) for cycle in full])) if full else None
    per_cycle = float(tokens / cycles) if cycles and not passive else None
    return ClassReport(
        name=name,
        prompts=measured,
        chat=sum(run.prompt is not None and run.prompt.chat for run in runs) if chat else 0,
        tokens=int(tokens),
        cycles=int(cycles),
        tokens_per_cycle=per_cycle,
        tokens_per_cycle_interval=None if per_cycle is None else interval(per_cycle, ratio(*left_out(sizes).T)),
        positions=positions,
        cycle_seconds=clocked,
        predictions=predictions,
        best=best_depth,
        verdict=verdict,
        decided_by=decided_by,
    )


def _draft_costs(run: Run, seconds: Sequence[float]) -> list[float]:
    """By depth k from 1: seconds of the cycles, had they drafted at most k tokens.

    A drafter that always drafts makes this t(k) per cycle; one that often has no draft pays less.
    """
    return [
        sum(seconds[min(cycle.offered, k)] for cycle in run.cycles if cycle.depth >= k) for k in range(1, len(seconds))
    ]


def _predict(requested: Any, accepted: Any, seconds: Float64, plain: float) -> tuple[Float64, Float64]:
    """E(k) and S(k) by depth ``[..., K]``, from counters ``[..., K]`` and the seconds of those cycles."""
    tokens = 1.0 + np.cumsum(ratio(accepted, requested), axis=-1)
    return tokens, tokens * plain / ratio(seconds, requested)
