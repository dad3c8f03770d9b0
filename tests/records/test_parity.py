"""What the comparison of rows finds: at load, and in ``specdec doctor`` with more rows, contexts and whole passes."""

import attrs
import numpy as np
import pytest

from specdec.backends.cpu.caches import CpuDeltaCache
from specdec.backends.cpu.reference import ReferenceOps
from specdec.contract import Parity
from specdec.doctor import probe_bits, promise
from specdec.models.parity import probe_parts, probe_rows
from specdec.records.bits import Comparison
from specdec.testing import Memory, TableModel
from tests import tiny
from tests.backends.families import TRIED
from tests.wrong_ops import FROM, ROWS, Leaky, last_row, wrong_ops


def differing(target, context=None):
    return [finding for finding in probe_bits(target, context) if not finding.equal]


@pytest.mark.parametrize("family", TRIED)
def test_right_operations_of_every_family_pass(checkpoint, family):
    target = tiny.make_target(checkpoint(family, **TRIED[family]), ops=wrong_ops())
    assert probe_rows(target) is None
    kinds = [finding.subject for finding in probe_parts(target, [(1,)], (0,))]
    assert len(kinds) <= 5 + bool(target.info.mtp_layers)  # a model of a hundred layers takes no longer


QWEN35 = ("project", "linear", "swiglu", "rms_norm", "norm_rope", "attend", "conv_window", "gated_delta")


@pytest.mark.parametrize(
    ("family", "operation"),
    [
        *(("qwen3_5", name) for name in (*QWEN35, "gated_rms_norm", "embed", "head")),
        ("qwen3_5_moe", "route"),
        ("qwen3_5_moe", "moe"),
        ("deepseek_v3", "attend_latent"),
        ("deepseek_v3", "project_heads"),
    ],
)
def test_a_mistake_of_every_operation_is_found_at_load(checkpoint, family, operation):
    """The smallest mistake: one unit in the last place, in the last row of passes of three rows and more."""
    target = tiny.make_target(checkpoint(family), ops=wrong_ops(operation))
    reason = probe_rows(target)
    assert reason is not None
    assert f"different bits in blocks of {FROM}" in reason


@pytest.mark.parametrize("operation", ["swiglu", "linear", "attend", "head"])
def test_a_mistake_that_shows_with_few_inputs_is_found_at_load(checkpoint, operation):
    """A kernel may differ for one row in four: no single pattern of rows can be relied on."""

    def rare(rows, cache):
        return [t for t in range(len(rows)) if float(rows[t].abs().sum()) * 1e4 % 4 < 1]

    ops = wrong_ops(operation, which=rare)
    assert probe_rows(tiny.make_target(checkpoint("qwen3_5"), ops=ops)) is not None


def test_a_mistake_behind_a_long_context_is_found_there(checkpoint):
    ops = wrong_ops("attend", which=lambda rows, cache: last_row(rows, cache) * (cache.length >= 200))
    target = tiny.make_target(checkpoint("qwen3"), ops=ops)
    assert probe_rows(target) is None
    found = [finding.subject for finding in differing(target)]
    assert found
    assert all(subject.endswith(" rows before") for subject in found)
    target.ops.capabilities = attrs.evolve(target.ops.capabilities, probed_context=250)
    assert probe_rows(target) is not None


def test_a_mistake_in_the_longest_pass_alone_is_found(checkpoint):
    ops = wrong_ops("swiglu", which=lambda rows, cache: last_row(rows, cache) * (len(rows) == ROWS))
    found = differing(tiny.make_target(checkpoint("qwen3", max_positions=64), ops=ops))
    assert {finding.differing for finding in found} == {(ROWS,)}
    assert {finding.subject.split(" ")[0] for finding in found} == {"layer", "logits", "the"}


def test_a_state_that_keeps_rejected_rows_is_found(checkpoint):
    found = differing(tiny.make_target(checkpoint("qwen3_5", max_positions=64), ops=Leaky(wrong_ops().dtype)))
    assert [finding.subject for finding in found] == ["the state after commit, after 40 tokens"]


@pytest.mark.parametrize("block", [2, 6, 8, 16])
def test_a_state_that_a_block_leaves_wrong_is_found_at_load(checkpoint, monkeypatch, block):
    """The row after a block reads its state, after the longest one too."""
    right = CpuDeltaCache.commit

    def wrong(self, rows):
        right(self, rows)
        self.state += rows == block

    monkeypatch.setattr(CpuDeltaCache, "commit", wrong)
    assert probe_rows(tiny.make_target(checkpoint("qwen3_5"))) is not None


def test_a_pass_that_changes_from_time_to_time_is_found(checkpoint, monkeypatch):
    target = tiny.make_target(checkpoint("qwen3"), ops=wrong_ops())
    calls = iter(range(10**6))
    clean = ReferenceOps.head

    def head(self, x, weight):
        logits = clean(self, x, weight)
        logits.array[0, 0] += next(calls)
        return logits

    monkeypatch.setattr(ReferenceOps, "head", head)
    assert "the output head" in (probe_rows(target) or "")


@pytest.mark.parametrize("memory", list(Memory))
def test_another_engines_model_is_compared_by_passes(memory):
    """There are no layers to look at; its own word and whole passes are what a promise can rest on."""
    table = np.random.default_rng(0).dirichlet(np.ones(7), size=(7, 7))
    target = TableModel(table, memory=memory, tilt=0.3, mtp_table=table, max_positions=64, max_rows=6)
    findings = probe_bits(target)
    assert len(findings) == 2
    assert all(finding.equal for finding in findings)
    verdict = promise(target, findings)
    assert verdict["exact"] == (target.info.parity is Parity.BITWISE)
    assert not verdict["broken"]


def test_bits_are_compared_and_not_values():
    comparison = Comparison("x")
    comparison.rows(2, np.array([[np.nan], [1.0]]), np.array([[np.nan], [1.0]]))
    assert comparison.finding().equal
    comparison.rows(3, np.array([[1.0], [0.0]]), np.array([[1.0], [-0.0]]))
    comparison.rows(4, np.array([[1.0], [2.5]]), np.array([[1.0], [2.0]]))
    comparison.rows(6, np.array([[1.0]]), np.array([[1.0]]))
    assert str(comparison.finding()) == "x: different bits in blocks of 3 to 4 rows, first in row 1; off by at most 0.5"
    comparison.arrays(8, {"state": np.ones(2)}, {})
    assert comparison.finding().difference is None
    assert comparison.finding().blocks() == "3 to 4, 8"
