"""Functions that claims refer to: claims computed from formulas, and statistics of several runs of one seed."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Optional

from bitcycle.reproduction.analysis import labels
from bitcycle.reproduction.analysis.cells import Cell, Run
from bitcycle.reproduction.analysis.gain import mean_gain, slope_of_gain
from bitcycle.schedule import SUITE, Schedule, schedule
from bitcycle.schedule.gated import Dfq

STEPS = 64_000
"""Number of steps in formulas of the papers."""
COARSE = 6_400
"""Length at which costs are precise enough to order schedules, in a tenth of the time."""
Computed = tuple[bool, str]
"""Whether a computed claim holds, and the numbers."""


# Formulas


def relative_cost(bound: Schedule) -> float:
    """Bit operations of a schedule relative to static q_max, for a fully quantized network: the mean of w a + w g + a g over
    the steps, divided by its value at static q_max."""
    total = sum((w * a + w * g + a * g) * steps for (w, a, g), steps in bound.run_lengths)
    w, a, g = bound.reference
    return total / (bound.length.total_steps * (w * a + w * g + a * g))


@lru_cache
def cost_of(name: str, q_min: int = 3, q_max: int = 8, cycles: int = 8, steps: int = COARSE) -> float:
    """The relative cost of a schedule."""
    return relative_cost(schedule(name, q_min=q_min, q_max=q_max, cycles=cycles, total_steps=steps))


def schedule_groups(options: Mapping[str, float]) -> Computed:
    """The costs of the groups are ordered: Large < Medium < Small < static."""
    groups = [[cost_of(name) for name in members] for members in labels.SAVINGS_GROUPS.values()]
    ordered = all(max(low) < min(high) for low, high in pairwise([*groups, [1.0]]))
    words = ", ".join(f"{name} {min(cost):.3f} to {max(cost):.3f}" for name, cost in zip(labels.SAVINGS_GROUPS, groups))
    return ordered, f"relative costs at 3 to 8 bits, 8 cycles: {words}"


def _bits(name: str, cycles: int) -> list[int]:
    bound = schedule(name, q_min=3, q_max=8, cycles=cycles, total_steps=COARSE)
    return [precision.weight for precision, _ in bound.run_lengths]


def schedule_bounds(options: Mapping[str, float]) -> Computed:
    """Every schedule stays within its bounds and ends at q_max."""
    every = [_bits(name, cycles) for name in SUITE for cycles in (2, 8)]
    held = [bits[-1] == 8 and min(bits) >= 3 and max(bits) <= 8 for bits in every]
    return all(held), f"{sum(held)} of {len(held)} schedules with 2 and 8 cycles"


def cosine_shape(options: Mapping[str, float]) -> Computed:
    """FW(3,8) takes all values and restarts in each of eight cycles."""
    bits = _bits("CR", 8)
    restarts = 1 + sum(later < earlier for earlier, later in pairwise(bits))
    holds = set(bits) == set(range(3, 9)) and restarts == 8
    return holds, f"values {min(bits)} to {max(bits)}, {restarts} cycles"


def cosine_savings(options: Mapping[str, float]) -> Computed:
    """The savings of the cosine schedule with 32 cycles are those given by the paper's formula."""
    bounds = {word: [int(bits) for bits in word.split("-")] for word in options}
    ours = {word: 100 * (1 - cost_of("CR", low, high, 32, STEPS)) for word, (low, high) in bounds.items()}
    holds = all(abs(ours[word] - percent) <= 0.1 for word, percent in options.items())
    return holds, "savings " + ", ".join(f"{word}: {saved:.2f} %" for word, saved in ours.items())


def gate_share(options: Mapping[str, float]) -> Computed:
    """The MACs of a gate are below 0.5 % of those of its block, in ResNets on 32 x 32 images."""
    gates = Dfq(family="resnet")
    (hidden, embedding, state), count = gates.sizes, len(gates.pairs)
    shares = []
    for channels, side in ((16, 32), (32, 16), (64, 8)):
        gate = channels * hidden + hidden * embedding + 4 * state * (embedding + state) + state * count
        shares.append(gate / (2 * 9 * channels**2 * side**2))
    words = f"{100 * min(shares):.3f} to {100 * max(shares):.3f} % of the MACs of a block"
    return max(shares) < 0.005, words


COMPUTED: dict[str, Callable[[Mapping[str, float]], Computed]] = {
    function.__name__: function
    for function in (schedule_groups, schedule_bounds, cosine_shape, cosine_savings, gate_share)
}

# Statistics of several runs of one seed

Curve = list[tuple[float, float]]
"""(iterations or seconds, metric) of runs of increasing length."""
Length = Callable[[Run], Optional[float]]
"""How the length of a run is measured."""
TARGETS = 100


def runs_of(cells: Iterable[Cell], seed: str) -> list[Run]:
    """The runs of a seed, without duplicates."""
    return list({run.row["hash"]: run for cell in cells for run in cell.runs if run.row["seed"] == seed}.values())


def reach(points: Curve, target: float) -> float | None:
    """Where a curve first reaches a target, by linear interpolation; None if it never does.

    >>> reach([(1, 10.0), (2, 20.0)], 15.0), reach([(1, 10.0)], 11.0), reach([(4, 10.0)], 5.0)
    (1.5, None, 4)
    """
    index = next((index for index, (_, y) in enumerate(points) if y >= target), None)
    if not index:
        return None if index is None else points[0][0]
    (x, y), (after, above) = points[index - 1 : index + 1]
    return x + (after - x) * (target - y) / (above - y)


def speedup(fast: Curve, slow: Curve) -> float | None:
    """Harmonic mean of the speedup of one method over another to 100 target accuracies, from half of the slow method's best to
    the highest that both reach (partial pre-training, section 4.2)."""
    if len(slow) < 2 or len(fast) < 2:
        return None
    best = max(value for _, value in slow)
    top = min(best, max(value for _, value in fast))
    targets = [best / 2 + (top - best / 2) * index / (TARGETS - 1) for index in range(TARGETS)]
    times = [(reach(slow, target), reach(fast, target)) for target in targets]
    ratios = [late / early for late, early in times if late and early]
    return statistics.harmonic_mean(ratios) if ratios else None


def iterations(run: Run) -> float | None:
    """The number of iterations of a run."""
    return run.number("total_steps")


training_seconds: Length = attrgetter("training_seconds")


def log_speedup(length: Length, ours: Sequence[Cell], theirs: Sequence[Cell], seed: str) -> float | None:
    """Logarithm of the speedup in iterations or seconds."""
    several = (runs_of(cells, seed) for cells in (ours, theirs))
    found = speedup(*(sorted((length(run) or 0.0, run.number("final") or 0.0) for run in runs) for runs in several))
    return math.log(found) if found else None


def speedup_excess(*arms: Any) -> float | None:
    """Log speedup in seconds minus log speedup in iterations."""
    seconds, steps = (log_speedup(length, *arms) for length in (training_seconds, iterations))
    return None if seconds is None or steps is None else seconds - steps


def cost_to_reach(ours: Sequence[Cell], theirs: Sequence[Cell], seed: str) -> float | None:
    """Mean log ratio of the costs (theirs to ours) of reaching 90, 95 and 98 % of the lower of the two best accuracies."""
    pairs = [run for cells in (ours, theirs) for run in runs_of(cells, seed)[:1]]
    if len(pairs) < 2 or not all(run.curve for run in pairs):
        return None
    lowest = min(max(run.curve["evaluations"]["value"]) for run in pairs)
    shares = (0.9, 0.95, 0.98)
    costs = [(_first_cost(pairs[0], share * lowest), _first_cost(pairs[1], share * lowest)) for share in shares]
    gaps = [math.log(theirs / own) for own, theirs in costs if own and theirs]
    return statistics.fmean(gaps) if len(gaps) == len(shares) else None


def _first_cost(run: Run, target: float) -> float | None:
    found = run.curve["evaluations"]
    return next((cost for cost, value in zip(found["gbitops"], found["value"]) if value >= target), None)


PER_SEED: dict[str, Callable[[Sequence[Cell], Sequence[Cell], str], Optional[float]]] = {
    "speedup_iterations": partial(log_speedup, iterations),
    "speedup_training_seconds": partial(log_speedup, training_seconds),
    "speedup_excess": speedup_excess,
    "cost_to_reach": cost_to_reach,
    "mean_gain": mean_gain,
    "slope_of_gain": slope_of_gain,
}
"""Name -> statistic of one seed, from the cells of both arms."""
