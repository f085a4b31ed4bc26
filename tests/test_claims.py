"""Verdicts: the statistical rule, its preconditions, claims as data, and errors of earlier verdicts that stay mended."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from bitcycle.analysis import statistics as rule
from bitcycle.analysis.claim_functions import allocation_at, speedup
from bitcycle.analysis.claims import PREDICATES, Claim, read_claims, rule_of
from bitcycle.analysis.contrast import FACTS, METRICS, Pool
from bitcycle.analysis.items import PAPERS, read_items
from bitcycle.analysis.judge import judge
from bitcycle.analysis.preconditions import reached_last_stage
from bitcycle.analysis.results import Cell, Results, Run
from bitcycle.analysis.verdict import (
    COMPUTED,
    CONTRADICTED,
    NO_TEST,
    NOT_RUN,
    SUPPORTED,
    UNDECIDED,
    ClaimResult,
    read_claim_results,
    write_claims,
)
from bitcycle.settings import SettingError
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published"
CLAIMS = {claim.id: claim for claim in read_claims(PUBLISHED)}


def cell(*values: float, scale: str = "mini", steps: int = 1000, curve: dict | None = None, **settings: object) -> Cell:
    """A cell with a run of each value for the seeds 0, 1, ...; settings by words such as schedule__q_max; None: no run."""
    row = {key: settings.pop(key) for key in ("seconds", "finished", "gbitops", "steps_per_second") if key in settings}
    actual = settings.pop("actual", {})
    paper = {name.replace("__", "."): str(value) for name, value in settings.items()}
    paper = {"model": "resnet74", "dataset": "cifar10", "quantizer": "sbm", **paper}
    ours = {"model": "resnet8", "dataset": "cifar10", "schedule": paper.get("schedule", ""), **actual}
    nested = {key: {"name": value} for key, value in ours.items()}
    nested["schedule"].update({key.partition(".")[2]: value for key, value in paper.items() if "schedule." in key})
    common = {"scale": scale, "hash": str(sorted(paper.items())), "metric": "test_accuracy", **ours}
    common |= {"total_steps": str(steps), "processor": "made up", **{key: str(value) for key, value in row.items()}}
    runs = []
    for seed, value in enumerate(values):
        run = Run({**common, "seed": str(seed), "final": str(value), "best": str(value)}, nested)
        vars(run)["curve"] = curve or {}
        vars(run)["analyses"] = []
        runs.append(run)
    return Cell(paper, ours, tuple(runs), "resnet8, cifar10" if scale == "mini" else "")


def verdict(claim: Claim | str, *cells: Cell, scale: str = "mini", pool: Pool | None = None) -> ClaimResult:
    claim = CLAIMS[claim] if isinstance(claim, str) else claim
    (found,) = judge([claim], {claim.item: Results(scale, cells)}, pool)
    return found


HIGHER = Claim("x/y-c1", "one is better", predicate="higher", a={"schedule": "CR"}, b={"schedule": "static"})
ONE, OTHER = (71.0, 75.5, 74.0, 72.0), (70.0, 73.0, 73.0, 70.0)
PAIR = cell(*ONE, schedule="CR"), cell(*OTHER, schedule="static")


# The rule


def test_directions_are_paired_t_tests():
    found = verdict(HIGHER, *PAIR)
    expected = stats.ttest_rel(ONE, OTHER)
    low, high = expected.confidence_interval(0.95)
    assert (found.estimate, found.low, found.high) == pytest.approx((np.mean(ONE) - np.mean(OTHER), low, high))
    assert found.p_raw == found.p_corrected == pytest.approx(expected.pvalue)
    assert (found.n, found.trainings, found.df, found.level) == (4, 8, 3, 0.95)
    assert (found.verdict, found.decided, found.leaning) == (SUPPORTED, True, SUPPORTED)
    assert verdict(replace(HIGHER, predicate="lower"), *PAIR).verdict == CONTRADICTED
    assert found.scope == "proxy: ResNet-8, CIFAR-10" and "95 % interval" in found.rule and "schedule CR" in found.rule


@pytest.mark.parametrize(("margin", "expected"), [(4.0, SUPPORTED), (1.5, UNDECIDED), (0.2, CONTRADICTED)])
def test_margins_are_two_one_sided_tests(margin, expected):
    found = verdict(replace(HIGHER, predicate="equivalent", margin=margin), *PAIR)
    support = ttost_paired(np.array(ONE), np.array(OTHER), -margin, margin)[0]
    assert found.verdict == expected and found.level == 0.9 and found.margin == margin
    if expected == SUPPORTED:
        assert found.p_raw == pytest.approx(support) and max(abs(found.low), abs(found.high)) < margin
    if expected == CONTRADICTED:
        assert found.low > margin and support > 0.95
    assert verdict(replace(HIGHER, predicate="at_least", margin=margin), *PAIR).verdict == SUPPORTED
    assert verdict(replace(HIGHER, predicate="at_most", margin=margin), *PAIR).verdict == expected


def test_one_seed_decides_with_the_deviation_of_others_alone():
    """Never from n = 1: the deviation is that of other settings of the same network, data and length, or there is no test."""
    alone = cell(75.0, schedule="CR"), cell(70.0, schedule="static")
    found = verdict(HIGHER, *alone)
    assert (found.verdict, found.n, found.low, found.p_raw) == (UNDECIDED, 1, None, None)
    assert "one seed" in found.reason
    others = [cell(60 + i, 62 + i + 0.5 * (i % 2), 61 + i, schedule="LR", schedule__cycles=i) for i in range(8)]
    pool = Pool([run for one in (*alone, *others) for run in one.runs])
    deviation, df = pool.deviation(alone[0].runs[0], "final")
    found = verdict(HIGHER, *alone, pool=pool)
    assert (found.verdict, found.df) == (SUPPORTED, df) and df == 14
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.975, df) * deviation * math.sqrt(2))
    longer = cell(75.0, schedule="CR", steps=2000), cell(70.0, schedule="static", steps=2000)
    assert verdict(HIGHER, *longer, pool=pool).p_raw is None


def test_cells_of_the_same_training_count_once_and_seeds_without_partner_not_at_all():
    several = [cell(*ONE, 99.0, schedule="CR"), cell(*OTHER, schedule="static")]
    several += [replace(one, paper={**one.paper, "model": "resnet110"}) for one in several]
    found = verdict(replace(HIGHER, match=["model"]), *several)
    assert (found.estimate, found.n, found.trainings) == (np.mean(ONE) - np.mean(OTHER), 4, 8)
    same = replace(several[0], paper={**several[0].paper, "schedule": "static"})
    found = verdict(replace(HIGHER, match=["model"]), several[0], same)
    assert found.verdict == NOT_RUN or "same training" in found.reason


def test_several_arms_have_to_be_beaten_all():
    claim = replace(HIGHER, b=[{"schedule": "static"}, {"schedule": "LR"}])
    worse, better = cell(60.0, 61.0, 62.0, 60.5, schedule="LR"), cell(90.0, 93.0, 92.0, 90.5, schedule="LR")
    assert verdict(claim, *PAIR, worse).verdict == SUPPORTED
    found = verdict(claim, *PAIR, better)
    assert found.verdict == CONTRADICTED and found.estimate == pytest.approx(np.mean(ONE) - 91.375)


def test_trends_and_spreads():
    generator = np.random.default_rng(0)
    claim = Claim("x/y-c1", "falls", predicate="falling", a={"schedule": "CR"}, by="schedule.cycles", match=["model"])
    cells = [cell(*(80 - 2 * n + generator.normal(0, 0.5, 3)), schedule="CR", schedule__cycles=n) for n in range(6)]
    found = verdict(claim, *cells)
    assert found.verdict == SUPPORTED and found.estimate < -0.9 and found.high < 0
    assert verdict(replace(claim, predicate="rising"), *cells).verdict == CONTRADICTED
    one = verdict(claim, *(replace(each, runs=each.runs[:1]) for each in cells))
    assert (one.verdict, one.leaning, one.n) == (UNDECIDED, SUPPORTED, 1) and one.p_corrected < 0.05, "a single seed"
    wide, narrow = (
        [cell(*generator.normal(80, spread, 6), schedule=name, schedule__q_max=n) for n in range(4)]
        for name, spread in (("CR", 3.0), ("static", 0.3))
    )
    spread = Claim("x/y-c2", "narrow", predicate="smaller_spread", a={"schedule": "static"}, b={"schedule": "CR"})
    assert verdict(spread, *wide, *narrow).verdict == SUPPORTED


def test_all_settings_alike():
    claim = Claim("x/y-c1", "hardly matters", predicate="all_equivalent", a={"schedule": "CR"}, match=["model"])
    noise = np.random.default_rng(1).normal(0, 0.05, (3, 5))
    alike = [cell(*(80 + noise[n]), schedule="CR", schedule__cycles=n) for n in range(3)]
    assert verdict(claim, *alike).verdict == SUPPORTED
    assert verdict(claim, *alike, cell(*(82 + noise[0]), schedule="CR", schedule__cycles=9)).verdict == CONTRADICTED


def simulated(effect: float, repetitions: int, claims: int = 12, seeds: int = 5) -> list[ClaimResult]:
    """Verdicts on claims with made-up runs of deviation 1 beside a common effect of each seed."""
    generator = np.random.default_rng(0)
    several = [replace(HIGHER, id=f"x/y{number}-c1") for number in range(claims)]
    found = []
    for _ in range(repetitions):
        results = {}
        for claim in several:
            seed = generator.normal(0, 3, seeds)
            arms = [shift + seed + generator.normal(70, 1, seeds) for shift in (effect, 0.0)]
            cells = [cell(*arm, schedule=name) for arm, name in zip(arms, ("CR", "static"))]
            results[claim.item] = Results("mini", tuple(cells))
        found += judge(several, results, Pool([]))
    return found


def test_without_effect_at_most_one_in_twenty_is_decided_and_a_detectable_effect_in_four_of_five(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # which statsmodels calls each time
    nothing = simulated(0.0, 40)
    assert sum(row.decided for row in nothing) <= 0.05 * len(nothing)
    assert sum(bool(row.leaning) for row in nothing) <= 0.05 * len(nothing) + 3 * math.sqrt(0.05 * len(nothing))
    effect = rule.detectable(math.sqrt(2), seeds=5, df=4, tests=12)
    there = simulated(effect, 20)
    assert sum(row.decided and row.verdict == SUPPORTED for row in there) >= 0.8 * len(there)
    alone = simulated(rule.detectable(math.sqrt(2), seeds=5, df=4), 20)
    assert sum(row.leaning == SUPPORTED for row in alone) >= 0.74 * len(alone), "0.8 but for chance, uncorrected"


def test_claims_of_one_scale_are_corrected_together():
    several = [replace(HIGHER, id=f"x/y-c{number}") for number in range(5)]
    rows = judge(several, {"x/y": Results("mini", PAIR)})
    assert [row.p_corrected for row in rows] == pytest.approx([5 * rows[0].p_raw] * 5)
    assert {(row.verdict, row.decided, row.leaning) for row in rows} == {(UNDECIDED, False, SUPPORTED)}
    paper = cell(*ONE, scale="paper", schedule="CR"), cell(*OTHER, scale="paper", schedule="static")
    both = judge([HIGHER], {"x/y": Results("mini", PAIR, (Results("paper", paper),))})
    assert [(row.scale, row.scope) for row in both] == [("paper", "paper scale"), ("mini", "proxy: ResNet-8, CIFAR-10")]


def test_how_many_seeds_would_decide():
    assert rule.seeds_needed(1.0, 1.0, tests=1) == 10  # statsmodels' TTestPower: 9.94
    assert rule.seeds_needed(1.0, 1.0, tests=20) > 10
    assert rule.seeds_needed(None, 1.0, 1) is None and rule.seeds_needed(1.0, 0.0, 1) is None
    wide = cell(71.0, 78.0, 74.0, schedule="CR"), cell(70.0, 73.0, 76.0, schedule="static")
    found = verdict(replace(HIGHER, value=1.0), *wide)
    assert found.verdict == UNDECIDED and found.seeds_needed > 50


# Preconditions


def reason(claim: Claim, *cells: Cell, pool: Pool | None = None) -> str:
    found = verdict(claim, *cells, pool=pool)
    assert found.verdict == NO_TEST, found
    return found.reason


def test_fewer_than_half_of_the_cells():
    empty = [cell(schedule=name, model=f"resnet{n}") for n in (20, 38) for name in ("CR", "static")]
    assert "1 of 3" in reason(replace(HIGHER, match=["model"]), *PAIR, *empty)
    assert verdict(HIGHER, *empty).verdict == NOT_RUN


def test_ceiling_and_chance():
    assert "ceiling" in reason(HIGHER, cell(99.7, 99.8, 99.9, schedule="CR"), cell(99.5, 99.6, 99.8, schedule="static"))
    assert "chance" in reason(HIGHER, cell(10.7, 9.8, 11.9, schedule="CR"), cell(9.5, 10.6, 9.8, schedule="static"))


def test_methods_that_did_not_reach_their_last_stage():
    claim = replace(HIGHER, a={"schedule": "pfq"}, requires=["last stage"])
    curve = {"training": {"weight": [3, 3, 4]}}
    early, late = (
        cell(70.0, 71.0, 73.0, schedule="pfq", curve={"training": {"weight": bits}}) for bits in ([3, 4], [3, 8])
    )
    for one in (early, late):
        for run in one.runs:
            run.settings["schedule"]["stages"] = [3, 4, 6, 8]
    assert "3 of 3 trainings did not reach the last stage" in reason(claim, early, PAIR[1])
    assert verdict(claim, late, PAIR[1]).verdict == UNDECIDED
    gated = cell(1.0, schedule="fractrain", curve={**curve, "training": {"cp_target": [1.5, 2.0]}}).runs[0]
    gated.settings["schedule"].update(target=1.5, target_step=0.5, stages=4)
    assert not reached_last_stage(gated)
    phased = cell(1.0, schedule="hlhlp", curve={"phases": [{}, {}, {}]}).runs[0]
    assert not reached_last_stage(phased)


def test_unequal_lengths_count_where_trainings_have_converged():
    longer, short = cell(80.0, 81.0, 82.0, schedule="CR", steps=5000), cell(70.0, 71.0, 72.5, schedule="static")
    assert "1,000 and 5,000 steps" in reason(HIGHER, longer, short)
    claim = replace(HIGHER, lengths="converged")
    assert "have not converged" in reason(claim, longer, short)
    for run in (*longer.runs, *short.runs):
        run.row["train_samples"] = "1000"
        run.settings["training"] = {"batch_size": 32}
    assert verdict(claim, longer, short).verdict == SUPPORTED


def test_timings_on_a_shared_machine():
    claim = replace(HIGHER, metric="speed", display="ratio", reference=1.0, requires=["quiet machine"])
    one, two = (
        cell(1.0, 2.0, 3.0, schedule=name, steps_per_second=5, seconds=60, finished="2026-01-01T10:00:00+00:00")
        for name in ("CR", "static")
    )
    for minute, run in enumerate((*one.runs, *two.runs)):
        run.row["finished"] = f"2026-01-01T10:{10 + minute}:00+00:00"
    quiet = Pool([*one.runs, *two.runs])
    assert verdict(claim, one, two, pool=quiet).verdict != NO_TEST
    busy = Pool([*quiet.runs, *cell(1.0, schedule="LR", seconds=900, finished="2026-01-01T10:20:00+00:00").runs])
    assert "shared" in reason(claim, one, two, pool=busy)


def test_proxies_that_are_too_far():
    arms = [
        cell(*v, schedule=s, dataset="imagenet", actual={"dataset": "digits"})
        for v, s in ((ONE, "CR"), (OTHER, "static"))
    ]
    assert "handwritten digits for ImageNet" in reason(HIGHER, *arms)
    arms = [cell(*v, schedule=s, model="mobilenet_v2") for v, s in ((ONE, "CR"), (OTHER, "static"))]
    assert verdict(HIGHER, *arms).verdict == SUPPORTED
    assert "ResNet-8 for MobileNetV2" in reason(replace(HIGHER, requires=["network family"]), *arms)
    published = Claim("x/y-c1", "69 %", predicate="at_least", a={"schedule": "CR"}, reference=69.0, margin=1.0)
    assert "published number" in reason(published, PAIR[0])
    found = verdict(published, cell(*ONE, scale="paper", schedule="CR"), scale="paper")
    assert found.verdict == SUPPORTED and found.estimate == pytest.approx(np.mean(ONE) - 69)


# Claims as data


def test_every_claim_of_every_paper_is_an_entry():
    assert len(CLAIMS) == 111 and {claim.paper for claim in CLAIMS.values()} == set(PAPERS)
    assert {claim.item for claim in CLAIMS.values()} <= {item.id for item in read_items(PUBLISHED)}
    assert {claim.predicate for claim in CLAIMS.values()} == set(PREDICATES) and len(PREDICATES) == 12
    for claim in CLAIMS.values():
        assert claim.section and claim.effect and rule_of(claim)
        assert bool(claim.reason) == (claim.predicate == "none")
        for name in [*claim.where, *claim.a, *claim.match, *(key for arm in claim.arms for key in arm)]:
            assert name in FACTS or "." in name, (claim.id, name)
        assert all(m in METRICS or m in ("final", "best", "q_min", "gbitops") or ": " in m for m in claim.metrics), (
            claim.id
        )


def test_deleting_the_claims_of_a_paper_leaves_the_others_working(tmp_path):
    shutil.copytree(PUBLISHED / "claims", tmp_path / "claims")
    for paper in PAPERS:
        (tmp_path / "claims" / f"{paper}.yaml").unlink()
        left = read_claims(tmp_path)
        assert {claim.paper for claim in left} == {
            one for one in PAPERS if (tmp_path / "claims" / f"{one}.yaml").exists()
        }
        assert [row.claim_id for row in judge(left, {})] == [claim.id for claim in left]
    for claim in CLAIMS.values():
        assert all(item.startswith(f"{claim.paper}/") for item in claim.items)


def test_wrong_entries_are_refused(tmp_path):
    (tmp_path / "claims").mkdir()
    file = tmp_path / "claims" / "x.yaml"
    for entry, word in (("predicate: higer", "higher"), ("predicate: higher, metrik: final", "metric")):
        file.write_text(f"defaults: {{}}\nclaims:\n  - {{id: t-c1, sentence: s, {entry}}}\n")
        with pytest.raises(SettingError, match=word):
            read_claims(tmp_path)


def test_without_runs_only_formulas_say_something():
    rows = judge(list(CLAIMS.values()), {})
    computed = [row for row in rows if row.verdict == COMPUTED]
    assert len(computed) == 6 and all(row.holds and row.reason for row in computed)
    assert {row.verdict for row in rows} == {COMPUTED, NO_TEST, NOT_RUN}
    assert all(row.reason for row in rows if row.verdict == NO_TEST)


def test_verdicts_are_read_as_they_were_written(tmp_path):
    found = [
        ClaimResult("a/t-c1", "a/t", "a", 'one, "two"', verdict=SUPPORTED, decided=True, estimate=1.25, n=3, df=2.0),
        ClaimResult("a/t-c2", "a/t", "a", "three", verdict=UNDECIDED, holds=False, p_raw=0.25, seeds_needed=9),
    ]
    write_claims(found, tmp_path / "x" / "claims.csv")
    assert read_claim_results(tmp_path / "x" / "claims.csv") == found


# Errors of earlier verdicts


def test_allocations_are_read_in_the_order_of_steps_and_near_the_epochs_that_are_named():
    """Keys are text, of which "1000" comes before "500"; epoch 5 of 160 was taken from epoch 80."""
    early, late = {"a": {"6/8": 1.0}, "b": {"4/6": 1.0}}, {"a": {"4/6": 1.0}, "b": {"6/8": 1.0}}
    cells = [
        cell(*(1.0,) * 3, schedule="fractrain", curve={"allocation": {str(last): late, str(first): early}}, steps=1600)
        for last, first in ((850, 50), (1600, 800))
    ]
    run, coarse = (one.runs[0] for one in cells)
    assert allocation_at(run, 5 / 160) == early and allocation_at(run, 85 / 160) == late
    assert allocation_at(coarse, 5 / 160) is None
    assert verdict("fractrain/fig8-c1", cells[0]).estimate == 2.0
    assert "10 %" in reason(CLAIMS["fractrain/fig8-c1"], cells[1])


def split_cells() -> list[Cell]:
    """1 bit throughout is best at small budgets, as in our runs."""
    common = {"model": "resnet20_extra_skip", "schedule": "partial_pretrain", "quantizer": "pact_binary"}
    rows = {128: (40, 35, 30), 256: (45, 41, 38), 512: (50, 51, 49), 768: (51, 54, 53), 1024: (52, 55, 58)}
    splits = (0.0, 0.5, 0.75)
    return [
        cell(
            *(value + 0.01 * seed for seed in range(3)),
            **common,
            steps=steps,
            schedule__split=split,
            training__steps=steps,
        )
        for steps, values in rows.items()
        for split, value in zip(splits, values)
    ]


def test_budgets_count_the_split_without_full_precision():
    found = verdict("partial/fig3-c2", *split_cells())
    assert found.estimate > 0.9 and found.verdict == CONTRADICTED
    found = verdict("partial/fig3-c1", *split_cells())
    assert found.estimate == pytest.approx(5) and found.verdict == CONTRADICTED


def test_speedups_are_of_equal_seeds():
    """Twice as fast at every target; over three seeds the ratio is decided, of one nothing."""
    slow = {1000: 10.0, 2000: 20.0, 4000: 40.0, 8000: 80.0}
    fast = {1000: 20.0, 2000: 40.0, 4000: 80.0}
    common: dict[str, object] = {
        "model": "resnet20_extra_skip",
        "schedule": "partial_pretrain",
        "quantizer": "pact_binary",
    }
    cells = [
        cell(
            *(value * (1 + 0.01 * seed * share) for seed in range(3)),
            **common,
            steps=k,
            schedule__split=split,
            training__steps=k,
        )
        for split, share, points in ((0.0, 0.1, slow), (0.5, 1.0, fast))
        for k, value in points.items()
    ]
    assert speedup([(float(k), v) for k, v in fast.items()], [(float(k), v) for k, v in slow.items()]) == pytest.approx(
        2
    )
    found = verdict("partial/fig1-c1", *cells)
    assert found.verdict == SUPPORTED and found.estimate == pytest.approx(2.0, rel=0.05) and found.low > 1
    assert verdict("partial/fig1-c1", *(replace(one, runs=one.runs[:1]) for one in cells)).verdict == UNDECIDED


def test_the_gap_to_float_is_not_the_gap_to_fine_tuning():
    """hlhlp/table1-c2 was the difference of c1, counted twice."""
    common = {"quantizer": "uniform_l2", "dataset": "cifar10"}
    cells = [cell(*np.add(OTHER, 1.0), schedule="hlhlp", **common), cell(*OTHER, schedule="fine_tuning", **common)]
    float_cell = cell(*np.add(OTHER, (20.0, 21.0, 20.5, 20.0)), schedule="static", quantizer="none")
    assert verdict("hlhlp/table1-c1", *cells, float_cell).estimate == pytest.approx(1.0)
    found = verdict("hlhlp/table1-c2", *cells, float_cell)
    assert found.estimate == pytest.approx(-19.375) and found.verdict == CONTRADICTED


def test_saving_cost_alone_is_not_comparable_accuracy():
    """fractrain/fig7-c1 and table3-c3 agreed at -1.22 and -4.13 points, as only the saving was asked for."""
    curve = {"training": {"weight": [3, 8]}}
    gated = cell(*np.subtract(OTHER, (4.0, 4.2, 4.1, 4.3)), schedule="pfq", gbitops=50, curve=curve)
    for run in gated.runs:
        run.settings["schedule"]["stages"] = [3, 4, 6, 8]
    static = cell(*OTHER, schedule="static", schedule__q_max=8, gbitops=100)
    found = verdict(replace(CLAIMS["fractrain/fig7-c1"], match=["model"]), gated, static)
    assert found.verdict == CONTRADICTED and "saving 50 %" in found.reason
