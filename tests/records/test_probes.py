"""Probe records: what they keep, when they count, and that a mistake of an operation does not get past the probe."""

from __future__ import annotations

import inspect
import os
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.ops import Ops
from specdec.config import RunConfig, TargetConfig
from specdec.contract import ModelInfo, Parity
from specdec.doctor import RowCosts, make_record, measure_row_costs, probe_bits, promise
from specdec.doctor.operations import NO_ROWS, ROW_ARGUMENTS, note_calls, over
from specdec.errors import UnsupportedError
from specdec.measuring.speed_model import expected_tokens
from specdec.models.loading import load_target
from specdec.records import probes
from specdec.records.cost_table import plausible
from specdec.records.probes import (
    Finding,
    ProbeIdentity,
    ProbeRecord,
    RowCost,
    read_probe,
    stored_probe,
    unproved,
    write_probe,
)
from specdec.registry import BUILT_INS, Registry, use_registry
from specdec.testing import Memory, TableModel
from tests import tiny
from tests.selection import examples
from tests.tiny_families import FAMILIES
from tests.wrong_ops import FROM, ROWS, Leaky, ProbedBackend, wrong_ops

INFO = ModelInfo(
    family="qwen3_5",
    vocab_size=10,
    hidden_size=4,
    max_positions=64,
    mtp_layers=0,
    max_rows=8,
    parity=Parity.BITWISE,
    backend="probed",
    device="a device",
    dtype="bfloat16",
    kernels="own kernels 3",
    fingerprint="abc",
)
PASSING = tuple(Finding(kind=kind, subject=f"some {kind}", rows=8) for kind in ("op", "pass", "state", "draft"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_PROBES", str(tmp_path / "probes"))
    return tmp_path / "probes"


def record_of(info: ModelInfo = INFO, findings: tuple[Finding, ...] = PASSING, **others: Any) -> ProbeRecord:
    return ProbeRecord(identity=ProbeIdentity.of(info), probed="2027-01-02T03:04:05+00:00", findings=findings, **others)


# --- files ------------------------------------------------------------------------------------------------------------

_words = st.text(max_size=8)
_numbers = st.floats(0, 1e9)
_findings = st.builds(
    Finding,
    kind=st.sampled_from(["op", "pass", "state", "draft"]),
    subject=_words,
    rows=st.integers(2, 16),
    differing=st.lists(st.integers(2, 16), max_size=3).map(tuple),
    first_row=st.none() | st.integers(0, 15),
    difference=st.none() | _numbers,
    where=_words,
)
_identities = st.builds(
    ProbeIdentity,
    max_rows=st.integers(1, 64),
    **{field.name: _words for field in attrs.fields(ProbeIdentity) if field.name not in ("max_rows", "model")},
    model=st.text(min_size=1, max_size=8),
)
_records = st.builds(
    ProbeRecord,
    identity=_identities,
    probed=_words,
    findings=st.lists(_findings, max_size=4).map(tuple),
    costs=st.lists(st.builds(RowCost, rows=st.integers(1, 16), seconds=_numbers, ratio=_numbers), max_size=3).map(
        tuple
    ),
    draft_step=st.none() | _numbers,
    notes=st.lists(_words, max_size=2).map(tuple),
)


@given(record=_records)
def test_a_record_is_read_as_it_was_written(record, tmp_path_factory):
    path = write_probe(record, tmp_path_factory.mktemp("records"))
    assert read_probe(path) == record
    assert path.stem == record.identity.key()


def test_no_cut_of_a_file_is_a_record(folder):
    path = write_probe(record_of(), folder)
    text = path.read_text()
    assert unproved(INFO, "m") is None
    for length in range(0, len(text) - 2, 37):
        path.write_text(text[:length])
        assert stored_probe(INFO) is None
        assert "is broken" in str(unproved(INFO, "m"))


@pytest.mark.parametrize(
    "other", ['{"format": 2}', "[]", "null", '{"format": 1, "findings": []}', '{"format": 1, "passed": true}']
)
def test_something_else_is_no_record(folder, other):
    path = write_probe(record_of(), folder)
    path.write_text(other)
    assert stored_probe(INFO) is None
    assert "is broken" in str(unproved(INFO, "m"))


def test_a_key_that_nobody_wrote_breaks_a_record(folder):
    path = write_probe(record_of(), folder)
    path.write_text(path.read_text().replace('"rows": 8', '"rows": "8"', 1))
    assert stored_probe(INFO) is None


def test_a_target_without_a_fingerprint_has_no_record(folder):
    nameless = attrs.evolve(INFO, fingerprint="")
    with pytest.raises(UnsupportedError, match="without a fingerprint"):
        write_probe(record_of(nameless), folder)
    assert "no fingerprint" in str(unproved(nameless, "m"))


def test_a_folder_that_cannot_be_written_is_an_error_for_people(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedError, match="the probe cannot be stored") as caught:
        write_probe(record_of(), tmp_path / "file" / "probes")
    assert "--no-store" in caught.value.facts["try"]


# --- when a record counts ---------------------------------------------------------------------------------------------


def test_without_a_record_the_reason_names_the_command():
    reason = unproved(INFO, "some/model")
    assert reason == (
        "not probed on this machine: run specdec doctor some/model -s target.backend=probed -s target.dtype=bfloat16"
    )


def test_switched_off_nothing_counts(folder, monkeypatch):
    write_probe(record_of(), folder)
    monkeypatch.setenv("SPECDEC_PROBES", "off")
    assert "SPECDEC_PROBES=off" in str(unproved(INFO, "m"))


@pytest.mark.parametrize("field", ["fingerprint", "backend", "device", "dtype"])
def test_a_record_of_something_else_is_not_found(folder, field):
    write_probe(record_of(), folder)
    assert stored_probe(attrs.evolve(INFO, **{field: "other"})) is None


@pytest.mark.parametrize(("field", "value"), [("kernels", "own kernels 4"), ("max_rows", 9)])
def test_a_record_of_other_kernels_is_stale_and_the_reason_says_so(folder, field, value):
    write_probe(record_of(), folder)
    changed = attrs.evolve(INFO, **{field: value})
    assert stored_probe(changed) is None
    assert f"{field} {getattr(INFO, field)}, here {value}" in str(unproved(changed, "m"))


@pytest.mark.parametrize("field", ["libraries", "system", "processor", "specdec"])
def test_a_record_of_another_machine_or_version_is_stale(folder, field):
    record = record_of()
    write_probe(attrs.evolve(record, identity=attrs.evolve(record.identity, **{field: "older"})), folder)
    assert stored_probe(INFO) is None
    assert f"{field} older, here" in str(unproved(INFO, "m"))


def test_every_part_of_the_identity_counts(folder):
    """No field can be added to the identity and forgotten in the comparison."""
    ours = ProbeIdentity.of(INFO)
    for field in attrs.fields(ProbeIdentity):
        other = attrs.evolve(ours, **{field.name: -1 if field.name == "max_rows" else "?"})
        assert len(ours.differences(attrs.asdict(other))) == 1
    assert ours.differences(attrs.asdict(ours)) == []


def test_a_record_that_others_could_have_written_does_not_count(folder, monkeypatch):
    """It would let a result say "exact" where nobody has looked."""
    path = write_probe(record_of(), folder)
    assert unproved(INFO, "m") is None
    path.chmod(0o666)
    assert "can be written by other users" in str(unproved(INFO, "m"))
    path.chmod(0o644)
    folder.chmod(0o777)
    assert stored_probe(INFO) is None
    folder.chmod(0o755)
    assert unproved(INFO, "m") is None
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("SPECDEC_PROBES", folder.name)
    assert "relative path" in str(unproved(INFO, "m"))


def test_what_is_no_file_is_not_read(folder):
    """Opening a pipe would wait for a writer."""
    path = write_probe(record_of(), folder)
    path.unlink()
    os.mkfifo(path)
    assert "not a file" in str(unproved(INFO, "m"))


def test_a_failed_probe_counts_against_the_claim(folder):
    failed = Finding(kind="op", subject="linear 4x4", rows=8, differing=(3, 4, 5, 8), first_row=2, difference=0.5)
    write_probe(record_of(findings=(*PASSING, failed)), folder)
    record = stored_probe(INFO)
    assert record is not None
    assert not record.passed
    told = "linear 4x4: different bits in blocks of 3 to 5, 8 rows, first in row 2; off by at most 0.5"
    assert unproved(INFO, "m") == f"the probe of 2027-01-02 found it not exact: {told}"


@pytest.mark.parametrize("missing", sorted(probes.PROOF))
def test_a_probe_that_left_something_out_proves_nothing(folder, missing):
    write_probe(record_of(findings=tuple(one for one in PASSING if one.kind != missing)), folder)
    assert "not complete" in str(unproved(INFO, "m"))


def test_a_probe_that_could_not_compare_something_proves_nothing(folder):
    write_probe(record_of(notes=("no comparison is known for the operation warp",)), folder)
    assert "warp" in str(unproved(INFO, "m"))


# --- at load ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def load(checkpoint):
    """``load(make)``: the tiny checkpoint on a backend with these ops, which needs a probe."""
    config = RunConfig(target=TargetConfig(model=str(checkpoint("qwen3_5", layers=2)), backend="probed"))

    def load(make: Any = wrong_ops, **how: Any) -> Any:
        former = use_registry(Registry((*BUILT_INS, ProbedBackend(make, **how)), entry_points=()))
        try:
            return load_target(config)
        finally:
            use_registry(former)

    return load


def test_a_claim_that_needs_a_probe_is_believed_with_one_only(load, folder, monkeypatch):
    first = load()
    assert first.target.info.parity is Parity.NUMERIC
    assert first.target.info.parity_reason.startswith("not probed on this machine: run specdec doctor ")
    assert [notice for notice in first.notices if "not probed on this machine" in notice]

    record = make_record(first.target, *probe_bits(first.target, (5,)), None)
    assert record.passed
    assert promise(first.target, record, None).exact
    assert load().target.info.parity is Parity.NUMERIC  # nothing is stored yet
    write_probe(record, folder)
    second = load()
    assert second.target.info.parity is Parity.BITWISE
    assert not [notice for notice in second.notices if "parity" in notice]

    monkeypatch.setattr("specdec.records.store.library_versions", lambda: "torch 99")
    assert "libraries torch" in load().target.info.parity_reason


def test_a_record_does_not_replace_the_probe_at_load(load, folder):
    good = load().target
    write_probe(make_record(good, PASSING, (), None), folder)
    spoilt = load(lambda: wrong_ops("swiglu")).target
    assert spoilt.info.parity is Parity.NUMERIC
    assert "a pass of 3 rows" in spoilt.info.parity_reason or "a pass of 4 rows" in spoilt.info.parity_reason


def test_without_the_need_nothing_is_asked(load):
    assert load(needs_probe=False).target.info.parity is Parity.BITWISE


def test_a_failed_record_names_what_failed(load, folder):
    target = load(lambda: wrong_ops("attend")).target
    record = make_record(target, *probe_bits(target, (5,)), None)
    verdict = promise(target, record, None)
    assert not verdict.exact
    assert not verdict.broken  # it was never believed
    write_probe(record, folder)
    assert "found it not exact: attend" in load(lambda: wrong_ops("attend")).target.info.parity_reason


# --- what the probe finds ---------------------------------------------------------------------------------------------


def differing(target: Any, contexts: tuple[int, ...] = (5,)) -> list[Finding]:
    findings, notes = probe_bits(target, contexts)
    assert notes == ()
    return [finding for finding in findings if not finding.equal]


@pytest.mark.parametrize("family", FAMILIES)
def test_right_operations_of_every_family_pass(checkpoint, family):
    target = tiny.make_target(checkpoint(family), ops=wrong_ops())
    findings, notes = probe_bits(target, (5,))
    assert notes == ()
    assert [str(finding) for finding in findings if not finding.equal] == []
    assert {finding.kind for finding in findings} >= probes.PROOF
    assert ("draft" in {finding.kind for finding in findings}) == bool(target.info.mtp_layers)


def test_native_kernels_pass(make_target):
    if "native" not in tiny.kernels_available():
        pytest.skip("the native kernels do not compile on this machine")
    assert differing(make_target("qwen3_5", kernels="native", dtype="bfloat16"), (5, 250)) == []


QWEN35 = (
    "embed",
    "project",
    "linear",
    "swiglu",
    "rms_norm",
    "concat",
    "norm_rope",
    "attend",
    "conv_window",
    "gated_delta",
    "gated_rms_norm",
    "head",
)


@pytest.mark.parametrize(
    ("family", "operation"),
    [
        *(pytest.param("qwen3_5", name, marks=[pytest.mark.slow] * (number > 0)) for number, name in enumerate(QWEN35)),
        ("qwen3_5_moe", "route"),
        ("qwen3_5_moe", "moe"),
        ("deepseek_v3", "attend_latent"),
        ("deepseek_v3", "project_heads"),
    ],
)
def test_every_operation_is_caught_by_its_own_comparison(checkpoint, family, operation):
    """The smallest mistake: one value, one unit in the last place, in passes of three rows and more."""
    target = tiny.make_target(checkpoint(family), ops=wrong_ops(operation))
    found = [finding for finding in differing(target) if finding.kind == "op"]
    assert any(operation in finding.subject for finding in found)
    for finding in found:
        assert finding.differing == tuple(range(FROM, ROWS + 1))
        assert finding.first_row == FROM - 1
        assert finding.difference is not None
        assert 0.0 < finding.difference < 1e-4


def test_a_mistake_behind_a_long_context_is_found_there(checkpoint):
    ops = wrong_ops("attend", when=lambda rows, cache: cache.length >= 200)
    found = [finding.subject for finding in differing(tiny.make_target(checkpoint("qwen3"), ops=ops), (5, 250))]
    assert len(found) == 1
    assert "250 rows before" in found[0]


def test_a_mistake_in_the_longest_pass_alone_is_found(checkpoint):
    ops = wrong_ops("swiglu", when=lambda rows, cache: rows == ROWS)
    found = differing(tiny.make_target(checkpoint("qwen3"), ops=ops))
    assert {finding.differing for finding in found} == {(ROWS,)}
    assert {finding.kind for finding in found} == {"op", "pass", "state"}


def test_a_state_that_keeps_rejected_rows_is_found(checkpoint):
    found = differing(tiny.make_target(checkpoint("qwen3_5"), ops=Leaky(wrong_ops().dtype)))
    assert {finding.kind for finding in found} == {"op", "state"}
    assert {finding.where for finding in found} <= {"state", "layers.0.state"}


def test_a_pass_that_changes_from_time_to_time_is_found(checkpoint, monkeypatch):
    target = tiny.make_target(checkpoint("qwen3"), ops=wrong_ops())
    calls = iter(range(10**6))
    clean = ReferenceOps.head

    def head(self: Any, x: Any, weight: Any) -> Any:
        logits = clean(self, x, weight)
        logits.array[0, 0] += next(calls)
        return logits

    monkeypatch.setattr(ReferenceOps, "head", head)
    assert any("twice" in finding.subject for finding in differing(target))


@pytest.mark.parametrize("memory", list(Memory))
def test_another_engines_model_is_compared_by_passes(memory):
    """There are no operations to look at; its own word and whole passes are what a promise can rest on."""
    table = np.random.default_rng(0).dirichlet(np.ones(7), size=(7, 7))
    tilt = 0.0 if memory is Memory.CONVOLUTION else 0.3
    target = TableModel(table, memory=memory, tilt=tilt, mtp_table=table, max_positions=64, max_rows=6)
    findings, notes = probe_bits(target, (5,))
    assert {finding.kind for finding in findings} == {"pass", "state", "draft"}
    assert all(finding.equal for finding in findings)
    assert len(notes) == 1
    record = make_record(target, findings, notes, measure_row_costs(target, repeats=3))
    assert not record.passed
    assert [row.rows for row in record.costs] == [1, 2, 3, 4, 5, 6]
    assert promise(target, record, None).exact == (target.info.parity is Parity.BITWISE)


def test_an_operation_that_nobody_knows_is_told(make_target):
    target = make_target("qwen3")

    class More(ReferenceOps):
        def warp(self, x: Any) -> Any:
            return x

    noted = note_calls(target, 4)
    assert noted.unknown == set()
    noted.inner = More(target.ops.dtype)
    noted.warp(1)
    assert noted.unknown == {"warp"}


def test_every_operation_of_the_protocol_is_known():
    """A new operation with rows needs a line here, or no model that runs it can be shown to be exact."""
    methods = {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}
    assert methods == {*ROW_ARGUMENTS, *NO_ROWS}
    for name, rows in ROW_ARGUMENTS.items():
        assert set(rows) <= set(inspect.signature(getattr(Ops, name)).parameters)


def test_weights_of_another_storage_are_operations_of_their_own(make_target):
    """Two packed matrices of one shape and other bits run other kernels."""

    @attrs.frozen(eq=False)
    class Packed:
        bits: int
        shape: tuple[int, ...] = (4, 4)

    class Takes(ReferenceOps):
        def linear(self, x: Any, weight: Any, residual: Any = None) -> Any:
            return x

    noted: Any = note_calls(make_target("qwen3"), 4)
    noted.calls.clear()
    noted.inner = Takes(make_target("qwen3").ops.dtype)
    x = make_target("qwen3").ops.embed(make_target("qwen3").model.embed_tokens, [1, 2])
    for bits in (4, 8, 4):
        noted.linear(x, Packed(bits))
    assert [call.label() for call in noted.calls] == ["linear 4x4 (bits=4)", "linear 4x4 (bits=8)"]


def test_ops_are_replaced_everywhere_and_weights_are_shared(make_target):
    model, other = make_target("qwen3_5").model, object()
    changed = over(model, other)
    assert changed.ops is other
    assert changed.layers[0].mixer.ops is other
    assert changed.layers[0].mlp.ops is other
    assert changed.mtp.layer.mixer.ops is other
    assert changed.layers[0].mlp.gate_proj is model.layers[0].mlp.gate_proj
    assert model.layers[0].mlp.ops is model.ops


# --- costs ------------------------------------------------------------------------------------------------------------


@examples(60)
@given(
    ratios=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    step=st.none() | st.floats(0.0, 2.0),
    one=st.floats(1e-5, 10.0),
)
def test_a_depth_breaks_even_where_it_emits_what_it_costs(ratios, step, one):
    totals = [1.0]
    for more in ratios:
        totals.append(totals[-1] + more)
    totals = list(plausible(dict(enumerate(totals, start=1))).values())
    costs = RowCosts(
        rows=tuple(RowCost(rows=i + 1, seconds=one * ratio, ratio=ratio) for i, ratio in enumerate(totals)),
        draft_step=None if step is None else step * one,
        context=1,
        repeats=3,
        steady=True,
    )
    prices = costs.depths()
    assert [price.depth for price in prices] == list(range(1, min(7, len(ratios)) + 1))
    for price in prices:
        assert price.cost == pytest.approx(totals[price.depth] + price.depth * (step or 0.0))
        if price.break_even is None:
            assert price.cost > price.depth + 1
        else:
            assert expected_tokens([price.break_even] * price.depth) == pytest.approx(max(1.0, price.cost), rel=1e-6)
    for acceptance in (0.5, 0.9):
        depth, speedup = costs.best_depth(acceptance)
        assert speedup == max([1.0, *(price.speedups[f"{acceptance}"] for price in prices)])
        assert (depth == 0) == (speedup == 1.0)
