"""The comparison of plain and speculative decoding: its counts, its algebra, and that it sees a difference."""

import attrs
import numpy as np
import pytest

from specdec.backends.arrays import HostLogits
from specdec.config import Choice
from specdec.contract import Context, CycleRecord, Draft, Guarantee, Sampling, Verdict, Verifier
from specdec.measuring import bench as bench_module
from specdec.measuring import runs
from specdec.measuring.bench import BenchMeasurement, compare
from specdec.measuring.runs import generate
from specdec.measuring.synthetic import SyntheticVerifier
from specdec.records.cost_table import CostTable
from specdec.registry.parts import DepthPart
from specdec.verifiers.strict import StrictVerifier
from tests.measuring.test_acceptance import prompts

COSTS = CostTable(verify={1: 1.0, 2: 1.25, 4: 1.75}, draft={0: 0.0, 1: 0.25, 3: 0.75}, commit=0.5)


@pytest.fixture(autouse=True)
def _costs(monkeypatch):
    monkeypatch.setattr(bench_module, "measure_costs", lambda lm: COSTS)


def deep(lm):
    """``lm`` at depth 4."""
    return attrs.evolve(lm, depth=DepthPart.of(Choice("fixed", {"depth": 4})))


class AcceptsAll(Verifier):
    """Claims to be exact and accepts every draft: what the comparison is there to notice."""

    guarantee = Guarantee.EXACT

    def verify(self, draft, logits, context):
        return Verdict(len(draft.tokens), logits.argmax()[len(draft.tokens)])


def test_both_arms_run_interleaved_and_are_counted(scripted, monkeypatch):
    order = []

    def noted(lm, *args, **settings):
        order.append("A" if lm.drafter.spec.name == "none" else "B")
        return generate(lm, *args, **settings)

    monkeypatch.setattr(runs, "generate", noted)
    ticks = []
    lm = deep(scripted([(4, 2), (4, 0)]))
    report = compare(
        lm, prompts("one", count=2), repeats=2, max_new_tokens=20, progress=lambda *tick: ticks.append(tick)
    )
    warm = 2 * len(report.warm_up)
    assert "".join(order[:warm]) == "AB" * len(report.warm_up)
    assert "".join(order[warm:]) == "ABBA" * 4
    assert ticks[-1] == (16, 16)
    assert [(len(one.plain), len(one.speculative)) for one in report.prompts] == [(4, 4), (4, 4)]
    assert report.equal
    assert not report.broken_promise
    (group,) = report.classes
    # cycles of 3 and 1 tokens in turn; after ten of them all 20 are there, and the last one cannot draft beyond the end
    assert group.tokens_per_cycle == 2.0
    assert group.offered[0] == group.reached[0] == 8 * 9
    assert group.accepted[:3] == (8 * 5, 8 * 5, 0)
    assert group.depths == {0: 8, 3: 8, 4: 8 * 8} or sum(group.depths.values()) == 80
    data = report.to_dict()
    assert {row["arm"] for row in data["prompts"]} == {"plain", "speculative"}
    assert data["equal"] is True
    assert data["blame"] in bench_module.TERMS
    assert len(data["prompts"]) == 16


def test_a_verifier_that_is_not_exact_is_found_out(scripted):
    lm = attrs.evolve(deep(scripted([(4, 2)])), verifier=AcceptsAll())
    report = compare(lm, prompts("one"), max_new_tokens=12)
    # the third drafted token is the first wrong one
    assert [one.differs_at for one in report.prompts] == [2]
    assert not report.equal
    assert report.broken_promise == (report.environment.parity == "bitwise")


def test_stopping_reports_what_was_done(scripted):
    lm = deep(scripted([(4, 2)]))
    run = BenchMeasurement(
        lm, prompts("one", count=3), max_new_tokens=8, progress=lambda done, planned: run.stop() if done == 4 else None
    )
    report = run.run()
    assert report.partial
    assert len(report.prompts) == 1
    nothing = BenchMeasurement(lm, prompts("one"), max_new_tokens=8)
    nothing.stop()
    empty = nothing.run()
    assert (empty.overall, empty.terms, empty.prompts) == (None, (), ())
    assert empty.to_dict()["limit"] == ""


# --- algebra ---------------------------------------------------------------------------------------------------------


def cycle(offered, emitted, draft, verify, commit):
    return CycleRecord(
        position=9,
        depth=offered,
        offered=offered,
        accepted=emitted - 1,
        emitted=tuple(range(emitted)),
        draft_seconds=draft,
        verify_seconds=verify,
        commit_seconds=commit,
    )


def test_prediction_and_terms_by_hand():
    cycles = [cycle(3, 4, 1.0, 2.0, 0.5), cycle(1, 1, 0.5, 1.0, 0.5)]
    plain_cycles = [cycle(0, 1, 0.0, 1.0, 0.5)]
    # 5 tokens; t(0) = 1.5, t(3) = 1.75 + 0.75 + 0.5, t(1) = 1.25 + 0.25 + 0.5
    assert bench_module._predicted(cycles, COSTS) == pytest.approx(5 * 1.5 / (3.0 + 2.0))
    verification, drafting, bookkeeping = bench_module._terms(cycles, plain_cycles, COSTS)
    assert (verification.predicted_ms, verification.measured_ms) == pytest.approx((1500.0, 1500.0))
    assert (drafting.predicted_ms, drafting.measured_ms) == pytest.approx((500.0, 750.0))
    # a mean cycle takes 2.75 and emits 2.5 tokens
    assert verification.speedup_if_free == pytest.approx(2.5 * 1.5 / (2.75 - 0.5))
    assert drafting.speedup_if_free == pytest.approx(2.5 * 1.5 / 2.0)
    assert bookkeeping.speedup_if_free == pytest.approx(2.5 * 1.5 / 2.75)
    assert bench_module._if_accepted(cycles, plain_cycles) == pytest.approx(1.5 * 3 / 2.75)


# --- imposed acceptance ----------------------------------------------------------------------------------------------


def imposed(profile, depth, cycles):
    verifier = SyntheticVerifier(StrictVerifier(), profile)
    context, logits = (
        Context([1, 2, 3], Sampling(seed=5)),
        HostLogits(np.eye(110, dtype=np.float32)[100 : 101 + depth]),
    )
    verdicts = []
    for number in range(cycles):
        context.cycle = number
        verdicts.append(verifier.verify(Draft(tuple(range(depth))), logits, context))
    return verdicts


def test_imposed_acceptance_has_the_profile_and_its_tail():
    """Cumulative rates over 600 cycles within 4 standard deviations; beyond the profile the last rate goes on."""
    count, profile = 600, (0.8, 0.4)
    accepted = np.array([verdict.accepted for verdict in imposed(profile, 4, count)])
    for place, wanted in enumerate((0.8, 0.4, 0.2, 0.1)):
        got = (accepted > place).mean()
        assert abs(got - wanted) < 4 * (wanted * (1 - wanted) / count) ** 0.5
    assert [v.accepted for v in imposed(profile, 4, 50)] == [v.accepted for v in imposed(profile, 4, 50)]
    assert {v.accepted for v in imposed((1.0,), 3, 20)} == {3}
    assert {v.accepted for v in imposed((0.0,), 3, 20)} == {0}
    assert all(v.next_token == min(v.accepted, 3) for v in imposed(profile, 4, 50))  # a drafted one, as of the text
