"""Choose the tiles and slices of a product from its sizes, its format and the device, never from T.

The choice affects the bits (the order of the sum over K), so nothing is measured at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import attrs
import torch

from specdec.backends.cuda.kernels.launch import interpreting
from specdec.backends.cuda.kernels.workspace import COLUMNS, TILES

HOPPER_SMS = 132  # also assumed without a CUDA device
HOPPER_SHARED = 228 * 1024  # likewise


@attrs.frozen
class Tile:
    """The work of one program: sum ``[16, block_n]`` over the blocks of ``block_k`` columns of its slice of K."""

    block_n: int
    block_k: int
    splits: int = 1  # slices of K, folded in ascending order
    stages: int = 4  # blocks in flight
    warps: int = 4  # the same for all products: the order of a norm's sum depends on it


@functools.cache
def sms(device: torch.device) -> int:
    """The number of streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else HOPPER_SMS


# The fixed cost of a program (start, prologue, epilogue) in bytes that its SM could have read in that time: about a
# microsecond at 33 kB per microsecond and SM (4.3 TB/s over 132 SMs). An estimate, not a measurement.
_START = 32_000
_FOLD = 4_000  # per additional slice: partial sums go through L2
# Slices also cost the launch a fence, an atomic and the last program's reading of all sums: about 1.75 microseconds, so
# they pay only where there are fewer tiles than SMs. An estimate too.
_MEETING = 58_000
# Bytes of weights that an SM must have in flight (Little's law: 33 kB per microsecond, a latency somewhat below that).
_FLIGHT = 40_000
# Programs of one SM at a time, by their registers: at most 168 for each of 128 threads, or 232 with 4-bit weights.
_BY_REGISTERS, _BY_REGISTERS_OF_4_BITS = 3, 2
_RESERVED = 1024  # bytes of shared memory per program beside its own


def resident(tile: Tile, bits: int, device: torch.device, *, pair: bool = False) -> int:
    """Programs that one SM runs at a time, by registers and by the shared memory of a bfloat16 product with a norm."""
    step = (2 if pair else 1) * tile.block_n * tile.block_k * bits // 8
    rows = 16 * tile.block_k * 2  # a block of x
    scales = tile.block_k * 4  # and of the norm's weight
    shared = (tile.stages - 1) * (step + scales) + tile.stages * rows
    by_registers = _BY_REGISTERS if bits > 4 else _BY_REGISTERS_OF_4_BITS
    return max(1, min(by_registers, shared_memory(device) // (shared + _RESERVED)))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of one multiprocessor."""
    if device.type != "cuda":
        return HOPPER_SHARED
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@functools.cache
def choose(n: int, k: int, bits: int, device: torch.device, *, pair: bool = False, most_k: int = 128) -> Tile:
    """The tile of a product with a weight ``[n, k]`` of ``bits`` bits per value; ``pair``: gate and up in one program.

    ``most_k`` bounds ``block_k`` (a scale's block, a head's size); a power of two of at least 16.
    The time of a choice is modelled as the bytes that the busiest SM reads, longer if too few are in flight at a time
    (``candidates``).
    """
    if interpreting():  # every program costs milliseconds, so use few; two slices, so that folds run
        block_k = min(most_k, 128)
        return Tile(min(256, _power(n)), block_k, _split(k, block_k, 2 if k > 256 else 1))
    best: tuple[float, Tile] | None = None
    for cost, tile in candidates(n, k, bits, device, pair=pair, most_k=most_k):
        if best is None or cost < 0.99 * best[0]:  # prefers wider and fewer slices if as fast
            best = (cost, tile)
    assert best is not None
    return best[1]


def candidates(
    n: int, k: int, bits: int, device: torch.device, *, pair: bool = False, most_k: int = 128
) -> Iterator[tuple[float, Tile]]:
    """The tiles that ``choose`` chooses from, widest first, each with its modelled time as bytes that an SM reads."""
    block_k, matrices = min(most_k, 128) if pair else most_k, 2 if pair else 1  # two blocks of 256 take all registers
    for block_n in (64, 32) if pair else (128, 64, 32):
        tiles = -(-n // block_n)
        step = matrices * block_n * block_k * bits // 8
        stages = min(max(3, 1 + -(-24_000 // step)), 6)
        for wanted in (1, 2, 3, 4, 5, 6, 8):
            splits = _split(k, block_k, wanted)
            length = _slice(k, block_k, splits)
            if splits > 1 and (length < 4 * block_k or tiles > TILES or splits * tiles * block_n * matrices > COLUMNS):
                continue
            tile = Tile(block_n, block_k, splits, stages)
            at_once = resident(tile, bits, device, pair=pair)
            busiest = -(-tiles * splits // sms(device))
            flight = min(busiest, at_once) * (stages - 1) * step
            read = matrices * block_n * length * bits / 8 * max(1.0, _FLIGHT / flight)
            cost = busiest * read + (_START + _FOLD * (splits - 1)) * max(1.0, busiest / at_once)
            yield cost + (_MEETING if splits > 1 else 0), tile


def _split(k: int, block_k: int, wanted: int) -> int:
    """The number of nonempty slices when K's blocks are cut into ``wanted`` slices."""
    blocks = -(-k // block_k)
    return -(-blocks // -(-blocks // wanted))


def _slice(k: int, block_k: int, splits: int) -> int:
    """Columns of every slice but the last."""
    blocks = -(-k // block_k)
    return -(-blocks // splits) * block_k


def _power(n: int) -> int:
    """The smallest power of two that is at least n and 16."""
    return max(16, 1 << (n - 1).bit_length())
