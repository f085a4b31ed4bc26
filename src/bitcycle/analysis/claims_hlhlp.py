"""Checks of the claims of HLHLp."""

from __future__ import annotations

from collections.abc import Sequence

from bitcycle.analysis.evidence import Check, Outcome, described, differences, mean, panels, pick
from bitcycle.analysis.labels import is_float, model_of, schedule_of
from bitcycle.analysis.landscape import results_of, rise_around, robustness, sharpness
from bitcycle.analysis.results import Cell, Results, Value
from bitcycle.measurement.artifacts import Result

METRIC = "final"
PUBLISHED_GAPS = {"ResNet-14": 0.71, "ResNet-20": 1.57, "ResNet-32": 1.31, "MobileNetV2": 0.47}
DEFAULT_BITS = {"hlhlp": [32, 2, 8, 2], "fine_tuning": [32, 2], "hlhlhlp": [32, 2, 8, 2, 8, 2]}
LEVELS = {"ternary": ("ternary", "uniform_l2", "ttq"), "4-level": ("multibit",)}
"""Quantizers of weights with three and four levels at 2 bits."""
ABLATIONS = {"A": [32, 2, 8, 2], "B": [32, 32, 32, 2], "C": [32, 2, 2, 2], "D": [32, 2]}
"""Table 6: bits of the phases of its variants."""


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


def network_name(cell: Cell, phase: int | None) -> str:
    """The paper's name of a network: FLOAT, Hlp, HLp or HLHLp; the phase is that at whose end it stood, None the last."""
    method = hlhlp_method(cell)
    if method == "float" or phase == 1:
        return "FLOAT"
    return "Hlp" if method == "fine-tuning" else "HLHLp" if phase is None else "HLp"


def planes(results: Results, split: str) -> list[tuple[Result, list[str]]]:
    """Every plane of the train or test split with the names of its networks; of several seeds the first."""
    cells = {(run.row["hash"], run.row["seed"]): cell for cell in results.done for run in cell.runs}
    found: dict[tuple[str, ...], Result] = {}
    for plane in (plane for cell in results.done for plane in results_of(cell, "plane")):
        parts = [(cells.get((part["hash"], str(part["seed"]))), part["phase"]) for part in plane.header["runs"]]
        if plane.options["split"] == split and all(cell is not None for cell, _ in parts):
            found.setdefault(tuple(network_name(cell, phase) for cell, phase in parts if cell), plane)
    return [(plane, list(names)) for names, plane in sorted(found.items(), reverse=True)]


def centre_of_basin(results: Results) -> Outcome | None:
    """Around HLHLp the error rises less than around fine-tuning, and than around the network after its second phase."""
    gaps: dict[str, tuple[float, float]] = {}
    for plane, names in planes(results, "test"):
        around = [rise_around(plane, number) for number in (2, 3)]
        if names[2] == "HLHLp" and around[0] is not None and around[1] is not None:
            gaps[names[1]] = around[0], around[1]
    if not {"Hlp", "HLp"} <= set(gaps):
        return None
    holds = all(ours < theirs for theirs, ours in gaps.values())
    words = "; ".join(f"{name} {theirs:+.2f}, HLHLp {ours:+.2f}" for name, (theirs, ours) in sorted(gaps.items()))
    return Outcome(holds, holds, f"error rises by points: {words}, one seed")


def less_sharp(results: Results) -> Outcome | None:
    """Epsilon-sharpness of HLHLp and of fine-tuning."""
    ours, theirs = of(results.cells, "HLHLp"), of(results.cells, "fine-tuning")
    if not ours or not theirs:
        return None
    found, base = sharpness(ours[0]), sharpness(theirs[0])
    shared = sorted(set(found) & set(base), key=float)
    if not shared:
        return None
    holds = all(found[epsilon].mean < base[epsilon].mean for epsilon in shared)
    words = "; ".join(
        f"eps {epsilon}: HLHLp {found[epsilon].mean:.3g}, Hlp {base[epsilon].mean:.3g} %" for epsilon in shared
    )
    return Outcome(holds, holds, f"sharpness {words}, {results.trials}")


def robust_to_corruptions(results: Results) -> Outcome | None:
    """Accuracy on corrupted images after all steps and after the first two; of the published images at paper scale alone."""
    cells = of(results.cells, "HLHLp")
    after, before = (
        robustness(cells[0], "corruption", "error_percent", phase) if cells else None for phase in (None, 1)
    )
    if after is None or before is None:
        return None
    gain = before[1] - after[1]
    published = all(result.options["folder"] for result in results_of(cells[0], "corruption"))
    images = "published images" if published else "corruptions of our own, none of ImageNet-C"
    words = (
        f"accuracy on corrupted images {100 - before[1].mean:.2f} after two steps, {100 - after[1].mean:.2f} after all"
    )
    return Outcome(published and gain.mean > 2, gain.mean > 0, f"{words}, {images}, n = {gain.n}")


def robust_to_noise(results: Results) -> Outcome | None:
    """Character error rate in noise of HLHLp and of float; our noises stand in for Aurora-4, so that the sign alone counts."""
    ours, floats = of(results.cells, "HLHLp"), of(results.cells, "float")
    found, base = (robustness(cells[0], "noise", "cer_percent") if cells else None for cells in (ours, floats))
    if found is None or base is None:
        return None
    clean, noisy = (one - other for one, other in zip(base, found))
    words = f"character error rate below float by {clean.mean:+.2f} clean, {noisy.mean:+.2f} in noise of our own"
    return Outcome(False, noisy.mean > 0, f"{words}, none of Aurora-4, n = {noisy.n}")


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
    "hlhlp/table5-c2": robust_to_noise,
    "hlhlp/table6-c1": ablation,
    "hlhlp/fig1-c1": centre_of_basin,
    "hlhlp/appD-c1": robust_to_corruptions,
    "hlhlp/appE-c1": three_quantizers,
    "hlhlp/appF-c1": robust_to_noise,
    "hlhlp/appH-c1": less_sharp,
}
UNCHECKED: dict[str, str] = {}
