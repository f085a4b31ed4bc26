"""Checks of the claims of CPT."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

from bitcycle.analysis.claims_better import relative_cost
from bitcycle.analysis.evidence import (
    Check,
    Outcome,
    described,
    differences,
    exact,
    having,
    mean,
    panels,
    pick,
    spearman,
    with_method,
    with_schedule,
)
from bitcycle.analysis.labels import backward_bits, forward_bits, highest, method_of, model_of, schedule_of
from bitcycle.analysis.landscape import RADIUS, common_rises
from bitcycle.analysis.results import Cell, Results, Value
from bitcycle.schedule import schedule

METRIC = "best"
STEPS = 64_000
FPGA = "The design of the FPGA is not published; no cost model stands for it."


def pairs(results: Results, method: str = "CPT", base: str = "SBM") -> list[Value]:
    """Each cell of a method minus the one of another with the same upper bound, for each panel."""
    found: list[Value] = []
    for cells in panels(results.cells):
        for cell in pick(cells, with_method(method)):
            found += differences(
                [cell], [other for other in pick(cells, with_method(base)) if bounds(other) == bounds(cell)], METRIC
            )
    return found


def bounds(cell: Cell) -> tuple[int, int]:
    """Most bits forward and backward."""
    return highest(forward_bits(cell)), highest(backward_bits(cell))


def against_static(
    paper: Callable[[list[Value]], bool], reduced: Callable[[list[Value]], bool], method: str = "CPT", base: str = "SBM"
) -> Check:
    """A method against static precision in all cells."""

    def check(results: Results) -> Outcome | None:
        found = pairs(results, method, base)
        return Outcome(paper(found), reduced(found), described(found)) if found else None

    return check


def share(found: list[Value], holds: Callable[[float], bool]) -> float:
    """Share of differences of which something holds."""
    return sum(holds(gap.mean) for gap in found) / len(found)


def formula_savings(wanted: dict[tuple[int, int], float]) -> Check:
    """Savings of the cosine schedule with 32 cycles, as computed, against what the formula gives for the paper's cells."""

    def check(results: Results) -> Outcome:
        ours = {b: 100 * (1 - relative_cost("CR", *b, 32)) for b in wanted}
        holds = all(abs(ours[b] - percent) <= 0.1 for b, percent in wanted.items())
        words = ", ".join(f"{low}-{high}: {ours[low, high]:.2f} %" for low, high in wanted)
        return exact(holds, f"savings {words}")

    return check


def first_stage(results: Results, bits: int, rate: float) -> list[Cell]:
    """Cells of table 1 with a precision and learning rate of the first stage."""
    return pick(
        results.cells,
        lambda cell: (cell.setting("schedule.stages") or [0])[0] == bits,
        lambda cell: abs(float(cell.setting("training.learning_rate.initial", 0.1)) - rate) < 1e-9,
    )


def stage_gaps(results: Results, rate: float) -> list[Value]:
    """Full precision minus 4 bits in the first stage, at a learning rate, for each distinct network."""
    found = []
    for full in first_stage(results, 32, rate):
        low = [cell for cell in first_stage(results, 4, rate) if model_of(cell) == model_of(full)]
        found += differences([full], low, METRIC)
    return list(dict.fromkeys(found))


def full_beats_low(results: Results) -> Outcome | None:
    """At rate 0.1 full precision leads."""
    found = stage_gaps(results, 0.1)
    return Outcome(min(gap.mean for gap in found) > 0.3, mean(found) > 0, described(found)) if found else None


def low_beats_full(results: Results) -> Outcome | None:
    """At rate 0.01 4 bits lead."""
    found = [Value(-gap.mean, gap.std, gap.n) for gap in stage_gaps(results, 0.01)]
    return Outcome(min(gap.mean for gap in found) > 0.5, mean(found) > 0, described(found)) if found else None


def gap_falls_with_rate(results: Results) -> Outcome | None:
    """The lead of full precision shrinks as the rate falls."""
    rates = (0.1, 0.06, 0.03, 0.01)
    found = [stage_gaps(results, rate) for rate in rates]
    if not all(found):
        return None
    means = [mean(gaps) for gaps in found]
    rank = spearman(rates, means)
    words = ", ".join(f"{rate:g}: {gap:+.2f}" for rate, gap in zip(rates, means))
    return Outcome(
        rank is not None and rank > 0.7, means[0] > means[-1], f"full minus 4 bits by rate {words}, n = {found[0][0].n}"
    )


def progressive_against_static(results: Results) -> Outcome | None:
    """Progressive precision is slightly better than static."""
    found = differences(
        pick(results.cells, with_schedule("pfq_manual")), pick(results.cells, with_schedule("static")), METRIC
    )
    if not found:
        return None
    noise = found[0].std or 0
    return Outcome(0 <= found[0].mean <= 0.8 and found[0].n >= 3, found[0].mean >= -noise, described(found))


def cyclic_against_static(results: Results) -> Outcome | None:
    """CPT is better at 36.7 % less cost."""
    found = differences(pick(results.cells, with_schedule("CR")), pick(results.cells, with_schedule("static")), METRIC)
    if not found:
        return None
    saved = 100 * (1 - relative_cost("CR", 3, 8, 32))
    paper = found[0].mean > 0.4 and found[0].n >= 3 and abs(saved - 36.67) <= 0.1
    return Outcome(paper, found[0].mean > 0, f"{described(found)}; saving by formula {saved:.2f} %")


def wider_minima(results: Results) -> Outcome | None:
    """The loss rises less around the networks of progressive precision and CPT than around that of static precision."""
    cells = [pick(results.cells, with_schedule(name))[:1] for name in ("static", "pfq_manual", "CR")]
    found = common_rises([cell for one in cells for cell in one])
    if not all(cells) or not found:
        return None
    means = [statistics.fmean(column) for column in zip(*found)]
    paper = len(found) >= 3 and all(static > max(others) for static, *others in found)
    words = ", ".join(f"{name} {mean:.3g}" for name, mean in zip(("static", "progressive", "CPT"), means))
    return Outcome(
        paper, means[2] < means[0], f"loss rise at radius {RADIUS:g}: {words}; {_pairs(found)}, {results.trials}"
    )


def wider_minima_of_both(results: Results) -> Outcome | None:
    """The same for two networks after static training and CPT."""
    gaps: list[float] = []
    words = []
    for cells in panels(results.cells):
        both = [pick(cells, with_schedule(name))[:1] for name in ("static", "CR")]
        found = common_rises([cell for one in both for cell in one])
        if all(both) and found:
            static, cyclic = (statistics.fmean(column) for column in zip(*found))
            gaps.append(static - cyclic)
            words.append(f"{model_of(cells[0])} static {static:.3g}, CPT {cyclic:.3g}, {_pairs(found)}")
    if not gaps:
        return None
    paper = len(gaps) == 2 and min(gaps) > 0
    measured = f"loss rise at radius {RADIUS:g}: {'; '.join(words)}, {results.trials}"
    return Outcome(paper, statistics.fmean(gaps) > 0, measured)


def _pairs(found: list[list[float]]) -> str:
    return f"{len(found)} {'pair' if len(found) == 1 else 'pairs'} of directions"


def range_test_bounds(results: Results) -> Outcome | None:
    """Bounds of 3 and 4 bits."""
    found = {model_of(cell): value for cell in results.done if (value := cell.value("q_min"))}
    deep, mobile = found.get("ResNet-152"), found.get("MobileNetV2")
    if deep is None or mobile is None:
        return None
    words = f"ResNet-152 {deep.mean:g}, MobileNetV2 {mobile.mean:g} bits, n = {deep.n}"
    return Outcome(deep.mean == 3 and mobile.mean == 4, mobile.mean > deep.mean, words)


def spread_shrinks(results: Results) -> Outcome | None:
    """CPT shrinks the spread over repeats."""
    spreads: dict[str, dict[int, float]] = {"CPT": {}, "SBM": {}}
    for cell in results.done:
        value = cell.value(METRIC)
        if value and value.std is not None and method_of(cell) in spreads:
            spreads[method_of(cell)][bounds(cell)[0]] = value.std
    common = sorted(set(spreads["CPT"]) & set(spreads["SBM"]))
    if not common:
        return None
    smaller = sum(spreads["CPT"][high] < spreads["SBM"][high] for high in common)
    pooled = [statistics.fmean(spreads[method][high] ** 2 for high in common) ** 0.5 for method in ("CPT", "SBM")]
    words = f"pooled standard deviation {pooled[0]:.3f} against {pooled[1]:.3f}, {results.trials}"
    words += f", smaller in {smaller} of {len(common)} ranges"
    return Outcome(smaller > len(common) / 2, pooled[0] < pooled[1], words)


def gains_in_all_ranges(results: Results) -> Outcome | None:
    """CPT gains in all ranges, most at the lowest upper bound."""
    gains = {
        bounds(cell)[0]: gap[0]
        for cell in pick(results.cells, with_method("CPT"))
        if (gap := _against_own(results, cell))
    }
    if not gains:
        return None
    found = list(gains.values())
    most = max(gains, key=lambda high: gains[high].mean)
    return Outcome(
        all(gap.mean > 0 for gap in found) and most == min(gains),
        mean(found) > 0,
        f"{described(found)}; largest up to {most} bits",
    )


def _against_own(results: Results, cell: Cell) -> list[Value]:
    base = [other for other in pick(results.cells, with_method("SBM")) if bounds(other)[0] == bounds(cell)[0]]
    return differences([cell], base, METRIC)


def cycle_gains(results: Results) -> list[list[tuple[int, Value, Value]]]:
    """For each panel: (number of cycles, CPT, static)."""
    found = []
    for cells in panels(results.cells):
        static = pick(cells, with_method("SBM"))
        base = static[0].value(METRIC) if static else None
        swept = [
            (int(cell.setting("schedule.cycles")), value)
            for cell in pick(cells, with_method("CPT"))
            if (value := cell.value(METRIC))
        ]
        if base and swept:
            found.append([(cycles, value, base) for cycles, value in sorted(swept)])
    return found


def cycles_hardly_matter(results: Results) -> Outcome | None:
    """The spread over the number of cycles is at most 0.5 points."""
    found = [group for group in cycle_gains(results) if len(group) > 1]
    if not found:
        return None
    spreads = [max(value.mean for _, value, _ in group) - min(value.mean for _, value, _ in group) for group in found]
    return Outcome(
        max(spreads) <= 0.7, max(spreads) <= 1.0, f"largest minus smallest {max(spreads):.2f} points, {results.trials}"
    )


def every_number_of_cycles(results: Results) -> Outcome | None:
    """Every number of cycles beats static."""
    found = [value - base for group in cycle_gains(results) for _, value, base in group]
    return Outcome(all(gap.mean > 0 for gap in found), mean(found) > 0, described(found)) if found else None


def cosine_shape(results: Results) -> Outcome:
    """FW(3,8) takes all values and restarts with each of eight cycles."""
    bits = [
        precision.weight for precision, _ in schedule("CR", q_min=3, q_max=8, cycles=8, total_steps=STEPS).run_lengths
    ]
    restarts = 1 + sum(later < earlier for earlier, later in pairwise(bits))
    return exact(
        set(bits) == set(range(3, 9)) and restarts == 8, f"values {min(bits)} to {max(bits)}, {restarts} cycles"
    )


def beats_strongest(results: Results) -> Outcome | None:
    """CPT against the best static method of each cell; at smaller scales against SBM."""
    best, sbm = [], pairs(results)
    for cells in panels(results.cells):
        for cell in pick(cells, with_method("CPT")):
            statics = [o for o in pick(cells, with_method("SBM", "DoReFa", "WAGEUBN")) if bounds(o) == bounds(cell)]
            if {method_of(other) for other in statics} == {"SBM", "DoReFa", "WAGEUBN"}:
                best.append(min(differences([cell], [other], METRIC)[0] for other in statics))
    if not sbm:
        return None
    paper = bool(best) and share(best, lambda gap: gap > 0) >= 10 / 12 and mean(best) > 0.2
    words = f"against SBM: {described(sbm)}" + (f"; against the best: {described(best)}" if best else "")
    return Outcome(paper, mean(sbm) > 0, words)


def sbm_is_best(results: Results) -> Outcome | None:
    """SBM is the most accurate static quantizer."""
    best, values = 0, {name: list[float]() for name in ("SBM", "DoReFa", "WAGEUBN")}
    count = 0
    for cells in panels(results.cells):
        for high in (6, 8):
            same = {
                method_of(cell): value
                for cell in pick(cells, with_schedule("static"), having("schedule.q_max", high))
                if (value := cell.value(METRIC))
            }
            if set(same) >= set(values):
                count += 1
                best += max(values, key=lambda name: same[name].mean) == "SBM"
                for name in values:
                    values[name].append(same[name].mean)
    if not count:
        return None
    means = {name: statistics.fmean(numbers) for name, numbers in values.items()}
    words = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    return Outcome(
        best >= 0.75 * count,
        max(means, key=lambda name: means[name]) == "SBM",
        f"SBM best in {best} of {count} cells; means {words}, {results.trials}",
    )


def gain_at_six_bits(results: Results) -> Outcome | None:
    """CPT 3-6 against SBM 6 with ResNet-74 on CIFAR-10."""
    cells = [cell for cell in results.done if model_of(cell) == "ResNet-74" and cell.setting("dataset") == "cifar10"]
    found = differences(
        pick(cells, with_method("CPT"), having("schedule.q_max", 6)),
        pick(cells, with_method("SBM"), having("schedule.q_max", 6)),
        METRIC,
    )
    return Outcome(found[0].mean > 0.6 and found[0].n >= 3, found[0].mean > 0, described(found)) if found else None


def full_precision_beaten(results: Results) -> Outcome | None:
    """CPT between 8 and 32 bits beats full precision."""
    found: list[Value] = []
    for cells in panels(results.cells):
        found += differences(pick(cells, with_method("CPT")), pick(cells, with_method("Full Precision")), METRIC)
    return Outcome(min(gap.mean for gap in found) > 0.3, mean(found) > 0, described(found)) if found else None


def perplexity_falls(model: str, paper: Callable[[list[Value]], bool]) -> Check:
    """CPT lowers the perplexity of a network."""

    def check(results: Results) -> Outcome | None:
        cells = [cell for cell in results.done if model_of(cell) == model]
        found: list[Value] = []
        for cell in pick(cells, with_method("CPT")):
            found += differences(
                [cell], [other for other in pick(cells, with_method("SBM")) if bounds(other) == bounds(cell)], METRIC
            )
        return Outcome(paper(found), mean(found) < 0, described(found, "perplexity")) if found else None

    return check


def cosine_best_on_mobile(results: Results) -> Outcome | None:
    """On MobileNetV2 the cosine pattern is best."""
    found = [cell for cell in results.done if model_of(cell) == "MobileNetV2"]
    gaps: dict[int, list[Value]] = {}
    for high in (6, 8):
        same = pick(found, having("schedule.q_max", high))
        for other in pick(same, with_schedule("triangular", "cosine_anneal")):
            gaps.setdefault(high, []).extend(differences(pick(same, with_schedule("CR")), [other], METRIC))
    every = [gap for values in gaps.values() for gap in values]
    if not every:
        return None
    return Outcome(
        8 in gaps and all(gap.mean > 0 for gap in gaps[8]),
        mean(every) > 0,
        f"cosine minus the others: {described(every)}",
    )


def start_order(results: Results) -> list[dict[float, Value]]:
    """For each network and range: share of the run at which CPT begins -> accuracy."""
    found = []
    for cells in panels(results.cells):
        for high in (6, 8):
            same = pick(cells, having("schedule.q_max", high))
            starts = {
                float(cell.setting("schedule.start", 0.5)) if schedule_of(cell) == "delayed" else 0.0: value
                for cell in same
                if (value := cell.value(METRIC))
            }
            if starts:
                found.append(starts)
    return found


def earlier_is_better(results: Results) -> Outcome | None:
    """Accuracy falls with the start of CPT."""
    rows = [{start: value for start, value in row.items() if start < 1} for row in start_order(results)]
    rows = [row for row in rows if 0.0 in row and 0.75 in row]
    if not rows:
        return None
    ranks = [spearman(list(row), [value.mean for value in row.values()]) for row in rows]
    gaps = [row[0.0] - row[0.75] for row in rows]
    paper = all(rank is not None and rank <= -0.8 for rank in ranks)
    return Outcome(paper, mean(gaps) > 0, f"start 0 minus start 120: {described(gaps)}")


def late_beats_never(results: Results) -> Outcome | None:
    """Start 120 against never."""
    gaps = [row[0.75] - row[1.0] for row in start_order(results) if 0.75 in row and 1.0 in row]
    return Outcome(min(gap.mean for gap in gaps) > 2, mean(gaps) > 0, described(gaps)) if gaps else None


def gradient_cycles_do_not_help(results: Results) -> Outcome | None:
    """No cycle of the gradient precision beats FW6/BW6."""
    static = pick(results.cells, with_schedule("static"), lambda cell: backward_bits(cell) == "6")
    found = differences(pick(results.cells, with_schedule("gradient_cycle")), static, METRIC)
    if not found:
        return None
    return Outcome(
        max(gap.mean for gap in found) <= 0.3, mean(found) <= 0.2, f"cyclic minus FW6/BW6: {described(found)}"
    )


def _positive(found: list[Value]) -> bool:
    return mean(found) > 0


CHECKS: dict[str, Check] = {
    "cpt/table1-c1": full_beats_low,
    "cpt/table1-c2": low_beats_full,
    "cpt/table1-c3": gap_falls_with_rate,
    "cpt/fig1-c1": progressive_against_static,
    "cpt/fig1-c2": cyclic_against_static,
    "cpt/fig2-c1": wider_minima,
    "cpt/fig4-c1": range_test_bounds,
    "cpt/fig5-c1": against_static(
        lambda found: share(found, lambda gap: gap > 0) >= 15 / 18 and mean(found) > 0.3, _positive
    ),
    "cpt/fig5-c2": against_static(
        lambda found: share(found, lambda gap: gap < 0) >= 16 / 18, lambda found: mean(found) < 0, "SBM+CLR"
    ),
    "cpt/fig6-c1": wider_minima_of_both,
    "cpt/fig7-c1": gains_in_all_ranges,
    "cpt/fig7-c2": spread_shrinks,
    "cpt/fig8-c1": cycles_hardly_matter,
    "cpt/fig8-c2": every_number_of_cycles,
    "cpt/fig9-c1": cosine_shape,
    "cpt/table2-c1": beats_strongest,
    "cpt/table2-c2": formula_savings({(4, 6): 20.69, (3, 6): 30.05, (4, 8): 30.11, (3, 8): 36.67}),
    "cpt/table2-c4": sbm_is_best,
    "cpt/table2-c5": gain_at_six_bits,
    "cpt/table3-c1": against_static(
        lambda found: max(abs(gap.mean) for gap in found) <= 0.4, lambda found: min(gap.mean for gap in found) >= -1.0
    ),
    "cpt/table3-c2": formula_savings({(4, 6): 20.69, (4, 8): 30.11}),
    "cpt/table4-c1": full_precision_beaten,
    "cpt/table5-c1": perplexity_falls("Transformer", lambda found: max(gap.mean for gap in found) < -0.5),
    "cpt/table5-c2": perplexity_falls("2-LSTM", lambda found: max(gap.mean for gap in found) < 0 and found[0].n >= 3),
    "cpt/table6-c2": cosine_best_on_mobile,
    "cpt/table7-c1": earlier_is_better,
    "cpt/table7-c2": late_beats_never,
    "cpt/table8-c1": gradient_cycles_do_not_help,
}
UNCHECKED = {
    "cpt/table2-c3": FPGA,
    "cpt/table6-c1": "The claim compares with SBM, which the sweep of this table does not train; see table 2 for it.",
}
