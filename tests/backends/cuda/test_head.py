"""The head's statistics: best token, its logit, log-sum-exp and Gumbel noise, without the logits being written."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import gemm, head, norm
from specdec.backends.cuda.kernels.tiles import Tile
from specdec.backends.cuda.weights import DenseWeight
from specdec.errors import ShapeError
from specdec.sampling import Purpose, gumbel
from tests.backends.cuda.dense import (
    DTYPES,
    close,
    first_rows,
    mutated,
    only_interpreted,
    poisoned,
    product_bound,
    rows_of,
    same_for_any_rows,
    weight_of,
)

pytestmark = pytest.mark.interpreter

TILE = Tile(32, 32)
V, K = 150, 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["dense", "fp8 32x32", "nvfp4"])
def test_best(form: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = rows_of(4, K, dtype, device), weight_of(form, V, K, dtype, device)
    with poisoned(device):
        found = head.best(first_rows(x, 4), weight, tile=TILE)
        logits = head.logits(first_rows(x, 4), weight, tile=TILE)
    rows = gemm.linear_reference(x, weight)
    bound = product_bound(x, weight, rows, torch.float32)
    close(logits, rows, bound)
    assert torch.equal(found.ids.long(), logits.argmax(-1))
    assert torch.equal(found.values, logits.max(-1).values)
    exact = torch.logsumexp(rows, -1)
    # log-sum-exp moves by at most the largest error of a logit; the sum of V exponentials adds (V + 8) roundings, and
    # each exponential |logit - maximum| of them, which its own smallness outweighs: t exp(-t) < 1
    close(found.log_sum, exact, bound.max(-1).values + (2 * V + 16) * 2.0**-24 * (1 + exact.abs()))


def test_best_with_a_norm_and_ids(device: torch.device) -> None:
    x, weight = rows_of(3, K, torch.float32, device), weight_of("dense", V, K, torch.float32, device)
    rms = norm.Rms(torch.rand(K, device=device), 1e-6)
    ids = torch.arange(V, dtype=torch.int32, device=device) * 7 + 3
    found, expected = head.best(x, weight, ids=ids, prologue=rms), head.best_reference(x, weight, ids=ids, prologue=rms)
    assert torch.equal(found.ids, expected.ids)
    close(found.values, expected.values, 1e-4 * expected.values.abs() + 1e-4)
    plain = head.best(norm.rms_norm(x, rms.weight, rms.eps), weight, ids=ids)
    assert torch.equal(plain.values, found.values)
    assert torch.equal(plain.log_sum, found.log_sum)


def test_bits_do_not_depend_on_the_number_of_rows(device: torch.device) -> None:
    weight, x = weight_of("dense", V, K, torch.float32, device), rows_of(16, K, torch.float32, device)
    tile = Tile(64, 64)

    def run(rows: Tensor) -> Tensor:
        found = head.best(rows, weight, tile=tile)
        return torch.stack([found.ids.float(), found.values, found.log_sum], dim=1)

    together = head.sample(x, weight, noise=head.Noise.of(5, 40, 0.9, device), tile=tile)
    for t in (0, 9):  # the noise belongs to the position
        alone = head.sample(x[t : t + 1], weight, noise=head.Noise.of(5, 40 + t, 0.9, device), tile=tile)
        assert alone.ids[0] == together.ids[t]

    same_for_any_rows(run, x, (1, 7), (6,))


def _ties(module: ModuleType | Any, device: torch.device) -> None:
    """Equal best logits in one tile, in two tiles, and in two blocks of tiles."""
    for places in ([3, 9, 20], [5, 40, 149], [33, 35], [70, 100]):
        weight = torch.zeros(V, 16, device=device)
        weight[places, 0] = 1.0
        x = torch.zeros(2, 16, device=device)
        x[:, 0] = torch.tensor([2.0, -1.0], device=device)
        ids = module.best(x, DenseWeight(weight), tile=Tile(16, 16)).ids.tolist()
        assert ids == [places[0], 0 if 0 not in places else 1], f"ties at {places} went to {ids}"


@pytest.mark.sample
def test_the_lowest_id_wins_ties(device: torch.device) -> None:
    _ties(head, device)


@only_interpreted
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "id = tl.min(tl.where(score == top[:, None], ids, LAST), 1)",
            "id = tl.max(tl.where(score == top[:, None], ids, -1), 1)",
        ),
        ("tl.min(tl.where(scores == block_top, ids, LAST), 0)", "tl.max(tl.where(scores == block_top, ids, -1), 0)"),
    ],
)
def test_mutant_ties(old: str, new: str, tmp_path: Path, device: torch.device) -> None:
    with pytest.raises(AssertionError, match="went to"):
        _ties(mutated(head, tmp_path, (old, new)), device)


def test_folding_more_tiles_than_one_block(device: torch.device) -> None:
    """Statistics of more tiles than ``fold_kernel`` reads at once."""
    from specdec.backends.cuda.kernels.launch import launch

    some = torch.Generator().manual_seed(1)
    floats, ids = torch.randn(50, 16, 4, generator=some), torch.arange(800, dtype=torch.int32).view(50, 16)
    floats[..., 3] = floats[..., 3].abs() + 1
    floats[[7, 41], :, 0] = 9.0  # a tie between two blocks
    floats, ids = floats.to(device), ids.to(device)
    out_ids = torch.zeros(16, dtype=torch.int32, device=device)
    values, log_sum = torch.zeros(2, 16, device=device)
    launch(head.fold_kernel, (16,), floats, ids, 50, out_ids, values, log_sum, BLOCK=16)
    assert torch.equal(out_ids, ids[7])
    assert torch.equal(values, floats[7, :, 1])
    expected = (floats[..., 2].double() + floats[..., 3].double().log()).logsumexp(0)
    close(log_sum, expected, torch.full_like(expected, 1e-5))


def test_nan_and_infinite_logits(device: torch.device) -> None:
    weight = weight_of("dense", V, 16, torch.float32, device)
    weight.tensor[77, 3] = float("nan")
    assert head.best(torch.ones(2, 16, device=device), weight, tile=Tile(16, 16)).ids.tolist() == [-1, -1]
    weight.tensor[77, 3] = float("inf")
    found = head.best(torch.ones(1, 16, device=device), weight, tile=Tile(16, 16))
    assert found.ids.tolist() == [77]
    assert found.log_sum.tolist() == [math.inf]
    weight.tensor[:, 3] = float("-inf")
    found = head.best(torch.ones(1, 16, device=device), weight, tile=Tile(16, 16))
    assert found.ids.tolist() == [0]
    assert found.log_sum.tolist() == [-math.inf]


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 2**63 + 12345])
def test_sampling_is_the_race_of_the_keyed_noise(seed: int, device: torch.device) -> None:
    x, weight = rows_of(3, 16, torch.float32, device) / 8, weight_of("dense", V, 16, torch.float32, device)
    ids = torch.arange(V, dtype=torch.int32, device=device) * 3 + 1
    noise = head.Noise.of(seed, 77, 0.7, device)
    with poisoned(device):
        logits = head.logits(x, weight, tile=Tile(64, 16))
        plain, mapped = (head.sample(x, weight, noise=noise, ids=i, tile=Tile(64, 16)) for i in (None, ids))
    rows = logits.double().cpu().numpy()
    for found, tokens in ((plain, np.arange(V)), (mapped, ids.cpu().numpy().astype(np.int64))):
        for t in range(3):
            score = rows[t] / 0.7 + gumbel(seed, 77 + t, tokens, Purpose.TOKEN)
            at = int(np.argmax(score))
            second = np.partition(score, -2)[-2]
            assert score[at] - second > 1e-4, "a near tie shows nothing"
            assert found.ids[t] == tokens[at]
            assert found.values[t] == logits[t, at]


def test_the_noise_is_gumbels(device: torch.device) -> None:
    """Every token's noise, read off as the value at which it overtakes: a head of zeros but for one probe."""
    from specdec.backends.cuda.kernels.launch import launch

    words = torch.tensor([0, 1, 2, 255, 2**24, 2**31 - 1], dtype=torch.int32)
    words = torch.cat([words, -1 - words]).to(device)  # the same bits from the other end: 2^32 - 1 and below
    out = torch.zeros(16, device=device)
    launch(_noise_kernel(), (1,), words, out, len(words), BLOCK=16)
    u = (words.cpu().numpy().view(np.uint32).astype(np.float64) + 0.5) * 2.0**-32
    expected = torch.from_numpy(-np.log(-np.log1p(-u)))
    # w and its logarithm in float32: 8 roundings of a value, and w's own where w is large (1 - w loses its digits)
    large = torch.from_numpy(2.0**-24 * u / (1 - u) / -np.log1p(-u)).clamp(max=1.0)
    close(out[: len(words)].cpu(), expected, 8 * 2.0**-24 * (1 + expected.abs()) + large)


def _noise_kernel() -> Any:
    from tests.backends.cuda.kernels import noise_kernel

    return noise_kernel


def test_what_is_refused(device: torch.device) -> None:
    weight = weight_of("dense", V, K, torch.float32, device)
    with pytest.raises(ShapeError, match="1 to 16 rows"):
        head.best(torch.zeros(17, K, device=device), weight)
    with pytest.raises(ShapeError, match="head of 150 rows came with 3 token ids"):
        head.best(torch.zeros(1, K, device=device), weight, ids=torch.zeros(3, dtype=torch.int32, device=device))
