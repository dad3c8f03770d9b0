"""How many seeds a fuzzer tries: a block by default, 150 in CI, as many as ``SPECDEC_FUZZ_CASES`` says by hand.

    SPECDEC_FUZZ_CASES=10000 pytest -m slow tests/fuzz/test_session_files.py

``SPECDEC_FUZZ_SEED`` is the first seed, 0 unless set. A failure names its seed.
"""

import os
from typing import Any

from tests.selection import cases

CASES = 150
BLOCK = 10  # seeds of one test


def blocks() -> list[Any]:
    """Ranges of seeds for ``parametrize``, marked ``slow``; the first is the sample that every run includes."""
    first = int(os.environ.get("SPECDEC_FUZZ_SEED", 0))
    count = int(os.environ.get("SPECDEC_FUZZ_CASES", CASES))
    end = first + count
    return cases(
        [range(start, min(start + BLOCK, end)) for start in range(first, end, BLOCK)],
        sample=1,
        name=lambda block: f"{block[0]}-{block[-1]}",
        mark="slow",
    )
