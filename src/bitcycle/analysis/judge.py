"""The verdicts on all claims, which `make figures` writes to results/summary/claims.csv.

One rule at every scale: a claim is decided where its p-value, multiplied by the number of looks (Bonferroni) and corrected over
all claims of the scale (Holm), is below 0.05, and leaning where the uncorrected one is; what could not be tested says why. The
scope says which trainings it is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bitcycle.analysis import preconditions, verdict
from bitcycle.analysis import statistics as rule
from bitcycle.analysis.aggregation import Cell, Results
from bitcycle.analysis.claim_functions import COMPUTED as FORMULAS
from bitcycle.analysis.claims import Claim, rule_of, tested_reference
from bitcycle.analysis.contrast import Pool, select
from bitcycle.analysis.predicates import Found, evaluate
from bitcycle.analysis.verdict import ClaimResult

SCALES = ("paper", "mini")
"""Scales that count; smoke runs say nothing."""


def judge(claims: Sequence[Claim], results: Mapping[str, Results], pool: Pool | None = None) -> list[ClaimResult]:
    """The verdict on every claim at every scale that has trainings for it; p-values of one scale are corrected together.

    Args:
        claims: what to judge.
        results: item -> its runs.
        pool: all recorded runs; None: those of the results.
    """
    if pool is None:
        runs = [run for one in results.values() for scale in (one, *one.others) for run in scale.runs]
        pool = Pool(list({(r.row["scale"], r.row["hash"], r.row["seed"]): r for r in runs}.values()))
    judged: list[tuple[Claim, ClaimResult, Found | None]] = []
    for claim in claims:
        rows = [_judge_at(claim, scale, results, pool) for scale in SCALES]
        known = [row for row in rows if row is not None] or [_without_runs(claim, results)]
        judged += [(claim, *row) for row in (known[:1] if claim.predicate in ("computed", "none") else known)]
    for scale in SCALES:
        tested = [i for i, (_, row, _) in enumerate(judged) if row.scale == scale and row.p_raw is not None]
        adjusted = rule.corrected([min(1.0, (judged[i][1].p_raw or 0.0) * judged[i][0].looks) for i in tested])
        for i, p in zip(tested, adjusted):
            claim, row, found = judged[i]
            judged[i] = (claim, _final(claim, row, found, p, len(tested)), found)
    return [row for _, row, _ in judged]


def _empty(claim: Claim) -> ClaimResult:
    metric = claim.function.replace("_", " ") or " and ".join(dict.fromkeys(claim.metrics))
    return ClaimResult(
        *(claim.id, claim.item, claim.paper, claim.sentence, claim.section, claim.predicate),
        rule=rule_of(claim),
        metric="" if claim.predicate in ("computed", "none") else metric,
        unit="" if claim.predicate in ("computed", "none") else claim.unit,
        published_effect=claim.effect,
        published_value=claim.value,
    )


def _without_runs(claim: Claim, results: Mapping[str, Results]) -> tuple[ClaimResult, Found | None]:
    row = _empty(claim)
    if claim.predicate == "computed":
        found = FORMULAS[claim.function](claim.options)
        return replace(row, verdict=verdict.COMPUTED, holds=found.holds, reason=found.measured), None
    if claim.predicate == "none":
        return replace(row, verdict=verdict.NO_TEST, reason=claim.reason), None
    some = any(results[item].done for item in (claim.item, *claim.items) if item in results)
    return replace(row, verdict=verdict.NOT_RUN, reason="The runs that it needs are missing." if some else ""), None


def _judge_at(
    claim: Claim, scale: str, results: Mapping[str, Results], pool: Pool
) -> tuple[ClaimResult, Found | None] | None:
    """The verdict at a scale, before correction; None where no training says anything."""
    if claim.predicate in ("computed", "none"):
        return None
    at_scale = [results[item].at(scale) for item in (claim.item, *claim.items) if item in results]
    every = select([cell for one in at_scale if one is not None for cell in one.cells], claim.where)
    if not any(cell.runs for cell in every):
        return None
    cells, excluded = preconditions.near_enough(claim, every)
    parts = claim.parts
    found = [evaluate(part, cells, pool) for part in parts]
    row = replace(_empty(claim), scale=scale)
    first = found[0]
    if first is None:
        reason = excluded if evaluate(claim, every, pool) is not None else _moments_missing(claim, cells)
        if not reason:
            return None
        return replace(row, verdict=verdict.NO_TEST, scope=_scope(scale, every), reason=reason), None
    used = [cell for one in first.contrasts for unit in one.units for cell in unit.cells]
    runs = {run.training: run for one in first.contrasts for run in one.runs}
    low, high = first.interval or (None, None)
    row = replace(
        row,
        scope=_scope(scale, used),
        rule=rule_of(claim, first.margin),
        verdict=verdict.UNDECIDED,
        estimate=first.shown,
        low=low,
        high=high,
        level=claim.level,
        margin=first.margin,
        n=first.tested.n,
        df=first.tested.df or None,
        trainings=len(runs),
    )
    if failed := preconditions.failed(
        claim, first.contrasts, list(runs.values()), pool, bool(row.scope) and scale != "paper"
    ):
        return replace(row, verdict=verdict.NO_TEST, reason=failed), first
    return _with_parts(row, parts, found), first


def _moments_missing(claim: Claim, cells: Sequence[Cell]) -> str:
    if claim.metrics[0].startswith("depth") and select(cells, claim.where, claim.a):
        return "No evaluation lies within 10 % of the epochs that the claim names."
    return ""


def _with_parts(row: ClaimResult, parts: Sequence[Claim], found: Sequence[Found | None]) -> ClaimResult:
    """The row with the p-value of all parts together; the further parts stand in the reason."""
    words = []
    for part, one in zip(parts[1:], found[1:]):
        if one is None or one.shown is None:
            return replace(row, reason=f"no runs tell the {part.metric}")
        shown = f"{one.shown:.3g} {part.unit}".strip()
        words.append(f"{part.display or part.metric} {shown}" + (f" (p = {one.values.p:.2g})" if one.values.p else ""))
    joint = rule.all_of([one.values for one in found if one is not None])
    reason = "; ".join(words)
    if joint.p is None:
        missing = "one seed, and no deviation of such trainings is known" if row.n == 1 else "no deviation is known"
        return replace(row, reason="; ".join(filter(None, (missing, reason))))
    leaning = ""
    if joint.p < rule.SIGNIFICANCE:
        leaning = verdict.SUPPORTED if joint.supports == joint.p else verdict.CONTRADICTED
    return replace(row, p_raw=joint.p, looks=parts[0].looks, leaning=leaning, reason=reason)


def _final(claim: Claim, row: ClaimResult, found: Found | None, p: float, tests: int) -> ClaimResult:
    """The row with its corrected p-value, which decides, and the seeds that an undecided claim needs."""
    row = replace(row, p_corrected=p)
    if p < rule.SIGNIFICANCE and row.leaning:
        if row.n == 1 and not row.df:
            return replace(
                row, reason="; ".join(filter(None, ("an order within one seed decides nothing", row.reason)))
            )
        return replace(row, verdict=row.leaning, decided=True)
    if found is None or found.tested.deviation is None:
        return row
    tests *= claim.looks
    if found.margin is not None:
        return replace(row, seeds_needed=rule.seeds_needed(found.tested.deviation, found.margin, tests, margin=True))
    effect = claim.value
    if effect is not None and claim.display:
        effect = tested_reference(replace(claim, reference=effect)) - tested_reference(claim)
    return replace(row, seeds_needed=rule.seeds_needed(found.tested.deviation, effect, tests))


def _scope(scale: str, cells: Iterable[Cell]) -> str:
    """What the trainings are: the paper's, or a proxy."""
    proxies = list(dict.fromkeys(preconditions.proxy_label(cell) for cell in cells if cell.runs))
    named = [proxy for proxy in proxies if proxy]
    if not named:
        return "paper scale" if scale == "paper" else ""
    return f"proxy: {' / '.join(named)}"
