"""Sampled tokens under top-k, top-p and min-p, chosen from logits on the device without the host.

The filters keep a prefix of the tokens in the order (probability descending, id ascending), and the token with the best
score among those that are kept is chosen (``specdec.sampling``). So a row is not sorted: the best score of all names a
candidate, and one pass over the row says whether the filters keep it. If they surely do not, they keep nothing after it
either, and the next candidate is the best score before it.

Probabilities are float64, with the operations of the reference up to ``exp``. Sums and logarithms are rounded in
another order than there, and the noise is float32. A row that this could decide is OPEN, and the host chooses its
token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.accept import OPEN, POSITION
from specdec.backends.cuda.kernels.head import LAST, gumbel, word
from specdec.backends.cuda.kernels.launch import MAX_ROWS, interpreting, launch
from specdec.contract import Sampling
from specdec.errors import ShapeError

TEMPERATURE = tl.constexpr(0)  # fields of the settings, float64
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
TOP_K = tl.constexpr(3)
SETTINGS = 4

_TIE = tl.constexpr(1e-14)  # nats: closer ones may change places, or be equal, by rounding
_SHARE = tl.constexpr(1e-12)  # relative error of a probability
_NOISE = tl.constexpr(1e-4)  # error of a score; that of its noise is within 1e-5
_SUM = tl.constexpr(2.0**-50)  # error of a sum of probabilities, for each of its terms


def settings_of(sampling: Sampling) -> list[float]:
    """The values of the settings, in the order of their fields."""
    return [sampling.temperature, sampling.top_p, sampling.min_p, float(sampling.top_k)]


@triton.jit
def _keys(control, seed, keys, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    first = tl.load(control + POSITION).to(tl.int64) + 1
    tl.store(keys + 2 * row, tl.load(seed) + row.to(tl.int64) * 0)
    tl.store(keys + 2 * row + 1, first + row)


def keys(control: Tensor, seed: Tensor, out: Tensor) -> None:
    """Write the noise keys (``head.Noise.key``) of a cycle's rows to ``out``, int64 ``[16, 2]``.

    The pending token is at POSITION of the control block, and row t decides the token t + 1 positions later. ``seed``
    is int64 ``[1]``.
    """
    launch(_keys, (1,), control, seed, out, ROWS=MAX_ROWS, num_warps=1)


def keys_reference(control: Tensor, seed: Tensor, out: Tensor) -> None:
    """``keys`` on the host."""
    for row in range(MAX_ROWS):
        out[row, 0], out[row, 1] = seed[0], control[POSITION.value] + 1 + row


@triton.jit
def _scores(x_ptr, ids_ptr, key_ptr, settings, out_ptr, N, MAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    at = row.to(tl.int64) * N + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float64)
    ids = columns
    if MAPPED:
        ids = tl.load(ids_ptr + columns, mask=mask, other=0)
    position = tl.load(key_ptr + 1) + row + tl.zeros((BLOCK,), tl.int64)
    noise = gumbel(word(ids, position, tl.load(key_ptr)))
    tl.store(out_ptr + at, x / tl.load(settings + TEMPERATURE) + noise.to(tl.float64), mask=mask)


@triton.jit
def _order(x):
    """int64 numbers in the order of float32 values; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(order):
    """The float32 value of a number of ``_order``."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _nats(x, temperature, top):
    """Nats below the best token, by the operations of the reference; -inf where there is no token."""
    return x.to(tl.float64) / temperature - top


@triton.jit
def _select(
    x_ptr, scores_ptr, ids_ptr, settings, out_ptr, N, MAPPED: tl.constexpr, GUESS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * N
    scores_ptr += row.to(tl.int64) * N
    temperature = tl.load(settings + TEMPERATURE)
    top_p = tl.load(settings + TOP_P)
    min_p = tl.load(settings + MIN_P)
    most = tl.load(settings + TOP_K)
    kept = tl.where((most < 1) | (most > N), N, most).to(tl.int64)
    filtered = (kept < N) | (top_p < 1.0) | (min_p > 0.0)
    slack = _SUM * (N + 8)

    best = tl.full((), float("-inf"), tl.float32)
    wrong = tl.full((), 0, tl.int32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < N, other=float("-inf"))
        best = tl.maximum(best, tl.max(x, 0))
        wrong = tl.maximum(wrong, tl.max((x != x).to(tl.int32), 0))
    finite = (wrong == 0) & (tl.abs(best) < float("inf"))
    top = best.to(tl.float64) / temperature

    # probability that top-p divides by, in units of the best token's: of the top-k tokens, or of all
    mass = tl.full((), 1.0, tl.float64)
    if finite & (top_p < 1.0):
        low = _order(tl.full((), float("-inf"), tl.float32))
        high = low
        if kept < N:  # low: at least so many tokens are not below it; high: fewer are
            high = _order(best) + 1
            while high - low > 1:
                middle = (low + high) // 2
                count = tl.full((), 0, tl.int64)
                for start in range(0, N, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    x = tl.load(x_ptr + at, mask=at < N, other=float("-inf"))
                    count += tl.sum(((_order(x) >= middle) & (at < N)).to(tl.int64), 0)
                low = tl.where(count >= kept, middle, low)
                high = tl.where(count <= kept, middle, high)  # exactly so many: the search is over
        count = tl.full((), 0, tl.int64)
        mass = tl.full((), 0.0, tl.float64)
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < N, other=float("-inf"))
            above = (_order(x) >= high) & (at < N)
            count += tl.sum(above.to(tl.int64), 0)
            mass += tl.sum(tl.where(above, tl.exp(_nats(x, temperature, top)), 0.0), 0)
        if count < kept:  # equal ones are at the border
            mass += (kept - count).to(tl.float64) * tl.exp(_nats(_value(low), temperature, top))

    # tokens before (last_nats, last_id) in the order may be kept
    last_nats = tl.full((), float("-inf"), tl.float64)
    last_id = tl.full((), -1, tl.int32)
    token = tl.full((), -1, tl.int32)
    certain = finite
    searching = finite
    while searching:
        score = tl.full((), float("-inf"), tl.float64)
        second = tl.full((), float("-inf"), tl.float64)
        nats = tl.full((), float("-inf"), tl.float64)
        token = tl.full((), LAST, tl.int32)
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            b = _nats(tl.load(x_ptr + at, mask=at < N, other=float("-inf")), temperature, top)
            ids = at
            if MAPPED:
                ids = tl.load(ids_ptr + at, mask=at < N, other=LAST)
            before = (b > last_nats) | ((b == last_nats) & (ids < last_id))
            scores = tl.load(scores_ptr + at, mask=before & (at < N), other=float("-inf"))
            here = tl.max(scores, 0)
            id = tl.min(tl.where(scores == here, ids, LAST), 0)
            next_here = tl.max(tl.where(ids == id, float("-inf"), scores), 0)
            nats_here = tl.max(tl.where(ids == id, b, float("-inf")), 0)
            better = here > score
            second = tl.maximum(tl.maximum(second, next_here), tl.where(better, score, here))
            token = tl.where(better, id, token)
            nats = tl.where(better, nats_here, nats)
            score = tl.where(better, here, score)
        rank = tl.full((), 0, tl.int64)
        ahead = tl.full((), 0.0, tl.float64)
        near = tl.full((), 0, tl.int32)
        if filtered:
            for start in range(0, N, BLOCK):
                at = start + tl.arange(0, BLOCK)
                b = _nats(tl.load(x_ptr + at, mask=at < N, other=float("-inf")), temperature, top)
                ids = at
                if MAPPED:
                    ids = tl.load(ids_ptr + at, mask=at < N, other=LAST)
                before = ((b > nats) | ((b == nats) & (ids < token))) & (at < N)
                rank += tl.sum(before.to(tl.int64), 0)
                ahead += tl.sum(tl.where(before, tl.exp(b), 0.0), 0)
                near = tl.maximum(near, tl.max(((b != nats) & (tl.abs(b - nats) <= _TIE)).to(tl.int32), 0))
        share = tl.exp(nats)
        stays = (rank < kept) & ((rank == 0) | (top_p >= 1.0) | (ahead < (top_p - slack) * mass))
        stays = stays & ((nats == 0.0) | (share >= min_p * (1.0 + _SHARE)))
        goes = (rank >= kept) | ((rank > 0) & (top_p < 1.0) & (ahead >= (top_p + slack) * mass))
        goes = goes | ((nats < 0.0) & (share < min_p * (1.0 - _SHARE)))
        found = score > float("-inf")  # always: the best token stays
        certain = found & (near == 0) & (goes | (stays & (score - second > _NOISE)))
        searching = certain & goes
        last_nats = nats
        last_id = token
    if not GUESS:
        token = tl.where(certain, token, OPEN)
    tl.store(out_ptr + row, token)


def choose(
    logits: Tensor, key: Tensor, settings: Tensor, out: Tensor, *, ids: Tensor | None = None, guess: bool = False
) -> None:
    """Choose the token of every row of ``logits [T, n]`` float32 by temperature, filters and noise.

    Args:
        key: int64 ``[2]``, seed and position of row 0.
        settings: float64 ``[4]``, as ``settings_of`` gives them; the temperature is above 0.
        out: int32 ``[T]``: the token that ``specdec.sampling.Rows`` chooses, or OPEN where the host has to.
        ids: int32 ``[n]``, the token ids of the columns, each at most once; without them, 0 to n - 1.
        guess: for drafts: an open row has the token that is most likely right, and -1 if its logits are not finite.

    Raises: ShapeError.
    """
    rows, size = logits.shape
    fits = rows <= MAX_ROWS and len(out) == rows and (ids is None or len(ids) == size)
    if not fits:
        raise ShapeError(f"up to {MAX_ROWS} rows of logits and a place for each: {rows} and {len(out)}, {size} columns")
    if settings.dtype != torch.float64 or key.dtype != torch.int64 or out.dtype != torch.int32:
        raise ShapeError("settings are float64, a key is int64, and tokens are int32")
    logits = logits.contiguous()
    scores = torch.empty(rows, size, dtype=torch.float64, device=logits.device)
    named = logits if ids is None else ids
    mapped = ids is not None
    block = min(4096, max(16, triton.next_power_of_2(size)))
    spread = block if interpreting() else 512
    launch(
        _scores, (triton.cdiv(size, spread), rows), logits, named, key, settings, scores, size,
        MAPPED=mapped, BLOCK=spread,
    )  # fmt: skip
    launch(
        _select, (rows,), logits, scores, named, settings, out, size,
        MAPPED=mapped, GUESS=guess, BLOCK=block, num_warps=16,
    )  # fmt: skip
