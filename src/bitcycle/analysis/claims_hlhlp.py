"""Checks of the claims of HLHLp."""

from __future__ import annotations

from collections.abc import Sequence

from bitcycle.analysis.claims_cpt import SURFACES
from bitcycle.analysis.evidence import Check, Outcome, described, differences, mean, panels, pick
from bitcycle.analysis.labels import is_float, model_of, schedule_of
from bitcycle.analysis.results import Cell, Results, Value, value_of

METRIC = "final"
PUBLISHED_GAPS = {"ResNet-14": 0.71, "ResNet-20": 1.57, "ResNet-32": 1.31, "MobileNetV2": 0.47}
DEFAULT_BITS = {"hlhlp": [32, 2, 8, 2], "fine_tuning": [32, 2], "hlhlhlp": [32, 2, 8, 2, 8, 2]}
LEVELS = {"ternary": ("ternary", "uniform_l2", "ttq"), "4-level": ("multibit",)}
"""Quantizers of weights with three and four levels at 2 bits."""
ABLATIONS = {"A": [32, 2, 8, 2], "B": [32, 32, 32, 2], "C": [32, 2, 2, 2], "D": [32, 2]}
"""Table 6: bits of the phases of its variants."""
CORRUPTED = "Needs ImageNet-C, whose images this repository does not read."
NOISY = "Needs recordings with noise (Aurora-4), which nothing stands in for."


def bits_of(cell: Cell) -> list[int]:
    """Bits of the weights in each phase."""
    return [int(bits) for bits in cell.setting("schedule.bits") or DEFAULT_BITS.get(schedule_of(cell), [32])]


def hlhlp_method(cell: Cell) -> str:
    """float, fine-tuning or HLHLp."""
    if is_float(cell):
        return "float"
    return "fine-tuning" if schedule_of(cell) == "fine_tuning" or bits_of(cell) == [32, 2] else "HLHLp"


def levels_of(cell: Cell) -> str:
    """ternary or 4-level, by the quantizer."""
    quantizer = str(cell.setting("quantizer", ""))
    return next((levels for levels, names in LEVELS.items() if quantizer in names), "")


def of(cells: Sequence[Cell], method: str, levels: str = "", model: str = "") -> list[Cell]:
    """Cells of a method, and of levels and a network where they are named."""
    return pick(
        cells,
        lambda cell: hlhlp_method(cell) == method,
        lambda cell: not levels or levels_of(cell) == levels,
        lambda cell: not model or model_of(cell) == model,
    )


def gaps(results: Results, method: str, base: str, levels: str = "", model: str = "") -> list[tuple[str, Value]]:
    """(network, difference of two methods) for each distinct panel."""
    found = []
    for cells in panels(results.cells):
        reference = of(cells, base, "" if base == "float" else levels, model)
        found += [(model_of(cells[0]), gap) for gap in differences(of(cells, method, levels, model), reference, METRIC)]
    return found


def beats_fine_tuning(results: Results) -> Outcome | None:
    """HLHLp against fine-tuning for all networks."""
    found = [gap for _, gap in gaps(results, "HLHLp", "fine-tuning")]
    if not found:
        return None
    return Outcome(min(gap.mean for gap in found) > 0.3 and mean(found) > 0.7, mean(found) > 0, described(found))


def small_gap_to_float(results: Results) -> Outcome | None:
    """The gap to float, and that of fine-tuning."""
    ours, theirs = (gaps(results, method, "float") for method in ("HLHLp", "fine-tuning"))
    if not ours or not theirs:
        return None
    paper = all(-gap.mean <= 2 * PUBLISHED_GAPS.get(model, 1.5) for model, gap in ours)
    means = [mean([gap for _, gap in found]) for found in (ours, theirs)]
    return Outcome(
        paper,
        means[0] > means[1],
        f"HLHLp {means[0]:+.2f}, fine-tuning {means[1]:+.2f} against float, n = {ours[0][1].n}",
    )


def ternary_on_imagenet(results: Results) -> Outcome | None:
    """The loss of ternary ResNet-18 against the float network that it begins from (published: 68.8)."""
    cells = of(results.cells, "HLHLp")
    if not cells or (value := cells[0].value(METRIC)) is None:
        return None
    loss = 68.8 - value.mean
    return Outcome(loss <= 2.5, False, f"top-1 {value.mean:.2f}, {loss:+.2f} below the published float, n = {value.n}")


def perplexities(published: dict[str, float], levels: str) -> Check:
    """Perplexities close to the published ones; at smaller scales below those of fine-tuning, where it was run."""

    def check(results: Results) -> Outcome | None:
        values = {model: of(results.cells, "HLHLp", levels, model) for model in published}
        means = {model: value for model, cells in values.items() if cells and (value := cells[0].value(METRIC))}
        if set(means) != set(published):
            return None
        tuned = [gap for model in published for _, gap in gaps(results, "HLHLp", "fine-tuning", levels, model)]
        near = all(abs(means[model].mean / value - 1) <= 0.05 for model, value in published.items())
        if not tuned and results.scale != "paper":
            return None  # fine-tuning is in appendix E alone
        words = ", ".join(f"{model} {value.mean:.2f}" for model, value in means.items())
        return Outcome(near, bool(tuned) and mean(tuned) < 0, f"perplexity {words}, {results.trials}")

    return check


def gap_smallest_for_gru(results: Results) -> Outcome | None:
    """The gap to float of GRU is below that of LSTM."""
    found = {model: [gap for _, gap in gaps(results, "HLHLp", "float", model=model)] for model in ("LSTM", "GRU")}
    found = {model: gap for model, gap in found.items() if gap}
    if len(found) < 2:
        return None
    lstm, gru = mean(found["LSTM"]), mean(found["GRU"])
    small = max(gap.mean for gap in found["LSTM"]) <= 1.5 * 7.82 and max(gap.mean for gap in found["GRU"]) <= 1.5 * 2.96
    return Outcome(
        small and gru < lstm, gru < lstm, f"gap to float: LSTM {lstm:+.2f}, GRU {gru:+.2f}, {results.trials}"
    )


def four_levels_closer(results: Results) -> Outcome | None:
    """LSTM on WikiText-2: gap of ternary and of 4-level weights to float."""
    found = [[gap for _, gap in gaps(results, "HLHLp", "float", levels, "LSTM")] for levels in ("ternary", "4-level")]
    if not all(found):
        return None
    ternary, four = mean(found[0]), mean(found[1])
    return Outcome(
        ternary <= 8 and four <= 5,
        four < ternary,
        f"gap to float: ternary {ternary:+.2f}, 4-level {four:+.2f}, {results.trials}",
    )


def ternary_gru(results: Results) -> Outcome | None:
    """Ternary GRU against its float version."""
    found = [gap for _, gap in gaps(results, "HLHLp", "float", "ternary", "GRU")]
    return Outcome(mean(found) <= 1.0, mean(found) < 0, described(found, "perplexity")) if found else None


def speech_equals_float(results: Results) -> Outcome | None:
    """Character error rate against float and against fine-tuning."""
    ours = [gap for _, gap in gaps(results, "HLHLp", "float")]
    theirs = [gap for _, gap in gaps(results, "HLHLp", "fine-tuning")]
    if not ours or not theirs:
        return None
    words = f"character error rate against float {mean(ours):+.2f}, against fine-tuning {mean(theirs):+.2f}, n = {ours[0].n}"
    return Outcome(mean(ours) <= 0.5, mean(theirs) < 0, words)


def ablation(results: Results) -> Outcome | None:
    """Final perplexity of the four variants."""
    found = {}
    for name, bits in ABLATIONS.items():
        cells = [cell for cell in results.done if bits_of(cell) == bits]
        if not cells or (value := cells[0].value(METRIC)) is None:
            return None
        found[name] = value.mean
    words = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    paper = found["A"] < found["C"] and found["A"] < found["D"] - 5 and found["A"] < found["B"] - 5
    return Outcome(paper, found["A"] < found["D"] and found["A"] < found["B"], f"perplexity {words}, {results.trials}")


def three_quantizers(results: Results) -> Outcome | None:
    """HLHLp against fine-tuning on Penn Treebank with the uniform quantizer, which alone has both in this sweep."""
    found = [gap for _, gap in gaps(results, "HLHLp", "fine-tuning")]
    if not found:
        return None
    return Outcome(all(gap.mean < 0 for gap in found), mean(found) < 0, described(found, "perplexity"))


def phase_value(cell: Cell, phase: int) -> Value | None:
    """The final metric of a phase, from 1 on, over the seeds."""
    phases = [run.curve.get("phases", []) for run in cell.runs]
    return value_of([float(found[phase - 1]["final"]) for found in phases if len(found) >= phase])


CHECKS: dict[str, Check] = {
    "hlhlp/table1-c1": beats_fine_tuning,
    "hlhlp/table1-c2": small_gap_to_float,
    "hlhlp/table2-c1": ternary_on_imagenet,
    "hlhlp/table3-c1": perplexities({"LSTM": 97.27, "GRU": 95.04}, "ternary"),
    "hlhlp/table3-c2": perplexities({"LSTM": 94.89, "GRU": 96.20}, "4-level"),
    "hlhlp/table3-c3": gap_smallest_for_gru,
    "hlhlp/table4-c1": four_levels_closer,
    "hlhlp/table4-c2": ternary_gru,
    "hlhlp/table5-c1": speech_equals_float,
    "hlhlp/table6-c1": ablation,
    "hlhlp/appE-c1": three_quantizers,
}
UNCHECKED = {
    "hlhlp/table5-c2": NOISY,
    "hlhlp/fig1-c1": SURFACES,
    "hlhlp/appD-c1": CORRUPTED,
    "hlhlp/appF-c1": NOISY,
    "hlhlp/appH-c1": SURFACES,
}
