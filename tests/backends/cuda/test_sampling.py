"""The choice of tokens on the device: the best ones, and samples with the distribution of the float64 sampler."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends.cuda import choosing
from specdec.backends.cuda.kernels import noise
from specdec.backends.cuda.ops import CudaOps
from specdec.contract import Choosing, Context, Sampling
from specdec.sampling import Rows, survivors
from tests.backends.cuda.fake import FakeDevice
from tests.backends.cuda.kernel_runs import poisoned

pytestmark = pytest.mark.interpreter

SETTINGS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
}
DRAWS = 1500


def drawn(module, row, sampling, ids=None):
    """Tokens of many positions that all have the logits ``row``."""
    found = module.sample(row.expand(DRAWS, -1), sampling, 3, ids).numpy()
    return found


def distance(tokens, row, sampling, size):
    """Chi-squared over its degrees of freedom, of tokens against the distribution of the float64 sampler."""
    ids, probabilities = survivors(row.double().numpy(), sampling)
    counts = np.bincount(tokens, minlength=size)
    assert set(np.flatnonzero(counts)) <= set(ids), "a token that the filters drop"
    expected = DRAWS * probabilities
    enough = expected >= 5
    return float((((counts[ids] - expected) ** 2 / expected)[enough]).sum() / max(1, enough.sum() - 1))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, 2**40 + 7])
def test_the_distribution_is_that_of_the_float64_sampler(name, seed):
    """Equal logits too, of which filters keep the lower ids."""
    row = torch.randn(24, generator=torch.Generator().manual_seed(4)) * 2
    row[[3, 11, 17]] = row.max()
    row[5] = -torch.inf
    sampling = Sampling(seed=seed, **SETTINGS[name])
    assert distance(drawn(choosing, row, sampling), row, sampling, 24) < 2.2


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_filters_keep_the_tokens_of_the_float64_sampler(data):
    """Few different logits, so that equals abound. Where a bound of top-p falls on a sum, rounding may decide."""
    levels = data.draw(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
    row = torch.tensor(levels, dtype=torch.float32)
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        top_k=data.draw(st.integers(0, 13)),
        top_p=data.draw(st.sampled_from([1.0, 0.317, 0.771, 0.9313])),
    )
    below = (row - row.max())[None] / sampling.temperature
    _, shares = noise.perturb(below, torch.tensor([0, 0]))
    kept = choosing._prefix(below, shares, sampling)[0]
    assert kept.nonzero()[:, 0].tolist() == survivors(row.double().numpy(), sampling)[0].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_token_depends_on_its_row_and_position_alone(name):
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(seed=9, **SETTINGS[name])
    with poisoned():
        together = choosing.sample(logits, sampling, 100)
        for count in (1, 3, 15):
            assert torch.equal(choosing.sample(logits[:count], sampling, 100), together[:count])
        for t in (4, 15):
            assert choosing.sample(logits[t : t + 1], sampling, 100 + t) == together[t]
    assert len(set(together.tolist())) > 2
    assert not torch.equal(choosing.sample(logits, attrs.evolve(sampling, seed=10), 100), together)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_best_token_is_the_lowest_of_equals(data):
    values = st.sampled_from([0.0, -0.0, 1.0, -1.5, float("nan"), float("inf"), float("-inf")])
    rows = data.draw(st.lists(st.lists(values, min_size=5, max_size=5), min_size=1, max_size=4))
    ids = data.draw(st.none() | st.permutations([2, 9, 4, 0, 33]))
    names = list(range(5)) if ids is None else list(ids)
    found = choosing.best(torch.tensor(rows), None if ids is None else torch.tensor(names, dtype=torch.int32))
    for row, token in zip(rows, found.tolist(), strict=True):
        best = max(row) if not any(value != value for value in row) else float("nan")
        finite = abs(best) < float("inf")
        assert token == (min(name for name, value in zip(names, row, strict=True) if value == best) if finite else -1)


def test_logits_choose_where_no_history_counts():
    """Full and gathered heads; penalties, bias and bans are left to the host, and so is a row that is not finite."""
    ops = CudaOps(FakeDevice(), torch.float32)
    weight, x = torch.randn(63, 16, generator=torch.Generator().manual_seed(2)).split([60, 3])
    x[1] = float("nan")
    held = ops.weight(weight)
    pruned = ops.head_rows(held, [59, 0, 7], ops.head_rows(held, range(10, 50, 2)))
    for logits in (ops.head(x, held), ops.pruned_head(x, pruned)):
        context = Context([1, 2], Sampling(temperature=4.0, top_k=30, seed=3))
        first, broken, third = logits.choose(Choosing((5, 6), context))
        assert broken is None
        assert Rows(logits, (5, 6), context).choose(2) == third
        assert logits.choose(Choosing((5, 6), context))[0] == first
        for more in ({"repetition_penalty": 1.1}, {"banned": (3,)}, {"logit_bias": {4: 1.0}}, {"temperature": 0.0}):
            other = Context([1, 2], Sampling(**{"temperature": 0.7, "seed": 3, **more}))
            assert logits.choose(Choosing((5, 6), other)) == ()
    tokens = [
        ops.pruned_head(x[:1], pruned).choose(Choosing((), Context([1] * n, context.sampling)))[0] for n in range(12)
    ]
    assert set(tokens) <= set(pruned.tokens)
    assert len(set(tokens)) > 3
