"""Mutated cost tables: each is used with values in range, or measured again for a stated reason."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from specdec.contract import ModelInfo, Parity
from specdec.records.cost_table import FOLDER, CostIdentity, CostTable, find_costs, write_costs
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
    monkeypatch.setenv(FOLDER, str(tmp_path))
    identity = CostIdentity.of(INFO, drafter="mtp {}", cores=2, threads=1)
    path = identity.path()
    assert path is not None
    write_costs(path, TABLE, identity)
    data, refused = path.read_bytes(), 0
    for seed in seeds:
        mutant = mutated(random.Random(seed), data)
        path.write_bytes(mutant.data)
        found = find_costs(path)
        if isinstance(found, str):
            refused += 1
            assert 0 < len(found) <= LONGEST, (seed, mutant.what)
        else:
            for depth in (0, 1, 7, 100):
                assert 0.0 < found.cycle(depth) < 1e12, (seed, mutant.what)
    assert refused > len(seeds) // 4
