"""Checks of the claims of FracTrain. Costs are those of full runs unless a claim says otherwise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bitcycle.analysis.claims_cpt import FPGA, METRIC, bounds
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
    saving,
    spearman,
    with_method,
    with_schedule,
)
from bitcycle.analysis.labels import backward_bits, forward_bits, method_of, model_of, schedule_of
from bitcycle.analysis.results import Cell, Results, Value
from bitcycle.schedule.gated import Dfq

Pair = tuple[float, Value]
"""(share of the cost that is saved, difference of the metric)."""


def pfq_pairs(results: Results, *schedules: str) -> list[tuple[Cell, Pair]]:
    """PFQ against static precision with the same highest bits, for each panel."""
    found = []
    for cells in panels(results.cells):
        for cell in pick(cells, with_schedule(*(schedules or ("pfq",)))):
            base = [other for other in pick(cells, with_method("SBM")) if bounds(other) == bounds(cell)]
            pair = _pair(cell, base)
            if pair:
                found.append((cell, pair))
    return found


def gated_pairs(results: Results, method: str, base: str = "SBM", column: str = "gbitops") -> list[Pair]:
    """FracTrain or DFQ against a static method, for each panel and part of the data."""
    found = []
    for cells in panels(results.cells):
        for cell in pick(cells, with_method(method)):
            others = pick(cells, with_method(base), having("dataset.part", cell.setting("dataset.part")))
            pair = _pair(cell, others, column)
            if pair:
                found.append(pair)
    return found


def _pair(cell: Cell, base: Sequence[Cell], column: str = "gbitops") -> Pair | None:
    gap = differences([cell], base, METRIC)
    saved = saving(cell, base[0], column) if base else None
    return (saved, gap[0]) if gap and saved is not None else None


def words_of(pairs: Sequence[Pair]) -> str:
    """Savings and differences in words."""
    saved = [100 * share for share, _ in pairs]
    return f"savings {min(saved):.1f} to {max(saved):.1f} %; {described([gap for _, gap in pairs])}"


def pair_check(
    find: Callable[[Results], list[Pair]], paper: tuple[float, float], reduced: tuple[float, float]
) -> Check:
    """Savings above a bound and differences not below another, in all cells; at smaller scales the mean difference."""

    def check(results: Results) -> Outcome | None:
        found = find(results)
        if not found:
            return None
        holds = all(share > paper[0] and gap.mean >= paper[1] for share, gap in found)
        signs = (
            statistics.fmean(share for share, _ in found) > reduced[0] and mean([gap for _, gap in found]) >= reduced[1]
        )
        return Outcome(holds, signs, words_of(found))

    return check


def plain_pairs(results: Results) -> list[Pair]:
    """PFQ against static precision."""
    return [pair for _, pair in pfq_pairs(results)]


def all_stage_pairs(results: Results) -> list[Pair]:
    """Manual and automatic PFQ."""
    return [pair for _, pair in pfq_pairs(results, "pfq", "pfq_manual")]


def part_pairs(part: str) -> Callable[[Results], list[Pair]]:
    """FracTrain against SBM on one half of the data, cost up to the best."""

    def find(results: Results) -> list[Pair]:
        cells = pick(results.cells, having("dataset.part", part))
        return gated_pairs(Results(results.scale, tuple(cells)), "FracTrain", column="gbitops_to_best")

    return find


def savings_grow(results: Results) -> Outcome | None:
    """FW8/BW16 saves more than FW6/BW8."""
    by_bits: dict[tuple[int, int], list[float]] = {}
    for cell, (share, _) in pfq_pairs(results):
        by_bits.setdefault(bounds(cell), []).append(share)
    if (8, 16) not in by_bits or (6, 8) not in by_bits:
        return None
    high, low = (100 * statistics.fmean(by_bits[bits]) for bits in ((8, 16), (6, 8)))
    return Outcome(high > low, high > low, f"FW8/BW16 {high:.1f} %, FW6/BW8 {low:.1f} %, {results.trials}")


def larger_settings_cost_more(results: Results) -> Outcome | None:
    """Epsilon and alpha raise the cost; all are cheaper than static."""
    rows = []
    for cell, (share, gap) in pfq_pairs(results):
        rows.append(
            (
                float(cell.setting("schedule.epsilon", 0.05)),
                float(cell.setting("schedule.alpha", 0.3)),
                1 - share,
                gap.mean,
            )
        )
    if len(rows) < 3:
        return None
    ranks = [spearman([row[index] for row in rows], [row[2] for row in rows]) for index in (0, 1)]
    if None in ranks:
        return None
    signs = all(rank is not None and rank > 0 for rank in ranks) and max(row[2] for row in rows) < 1
    spread = max(row[3] for row in rows) - min(row[3] for row in rows)
    most = max(row[2] for row in rows)
    words = (
        f"rank correlation with cost: epsilon {ranks[0]:+.2f}, alpha {ranks[1]:+.2f}; cost at most {most:.2f} of static"
    )
    return Outcome(signs and spread <= 1.0, signs, f"{words}; accuracy spread {spread:.2f} points, {results.trials}")


def dfq_halves_cost(results: Results) -> Outcome | None:
    """DFQ at comparable accuracy: the cheapest cell of ResNet-74 on CIFAR-100 that is close to the best static one."""
    cells = [cell for cell in results.done if model_of(cell) == "ResNet-74" and cell.setting("dataset") == "cifar100"]
    statics = [cell for cell in pick(cells, with_method("SBM")) if cell.value(METRIC)]
    if not statics or not pick(cells, with_method("DFQ")):
        return None
    best = max(statics, key=lambda cell: cell.value(METRIC) or Value(0, None, 0))
    pairs = [pair for cell in pick(cells, with_method("DFQ")) if (pair := _pair(cell, [best]))]
    near = [pair for pair in pairs if pair[1].mean >= -0.5]
    close = [pair for pair in pairs if pair[1].mean >= -1.0]
    chosen = max(near or close or pairs, key=lambda pair: pair[0])
    return Outcome(
        bool(near) and chosen[0] > 0.3,
        any(share > 0 for share, _ in close),
        f"saving {100 * chosen[0]:.1f} %; {described([chosen[1]])}",
    )


def dfq_at_low_cost(results: Results) -> Outcome | None:
    """The cheapest DFQ against static FW2/BW6."""
    cells = [cell for cell in results.done if model_of(cell) == "ResNet-38" and cell.setting("dataset") == "cifar100"]
    static = [c for c in pick(cells, with_method("SBM")) if (forward_bits(c), backward_bits(c)) == ("2", "6")]
    gated = sorted(pick(cells, with_method("DFQ")), key=lambda cell: float(cell.setting("schedule.target", 3.0)))
    found = differences(gated[:1], static, METRIC)
    return Outcome(found[0].mean > 8, found[0].mean > 0, described(found)) if found else None


def cost_to_reach(cell: Cell, target: float) -> float | None:
    """Bit operations until an evaluation of the first seed reaches a target."""
    found = cell.runs[0].curve.get("evaluations", {})
    return next(
        (cost for cost, value in zip(found.get("gbitops", []), found.get("value", [])) if value >= target), None
    )


def fractrain_reaches_first(results: Results) -> Outcome | None:
    """FracTrain before DFQ before the static methods."""
    words, held = [], []
    for cells in panels(results.cells):
        by_method = {method_of(cell): cell for cell in cells if cell.runs[0].curve}
        if not {"FracTrain", "DFQ", "SBM"} <= set(by_method):
            continue
        final = min(value.mean for cell in by_method.values() if (value := cell.value(METRIC)))
        for share in (0.9, 0.95, 0.98):
            costs = {method: cost_to_reach(cell, share * final) for method, cell in by_method.items()}
            static = [
                cost for method, cost in costs.items() if method in ("SBM", "DoReFa", "WAGEUBN") and cost is not None
            ]
            first, second = costs["FracTrain"], costs["DFQ"]
            held.append(bool(static) and first is not None and second is not None and first < second < min(static))
            words.append(
                f"{share:.0%}: "
                + ", ".join(f"{m} {c:.3g}" if c is not None else f"{m} never" for m, c in costs.items())
            )
    if not held:
        return None
    return Outcome(
        all(held), any(held), f"GBitOps to reach a share of the lowest best accuracy: {'; '.join(words[:3])}"
    )


def bits_move_backwards(results: Results) -> Outcome | None:
    """Early more bits for the first third of the blocks, late for the last."""
    cell = next((c for c in results.done if schedule_of(c) == "fractrain" and c.runs[0].curve.get("allocation")), None)
    if cell is None:
        return None
    moments = list(cell.runs[0].curve["allocation"].values())
    contrasts = []
    for blocks in (moments[0], moments[2] if len(moments) > 2 else moments[-1]):
        bits = [sum(share * int(option.split("/")[0]) for option, share in block.items()) for block in blocks.values()]
        third = max(1, len(bits) // 3)
        contrasts.append(statistics.fmean(bits[:third]) - statistics.fmean(bits[-third:]))
    words = f"bits of the first third minus the last: {contrasts[0]:+.2f} early, {contrasts[1]:+.2f} late"
    return Outcome(contrasts[0] > 0 > contrasts[1], contrasts[1] < contrasts[0], f"{words}, n = 1")


def perplexity_pairs(results: Results) -> Outcome | None:
    """PFQ on WikiText-103: perplexity and saving."""
    cells = tuple(cell for cell in results.cells if cell.setting("dataset") == "wikitext103")
    found = plain_pairs(Results(results.scale, cells))
    if not found:
        return None
    share, gap = found[0]
    base = pick(cells, with_method("SBM"))[0].value(METRIC)
    near = base is not None and gap.mean <= 0.01 * base.mean
    return Outcome(gap.mean <= 0.5 and share > 0.25, near, words_of(found))


def on_imagenet(results: Results) -> list[Pair]:
    """PFQ on ImageNet."""
    return plain_pairs(
        Results(results.scale, tuple(cell for cell in results.cells if cell.setting("dataset") == "imagenet"))
    )


def cheaper_than_static(results: Results) -> Outcome | None:
    """FracTrain against all static methods."""
    found = [pair for base in ("SBM", "DoReFa", "WAGEUBN") for pair in gated_pairs(results, "FracTrain", base)]
    if not found:
        return None
    saved = [100 * share for share, _ in found]
    return Outcome(min(saved) >= 45 and max(saved) <= 85, statistics.fmean(saved) > 30, words_of(found))


def cheaper_than_dfq(results: Results) -> Outcome | None:
    """FracTrain against DFQ."""
    found = gated_pairs(results, "FracTrain", "DFQ")
    if not found:
        return None
    paper = all(share > 0 and abs(gap.mean) <= 0.7 for share, gap in found)
    return Outcome(paper, statistics.fmean(share for share, _ in found) > 0, words_of(found))


def hardware_savings(results: Results) -> Outcome | None:
    """Energy and latency of the accelerator model, where runs were counted with it."""
    savings = []
    for cells in panels(results.cells):
        for cell in pick(cells, with_method("FracTrain")):
            for base in pick(cells, with_method("SBM", "DoReFa", "WAGEUBN")):
                savings += [
                    share for column in ("energy_j", "latency_s") if (share := saving(cell, base, column)) is not None
                ]
    if not savings:
        return None
    holds = min(savings) > 0
    return Outcome(
        holds,
        statistics.fmean(savings) > 0,
        f"savings {100 * min(savings):.1f} to {100 * max(savings):.1f} % by the model",
    )


def gates_are_cheap(results: Results) -> Outcome:
    """MACs of a gate relative to its block, for the blocks of the ResNets on 32 x 32 images."""
    gates = Dfq(family="resnet").gates
    (hidden, embedding, state), options = gates.gate_sizes, len(gates.options)
    shares = []
    for channels, side in ((16, 32), (32, 16), (64, 8)):
        gate = channels * hidden + hidden * embedding + 4 * state * (embedding + state) + state * options
        shares.append(gate / (2 * 9 * channels**2 * side**2))
    return exact(max(shares) < 0.005, f"{100 * min(shares):.3f} to {100 * max(shares):.3f} % of the MACs of a block")


CHECKS: dict[str, Check] = {
    "fractrain/fig1-c1": pair_check(plain_pairs, (0.2, -0.3), (0.0, -0.5)),
    "fractrain/fig2-c1": gates_are_cheap,
    "fractrain/fig3-c1": pair_check(plain_pairs, (0.0, -0.3), (float("-inf"), -0.3)),
    "fractrain/fig3-c2": savings_grow,
    "fractrain/fig4-c1": larger_settings_cost_more,
    "fractrain/fig5-c1": dfq_halves_cost,
    "fractrain/fig5-c2": dfq_at_low_cost,
    "fractrain/fig6-c1": fractrain_reaches_first,
    "fractrain/fig7-c1": pair_check(all_stage_pairs, (0.0, -0.3), (0.0, float("-inf"))),
    "fractrain/fig8-c1": bits_move_backwards,
    "fractrain/table1-c1": pair_check(plain_pairs, (0.1, -0.4), (0.0, -0.5)),
    "fractrain/table2-c1": pair_check(on_imagenet, (0.1, -0.3), (float("-inf"), -0.5)),
    "fractrain/table2-c2": perplexity_pairs,
    "fractrain/table3-c1": cheaper_than_static,
    "fractrain/table3-c2": pair_check(
        lambda results: gated_pairs(results, "FracTrain"), (float("-inf"), -0.5), (float("-inf"), -1.0)
    ),
    "fractrain/table3-c3": cheaper_than_dfq,
    "fractrain/table3-c4": hardware_savings,
    "fractrain/table4-c1": pair_check(lambda results: gated_pairs(results, "FracTrain"), (0.35, -0.8), (0.0, -1.5)),
    "fractrain/table5-c1": pair_check(part_pairs("second_classes"), (0.45, -0.7), (0.0, -1.5)),
    "fractrain/table5-c2": pair_check(part_pairs("second_samples"), (0.45, -1.0), (0.0, -1.5)),
    "fractrain/table6-c1": pair_check(lambda results: gated_pairs(results, "FracTrain"), (0.25, -0.5), (0.0, -1.0)),
}
UNCHECKED = {
    "fractrain/fig5-c3": "Selective layer update, the method that it compares with, is not part of this repository.",
    "fractrain/sec4.6-fpga-c1": FPGA,
}
