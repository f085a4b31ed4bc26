"""The verdicts on all claims: from claims, runs and frozen families to the rows of results/summary/claims.csv.

`judge` tests every claim alone (`_tested`), then corrects the p-values of each family together (`_correct`). The rule is the same
at every scale: a claim is decided if its p-value, corrected for looks and over all claims of its family (Holm), is below 0.05; it
is leaning if only the uncorrected one is. A frozen family has a planned number K of looks, and p is multiplied by K; all other
claims of a scale are a family of their own, and look k is multiplied by k (k + 1), which bounds the false decisions of any number
of looks. Of these, a claim whose power at the published effect is below one half is not tested.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional, cast

from omegaconf import OmegaConf

from bitcycle.files import read_csv, write_csv
from bitcycle.reproduction.analysis.cells import Cell, Results, Run, distinct_runs
from bitcycle.reproduction.analysis.claim_functions import COMPUTED as FORMULAS
from bitcycle.reproduction.analysis.claims import (
    UNTRAINED,
    Claim,
    arms_in_words,
    published_effect,
    rule_of,
    tested_reference,
)
from bitcycle.reproduction.analysis.contrast import Contrast, Pool
from bitcycle.reproduction.analysis.facts import described, fact, select
from bitcycle.reproduction.analysis.frozen import LEAST_POWER, Family, differs, due_look, family_of
from bitcycle.reproduction.analysis.labels import forward_bits, our_model, proxy_label
from bitcycle.reproduction.analysis.metrics import COSTS, PHASE, reading
from bitcycle.reproduction.analysis.preconditions import counted_cells, left_out, why_no_test
from bitcycle.reproduction.analysis.predicates import Outcome, evaluate
from bitcycle.reproduction.analysis.statistics import SIGNIFICANCE, conjunction, holm, power, seeds_needed

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
    note: str = ""  # remark on the wording in the paper, or on what the estimate is a mean of


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


class Judged(NamedTuple):
    """A claim at one scale: its row, and what the correction of its p-value needs."""

    claim: Claim
    family: Family | None  # frozen family that the claim is in
    row: ClaimResult
    outcome: Outcome | None = None  # result of its first test; None if nothing was tested


def judge(
    claims: Sequence[Claim], results: Mapping[str, Results], pool: Pool, families: Sequence[Family] = ()
) -> list[ClaimResult]:
    """The verdict on every claim at each scale with runs for it, given the results of each item. The p-values of a family are
    corrected jointly; claims that are in no frozen family are one family at each scale."""
    judged = [one for claim in claims for one in _judge_alone(claim, results, pool, family_of(claim, families))]
    for scale, family in product(JUDGED_SCALES, (None, *families)):
        _correct([one for one in judged if one.row.scale == scale and one.family is family], family)
    return [one.row for one in judged]


def _judge_alone(claim: Claim, results: Mapping[str, Results], pool: Pool, family: Family | None) -> list[Judged]:
    """The rows of a claim before correction: one for each scale that tests it, otherwise one that says why none does."""
    scales = () if claim.predicate in UNTRAINED else JUDGED_SCALES
    found = [one for scale in scales if (one := _judge_at(scale, claim, results, pool, family)) is not None]
    if family is not None:  # it is trained at one scale: runs at another are no test of it that waits
        found = [one for one in found if one.outcome is not None] or found[-1:]
    if len(found) > 1:  # the first runs at a scale do not make a second row that tests nothing
        found = [one for one in found if one.row.verdict != NO_TEST] or found[-1:]
    found = found or [Judged(claim, family, _without_runs(claim, results))]
    for one in found:
        one.row.family = "" if family is None else family.name
        _mark_changed_test(one)
    return found


def _judge_at(
    scale: str, claim: Claim, results: Mapping[str, Results], pool: Pool, family: Family | None
) -> Judged | None:
    """A claim at one scale before correction; None if there are no runs. A claim in a family counts the runs of the family; until
    their first look, an amended one shows its earlier runs."""
    at_scale = [found for item in (claim.item, *claim.items) if item in results and (found := results[item].at(scale))]
    cells = select([cell for found in at_scale for cell in found.cells], claim.where)
    if not any(cell.runs for cell in cells):
        return None
    if family is None:
        return _tested(scale, claim, cells, pool, None)
    replaced = select([cell for found in at_scale for cell in found.replaced], claim.where)
    due, look = due_look(claim, cells, family, replaced)
    if runs := distinct_runs(due):
        last = max(run.row.get("finished", "") for run in runs)  # a verdict does not move as other runs are recorded
        return _tested(scale, claim, due, pool.until(last), family, look)
    if not claim.amended:
        return Judged(claim, family, replace(_new_row(claim), scale=scale, reason=f"{look}."))
    earlier = _tested(scale, claim, cells, pool, family, look)
    if earlier is not None and earlier.row.verdict == UNDECIDED:
        _explore(earlier.row, claim.amended)
    return earlier


def _tested(
    scale: str, claim: Claim, cells: Sequence[Cell], pool: Pool, family: Family | None, look: str = ""
) -> Judged | None:
    """Test a claim on some cells with runs; None if no run of theirs bears on it."""
    counted, excluded = counted_cells(claim, cells, pool)
    parts = claim.parts
    outcomes = [evaluate(part, counted, pool) for part in parts]
    first = outcomes[0]
    if first is None:
        reason = _why_untested(claim, cells, counted, excluded, pool)
        row = replace(_new_row(claim), scale=scale, verdict=NO_TEST, scope=_scope(scale, cells), reason=reason)
        return Judged(claim, family, row) if reason else None
    row = _estimated(claim, scale, first)
    row.trainings = len(_runs_of(first.contrasts))
    proxy = bool(row.scope) and scale != "paper"
    tested = ((part, one.contrasts) for part, one in zip(parts, outcomes) if one is not None)
    reasons = (why_no_test(part, contrasts, _runs_of(contrasts), proxy) for part, contrasts in tested)
    if reason := next(filter(None, reasons), ""):
        row.verdict, row.reason, row.published_inside = NO_TEST, reason, None
        return Judged(claim, family, row, first)
    _set_p_value(row, parts, outcomes)
    margin = "the margin is ours, the paper prints none" if claim.assumed_margin else ""
    row.reason = _joined(row.reason, _comparison(claim, first), left_out(cells, counted), look, margin)
    if family is None and row.power is not None and row.power < LEAST_POWER:
        row.verdict, row.leaning, row.seeds_needed = NOT_TESTED, "", _seeds_needed(claim, first, 1)
        row.reason = _joined(f"power {row.power:.2f} at the published effect, below one half", row.reason)
    return Judged(claim, family, row, first)


def _comparison(claim: Claim, outcome: Outcome) -> str:
    """Which of several comparisons the estimate belongs to: the arm that it is against, or the cell if every one is tested."""
    if outcome.against is not None:
        return f"the estimate is against {described(outcome.against)}"
    if not claim.each or outcome.weakest is None:
        return ""
    (unit,) = outcome.weakest.units
    cells = [terms[0][1] for terms in (unit.a, unit.b)]
    a, b = map(_method_of, cells)
    if a == b:
        a, b = described(claim.a), f"{described(claim.arms[0])}, {int(fact(cells[0], 'steps')):,} steps"
    return f"the estimate is that of {our_model(cells[0])}, {a} against {b}"


def _method_of(cell: Cell) -> str:
    return f"{fact(cell, 'method')} at {forward_bits(cell)} bits"


def _runs_of(contrasts: Iterable[Contrast]) -> list[Run]:
    """The distinct runs that contrasts compare."""
    return list({run.training: run for one in contrasts for run in one.runs}.values())


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def _why_untested(claim: Claim, cells: Sequence[Cell], counted: Sequence[Cell], excluded: str, pool: Pool) -> str:
    """Why the runs that count give no estimate; empty if the others would not give one either."""
    if excluded and evaluate(claim, cells, pool) is not None:
        return excluded
    if claim.metrics[0].startswith("depth") and select(counted, claim.a):
        return "No evaluation lies within 10 % of the epochs that the claim names."
    return ""


def _mark_changed_test(one: Judged) -> None:
    """A test that was changed after a result decides nothing until it is frozen, and the new seeds of its family are trained; one
    that differs from the frozen one decides nothing, nor does one that was withdrawn."""
    claim, family, row, _ = one
    if row.verdict != UNDECIDED or row.p_raw is None:
        return
    if family is not None and differs(claim, family):
        _explore(row, claim.amended or "it differs from the frozen one")
    elif family is not None and claim.id in family.withdrawn:
        _explore(row, "the frozen one was withdrawn")
    elif claim.amended and family is None:
        _explore(row, claim.amended)
    elif claim.amended:
        row.reason = _joined(row.reason, f"tested on new seeds, as its test was changed: {claim.amended}")


def _explore(row: ClaimResult, changed: str) -> None:
    row.verdict, row.reason = EXPLORATORY, _joined(f"test changed: {changed}", row.reason)


def _correct(judged: Sequence[Judged], family: Family | None) -> None:
    """Correct the p-values of a family at one scale for looks and for the number of its claims (Holm), and set the verdicts. All
    claims of a frozen family count, tested or not; of the others, those that were tested or have too little power."""
    with_p = [one for one in judged if one.row.p_raw is not None]
    tested = [one for one in with_p if one.row.verdict == UNDECIDED]
    if not tested:
        return
    weak = sum(one.row.verdict == NOT_TESTED for one in with_p)
    size = len(tested) + weak if family is None else len(family.tests)
    factors = [one.claim.looks * (one.claim.looks + 1) if family is None else family.looks for one in tested]
    for_looks = [min(1.0, (one.row.p_raw or 0.0) * factor) for one, factor in zip(tested, factors)]
    corrected = holm(for_looks + [1.0] * (size - len(tested)))
    for one, p, factor in zip(tested, corrected, factors):
        one.row.rule += f"; p multiplied by {factor} for looks"
        _decide(one, p, size * factor)


def _decide(one: Judged, p: float, tests: int) -> None:
    """Set the corrected p-value and the resulting verdict, or the number of seeds that an undecided claim needs."""
    claim, _, row, outcome = one
    row.p_corrected = p
    if p < SIGNIFICANCE and row.leaning:
        row.decided = row.n != 1 or bool(row.df)
        if row.decided:
            row.verdict = row.leaning
        else:
            row.reason = _joined("an order within one seed decides nothing", row.reason)
    elif outcome is not None:
        row.seeds_needed = _seeds_needed(claim, outcome, tests)
    if claim.untested and row.scope.startswith("proxy"):
        row.verdict = IN_PART if row.verdict == SUPPORTED else row.verdict
        row.reason = _joined(row.reason, f"not tested: {claim.untested}")


# Parts of a row


def _new_row(claim: Claim) -> ClaimResult:
    """What a row tells of the claim itself."""
    metric = claim.function.replace("_", " ") or " and ".join(dict.fromkeys(claim.metrics))
    return ClaimResult(
        *(claim.id, claim.item, claim.paper, claim.sentence, claim.section, claim.predicate, rule_of(claim)),
        *(("", "") if claim.predicate in UNTRAINED else (metric, claim.unit)),
        published_effect=claim.effect,
        published_value=claim.value,
        note=claim.note,
    )


def _without_runs(claim: Claim, results: Mapping[str, Results]) -> ClaimResult:
    """The row of a claim that is computed, cannot be tested, or has no runs."""
    row = _new_row(claim)
    if claim.predicate == "computed":
        holds, measured = FORMULAS[claim.function](claim.options)
        return replace(row, verdict=COMPUTED, holds=holds, reason=measured)
    if claim.predicate == "none":
        return replace(row, verdict=NO_TEST, reason=claim.reason)
    some = any(results[item].done for item in (claim.item, *claim.items) if item in results)
    return replace(row, reason="The runs that it needs are missing." if some else "No trainings are recorded.")


def _estimated(claim: Claim, scale: str, outcome: Outcome) -> ClaimResult:
    """The scope, rule, estimate and interval of a claim, still without its p-value."""
    row = replace(_new_row(claim), scale=scale)
    scope = _scope(scale, [cell for one in outcome.contrasts for unit in one.units for cell in unit.cells])
    row.scope = scope and scope + _reached(claim, outcome)
    row.rule, row.verdict, row.estimate = rule_of(claim, outcome.margin), UNDECIDED, outcome.shown
    if outcome.estimate.error == 0 and claim.metrics[0] not in COSTS:
        row.rule = re.sub("paired t( test)?", "sign test, as all seeds agree", row.rule)
    row.low, row.high = outcome.interval or (None, None)
    row.level, row.margin, row.n, row.df = LEVEL, outcome.margin, outcome.estimate.n, outcome.estimate.df or None
    row.deviation, row.power = outcome.estimate.deviation, _power(claim, outcome)
    if claim.value is not None and row.low is not None and row.high is not None and outcome.against is None:
        size = claim.value if claim.value_base is None else published_effect(claim, outcome.margin)
        row.published_inside = row.low <= size <= row.high
    return row


def _power(claim: Claim, outcome: Outcome) -> float | None:
    """The power of a test at the published effect; None if the paper prints no number, or the deviation is unknown."""
    if outcome.margin is None and (claim.value is None or not claim.arms):  # a published number is not an effect
        return None
    bounds = claim.bounds(outcome.margin, tested_reference(claim))
    return power(outcome.estimate, published_effect(claim, outcome.margin), bounds)


def _set_p_value(row: ClaimResult, parts: Sequence[Claim], outcomes: Sequence[Outcome | None]) -> None:
    """Set the joint p-value of all parts; the further parts are described in the reason."""
    words = []
    for part, one in zip(parts[1:], outcomes[1:]):
        if one is None or one.shown is None:
            row.reason = f"no runs tell the {part.metric}"
            return
        shown = f"{one.shown:.3g} {part.unit}".strip()
        arm = f" of {described(part.a)}" if part.a != parts[0].a else ""
        p = f" (p = {one.p_values.p:.2g})" if one.p_values.p else ""  # that of a cost that no seed changes is 0
        words.append(f"{part.display or part.metric}{arm} {shown}{p}")
    joint = conjunction([one.p_values for one in outcomes if one is not None])
    if joint.p is None:
        missing = "one seed, and no deviation of such trainings is known" if row.n == 1 else "no deviation is known"
        words.insert(0, missing)
    elif joint.p < SIGNIFICANCE:
        row.leaning = SUPPORTED if joint.supports == joint.p else CONTRADICTED
    row.p_raw, row.looks, row.reason = joint.p, None if joint.p is None else parts[0].looks, "; ".join(words)


def _seeds_needed(claim: Claim, outcome: Outcome, tests: int) -> int | None:
    """The number of seeds that would decide an effect of the published size, corrected for a number of tests."""
    effect = outcome.margin
    if effect is None and claim.value is not None:
        effect = published_effect(claim) - tested_reference(claim)
    return seeds_needed(outcome.estimate.deviation, effect, tests, margin=outcome.margin is not None)


def _scope(scale: str, cells: Iterable[Cell]) -> str:
    """The scope of a verdict from these cells: the paper's setting, or a proxy."""
    lengths: dict[str, set[str]] = {}
    for cell in cells:
        if cell.runs and (label := proxy_label(cell)):
            lengths.setdefault(label, set()).update(map(_length, cell.runs))
    named = (  # many lengths are those of a trend, which its rule names
        f"{label}, {' or '.join(sorted(several))}" if len(several) < 4 else label for label, several in lengths.items()
    )
    words = " / ".join(named)
    return f"proxy: {words}" if words else "paper scale" if scale == "paper" else ""


def _length(run: Run) -> str:
    """Length of a run in epochs, if it has at least one, or else in steps."""
    rounded = float(f"{run.epochs:.3g}")
    return f"{rounded:,g} epochs" if run.epochs >= 1 else f"{int(run.row['total_steps']):,} steps"


def _reached(claim: Claim, outcome: Outcome) -> str:
    """What the arms that a claim compares with reach, or the one that its estimate is against: the mean of the final metric of
    the runs that count, or of the same one at the moment that is compared."""
    shown = outcome.contrasts if outcome.weakest is None else [outcome.weakest]
    cells = [cell for one in shown for unit in one.units for _, cell, _ in unit.b]
    counted = {run.training for run in _runs_of(outcome.contrasts)}
    runs = [run for run in distinct_runs(cells) if run.training in counted]
    names = {run.row.get("metric", "") for run in runs}
    compared = claim.metrics[1]
    moment = compared if compared == "initial weights" or compared.startswith(PHASE) else "final"
    values = [value for run in runs if (value := reading(run, moment)) is not None]
    if len(names) != 1 or not values or not claim.arms:
        return ""
    if claim.each and outcome.weakest is not None and len(claim.arms) > 1:
        arms = list(dict.fromkeys(map(_method_of, cells)))
    elif moment == "final":
        arms = list(map(described, claim.arms if outcome.against is None else [outcome.against]))
    else:
        arms = list(arms_in_words(claim))
    return f"; {' or '.join(arms)}: {fmean(values):.3g} {names.pop().replace('_', ' ')}"
