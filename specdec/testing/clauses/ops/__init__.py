"""Checks of a backend's operations against their float64 definitions in ``specdec.backends.ops``: clauses O1 to O25.

Sizes are deliberately odd: no multiple of a vector, a tile or a block. Inputs are first rounded to the activation dtype
and read back, so that only the operation's own error counts.
"""

from __future__ import annotations

from specdec.testing.clauses.ops import attention, delta_rule, dense, experts, rows_and_caches  # noqa: F401  (registers)
