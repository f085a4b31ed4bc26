"""Cycles and memory traffic of one matrix product on a bit-flexible systolic array (Bit Fusion).

The array has R rows, along which it reduces, and C columns, one per output channel. A cell computes one 8 x 8-bit
product per cycle, or several narrower ones. With r(x) the bits x rounded up to 2, 4 or 8, a cell computes p = (8/r(a))
(8/r(b)) products of a-bit and b-bit operands, so that the array reduces R p numbers per cycle. Wider numbers are split
into 8-bit digits, and each pair of digits takes a pass.

A product of m output positions, n output channels, c reduction channels and t taps is cut into tiles that fit half of
each buffer (double buffering). An exhaustive search over tile sizes and the order of the three outer loops minimises
cycles, then energy:

    active = trips * tm * ceil(tn/C) * ceil(tc t/(R p)) * digits
    cycles = max(active, ceil((D - fill - drain)/bandwidth)) + ceil(fill/bandwidth) + ceil(drain/bandwidth)

where D is the external memory traffic in bits, fill the part read before the array can start, and drain the part
written after it has stopped.

Source: Sharma et al., Bit Fusion, ISCA 2018, and FracTrain, section 4.1, which uses the public simulator. The tilings
agree with the simulator's up to ties (tests/data/hardware/bitfusion_sample.json).
"""

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
"""One integer per candidate tiling: int64, or Python integers where int64 would overflow."""

T = TypeVar("T")


class Gemm(NamedTuple):
    """One matrix product: its dimensions, and the bits of the moving operand and of the operand held in the array."""

    m: int
    n: int
    c: int
    t: int
    moving_bits: int
    held_bits: int


class Energy(NamedTuple):
    """Energies in pJ: per active cycle of the array, and per bit read or written elsewhere."""

    array_cycle: float
    input_read: float
    input_write: float
    weight_read: float
    weight_write: float
    output_read: float
    output_write: float
    dram: float


class Array(NamedTuple):
    """An accelerator: array size, memory interface in bits per cycle, buffers in bits, and energies."""

    rows: int
    columns: int
    bandwidth: int
    input_buffer: int
    weight_buffer: int
    output_buffer: int
    partial_sum_bits: int
    energy: Energy


class Usage(NamedTuple, Generic[T]):
    """Resource usage of a product: total cycles, active cycles of the array, and bits moved at each buffer."""

    cycles: T
    active: T
    dram: T
    input_read: T
    input_write: T
    weight_read: T
    weight_write: T
    output_access: T


def energy_pj(usage: Usage[Any], energy: Energy) -> dict[str, Any]:
    """Picojoules of a usage by part: array, buffer, dram."""
    return {
        "array": usage.active * energy.array_cycle,
        "buffer": usage.input_read * energy.input_read
        + usage.input_write * energy.input_write
        + usage.weight_read * energy.weight_read
        + usage.weight_write * energy.weight_write
        + usage.output_access * (energy.output_read + energy.output_write),
        "dram": usage.dram * energy.dram,
    }


@cache
def cheapest(gemm: Gemm, array: Array) -> Usage[int]:
    """The usage of the tiling with the fewest cycles and, among those, the least energy; exact.

    Taps are not tiled, as in the source, unless those of one channel do not fit a buffer; then they count as channels.
    """
    tiles = _tiles(gemm, array)
    if not tiles.shape[1]:
        gemm = gemm._replace(c=gemm.c * gemm.t, t=1)
        tiles = _tiles(gemm, array)
    found = [_best(_usage(gemm, array, tiles, order), array.energy) for order in permutations("mnc")]
    return min(found)[1]


def _best(usage: Usage[Numbers], energy: Energy) -> tuple[tuple[int, float], Usage[int]]:
    """(cycles, energy) and usage of the best candidate; ties go to the first."""
    fastest = np.flatnonzero(usage.cycles == usage.cycles.min())
    candidates = Usage(*(numbers[fastest] for numbers in usage))
    picojoules = sum(energy_pj(candidates, energy).values())
    best = int(np.argmin(picojoules))
    chosen = Usage(*(int(numbers[best]) for numbers in candidates))
    return (chosen.cycles, float(picojoules[best])), chosen


def _tiles(gemm: Gemm, array: Array) -> Numbers:
    """All candidate tiles that fit: [3, candidates] of (tm, tn, tc)."""
    largest = gemm.m * gemm.n * gemm.c * gemm.t * array.columns * array.partial_sum_bits * 32
    kind = np.int64 if largest < 2**62 else object
    sizes = (_powers(gemm.m), _powers(gemm.n, array.columns), _powers(gemm.c))
    grid = np.meshgrid(*(np.array(values, dtype=kind) for values in sizes), indexing="ij")
    tiles = np.stack([axis.ravel() for axis in grid])
    halves = (array.input_buffer // 2, array.weight_buffer // 2, array.output_buffer // 2)
    fits = [bits <= half for bits, half in zip(_footprints(gemm, array, tiles), halves)]
    return tiles[:, np.logical_and.reduce(fits)]


def _powers(size: int, columns: int = 1) -> list[int]:
    """Tile sizes up to `size`: powers of two below the number of columns, then columns times powers of two, then `size`."""
    below = [2**k for k in range(columns.bit_length()) if 2**k < min(columns, size)]
    above = [columns * 2**k for k in range(size.bit_length()) if columns * 2**k < size]
    return [*below, *above, size]


def _packed_rows(gemm: Gemm, array: Array) -> int:
    """R p, the numbers that the array reduces per cycle."""
    return array.rows * (8 // _lane(gemm.moving_bits)) * (8 // _lane(gemm.held_bits))


def _lane(bits: int) -> int:
    """r(x): the number of bits rounded up to a width that a cell supports (2, 4 or 8)."""
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


def _footprints(gemm: Gemm, array: Array, tiles: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Bits of one tile of the input, the weight and the output."""
    tm, tn, tc = tiles
    rows = _packed_rows(gemm, array)
    return (
        tm * tc * gemm.t * gemm.moving_bits,
        _ceil(tc * gemm.t, rows) * rows * tn * gemm.held_bits,
        tm * _ceil(tn, array.columns) * array.columns * array.partial_sum_bits,
    )


def _usage(gemm: Gemm, array: Array, tiles: Numbers, order: Sequence[str]) -> Usage[Numbers]:
    """Usage of every tile for one order of the loops, innermost first."""
    tm, tn, tc = tiles
    trips = {"m": _ceil(gemm.m, tm), "n": _ceil(gemm.n, tn), "c": _ceil(gemm.c, tc)}
    all_trips = trips["m"] * trips["n"] * trips["c"]
    footprints = _footprints(gemm, array, tiles)
    x, x_held = _traffic(footprints[0], trips, "mc", order, array.input_buffer // 2)
    w, w_held = _traffic(footprints[1], trips, "cn", order, array.weight_buffer // 2)
    y, y_held = _traffic(footprints[2], trips, "mn", order, array.output_buffer // 2)
    digits = _ceil(gemm.moving_bits, 8) * _ceil(gemm.held_bits, 8)
    passes = _ceil(tn, array.columns) * _ceil(tc * gemm.t, _packed_rows(gemm, array))
    active, dram = all_trips * tm * passes * digits, x + w + 2 * y
    fill, drain = x_held + w_held + y_held, y_held
    waiting = _ceil(dram - fill - drain, array.bandwidth)
    products = all_trips * tm * tn * tc * gemm.t
    return Usage(
        cycles=np.maximum(active, waiting) + _ceil(fill, array.bandwidth) + _ceil(drain, array.bandwidth),
        active=active,
        dram=dram,
        input_read=products * gemm.moving_bits,
        input_write=x,
        weight_read=products * gemm.held_bits,
        weight_write=w,
        output_access=gemm.m * gemm.n * trips["c"] * array.partial_sum_bits + y,
    )


def _traffic(
    tile: Numbers, trips: dict[str, Numbers], indexed_by: str, order: Sequence[str], half: int
) -> tuple[Numbers, Numbers]:
    """Bits of an operand transferred over the memory interface, and those that stay in its buffer.

    From the innermost loop outwards, a loop that indexes the operand multiplies its traffic. A loop that does not is
    free as long as everything fetched so far fits in the buffer; after that, every further loop multiplies the traffic.
    """
    traffic, resident, fits = tile, tile, np.ones(tile.shape, dtype=bool)
    for loop in order:
        multiplied = traffic * trips[loop]
        if loop in indexed_by:
            fits = fits & (multiplied <= half)
            traffic = multiplied
            resident = np.where(fits, traffic, resident)
        else:
            traffic = np.where(fits, traffic, multiplied)
    return traffic, resident


def _ceil(numerator: Any, denominator: Any) -> Any:
    return -(-numerator // denominator)
