"""The verdicts on all claims, which `make figures` writes to results/summary/claims.csv.

The rule is the same at every scale: a claim is decided if its p-value, corrected for looks and over all claims of its family
(Holm), is below 0.05; it is leaning if only the uncorrected p-value is. A frozen family (`frozen.py`) has a planned number K of
looks, and p is multiplied by K; all other claims of a scale are a family of their own, and look k is multiplied by k (k + 1),
which bounds the false decisions of any number of looks. A claim whose power at the published effect is below one half is not in a
family. Claims that could not be tested have a reason. The scope names the setting for which the verdict holds.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import OmegaConf

from bitcycle.files import read_csv, write_csv
from bitcycle.reproduction.analysis import preconditions
from bitcycle.reproduction.analysis import statistics as rule
from bitcycle.reproduction.analysis.aggregation import Cell, Results, Run, distinct_runs
from bitcycle.reproduction.analysis.claim_functions import COMPUTED as FORMULAS
from bitcycle.reproduction.analysis.claims import UNTRAINED, Claim, published_effect, rule_of, tested_reference
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.facts import described, select
from bitcycle.reproduction.analysis.frozen import LEAST_POWER, Family, differs, due, family_of
from bitcycle.reproduction.analysis.metrics import COSTS
from bitcycle.reproduction.analysis.predicates import Outcome, evaluate

VERDICTS = (
    *("supported", "supported in part", "contradicted", "undecided", "exploratory", "computed"),
    *("no test", "not tested at this scale"),
)
SUPPORTED, IN_PART, CONTRADICTED, UNDECIDED, EXPLORATORY, COMPUTED, NO_TEST, NOT_TESTED = VERDICTS
DECIDED = (SUPPORTED, IN_PART, CONTRADICTED)
LEVEL = 0.95
JUDGED_SCALES = ("paper", "mini")
"""Scales at which claims are tested; smoke runs are too short."""


@dataclass
class ClaimResult:
    """The verdict on a claim in one scope."""

    claim_id: str  # PAPER/ITEM-cN
    item: str  # PAPER/ITEM with the runs that decide it
    paper: str  # key of the paper
    sentence: str  # the claim in one sentence
    section: str = ""  # section of the paper
    predicate: str = ""  # one of `claims.PREDICATES`
    rule: str = ""  # the decision rule in one sentence
    metric: str = ""  # compared metric
    unit: str = ""  # unit of estimate, interval, margin and published value
    scope: str = ""  # "paper scale" or "proxy: NETWORK, DATA"; empty if no runs are involved
    scale: str = ""  # paper or mini; empty if no runs are involved
    verdict: str = NOT_TESTED  # one of VERDICTS
    holds: Optional[bool] = None  # whether a computed claim holds
    decided: bool = False  # whether the corrected p-value is significant
    leaning: str = ""  # supported or contradicted, if the uncorrected p-value is significant
    estimate: Optional[float] = None  # estimate of the contrast in the rule
    low: Optional[float] = None  # lower end of the confidence interval
    high: Optional[float] = None  # upper end of the confidence interval
    level: Optional[float] = None  # confidence level
    n: Optional[int] = None  # number of seeds
    trainings: Optional[int] = None  # number of distinct runs
    df: Optional[float] = None  # degrees of freedom of the standard error
    looks: Optional[int] = None  # number of times it was tested as seeds were added
    family: str = ""  # frozen family of claims, if it is in one
    p_raw: Optional[float] = None  # two-sided p-value
    p_corrected: Optional[float] = None  # p-value corrected for looks, then over the claims of its family (Holm)
    deviation: Optional[float] = None  # standard deviation of the tested contrast between seeds
    power: Optional[float] = None  # power at the published effect, with these seeds and this deviation
    margin: Optional[float] = None  # margin of equivalence or non-inferiority
    published_effect: str = ""  # published effect as printed
    published_value: Optional[float] = None  # published effect as a number, in the direction of the estimate
    published_inside: Optional[bool] = None  # whether it lies inside of the interval; not part of the verdict
    reason: str = ""  # why there is no test, or a remark on the test
    seeds_needed: Optional[int] = None  # number of seeds that would decide an effect of the published size


FIELDS = tuple(field.name for field in dataclasses.fields(ClaimResult))


def write_claims(results: Iterable[ClaimResult], path: Path) -> None:
    """Write one row per claim and scope, with six significant digits."""
    write_csv(path, FIELDS, ({name: _as_text(getattr(result, name)) for name in FIELDS} for result in results))


def read_claim_results(path: Path) -> list[ClaimResult]:
    """Read a file written by `write_claims`."""
    schema = OmegaConf.structured(ClaimResult)
    rows = ({name: text for name, text in row.items() if text} for row in read_csv(path))
    return [cast(ClaimResult, OmegaConf.to_object(OmegaConf.merge(schema, row))) for row in rows]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# Judging


def judge(
    claims: Sequence[Claim], results: Mapping[str, Results], pool: Pool, families: Sequence[Family] = ()
) -> list[ClaimResult]:
    """The verdict on every claim at each scale with runs for it, given the results of each item. The p-values of a family are
    corrected jointly, for all of its claims, tested or not; claims that are in no frozen family are one family at each scale,
    with those that have too little power."""
    judged: list[tuple[Claim, ClaimResult, Outcome | None]] = []
    for claim in claims:
        home = family_of(claim, families)
        scales = () if claim.predicate in UNTRAINED else JUDGED_SCALES
        found = [one for scale in scales if (one := _judge_at(claim, scale, results, pool, home)) is not None]
        if home is not None:  # it is trained at one scale: runs at another are no test of it that waits
            found = [one for one in found if one[1] is not None] or found[-1:]
        if len(found) > 1:  # the first runs at a scale do not make a second row that tests nothing
            found = [one for one in found if one[0].verdict != NO_TEST] or found[-1:]
        judged += [(claim, *one) for one in found or [(_without_runs(claim, results), None)]]
    for claim, row, _ in judged:
        _explore(claim, row, family_of(claim, families))
    for scale, home in product(JUDGED_SCALES, (None, *families)):
        tested = [
            (claim, row, outcome)
            for claim, row, outcome in judged
            if row.scale == scale and row.p_raw is not None and row.verdict == UNDECIDED
            if family_of(claim, families) is home
        ]
        factors = [claim.looks * (claim.looks + 1) if home is None else home.looks for claim, _, _ in tested]
        weak = [
            row for _, row, _ in judged if row.scale == scale and row.verdict == NOT_TESTED and row.p_raw is not None
        ]
        size = len(tested) + len(weak) if home is None else len(home.tests)
        own = [min(1.0, (row.p_raw or 0.0) * k) for k, (_, row, _) in zip(factors, tested)]
        adjusted = rule.holm(own + [1.0] * (size - len(own))) if own else []
        for (claim, row, outcome), p, factor in zip(tested, adjusted, factors):
            row.rule += f"; p multiplied by {factor} for looks"
            _correct(claim, row, outcome, p, size * factor)
            if claim.untested and row.scope.startswith("proxy"):
                row.verdict = IN_PART if row.verdict == SUPPORTED else row.verdict
                row.reason = _joined(row.reason, f"not tested: {claim.untested}")
    return [row for _, row, _ in judged]


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def _explore(claim: Claim, row: ClaimResult, family: Family | None) -> None:
    """A test that was changed after a result decides nothing until it is frozen, and the new seeds of its family are trained; one
    that differs from the frozen one decides nothing."""
    row.family = "" if family is None else family.name
    changed = claim.amended
    if family is not None:
        changed = (claim.amended or "it differs from the frozen one") if differs(claim, family) else ""
        if claim.amended and not changed and row.verdict == UNDECIDED and row.p_raw is not None:
            row.reason = _joined(row.reason, f"tested on new seeds, as its test was changed: {claim.amended}")
    if changed and row.verdict == UNDECIDED and row.p_raw is not None:
        row.verdict = EXPLORATORY
        row.reason = _joined(f"test changed: {changed}", row.reason)


def _empty(claim: Claim) -> ClaimResult:
    metric = claim.function.replace("_", " ") or " and ".join(dict.fromkeys(claim.metrics))
    return ClaimResult(
        *(claim.id, claim.item, claim.paper, claim.sentence, claim.section, claim.predicate, rule_of(claim)),
        *(("", "") if claim.predicate in UNTRAINED else (metric, claim.unit)),
        published_effect=claim.effect,
        published_value=claim.value,
    )


def _without_runs(claim: Claim, results: Mapping[str, Results]) -> ClaimResult:
    row = _empty(claim)
    if claim.predicate == "computed":
        holds, measured = FORMULAS[claim.function](claim.options)
        return replace(row, verdict=COMPUTED, holds=holds, reason=measured)
    if claim.predicate == "none":
        return replace(row, verdict=NO_TEST, reason=claim.reason)
    some = any(results[item].done for item in (claim.item, *claim.items) if item in results)
    return replace(row, reason="The runs that it needs are missing." if some else "No trainings are recorded.")


def _judge_at(
    claim: Claim, scale: str, results: Mapping[str, Results], pool: Pool, home: Family | None = None
) -> tuple[ClaimResult, Outcome | None] | None:
    """The verdict at one scale, before correction; None if there are no runs. A claim in a family counts its runs alone."""
    at_scale = [results[item].at(scale) for item in (claim.item, *claim.items) if item in results]
    every = select([cell for one in at_scale if one is not None for cell in one.cells], claim.where)
    if not any(cell.runs for cell in every):
        return None
    planned, earlier = "", ""
    if home is not None:
        replaced = [cell for one in at_scale if one is not None for cell in one.replaced]
        own, planned = due(claim, every, home, select(replaced, claim.where))
        if not any(cell.runs for cell in own):
            earlier = claim.amended
            if not earlier:
                return replace(_empty(claim), scale=scale, reason=f"{planned}."), None
        every = every if earlier else own
    cells, excluded = preconditions.counting(claim, every, pool)
    parts = claim.parts
    found = [evaluate(part, cells, pool) for part in parts]
    first = found[0]
    if first is None:
        reason = excluded if evaluate(claim, every, pool) is not None else ""
        if not reason and claim.metrics[0].startswith("depth") and select(cells, claim.a):
            reason = "No evaluation lies within 10 % of the epochs that the claim names."
        no_test = replace(_empty(claim), scale=scale, verdict=NO_TEST, scope=_scope(scale, every), reason=reason)
        return (no_test, None) if reason else None
    row = _estimated(claim, scale, first)
    runs = list({run.training: run for one in first.contrasts for run in one.runs}.values())
    row.trainings = len(runs)
    if failed := preconditions.failed(claim, first.contrasts, runs, bool(row.scope) and scale != "paper"):
        row.verdict, row.reason = NO_TEST, failed
    else:
        _test(row, parts, found)
        margin = "the margin is ours, the paper prints none" if claim.assumed_margin else ""
        against = "" if first.against is None else f"the estimate is against {described(first.against)}"
        row.reason = _joined(row.reason, against, preconditions.left_out(every, cells), planned, margin)
        if earlier:  # until the first look at new seeds
            row.verdict, row.reason = EXPLORATORY, _joined(f"test changed: {earlier}", row.reason)
        if home is None and row.power is not None and row.power < LEAST_POWER:
            row.verdict, row.leaning = NOT_TESTED, ""
            row.seeds_needed = _seeds_needed(claim, first, 1)
            row.reason = _joined(f"power {row.power:.2f} at the published effect, below one half", row.reason)
    return row, first


def _estimated(claim: Claim, scale: str, found: Outcome) -> ClaimResult:
    """The scope, rule, estimate and interval of a claim, still without its p-value."""
    row = replace(_empty(claim), scale=scale)
    scope = _scope(scale, [cell for one in found.contrasts for unit in one.units for cell in unit.cells])
    row.scope = scope and scope + _reached(claim, found)
    row.rule, row.verdict, row.estimate = rule_of(claim, found.margin), UNDECIDED, found.shown
    if found.estimate.error == 0 and claim.metrics[0] not in COSTS:
        row.rule = row.rule.replace("paired t test", "sign test, as all seeds agree")
    row.low, row.high = found.interval or (None, None)
    row.level, row.margin, row.n, row.df = LEVEL, found.margin, found.estimate.n, found.estimate.df or None
    row.deviation, row.power = found.estimate.deviation, _power(claim, found)
    if claim.value is not None and row.low is not None and row.high is not None and found.against is None:
        row.published_inside = row.low <= claim.value <= row.high
    return row


def _power(claim: Claim, found: Outcome) -> float | None:
    """The power of a test at the published effect; None if the paper prints no number, or the deviation is unknown."""
    if found.margin is None and (claim.value is None or not claim.arms):  # a published number is not an effect
        return None
    return rule.power(found.estimate, published_effect(claim), claim.bounds(found.margin, tested_reference(claim)))


def _test(row: ClaimResult, parts: Sequence[Claim], found: Sequence[Outcome | None]) -> None:
    """Set the joint p-value of all parts; the further parts are described in the reason."""
    words = []
    for part, one in zip(parts[1:], found[1:]):
        if one is None or one.shown is None:
            row.reason = f"no runs tell the {part.metric}"
            return
        shown = f"{one.shown:.3g} {part.unit}".strip()
        arm = f" of {described(part.a)}" if part.a != parts[0].a else ""
        p = f" (p = {one.p_values.p:.2g})" if one.p_values.p else ""
        words.append(f"{part.display or part.metric}{arm} {shown}{p}")
    joint = rule.conjunction([one.p_values for one in found if one is not None])
    if joint.p is None:
        missing = "one seed, and no deviation of such trainings is known" if row.n == 1 else "no deviation is known"
        words.insert(0, missing)
    elif joint.p < rule.SIGNIFICANCE:
        row.leaning = SUPPORTED if joint.supports == joint.p else CONTRADICTED
    row.p_raw, row.looks, row.reason = joint.p, None if joint.p is None else parts[0].looks, "; ".join(words)


def _correct(claim: Claim, row: ClaimResult, found: Outcome | None, p: float, tests: int) -> None:
    """Set the corrected p-value and the resulting verdict, or the number of seeds that an undecided claim needs."""
    row.p_corrected = p
    if p < rule.SIGNIFICANCE and row.leaning:
        row.decided = row.n != 1 or bool(row.df)
        if row.decided:
            row.verdict = row.leaning
        else:
            row.reason = _joined("an order within one seed decides nothing", row.reason)
    elif found is not None:
        row.seeds_needed = _seeds_needed(claim, found, tests)


def _seeds_needed(claim: Claim, found: Outcome, tests: int) -> int | None:
    """The number of seeds that would decide an effect of the published size, corrected for a number of tests."""
    effect = found.margin
    if effect is None and claim.value is not None:
        effect = published_effect(claim) - tested_reference(claim)
    return rule.seeds_needed(found.estimate.deviation, effect, tests, margin=found.margin is not None)


def _scope(scale: str, cells: Iterable[Cell]) -> str:
    """The scope of a verdict from these cells: the paper's setting, or a proxy."""
    lengths: dict[str, set[str]] = {}
    for cell in cells:
        if cell.runs and (label := preconditions.proxy_label(cell)):
            lengths.setdefault(label, set()).update(map(_length, cell.runs))
    words = " / ".join(
        f"{label}, {' or '.join(sorted(several))}" for label, several in lengths.items() if len(several) < 4
    )
    words = words or " / ".join(lengths)
    return f"proxy: {words}" if words else "paper scale" if scale == "paper" else ""


def _length(run: Run) -> str:
    """Length of a run in epochs, if it has at least one, or else in steps."""
    return f"{run.epochs:.3g} epochs" if run.epochs >= 1 else f"{int(run.row['total_steps']):,} steps"


def _reached(claim: Claim, found: Outcome) -> str:
    """What the arms that a claim compares with reach: the mean of their runs' final metric."""
    units = [unit for one in found.contrasts for unit in one.units]
    runs = distinct_runs(cell for unit in units for _, cell, _ in unit.b)
    names = {run.row.get("metric", "") for run in runs}
    values = [value for run in runs if (value := run.number("final")) is not None]
    if len(names) != 1 or not values or not claim.arms:
        return ""
    arms = " or ".join(described(arm) for arm in claim.arms)
    return f"; {arms}: {statistics.fmean(values):.3g} {names.pop().replace('_', ' ')}"
