"""Checks of the claims of Better Schedules."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bitcycle.analysis.evidence import (
    Check,
    Outcome,
    Test,
    described,
    differences,
    exact,
    having,
    mean,
    panels,
    pick,
    spearman,
    with_schedule,
)
from bitcycle.analysis.labels import GROUPS, aggregation_of, dataset_of, model_of, schedule_of
from bitcycle.analysis.results import Cell, Results, Value
from bitcycle.schedule import SUITE, schedule

LARGE, MEDIUM, SMALL = GROUPS["Large"], GROUPS["Medium"], GROUPS["Small"]
METRIC = "final"


def on(*datasets: str) -> Test:
    """Whether the paper's data of a cell is one of these."""
    return lambda cell: dataset_of(cell) in datasets


CIFAR, IMAGENET = on("CIFAR-10", "CIFAR-100"), on("ImageNet")
ARXIV, PRODUCTS = on("OGBN-Arxiv"), on("OGBN-Products")
PTB, XNLI, VOC = on("Penn Treebank"), on("XNLI"), on("PascalVOC 2012")


def relative_cost(name: str, q_min: int = 3, q_max: int = 8, cycles: int = 8) -> float:
    """Bit operations of a schedule relative to static q_max, forward and both backward products."""
    bound = schedule(name, q_min=q_min, q_max=q_max, cycles=cycles, total_steps=64_000)
    costs = [(p.weight * p.activation + 2 * p.weight * p.gradient, n) for p, n in bound.run_lengths]
    return sum(cost * n for cost, n in costs) / (64_000 * 3 * q_max**2)


def gaps(results: Results, names: Sequence[str], where: Test, q_max: int | None = None) -> list[Value]:
    """Metric of schedules minus that of static precision with the same q_max, for each panel."""
    found: list[Value] = []
    for cells in panels(pick(results.cells, where)):
        for high in (6, 8) if q_max is None else (q_max,):
            same = pick(cells, having("schedule.q_max", high))
            found += differences(pick(same, with_schedule(*names)), pick(same, with_schedule("static")), METRIC)
    return found


def costs_in_groups(results: Results) -> Outcome:
    """Large < Medium < Small < static in cost."""
    groups = [[relative_cost(name) for name in group] for group in (LARGE, MEDIUM, SMALL)]
    ordered = max(groups[0]) < min(groups[1]) and max(groups[1]) < min(groups[2]) and max(groups[2]) < 1
    words = [f"{min(costs):.3f} to {max(costs):.3f}" for costs in groups]
    return exact(
        ordered, f"relative costs at 3 to 8 bits, n = 8: Large {words[0]}, Medium {words[1]}, Small {words[2]}"
    )


def bounds_are_kept(results: Results) -> Outcome:
    """Every schedule ends at q_max and stays within its bounds."""
    held = []
    for name in SUITE:
        for cycles in (2, 8):
            bound = schedule(name, q_min=3, q_max=8, cycles=cycles, total_steps=6400)
            bits = [precision.weight for precision, _ in bound.run_lengths]
            held.append(bits[-1] == 8 and min(bits) >= 3 and max(bits) <= 8)
    return exact(all(held), f"{sum(held)} of {len(held)} schedules with 2 and 8 cycles")


def share_at_least_static(where: Test, share: float, slack: float, reduced: Callable[[list[Value]], bool]) -> Check:
    """Most schedules reach static."""

    def check(results: Results) -> Outcome | None:
        found = gaps(results, tuple(SUITE), where)
        if not found:
            return None
        reached = sum(gap.mean >= -slack for gap in found) / len(found)
        return Outcome(reached >= share, reduced(found), f"{reached:.0%} of {len(found)} cells; {described(found)}")

    return check


def group_against_static(
    names: Sequence[str],
    where: Test,
    paper: Callable[[list[Value]], bool],
    reduced: Callable[[list[Value]], bool],
    q_max: int | None = None,
) -> Check:
    """The differences of a group of schedules to static precision."""

    def check(results: Results) -> Outcome | None:
        found = gaps(results, names, where, q_max)
        return Outcome(paper(found), reduced(found), described(found)) if found else None

    return check


def group_order(
    names: Sequence[str],
    where: Test,
    paper: Callable[[list[Value]], bool],
    better_than: Sequence[str],
    worse_than: Sequence[str] = (),
    q_max: int | None = None,
) -> Check:
    """As `group_against_static`; at smaller scales: better than one group, and not better than another."""

    def check(results: Results) -> Outcome | None:
        found, low = gaps(results, names, where, q_max), gaps(results, better_than, where, q_max)
        high = gaps(results, worse_than, where, q_max) if worse_than else []
        if not found or not low or (worse_than and not high):
            return None
        ordered = mean(low) <= mean(found) and (not high or mean(found) <= mean(high))
        words = f"{described(found)}; Large {mean(low):+.2f}" + (f", Small {mean(high):+.2f}" if high else "")
        return Outcome(paper(found), ordered, words)

    return check


def large_below_cosine(results: Results) -> Outcome | None:
    """RR and RTH are less accurate than CR on CIFAR."""
    found = []
    for cells in panels(pick(results.cells, CIFAR)):
        for high in (6, 8):
            same = pick(cells, having("schedule.q_max", high))
            gap = differences(pick(same, with_schedule(*LARGE)), pick(same, with_schedule("CR")), METRIC)
            if gap:
                found.append(Value(mean(gap), gap[0].std, min(value.n for value in gap)))
    if not found:
        return None
    below = sum(gap.mean < 0 for gap in found) / len(found)
    return Outcome(
        below >= 2 / 3, mean(found) < 0, f"negative in {below:.0%} of {len(found)} panels; {described(found)}"
    )


def cost_and_accuracy(results: Results) -> Outcome | None:
    """Accuracy grows with cost over the schedules of each panel."""
    each, pooled = [], ([], [])  # type: tuple[list[float], tuple[list[float], list[float]]]
    for cells in panels(results.cells):
        for high in (6, 8):
            same = pick(cells, having("schedule.q_max", high), with_schedule(*SUITE))
            pairs = [(relative_cost(schedule_of(cell)), value.mean) for cell in same if (value := cell.value(METRIC))]
            rank = spearman([cost for cost, _ in pairs], [value for _, value in pairs])
            if rank is not None:
                each.append(rank)
                centre = statistics.fmean(value for _, value in pairs)
                pooled[0].extend(cost for cost, _ in pairs)
                pooled[1].extend(value - centre for _, value in pairs)
    total = spearman(*pooled)
    if total is None:
        return None
    high_enough = sum(rank > 0.3 for rank in each) / len(each)
    return Outcome(
        high_enough >= 0.75,
        total > 0,
        f"pooled rank correlation {total:+.2f} over {len(each)} panels, above 0.3 in {high_enough:.0%} of them",
    )


def six_against_eight(
    where: Test, margin: float = 0.0, higher_is_better: bool = True, all_schedules: bool = False
) -> Check:
    """q_max = 6 is worse than q_max = 8."""

    def check(results: Results) -> Outcome | None:
        found: list[Value] = []
        for cells in panels(pick(results.cells, where)):
            for name in ("static", *SUITE):
                same = pick(cells, with_schedule(name))
                found += differences(
                    pick(same, having("schedule.q_max", 8)), pick(same, having("schedule.q_max", 6)), METRIC
                )
        if not found:
            return None
        sign = 1 if higher_is_better else -1
        paper = all(sign * gap.mean > 0 for gap in found) if all_schedules else sign * mean(found) > margin
        return Outcome(paper, sign * mean(found) > 0, f"q_max = 8 minus 6: {described(found)}")

    return check


def gain_of_etv(results: Results) -> Outcome | None:
    """ETV gains at a quarter less cost."""
    found = gaps(results, ("ETV",), VOC, 8)
    if not found:
        return None
    saved = 100 * (1 - relative_cost("ETV", 5, 8))
    return Outcome(
        mean(found) > 0.3 and 20 <= saved <= 32, mean(found) > 0, f"{described(found)}; saving by formula {saved:.1f} %"
    )


def aggregation_gap(results: Results, where: Test) -> Value | None:
    """FP-Agg minus Q-Agg at static 8 bits."""
    static = pick(results.cells, where, with_schedule("static"), having("schedule.q_max", 8))
    full = [cell for cell in static if aggregation_of(cell) == "FP-Agg"]
    quantized = [cell for cell in static if aggregation_of(cell) == "Q-Agg"]
    if not full or not quantized:
        return None
    values = [cell.final("validation_accuracy") or cell.value(METRIC) for cell in (full[0], quantized[0])]
    return values[0] - values[1] if values[0] and values[1] else None


def aggregation_on_arxiv(results: Results) -> Outcome | None:
    """FP-Agg beats Q-Agg on Arxiv."""
    gap = aggregation_gap(results, ARXIV)
    return Outcome(0.2 <= gap.mean <= 0.8, gap.mean > 0, described([gap])) if gap else None


def aggregation_on_products(results: Results) -> Outcome | None:
    """The gap is smaller on Products."""
    arxiv, products = aggregation_gap(results, ARXIV), aggregation_gap(results, PRODUCTS)
    if arxiv is None or products is None:
        return None
    words = f"Products {products.mean:+.2f}, Arxiv {arxiv.mean:+.2f}, n = {products.n}"
    return Outcome(abs(products.mean) < 0.3, abs(products.mean) < abs(arxiv.mean), words)


def large_on_products(results: Results) -> Outcome | None:
    """Large schedules halve the cost and gain accuracy."""
    found = gaps(results, LARGE, PRODUCTS)
    if not found:
        return None
    factor = 1 / statistics.fmean(relative_cost(name) for name in LARGE)
    words = f"{described(found)}; static costs {factor:.2f} times as much by formula at 3 to 8 bits"
    return Outcome(0 <= mean(found) <= 0.8 and factor > 1.8, mean(found) >= 0, words)


def perplexity_of(results: Results, *names: str) -> float | None:
    """Mean perplexity on Penn Treebank at q_max = 8."""
    values = [
        value.mean
        for cell in pick(results.cells, PTB, with_schedule(*names), having("schedule.q_max", 8))
        if (value := cell.value(METRIC))
    ]
    return statistics.fmean(values) if values else None


def large_on_ptb(results: Results) -> Outcome | None:
    """Large schedules improve perplexity at much lower cost."""
    large, static = perplexity_of(results, *LARGE), perplexity_of(results, "static")
    if large is None or static is None:
        return None
    ratio = statistics.fmean(relative_cost(name, 5, 8, 2) for name in LARGE)
    words = f"perplexity {large:.2f} against {static:.2f}; cost ratio by formula {ratio:.3f}"
    return Outcome(0.55 <= ratio <= 0.75 and large <= static + 0.3, large <= 1.01 * static, words)


def cosine_on_ptb(results: Results) -> Outcome | None:
    """CR matches static at about 0.77 of the cost."""
    cosine, static = perplexity_of(results, "CR"), perplexity_of(results, "static")
    if cosine is None or static is None:
        return None
    costs = [statistics.fmean(relative_cost(name, 5, 8, 2) for name in LARGE), relative_cost("CR", 5, 8, 2)]
    words = f"perplexity {cosine:.2f} against {static:.2f}; costs Large {costs[0]:.3f}, CR {costs[1]:.3f}"
    return Outcome(abs(cosine / static - 1) <= 0.01, costs[0] < costs[1] < 1, words)


def large_worst_on_xnli(results: Results) -> Outcome | None:
    """Large schedules are worse than Medium ones and static."""
    large, medium = gaps(results, LARGE, XNLI, 8), gaps(results, MEDIUM, XNLI, 8)
    if not large or not medium:
        return None
    holds = mean(large) < mean(medium) and mean(large) < 0
    return Outcome(
        holds, holds, f"Large {mean(large):+.2f}, Medium {mean(medium):+.2f} against static, n = {large[0].n}"
    )


def medium_on_xnli(results: Results) -> Outcome | None:
    """Medium schedules match static at a quarter less cost."""
    large, medium = gaps(results, LARGE, XNLI, 8), gaps(results, MEDIUM, XNLI, 8)
    if not large or not medium:
        return None
    saved = 100 * (1 - statistics.fmean(relative_cost(name, 5, 8, 2) for name in MEDIUM))
    words = f"{described(medium)}; saving by formula {saved:.1f} %; Large {mean(large):+.2f}"
    return Outcome(abs(mean(medium)) <= 0.5 and 20 <= saved <= 32, mean(large) < mean(medium), words)


def small_on_xnli(results: Results) -> Outcome | None:
    """Small schedules gain up to two points."""
    found = gaps(results, SMALL, XNLI, 8)
    if not found:
        return None
    most = max(gap.mean for gap in found)
    return Outcome(0.2 <= most <= 2.5, mean(found) > 0, described(found))


def window_of(cell: Cell) -> tuple[float, float]:
    """Where the window of low precision begins and ends, as the sweep says: epochs, steps or shares."""
    if schedule_of(cell) != "deficit":
        return 0.0, 0.0
    return float(cell.setting("schedule.start", 0) or 0), float(cell.setting("schedule.end", 0.25))


def probes(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with a window of fixed length at several places in runs of one length; the others have an initial window."""
    later = [cell for cell in cells if window_of(cell)[0] > 0]
    if not later:
        return []
    start, end = window_of(later[0])
    whole = [later[0].setting(key) for key in ("training.epochs", "training.steps")]
    return [
        cell
        for cell in cells
        if abs(window_of(cell)[1] - window_of(cell)[0] - (end - start)) < 1e-9
        and [cell.setting(key) for key in ("training.epochs", "training.steps")] == whole
    ]


def longer_is_worse(results: Results) -> Outcome | None:
    """Accuracy falls with the length of an initial window."""
    initial = [cell for cell in results.done if window_of(cell)[0] == 0 and cell not in probes(results.done)]
    pairs = [(window_of(cell)[1], value.mean) for cell in initial if (value := cell.value(METRIC))]
    rank = spearman([end for end, _ in pairs], [value for _, value in pairs])
    return (
        None
        if rank is None
        else Outcome(
            rank <= -0.8, rank < 0, f"rank correlation {rank:+.2f} over {len(pairs)} lengths, {results.trials}"
        )
    )


def earliest_is_worst(results: Results) -> Outcome | None:
    """The window at the start hurts most."""
    windows = {window_of(cell)[0]: value.mean for cell in probes(results.done) if (value := cell.value(METRIC))}
    if 0.0 not in windows or len(windows) < 2:
        return None
    later = [value for start, value in windows.items() if start > 0]
    words = f"{windows[0.0]:.2f} at the start against {statistics.fmean(later):.2f} later, {results.trials}"
    return Outcome(windows[0.0] < min(later), windows[0.0] < statistics.fmean(later), words)


def table1_values(results: Results, model: str) -> dict[tuple[float, float], Value]:
    """Window of table 1 -> accuracy of a network; (0, 0) without window."""
    cells = pick(results.cells, lambda cell: model_of(cell) == model)
    return {window_of(cell): value for cell in cells if (value := cell.value(METRIC))}


def long_windows_cost(results: Results) -> Outcome | None:
    """On CIFAR-10 long initial windows cost accuracy."""
    values = table1_values(results, "ResNet-74")
    wanted = [(0.0, 0.0), (0.0, 128000.0), (0.0, 256000.0)]
    if any(window not in values for window in wanted):
        return None
    none, middle, longest = (values[window] for window in wanted)
    losses = [none - middle, none - longest]
    paper = 0.5 <= losses[1].mean <= 1.5 and 0.3 <= losses[0].mean <= 1.0
    return Outcome(
        paper,
        losses[1].mean > 0,
        f"losses of {losses[0].mean:+.2f} (128K) and {losses[1].mean:+.2f} (256K), n = {min(loss.n for loss in losses)}",
    )


def early_window_costs(results: Results) -> Outcome | None:
    """The same window hurts more at the start than later."""
    values = {
        window: value
        for window, value in table1_values(results, "ResNet-74").items()
        if window[1] - window[0] == 128000
    }
    if (0.0, 128000.0) not in values or len(values) < 2:
        return None
    first = values.pop((0.0, 128000.0))
    later = [value - first for value in values.values()]
    return Outcome(all(gap.mean > 0 for gap in later), mean(later) > 0, f"later minus first: {described(later)}")


def windows_on_imagenet(results: Results) -> Outcome | None:
    """On ImageNet accuracy falls with the initial window."""
    values = table1_values(results, "ResNet-18")
    if any(window not in values for window in ((0.0, 0.0), (0.0, 25.0), (0.0, 100.0))):
        return None
    losses = [values[0.0, 0.0] - values[0.0, end] for end in (25.0, 100.0)]
    paper = 0.2 <= losses[0].mean <= 0.9 and 0.4 <= losses[1].mean <= 1.3
    return Outcome(
        paper,
        losses[1].mean > 0,
        f"losses of {losses[0].mean:+.2f} (25 epochs) and {losses[1].mean:+.2f} (100), n = {min(loss.n for loss in losses)}",
    )


def _negative(found: list[Value]) -> bool:
    return mean(found) < 0


CHECKS: dict[str, Check] = {
    "better/fig2-c1": costs_in_groups,
    "better/fig2-c2": bounds_are_kept,
    "better/fig3-c1": share_at_least_static(CIFAR, 0.8, 0.1, lambda found: mean(found) >= -0.3),
    "better/fig3-c2": large_below_cosine,
    "better/fig3-c3": cost_and_accuracy,
    "better/fig3-c4": group_against_static(
        LARGE, IMAGENET, lambda found: all(-2.0 <= gap.mean <= -0.2 for gap in found), _negative
    ),
    "better/fig3-c5": group_against_static(
        SMALL, IMAGENET, lambda found: mean(found) > 0, lambda found: mean(found) >= -0.2
    ),
    "better/fig3-c6": six_against_eight(lambda cell: IMAGENET(cell) and model_of(cell) == "ResNet-34", margin=0.3),
    "better/fig3-c7": group_order(MEDIUM, IMAGENET, lambda found: -1.0 <= mean(found) <= 0.2, LARGE, SMALL),
    "better/fig4-c1": six_against_eight(VOC, all_schedules=True),
    "better/fig4-c2": group_against_static(
        tuple(SUITE), VOC, lambda found: min(gap.mean for gap in found) >= -0.3, lambda found: mean(found) >= -0.3, 8
    ),
    "better/fig4-c3": gain_of_etv,
    "better/fig5-c1": aggregation_on_arxiv,
    "better/fig5-c2": aggregation_on_products,
    "better/fig6-c1": group_against_static(LARGE, ARXIV, lambda found: -2.0 <= mean(found) <= -0.5, _negative),
    "better/fig6-c2": group_against_static(
        SMALL, ARXIV, lambda found: all(gap.mean >= -(gap.std or 0) for gap in found), lambda found: mean(found) > 0
    ),
    "better/fig6-c3": group_order(
        MEDIUM, ARXIV, lambda found: sum(abs(gap.mean) <= 0.4 for gap in found) > len(found) / 2, LARGE
    ),
    "better/fig6-c4": large_on_products,
    "better/fig6-c5": share_at_least_static(
        PRODUCTS, 0.8, 0.0, lambda found: sum(gap.mean > 0 for gap in found) > len(found) / 2
    ),
    "better/fig7-c1": six_against_eight(PTB, higher_is_better=False),
    "better/fig7-c2": large_on_ptb,
    "better/fig7-c3": cosine_on_ptb,
    "better/fig7-c4": large_worst_on_xnli,
    "better/fig7-c5": medium_on_xnli,
    "better/fig7-c6": small_on_xnli,
    "better/fig7-c7": six_against_eight(XNLI),
    "better/fig8-c1": longer_is_worse,
    "better/fig8-c2": earliest_is_worst,
    "better/table1-c1": long_windows_cost,
    "better/table1-c2": early_window_costs,
    "better/table1-c3": windows_on_imagenet,
}
UNCHECKED: dict[str, str] = {}
