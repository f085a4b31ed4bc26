"""Checks of the claims of partial pre-training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bitcycle.analysis.evidence import Check, Outcome, panels, pick, spearman
from bitcycle.analysis.labels import is_float, model_of, schedule_of
from bitcycle.analysis.results import Cell, Results

METHODS = ("full precision", "partial pre-training", "low precision")
PUBLISHED_GAPS = {"ResNet-20": 7.45, "VGG-16": 4.78, "ResNet-34": 10.2, "NCF": 5.9}
"""Points between 32 and 1 bit in table 1; of NCF in percent of hits."""
TARGETS = 100

Curve = list[tuple[float, float]]
"""(iterations or seconds, median accuracy) of trainings of growing length."""


def partial_method(cell: Cell) -> str:
    """One of METHODS."""
    if is_float(cell):
        return METHODS[0]
    split = float(cell.setting("schedule.split", 0.5) or 0) if schedule_of(cell) == "partial_pretrain" else 0.0
    return METHODS[1] if 0 < split < 1 else METHODS[2]


def steps_of(cell: Cell) -> int:
    """Steps of our runs."""
    return int(cell.runs[0].row["total_steps"])


def numbers(cell: Cell, column: str) -> list[float]:
    """A column over the runs of a cell."""
    return [number for run in cell.runs if (number := run.number(column)) is not None]


def seconds_of(cell: Cell) -> float:
    """Median training time of the runs."""
    return statistics.median(numbers(cell, "seconds"))


def phase_steps(cell: Cell) -> tuple[int, int]:
    """Iterations in full and in low precision."""
    total = steps_of(cell)
    split = (
        float(cell.actual("schedule.split", 0.5) or 0)
        if schedule_of(cell) == "partial_pretrain"
        else float(is_float(cell))
    )
    return round(split * total), total - round(split * total)


def curve(cells: Sequence[Cell], method: str, place: Callable[[Cell], float]) -> Curve:
    """Median final metric of a method over the length of training."""
    chosen = [cell for cell in cells if cell.runs and partial_method(cell) == method]
    return sorted((place(cell), statistics.median(numbers(cell, "final"))) for cell in chosen)


def reach(points: Curve, target: float) -> float | None:
    """Where a curve first reaches a target, by linear interpolation; None if it never does.

    >>> reach([(1, 10.0), (2, 20.0)], 15.0), reach([(1, 10.0)], 11.0), reach([(4, 10.0)], 5.0)
    (1.5, None, 4)
    """
    before: tuple[float, float] | None = None
    for x, y in points:
        if y >= target:
            if before is None or y == before[1]:
                return x
            return before[0] + (x - before[0]) * (target - before[1]) / (y - before[1])
        before = (x, y)
    return None


def speedup(cells: Sequence[Cell], place: Callable[[Cell], float]) -> float | None:
    """Harmonic mean of how much earlier partial pre-training reaches a target than low-precision training.

    Over 100 targets from half of the best 1-bit accuracy to the accuracy that both reach (section 4.2).
    """
    low, partial = (curve(cells, method, place) for method in (METHODS[2], METHODS[1]))
    if len(low) < 2 or len(partial) < 2:
        return None
    best = max(value for _, value in low)
    top = min(best, max(value for _, value in partial))
    targets = [best / 2 + (top - best / 2) * index / (TARGETS - 1) for index in range(TARGETS)]
    times = [(reach(low, target), reach(partial, target)) for target in targets]
    ratios = [slow / fast for slow, fast in times if slow and fast]
    return statistics.harmonic_mean(ratios) if ratios else None


def speedups(results: Results, place: Callable[[Cell], float]) -> dict[str, float]:
    """Speedup of each distinct network."""
    found = {}
    for cells in panels(results.cells):
        if (value := speedup(cells, place)) is not None:
            found[model_of(cells[0])] = value
    return found


def accuracy_gaps(results: Results) -> Outcome | None:
    """1-bit networks lose accuracy."""
    gaps: dict[str, float] = {}
    for cells in panels(results.cells):
        ends = [curve(cells, method, steps_of) for method in (METHODS[0], METHODS[2])]
        if all(ends):
            gaps[model_of(cells[0])] = ends[0][-1][1] - ends[1][-1][1]
    if not gaps:
        return None
    words = ", ".join(f"{model} {gap:+.2f}" for model, gap in gaps.items())
    near = all(abs(gap / PUBLISHED_GAPS[model] - 1) <= 0.3 for model, gap in gaps.items() if model in PUBLISHED_GAPS)
    return Outcome(near and len(gaps) == 4, all(gap > 0 for gap in gaps.values()), f"gaps {words}, {results.trials}")


def slower_when_simulated(results: Results) -> Outcome | None:
    """Simulated 1-bit training is slower."""
    ratios: dict[str, float] = {}
    for cells in panels(results.cells):
        speeds = {partial_method(cell): value.mean for cell in cells if (value := cell.value("steps_per_second"))}
        if METHODS[0] in speeds and METHODS[2] in speeds:
            ratios[model_of(cells[0])] = speeds[METHODS[0]] / speeds[METHODS[2]]
    if not ratios:
        return None
    words = ", ".join(f"{model} {ratio:.2f}" for model, ratio in ratios.items())
    return Outcome(
        min(ratios.values()) > 1.05, min(ratios.values()) > 1, f"32-bit over 1-bit speed: {words}, {results.trials}"
    )


def fewer_iterations(results: Results) -> Outcome | None:
    """Partial pre-training needs fewer iterations."""
    found = speedups(results, steps_of)
    if not found:
        return None
    average = statistics.fmean(found.values())
    words = ", ".join(f"{model} {value:.2f}" for model, value in found.items())
    return Outcome(
        1.1 <= average <= 1.6, average > 1, f"speedup in iterations {average:.2f} ({words}), {results.trials}"
    )


def at_least_as_accurate(results: Results) -> Outcome | None:
    """Partial pre-training at every budget."""
    held = []
    for cells in panels(results.cells):
        low, partial = (dict(curve(cells, method, steps_of)) for method in (METHODS[2], METHODS[1]))
        for steps in sorted(set(low) & set(partial)):
            excepted = model_of(cells[0]) == "VGG-16" and steps < 10_000
            held.append(partial[steps] >= low[steps] or (excepted and results.scale == "paper"))
    if not held:
        return None
    return Outcome(all(held), sum(held) > len(held) / 2, f"at {sum(held)} of {len(held)} budgets, {results.trials}")


def faster(model: str, low: float, high: float) -> Check:
    """Speedup of a network in wall-clock time."""

    def check(results: Results) -> Outcome | None:
        cells = [cell for cell in results.done if model_of(cell) == model]
        value = speedup(cells, seconds_of) if cells else None
        return (
            None
            if value is None
            else Outcome(low <= value <= high, value > 1, f"speedup in seconds {value:.2f}, {results.trials}")
        )

    return check


def time_gains_more(results: Results) -> Outcome | None:
    """The speedup in time exceeds that in iterations."""
    times, iterations = (list(speedups(results, place).values()) for place in (seconds_of, steps_of))
    if not times or not iterations:
        return None
    means = statistics.fmean(times), statistics.fmean(iterations)
    return Outcome(
        means[0] > means[1],
        means[0] > means[1],
        f"{means[0]:.2f} in seconds, {means[1]:.2f} in iterations, {results.trials}",
    )


def budgets(results: Results) -> dict[int, list[tuple[float, float]]]:
    """Budget -> (share of full precision, median accuracy) of its splits into two phases."""
    found: dict[int, list[tuple[float, float]]] = {}
    for cell in pick(results.cells):
        full, low = phase_steps(cell)
        if full and low:
            budget = round((full + low) / 10) * 10
            found.setdefault(budget, []).append((full / (full + low), statistics.median(numbers(cell, "final"))))
    return {budget: sorted(values) for budget, values in sorted(found.items()) if len(values) > 1}


def even_split_is_near_best(results: Results) -> Outcome | None:
    """The even split loses little at every budget that has one."""
    losses = []
    for values in budgets(results).values():
        even = [value for share, value in values if abs(share - 0.5) < 0.01]
        if even:
            losses.append(max(value for _, value in values) - even[0])
    if not losses:
        return None
    return Outcome(
        max(losses) <= 1.0,
        max(losses) <= 2.0,
        f"best minus even at most {max(losses):.2f} points at {len(losses)} budgets, {results.trials}",
    )


def short_budgets_favour_full_precision(results: Results) -> Outcome | None:
    """The best share of full precision falls with the budget."""
    best = {budget: max(values, key=lambda pair: pair[1])[0] for budget, values in budgets(results).items()}
    rank = spearman(list(best), list(best.values()))
    if rank is None:
        return None
    shares = list(best.values())
    ends = f"{shares[0]:.2f} at {min(best)} and {shares[-1]:.2f} at {max(best)} iterations"
    words = f"best share {ends}, rank correlation {rank:+.2f}"
    return Outcome(shares[0] > 0.5 > shares[-1], rank < 0, f"{words}, {results.trials}")


CHECKS: dict[str, Check] = {
    "partial/table1-c1": accuracy_gaps,
    "partial/table2-c1": slower_when_simulated,
    "partial/fig1-c1": fewer_iterations,
    "partial/fig1-c2": at_least_as_accurate,
    "partial/fig2-c1": faster("ResNet-20", 1.14, 1.45),
    "partial/fig2-c2": faster("VGG-16", 1.13, 1.42),
    "partial/fig2-c3": faster("ResNet-34", 1.18, 1.58),
    "partial/fig2-c4": faster("NCF", 1.31, 1.98),
    "partial/fig2-c5": time_gains_more,
    "partial/fig3-c1": even_split_is_near_best,
    "partial/fig3-c2": short_budgets_favour_full_precision,
}
UNCHECKED: dict[str, str] = {}
