"""Preconditions of a test: which runs of a claim's cells count, and why those that do cannot decide it.

`verdict.py` asks `counted_cells` before a test and `why_no_test` after it, as some reasons depend on the runs that were compared.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bitcycle.reproduction.analysis import labels
from bitcycle.reproduction.analysis.cells import Cell, Run, distinct_runs
from bitcycle.reproduction.analysis.claims import Claim
from bitcycle.reproduction.analysis.collect import is_accuracy
from bitcycle.reproduction.analysis.contrast import Contrast, Pool, Unit
from bitcycle.reproduction.analysis.metrics import readings

TOO_FAR = {("imagenet", "digits")}
"""(paper's dataset, ours) if ours lacks the difficulty that the claim is about."""
CEILING = 99.0
CHANCE = {**{name: 100 / classes for name, classes in labels.IMAGES.items()}, "xnli": 100 / 3}
CHANCE |= {"cora": 31.9, "citeseer": 23.1, "sick": 56.9}
"""Percentage of the most frequent class in the test data, if known: the accuracy of always predicting it."""
ABOVE_CHANCE = 2.0
"""Distance in points at which an accuracy counts as above chance."""
CONVERGED_EPOCHS = 160
"""Number of epochs after which a run counts as converged: that of the papers on CIFAR. After 30, longer training still gained
several points (results/notes/verdicts.md, on deficits)."""


def counted_cells(claim: Claim, cells: Sequence[Cell], pool: Pool) -> tuple[list[Cell], str]:
    """The cells with only the runs that count for a claim, and the first reason why others do not.

    Network and data must be close enough to the paper's. Timings count only if a run had its machine to itself. Runs that did not
    reach the last stage of their schedule do not count, nor those that are worse than guessing at the end or after a phase, nor
    any run of a cell for half or more of whose runs this is so.
    """
    reasons = [_too_far(claim, cell) if cell.runs else "" for cell in cells]
    kept = [replace(cell, runs=()) if reason else cell for cell, reason in zip(cells, reasons)]
    if "quiet machine" in claim.requires:
        quiet = [replace(cell, runs=tuple(run for run in cell.runs if not pool.shared_machine(run))) for cell in kept]
        if quiet != kept:
            reasons.append("Timings on a machine that other runs shared.")
        kept = quiet
    if "last stage" in claim.requires:
        reasons.append(_note_on_stages(kept))
        kept = [_with_most(cell, reached_last_stage) for cell in kept]
    reasons.append(_note_on_guessing(kept))
    kept = [_with_most(cell, lambda run: not diverged(run)) for cell in kept]
    return kept, next(filter(None, reasons), "")


def _with_most(cell: Cell, counts: Callable[[Run], bool]) -> Cell:
    """A cell with the runs that count if most of its runs do, otherwise with none."""
    some = tuple(filter(counts, cell.runs))
    return replace(cell, runs=some if 2 * len(some) > len(cell.runs) else ())


def _too_far(claim: Claim, cell: Cell) -> str:
    (data, our_data), (model, our_model) = (
        (str(cell.setting(key)), str(cell.actual(key))) for key in ("dataset", "model")
    )
    if (data, our_data) in TOO_FAR:
        what, group, paper, ours = "data are", "dataset", data, our_data
    elif our_model in claim.too_far or ("network family" in claim.requires and family(model) != family(our_model)):
        what, group, paper, ours = "network is", "model", model, our_model
    else:
        return ""
    why = claim.too_far.get(our_model, "")
    words = f"{labels.label_of(group, ours)} for {labels.label_of(group, paper)}{why and ', '}{why}"
    return f"The {what} too far from the claim's: {words}."


def family(model: str) -> str:
    """The family of a network, regardless of its depth.

    >>> family("resnet20_extra_skip"), family("mobilenet_v2"), family("vgg16")
    ('resnet', 'mobilenet_v', 'vgg')
    """
    return re.split(r"\d", model)[0]


def _note_on_stages(cells: Iterable[Cell]) -> str:
    staged = (*labels.STAGED, "fractrain", *labels.PHASED)
    runs = [run for run in distinct_runs(cells) if run.setting("schedule") in staged]
    early = [run for run in runs if not reached_last_stage(run)]
    names = ", ".join(sorted({str(run.row.get("schedule", "")) for run in early}))
    words = f"{len(early)} of {len(runs)} trainings did not reach the last stage of their schedule ({names})."
    return words if early else ""


def reached_last_stage(run: Run) -> bool:
    """Whether a run reached the last stage or phase of its schedule; also true if no curve was collected."""
    schedule, training = run.settings.get("schedule", {}), run.curve.get("training", {})
    name = run.setting("schedule")
    if name in labels.STAGED and training.get("weight"):
        return bool(training["weight"][-1] == schedule["stages"][-1])
    if name == "fractrain" and training.get("cp_target"):
        last = schedule["target"] + (schedule["stages"] - 1) * schedule["target_step"]
        return bool(training["cp_target"][-1] >= last)
    if name in labels.PHASED and run.curve:
        return len(run.curve.get("phases", [])) == len(run.setting("schedule.bits"))
    return True


def _note_on_guessing(cells: Iterable[Cell]) -> str:
    every = distinct_runs(cells)
    bad = [words for run in every if (words := diverged(run))]
    return f"{len(bad)} of {len(every)} trainings became worse than guessing ({bad[0]})." if bad else ""


def diverged(run: Run) -> str:
    """Where a run is worse than guessing: at the end of a phase, or of the whole run; empty if nowhere. An accuracy has to be
    ABOVE_CHANCE points worse, and only in a phase, since all runs at chance are a matter of the metric (`why_no_test`)."""
    lower_is_better = not run.higher_is_better
    phases: Sequence[Mapping[str, Any]] = run.curve.get("phases", [])
    ends = [(f"phase {number}", one.get("final"), one.get("chance")) for number, one in enumerate(phases, start=1)]
    for where, value, recorded in [*ends, *[("the end", run.number("final"), None)] * lower_is_better]:
        level = guessing(run) if recorded is None else float(recorded)
        if value is None or level is None:
            continue
        if not (value <= level if lower_is_better else value >= level - ABOVE_CHANCE):  # also true of a nan
            return f"{value:.4g} after {where}, where guessing is {level:.4g}"
    return ""


def guessing(run: Run) -> float | None:
    """What guessing reaches: the vocabulary (perplexity), 100 % (characters), or the most frequent class; None if unknown."""
    metric = run.row.get("metric", "")
    if metric.endswith("perplexity"):
        size = run.setting("dataset.vocabulary")
        return float(size) if size else None
    return 100.0 if metric.endswith("cer") else CHANCE.get(run.row.get("dataset", ""))


def left_out(cells: Sequence[Cell], counted: Sequence[Cell]) -> str:
    """A note on runs that `counted_cells` left out for not reaching the last stage, or for being worse than guessing."""
    kept = {run.training for run in distinct_runs(counted)}
    runs = [run for run in distinct_runs(cells) if run.training not in kept]
    useless = sum(bool(diverged(run)) for run in runs)
    early = sum(not reached_last_stage(run) for run in runs if not diverged(run))
    what = {"that did not reach the last stage of the schedule": early, "that became worse than guessing": useless}
    return "; ".join(
        f"1 training {words} does not count" if number == 1 else f"{number} trainings {words} do not count"
        for words, number in what.items()
        if number
    )


def why_no_test(claim: Claim, contrasts: Sequence[Contrast], runs: Sequence[Run], proxy: bool) -> str:
    """Why the contrasts of a claim, and the runs that they compare, cannot decide it; empty if they can."""
    units = [unit for one in contrasts for unit in one.units]
    if not any(cell.runs for unit in units for cell in unit.cells):
        same = contrasts and all(one.filled for one in contrasts)
        return "A setting and its baseline are the same training." if same else "The runs that it needs are missing."
    least = min(contrasts, key=lambda one: one.filled / max(one.wanted, 1))
    if 2 * least.filled < least.wanted:
        return f"Fewer than half of the cells have runs: {least.filled} of {least.wanted}."
    published = proxy and not claim.arms and bool(claim.reference)
    return (
        _saturated(claim, contrasts)
        or _other_lengths(claim, units, proxy)
        or _other_samples(units)
        or _few_moments(claim, runs)
        or ("A proxy cannot be compared with a published number." if published else "")
    )


def _saturated(claim: Claim, contrasts: Sequence[Contrast]) -> str:
    if claim.metrics[0] not in ("final", "best") or claim.function:
        return ""
    compared = [(one, unit) for one in contrasts for unit in one.units]
    rows = [cell.runs[0].row for _, unit in compared for cell in unit.cells]
    if not all(map(is_accuracy, rows)):
        return ""
    chances = {CHANCE.get(row.get("dataset", "")) for row in rows}
    terms = [
        (one.seeds_of(unit), arm, term) for one, unit in compared for arm in (0, 1) for term in (unit.a, unit.b)[arm]
    ]
    numbers: tuple[list[float], list[float]] = ([], [])
    for seeds, arm, (_, cell, metric) in terms:
        numbers[arm].extend(value for seed, value in readings(cell, metric).items() if seed in seeds)
    if not numbers[0]:
        return ""
    means = [statistics.fmean(several) for several in numbers if several]
    chance = chances.pop() if len(chances) == 1 else None
    where = "its ceiling" if min(means) > CEILING else "chance" if chance and max(means) < chance + ABOVE_CHANCE else ""
    return f"The metric is at {where}: {' and '.join(f'{mean:.2f}' for mean in means)} %." if where else ""


def _other_lengths(claim: Claim, units: Sequence[Unit], proxy: bool) -> str:
    if claim.lengths == "free" or (claim.lengths == "converged" and not proxy) or claim.function:
        return ""
    if not any(unit.b for unit in units) and claim.lengths == "converged":
        groups = [[cell for unit in units for cell in unit.cells]]
    else:
        groups = [unit.cells for unit in units]
    for cells in groups:
        steps = {int(run.row["total_steps"]) for cell in cells for run in cell.runs}
        converged = claim.lengths == "converged" and all(
            run.epochs >= CONVERGED_EPOCHS for cell in cells for run in cell.runs
        )
        if len(steps) > 1 and not converged:
            return f"Unequal training lengths, and the shorter ones have not converged: {min(steps):,} and {max(steps):,} steps."
    return ""


def _other_samples(units: Iterable[Unit]) -> str:
    """Held-out samples leave fewer for training; that counts unless the paper holds out samples in one arm only, too."""
    for unit in (unit for unit in units if unit.b):
        samples = {int(number) for cell in unit.cells for run in cell.runs if (number := run.number("train_samples"))}
        if len(samples) > 1 and len({cell.setting("dataset.validation") for cell in unit.cells}) == 1:
            return f"The arms train on different numbers of samples: {min(samples):,} and {max(samples):,}."
    return ""


def _few_moments(claim: Claim, runs: Iterable[Run]) -> str:
    counts = [len(run.curve.get("evaluations", {}).get("step", [])) for run in runs] if claim.moments else []
    few = next((count for count in counts if count < claim.moments), None)
    return "" if few is None else f"A run has {few} evaluations; the claim needs {claim.moments}."
