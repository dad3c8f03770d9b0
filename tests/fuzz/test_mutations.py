"""The mutations: a seed repeats them, and they reach what they claim to reach."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy

from tests.fuzz import mutations

ARRAYS = {
    "tokens": np.arange(9),
    "state.k": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4),
    "state.h": np.ones((1, 5), np.float16),
    "state.b": np.array(True),
}
DOCUMENT = {"format": 1, "meta": {"deep": [1, [2, {"a": 3}]], "name": "x"}, "stats": [3, 2, 1], "empty": {}, "f": 0.5}
FILE = safetensors.numpy.save(ARRAYS, {"note": json.dumps(DOCUMENT)})
MUTATIONS: dict[str, Callable[[random.Random], mutations.Mutant]] = {
    "bytes": lambda rng: mutations.mutate_bytes(rng, FILE, FILE[::-1]),
    "json": lambda rng: mutations.mutate_json(rng, DOCUMENT),
    "safetensors": lambda rng: mutations.mutate_safetensors(rng, FILE),
    "header": lambda rng: mutations.mutate_header(rng, FILE),
    "arrays": lambda rng: mutations.mutate_arrays(rng, FILE),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_a_seed_repeats_its_mutant_and_seeds_differ(mutate: Callable[[random.Random], mutations.Mutant]) -> None:
    made = [mutate(random.Random(seed)) for seed in range(2_000)]
    assert made[-200:] == [mutate(random.Random(seed)) for seed in range(1_800, 2_000)]  # whatever was mutated before
    assert len({mutant.data for mutant in made}) > 300
    assert all(mutant.what for mutant in made)


def test_mutated_arrays_stay_a_file_that_the_library_reads() -> None:
    """So that a reader's own checks are tested, not the library's."""
    seen = set()
    for seed in range(300):
        data = mutations.mutate_arrays(random.Random(seed), FILE).data
        file = mutations.SafetensorsFile.parse(data)
        if "BF16" not in {dtype for dtype, _ in file.arrays().values()}:
            arrays = safetensors.numpy.load(data)
            seen |= {(name, array.dtype.str, array.shape) for name, array in arrays.items()}
    assert {dtype for name, dtype, _ in seen if name == "state.k"} >= {"<f4", "<f8", "<f2", "<i8"}
    assert {shape for name, _, shape in seen if name == "state.k"} >= {
        (2, 3, 4),
        (1, 3, 4),
        (1, 1, 1),
        (24,),
        (1, 2, 3, 4),
    }


def test_a_file_survives_taking_apart() -> None:
    file = mutations.SafetensorsFile.parse(FILE)
    file.replace(file.arrays())
    again = safetensors.numpy.load(file.pack())
    assert all(
        np.array_equal(again[name], array) and again[name].dtype == array.dtype for name, array in ARRAYS.items()
    )


def test_documents_hold_what_python_cannot_write() -> None:
    made = b"\n".join(mutations.mutate_json(random.Random(seed), DOCUMENT).data for seed in range(1_000))
    for wanted in (b"NaN", b"Infinity", b"1e999", b"[" * mutations.NESTED, b"1" * mutations.DIGITS):
        assert wanted in made
