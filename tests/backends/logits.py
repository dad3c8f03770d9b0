"""What logits of a device answer, beside the reference over the same bits. Nothing here is a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from specdec.backends.cpu.reference import ReferenceOps
from specdec.errors import ContractError, UnsupportedError


@st.composite
def exact_heads(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Rows ``[T, 3]``, a head ``[V, 3]`` whose products are exact and often equal, token ids, and further ones."""
    rng, vocab = np.random.default_rng(draw(st.integers(0, 2**16))), draw(st.integers(2, 60))
    weight, x = rng.integers(0, draw(st.integers(1, 6)), (vocab, 3)), rng.integers(-2, 3, (draw(st.integers(1, 4)), 3))
    ids = st.integers(0, vocab - 1)
    tokens, more = draw(st.lists(ids, min_size=1, max_size=8)), draw(st.lists(ids, max_size=5))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(weight, dtype=torch.float32), tokens, more


def check_logits(ops: Any, y: Any, case: tuple[torch.Tensor, torch.Tensor, list[int], list[int]], error: float) -> None:
    """Full and pruned heads; ``y``: the rows on the device."""
    x, weight, tokens, more = case
    reference, vocab = ReferenceOps(torch.float32), len(weight)
    held, picked = ops.weight(weight), [(7 * t) % vocab for t in range(len(x))]
    base = reference.head_rows(weight, tokens), ops.head_rows(held, tokens)
    wider = reference.head_rows(weight, more, base[0]), ops.head_rows(held, more, base[1])
    again = ops.head_rows(held, tokens[:1] + more, wider[1])
    assert wider[1].tokens == again.tokens == tuple(sorted({*tokens, *more}))
    assert wider[1].parts[0] is base[1].parts[0]
    pairs = [(reference.head(x, weight), ops.head(y, held))]
    pairs += [(reference.pruned_head(x, a), ops.pruned_head(y, b)) for a, b in (base, wider)]
    for theirs, ours in pairs:
        assert len(ours) == len(x)
        assert ours.argmax() == theirs.argmax()
        assert np.array_equal(ours.rows(), theirs.rows())
        assert ours.rows().dtype == np.float32
        for k in (1, 2, vocab, vocab + 3):
            assert ours.topk(k) == theirs.topk(k)
        for some in (picked, picked[:1], []):
            assert ours.gather(some) == theirs.gather(some)
        assert np.allclose(ours.logsumexp(), theirs.logsumexp(), rtol=error, atol=error)


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
    for call in (
        lambda: ops.array(reference.hidden(weight)),
        lambda: ops.hidden(row).join([reference.hidden(weight)]),
        lambda: ops.pruned_head(row, reference.head_rows(weight, [1])),
    ):
        with pytest.raises(ContractError, match="another backend"):
            call()
