"""Mutated cost tables and probe records: each is used with values in range, or made again for a stated reason."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from specdec.contract import ModelInfo, Parity
from specdec.records.cost_table import COSTS as COST_STORE
from specdec.records.cost_table import CostIdentity, CostTable, parse_costs, write_costs
from specdec.records.probes import (
    PROBES,
    Finding,
    ProbeIdentity,
    ProbeRecord,
    RowCost,
    stored_probe,
    unproved,
    write_probe,
)
from tests.fuzz.campaign import blocks
from tests.fuzz.mutations import Mutant, mutate_bytes, mutate_json

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
TABLE = CostTable(verify={1: 1.0, 2: 1.25, 4: 1.75}, draft={0: 0.0, 1: 0.25, 3: 0.75}, commit=0.5)
LONGEST = 2_000  # characters of a reason


def mutated(rng: random.Random, data: bytes) -> Mutant:
    return mutate_bytes(rng, data) if rng.random() < 0.3 else mutate_json(rng, json.loads(data))


@pytest.mark.parametrize("seeds", blocks())
def test_a_mutated_cost_table_gives_costs_or_a_reason(
    seeds: range, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COST_STORE.switch, str(tmp_path))
    identity = CostIdentity.of(INFO, drafter="mtp {}", cores=2, threads=1)
    path = tmp_path / f"{identity.key()}.json"
    write_costs(path, TABLE, identity)
    data, refused = path.read_bytes(), 0
    for seed in seeds:
        mutant = mutated(random.Random(seed), data)
        path.write_bytes(mutant.data)
        found = COST_STORE.find(identity, parse_costs)
        if isinstance(found, str):
            refused += 1
            assert 0 < len(found) <= LONGEST, (seed, mutant.what)
        else:
            for depth in (0, 1, 7, 100):
                assert 0.0 < found.cycle(depth) < 1e12, (seed, mutant.what)
    assert refused > len(seeds) // 4


@pytest.mark.parametrize("seeds", blocks())
def test_a_mutated_probe_record_proves_nothing_that_was_not_probed(
    seeds: range, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation differs in the record; a mutant that is believed says so too, unless it has lost that finding."""
    monkeypatch.setenv(PROBES.switch, str(tmp_path))
    passing = [Finding(kind=kind, subject=f"some {kind}", rows=8) for kind in ("op", "pass", "state")]
    failed = Finding(kind="op", subject="linear", rows=8, differing=(3, 4), first_row=2, difference=0.5)
    record = ProbeRecord(
        identity=ProbeIdentity.of(INFO),
        probed="2026-11-22T10:00:00",
        findings=(*passing, failed),
        costs=(RowCost(rows=2, seconds=0.1, ratio=1.2),),
        draft_step=0.01,
    )
    path = write_probe(record, tmp_path)
    data = path.read_bytes()
    for seed in seeds:
        mutant = mutated(random.Random(seed), data)
        path.write_bytes(mutant.data)
        reason, found = unproved(INFO, "model"), stored_probe(INFO)
        assert reason is None or 0 < len(reason) <= LONGEST, (seed, mutant.what)
        assert (reason is None) == (found is not None and found.passed), (seed, mutant.what)
        if found is not None:
            assert found.identity == record.identity, (seed, mutant.what)
            assert found.passed <= (failed not in found.findings), (seed, mutant.what)
