"""What every device refuses. Nothing here is a test."""

from typing import Any

import pytest
import torch

from specdec.backends.cpu.reference import ReferenceOps
from specdec.errors import ContractError, UnsupportedError


def refuses_what_it_lacks(ops: Any) -> None:
    """Models with a sliding window or GEGLU are refused in one sentence."""
    for name, call in {
        "new_window": lambda: ops.new_window(8, 4, 1, 4),
        "geglu": lambda: ops.geglu(*[None] * 3),
    }.items():
        with pytest.raises(UnsupportedError, match=f"has no {name}, which this model needs"):
            call()


def refuses_arrays_of_another_backend(ops: Any, row: Any) -> None:
    """``row``: one row of 3 values on the device."""
    reference, weight = ReferenceOps(torch.float32), torch.ones(4, 3)
    for call in (lambda: ops.array(reference.hidden(weight)), lambda: ops.hidden(row).join([reference.hidden(weight)])):
        with pytest.raises(ContractError, match="another backend"):
            call()
