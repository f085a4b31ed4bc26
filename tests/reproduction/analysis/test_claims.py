"""Verdicts: the statistical rule, and claims as data."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from bitcycle.configuration import GROUPS
from bitcycle.reproduction.analysis import statistics as rule
from bitcycle.reproduction.analysis.cells import Results, Run
from bitcycle.reproduction.analysis.claims import PREDICATES, Claim, _claim, read_claims, rule_of
from bitcycle.reproduction.analysis.contrast import Pool, contrast
from bitcycle.reproduction.analysis.facts import FACTS
from bitcycle.reproduction.analysis.items import PAPERS, read_items
from bitcycle.reproduction.analysis.labels import our_data
from bitcycle.reproduction.analysis.metrics import METRICS
from bitcycle.reproduction.analysis.predicates import _all_hold, _t_test
from bitcycle.reproduction.analysis.verdict import (
    COMPUTED,
    CONTRADICTED,
    EXPLORATORY,
    IN_PART,
    NO_TEST,
    NOT_TESTED,
    SUPPORTED,
    UNDECIDED,
    ClaimResult,
    judge,
    read_claim_results,
    write_claims,
)
from bitcycle.reproduction.freeze import planned_power
from bitcycle.settings import SettingError
from tests.reproduction.claims_cases import CLAIMS, HIGHER, ONE, OTHER, PAIR, PUBLISHED, cell, verdict

# The rule


def test_directions_are_paired_t_tests():
    found = verdict(HIGHER, *PAIR)
    expected = stats.ttest_rel(ONE, OTHER)
    low, high = expected.confidence_interval(0.95)
    assert (found.estimate, found.low, found.high) == pytest.approx((np.mean(ONE) - np.mean(OTHER), low, high))
    assert found.p_raw == pytest.approx(expected.pvalue) and found.p_corrected == pytest.approx(2 * found.p_raw)
    assert (found.n, found.trainings, found.df, found.level) == (4, 8, 3, 0.95)
    assert (found.verdict, found.decided, found.leaning) == (SUPPORTED, True, SUPPORTED)
    assert verdict(replace(HIGHER, predicate="lower"), *PAIR).verdict == CONTRADICTED
    assert (
        found.scope.startswith("proxy: ResNet-8, CIFAR-10, ")
        and "95 % interval" in found.rule
        and "schedule CR" in found.rule
    )


@pytest.mark.parametrize(("margin", "expected"), [(4.0, SUPPORTED), (1.5, UNDECIDED), (0.2, NOT_TESTED)])
def test_margins_need_the_whole_95_percent_interval_within_them(margin, expected):
    found = verdict(replace(HIGHER, predicate="equivalent", margin=margin), *PAIR)
    support = ttost_paired(np.array(ONE), np.array(OTHER), -margin, margin)[0]
    assert found.verdict == expected and found.level == 0.95 and found.margin == margin
    assert (found.low, found.high) == pytest.approx(stats.ttest_rel(ONE, OTHER).confidence_interval(0.95))
    if expected == SUPPORTED:
        assert found.p_raw == pytest.approx(2 * support) and max(abs(found.low), abs(found.high)) < margin
    if expected == NOT_TESTED:
        assert found.power < 0.5 and "below one half" in found.reason and found.p_corrected is None
    at_least, at_most = (
        verdict(replace(HIGHER, predicate=name, margin=margin), *PAIR) for name in ("at_least", "at_most")
    )
    assert at_least.leaning == SUPPORTED or at_least.power < 0.5
    assert at_most.verdict == expected


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


def test_the_pooled_deviation_is_that_of_differences():
    """What a seed does to all settings is not in it: two seeds 5 points above a number by chance were certainly above it."""
    claim = Claim("x/y-c1", "it reaches 70 %", predicate="higher", a={"schedule": "CR"}, reference=70.0)
    seed, noise = np.array([3.0, 7.0]), np.random.default_rng(0).normal(0, 0.5, (7, 2))
    every = [cell(*(70 + seed + noise[n]), scale="paper", schedule="CR", schedule__cycles=n) for n in range(7)]
    pool = Pool([run for one in every for run in one.runs])
    found = verdict(claim, every[0], scale="paper", pool=pool)
    assert (found.verdict, found.n, found.low, found.p_raw) == (UNDECIDED, 2, None, None)


def test_a_pooled_deviation_of_zero_is_chance():
    """Two settings of two seeds whose accuracies, in tenths of a point, differed by as much had the interval 0.2 to 0.2."""
    pair = cell(81.2, 81.6, schedule="CR", gbitops=60), cell(81.0, 81.4, schedule="static", gbitops=100)
    pool = Pool([run for one in pair for run in one.runs])
    found = verdict(HIGHER, *pair, pool=pool)
    assert (found.estimate, found.n, found.low, found.p_raw) == (pytest.approx(0.2), 2, None, None)
    assert pool.deviation(pair[0].runs[0], "gbitops") == (0.0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_decide_nothing(bad):
    """Their standard error is nan, and max(0, nan) is 0: a claim and its opposite were both certain. A seed with nan was left
    out without a word, as if it were missing."""
    pair = cell(75.0, 73.0, schedule="CR"), cell(70.0, 76.0, schedule="static")
    diverged = cell(60, 61, bad, schedule="LR")
    pool = Pool([run for one in (*pair, diverged) for run in one.runs])
    assert pool.deviation(pair[0].runs[0], "final") == Pool(pool.runs[:-1]).deviation(pair[0].runs[0], "final")
    assert verdict(HIGHER, *pair, pool=pool).verdict == UNDECIDED
    for seeds in (2, 4):
        lost = cell(*ONE[: seeds - 1], bad, schedule="CR"), cell(*OTHER[:seeds], schedule="static")
        found = verdict(HIGHER, *lost, pool=pool)
        assert (found.verdict, found.p_raw, found.low) == (UNDECIDED, None, None)


def test_cells_of_the_same_training_count_once_and_seeds_without_partner_not_at_all():
    several = [cell(*ONE, 99.0, schedule="CR"), cell(*OTHER, schedule="static")]
    several += [replace(one, paper={**one.paper, "model": "resnet110"}) for one in several]
    found = verdict(replace(HIGHER, match=["model"]), *several)
    assert (found.estimate, found.n, found.trainings) == (np.mean(ONE) - np.mean(OTHER), 4, 8)
    same = replace(several[0], paper={**several[0].paper, "schedule": "static"})
    found = verdict(replace(HIGHER, match=["model"]), several[0], same)
    assert found.verdict == NOT_TESTED or "same training" in found.reason
    arms = *PAIR, cell(*np.subtract(OTHER, 9), schedule="static", schedule__q_max=6)
    again = replace(PAIR[1], paper={**PAIR[1].paper, "model": "resnet110"})
    assert verdict(HIGHER, *arms, again).estimate == pytest.approx(verdict(HIGHER, *arms).estimate), "in arm b, too"


def test_several_arms_have_to_be_beaten_all():
    claim = replace(HIGHER, b=[{"schedule": "static"}, {"schedule": "LR"}])
    worse, better = cell(60.0, 61.0, 62.0, 60.5, schedule="LR"), cell(90.0, 93.0, 92.0, 90.5, schedule="LR")
    assert verdict(claim, *PAIR, worse).verdict == SUPPORTED
    found = verdict(claim, *PAIR, better)
    assert found.verdict == CONTRADICTED and found.estimate == pytest.approx(np.mean(ONE) - 91.375)
    assert found.reason == "the estimate is against schedule LR"
    printed = verdict(replace(claim, value=-18.0), *PAIR, better)
    assert printed.published_inside is None, "the published effect is not that against one arm"


def test_trends_and_spreads():
    generator = np.random.default_rng(0)
    claim = Claim("x/y-c1", "falls", predicate="falling", a={"schedule": "CR"}, by="schedule.cycles", match=["model"])
    cells = [cell(*(80 - 2 * n + generator.normal(0, 0.5, 3)), schedule="CR", schedule__cycles=n) for n in range(6)]
    found = verdict(claim, *cells)
    assert found.verdict == SUPPORTED and found.estimate < -0.9 and found.high < 0
    assert verdict(replace(claim, predicate="rising"), *cells).verdict == CONTRADICTED
    one = verdict(claim, *(replace(each, runs=each.runs[:1]) for each in cells))
    assert (one.verdict, one.leaning, one.n) == (UNDECIDED, SUPPORTED, 1) and one.p_corrected < 0.05, "a single seed"
    lacking = [*cells[:-1], replace(cells[-1], runs=cells[-1].runs[:2])]
    assert verdict(claim, *lacking).n == 2, "a seed that lacks a place of the trend does not count"
    wide, narrow = (
        [cell(*generator.normal(80, spread, 6), schedule=name, schedule__q_max=n) for n in range(4)]
        for name, spread in (("CR", 3.0), ("static", 0.3))
    )
    spread = Claim("x/y-c2", "narrow", predicate="smaller_spread", a={"schedule": "static"}, b={"schedule": "CR"})
    assert verdict(spread, *wide, *narrow).verdict == SUPPORTED


def test_spreads_are_compared_by_an_f_test_of_pooled_variances():
    """For 2 and m degrees of freedom the distribution function of F is 1 - (1 + 2 x / m)^(-m / 2)."""
    ours, theirs = [[1.0, 2.0, 3.0]], [[0.0, 2.0, 4.0], [5.0, 9.0, 7.0]]  # variances 1 and 4, the latter of 4 degrees
    ratio, _, df, p = rule.spread_test(ours, theirs)
    below = 1 - (1 + 2 * 0.25 / 4) ** -2
    assert (ratio, df) == (pytest.approx(0.5), 2)
    assert p == pytest.approx((2 * below, 1.0))
    assert rule.spread_test([*ours, []], theirs)[3] == p, "a setting without values was a degree of freedom less"
    for pair in ((ours, [[73.1, 73.1, 73.1]]), ([[73.1, 73.1, 73.1]], ours)):
        assert rule.spread_test(*pair)[3] == rule.UNTESTED, (
            "of accuracies in whole percent one in five was certain, p = 0"
        )


def test_of_several_tests_the_one_that_supports_least_is_shown():
    """Of tests with the same p-value, the one with the smallest difference."""
    for predicate, sign in (("higher", 1), ("lower", -1)):
        claim, estimates = replace(HIGHER, predicate=predicate), [rule.Estimate(sign * n, 0.0, 4, 5) for n in (3, 1, 2)]
        tests = [_t_test(claim, estimate, None, []) for estimate in estimates]
        assert {test.p_values for test in tests} == {(2 * 0.5**5, 1.0)}
        assert _all_hold(claim, tests).shown == sign


def test_panels_of_one_seed_are_no_further_evidence_of_a_trend():
    """Seeds are the independent units: a second network with the same values was counted as three more blocks."""
    claim = Claim("x/y-c1", "falls", predicate="falling", a={"schedule": "CR"}, by="schedule.cycles", match=["model"])
    values = np.array([[5.0, 4.0, 4.5], [4.0, 4.5, 3.0], [3.0, 2.0, 3.5], [2.0, 3.0, 1.0]])
    one, two = (
        [cell(*row, schedule="CR", schedule__cycles=n, model=model) for n, row in enumerate(values)]
        for model in ("resnet38", "resnet74")
    )
    alone, both = verdict(claim, *one), verdict(claim, *one, *two)
    assert (both.p_raw, both.estimate, both.low, both.n) == (alone.p_raw, alone.estimate, alone.low, 3)
    lacking = [replace(each, runs=each.runs[:2]) for each in two]
    assert verdict(claim, *one, *lacking).n == 2, "a seed that lacks a panel does not count"


def test_seeds_that_lack_a_cell_of_a_place_do_not_count_in_a_trend():
    """A seed without the worse of two networks at some places rose there: the trend of four seeds was half of that of two."""
    claim = Claim("x/y-c1", "falls", predicate="falling", a={"schedule": "CR"}, by="schedule.cycles")
    values = [[level - n + 0.1 * seed for seed in range(4)] for n in range(4) for level in (90, 60)]
    models = ("resnet38", "resnet74")
    cells = [cell(*row, schedule="CR", schedule__cycles=n // 2, model=models[n % 2]) for n, row in enumerate(values)]
    assert verdict(claim, *cells).estimate == pytest.approx(-1)
    lacking = [replace(each, runs=each.runs[:2]) if n in (3, 7) else each for n, each in enumerate(cells)]
    found = verdict(claim, *lacking)
    assert (found.estimate, found.n) == (pytest.approx(-1), 2)


def test_a_place_that_a_network_lacks_does_not_count_in_a_trend():
    """A network that falls was left out, as it had three of four places, and still stood in the scope of a rise."""
    claim = Claim("x/y-c1", "rises", predicate="rising", a={"schedule": "CR"}, by="schedule.cycles", match=["model"])
    rise, fall = [], []
    for places, model, count, slope in ((rise, "resnet38", 4, 1), (fall, "resnet74", 3, -2)):
        for n in range(count):
            values = (70 + slope * n + 0.1 * seed for seed in range(6))
            places.append(cell(*values, schedule="CR", schedule__cycles=n, model=model))
    assert verdict(claim, *rise).verdict == SUPPORTED
    assert verdict(claim, *rise, *fall).verdict == CONTRADICTED


def test_a_margin_in_percent_is_that_of_the_seeds_that_count():
    claim = replace(HIGHER, predicate="at_least", margin_percent=1.0, match=["model"])
    more = cell(*ONE[:3], schedule="CR", model="resnet38"), cell(*OTHER[:3], schedule="static", model="resnet38")
    extreme = replace(PAIR[1], runs=(*PAIR[1].runs[:3], cell(*[0.0] * 4, schedule="static").runs[3]))
    assert verdict(claim, PAIR[0], extreme, *more).margin == pytest.approx(0.01 * sum(OTHER[:3]) / 3)


def test_only_trainings_of_seeds_that_count_are_counted():
    more = cell(*ONE, 71.5, schedule="CR", model="resnet38"), cell(*OTHER, 70.5, schedule="static", model="resnet38")
    found = verdict(replace(HIGHER, match=["model"]), *PAIR, *more)
    assert (found.n, found.trainings) == (4, 16)


def test_differences_that_are_equal_in_all_seeds_get_a_sign_test_and_the_rule_says_so():
    bits = [cell(*[level] * 12, schedule=name) for name, level in (("CR", 73.0), ("static", 72.0))]
    found = verdict(HIGHER, *bits)
    assert (found.verdict, found.p_raw) == (SUPPORTED, pytest.approx(2 * 0.5**12))
    assert "sign test" in found.rule and "t test" not in found.rule
    three = [
        cell(*values, schedule=name) for name, values in (("CR", (75.5, 74.0, 76.5)), ("static", (75.25, 73.75, 76.25)))
    ]
    found = verdict(replace(HIGHER, predicate="equivalent"), *three)
    assert (found.verdict, found.p_raw) == (UNDECIDED, 2 * 0.5**3), "three equal differences within a margin had p = 0"
    assert "(sign test, as all seeds agree)" in found.rule
    few = cell(73.1, 73.1, schedule="CR"), cell(72.3, 72.3, schedule="static")
    found = verdict(HIGHER, *few)
    assert (found.verdict, found.p_raw) == (UNDECIDED, None), (
        "the rounding of a fit was taken for a deviation: p = 4e-14"
    )


def test_a_further_part_about_another_arm_names_it():
    claim = replace(HIGHER, also=[{"a": {"schedule": "LR"}}])
    found = verdict(claim, *PAIR, cell(60.0, 61.0, 62.0, 60.5, schedule="LR"))
    assert found.verdict == CONTRADICTED and "final of schedule LR -10.6" in found.reason
    assert "for final (a: schedule LR)" in found.rule


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
    rows = judge(several, {"x/y": Results("mini", PAIR)}, Pool([]))
    assert [row.p_corrected for row in rows] == pytest.approx([5 * 2 * rows[0].p_raw] * 5)
    assert {(row.verdict, row.decided, row.leaning) for row in rows} == {(UNDECIDED, False, SUPPORTED)}
    paper = cell(*ONE, scale="paper", schedule="CR"), cell(*OTHER, scale="paper", schedule="static")
    both = judge([HIGHER], {"x/y": Results("mini", PAIR, (Results("paper", paper),))}, Pool([]))
    assert [(row.scale, row.scope) for row in both] == [
        ("paper", "paper scale; schedule static: 71.5 test accuracy"),
        ("mini", "proxy: ResNet-8, CIFAR-10, 1,000 steps; schedule static: 71.5 test accuracy"),
    ]


def test_look_k_of_a_claim_without_a_plan_costs_k_times_k_plus_1():
    """The number of looks so far is not enough, as a decision ends the collection: the sum of 1 / (k (k + 1)) is 1."""
    several = [replace(HIGHER, id="x/y-c1"), replace(HIGHER, id="x/z-c1", looks=2)]
    rows = judge(several, {"x/y": Results("mini", PAIR), "x/z": Results("mini", PAIR)}, Pool([]))
    p = float(stats.ttest_rel(ONE, OTHER).pvalue)
    assert [(row.p_raw, row.looks) for row in rows] == [(pytest.approx(p), 1), (pytest.approx(p), 2)]
    assert [row.p_corrected for row in rows] == pytest.approx([2 * 2 * p, 6 * p]), "Holm: 2 x (2 p), then 1 x (6 p)"
    assert rows[1].rule.endswith("; p multiplied by 6 for looks")
    once, thrice, often = (verdict(replace(HIGHER, looks=looks), *PAIR) for looks in (1, 3, 100))
    assert (once.verdict, once.p_corrected) == (SUPPORTED, pytest.approx(2 * p))
    assert (thrice.verdict, thrice.leaning, thrice.p_corrected) == (UNDECIDED, SUPPORTED, pytest.approx(12 * p))
    assert (thrice.low, thrice.high) == (once.low, once.high) and often.p_corrected == 1.0


def test_directions_and_margins_have_one_strength():
    """A claim at the border of a margin has the p-value that the same distance from a direction has."""
    direction = verdict(replace(HIGHER, reference=0.5), *PAIR)
    margin = verdict(replace(HIGHER, predicate="at_least", margin=0.0, reference=0.0), *PAIR)
    shifted = [cell(*np.subtract(ONE, 0.5), schedule="CR"), PAIR[1]]
    assert direction.p_raw == pytest.approx(verdict(HIGHER, *shifted).p_raw)
    assert margin.p_raw == pytest.approx(verdict(HIGHER, *PAIR).p_raw)


def test_power_is_that_of_the_t_test():
    from statsmodels.stats.power import TTestPower

    for n, effect in ((5, 1.0), (12, 0.7), (30, 0.2)):
        found = rule.power(rule.Estimate(0.0, 1 / math.sqrt(n), n - 1, n), effect, [(0.0, 1)])
        one_side = TTestPower().power(effect, n, 0.025, alternative="larger")
        assert found == pytest.approx(one_side, abs=1e-6)
    inside = rule.power(rule.Estimate(0.0, 0.1, 9, 10), 0.0, [(-0.5, 1), (0.5, -1)])
    assert 0.95 < inside < 1 and rule.power(rule.Estimate(0.0, 0.4, 9, 10), 0.0, [(-0.5, 1), (0.5, -1)]) < 0.2


def test_a_changed_test_decides_nothing_and_costs_the_others_nothing():
    changed = replace(HIGHER, id="x/y-c1", amended="24 November: another margin")
    rows = judge([changed, replace(HIGHER, id="x/y-c2")], {"x/y": Results("mini", PAIR)}, Pool([]))
    assert [(row.verdict, row.leaning) for row in rows] == [(EXPLORATORY, SUPPORTED), (SUPPORTED, SUPPORTED)]
    assert "another margin" in rows[0].reason and rows[0].p_corrected is None and not rows[0].decided
    assert rows[1].p_corrected == pytest.approx(2 * rows[1].p_raw)


def test_claims_of_too_little_power_count_in_the_correction():
    """Their power follows from their own results, so that leaving them out would be a choice by the result."""
    weak = replace(HIGHER, id="x/y-c2", value=0.1)
    rows = judge([HIGHER, weak], {"x/y": Results("mini", PAIR)}, Pool([]))
    assert rows[1].verdict == NOT_TESTED and verdict(HIGHER, *PAIR).p_corrected == pytest.approx(2 * rows[0].p_raw)
    assert rows[0].p_corrected == pytest.approx(2 * 2 * rows[0].p_raw)


def test_what_a_proxy_cannot_test_leaves_support_in_part():
    claim = replace(HIGHER, untested="the second network")
    found = verdict(claim, *PAIR)
    assert (found.verdict, found.decided) == (IN_PART, True) and "not tested: the second network" in found.reason
    assert verdict(replace(claim, predicate="lower"), *PAIR).verdict == CONTRADICTED


def test_every_cell_has_to_agree():
    more = [
        cell(*values, schedule=name, model="resnet38") for name, values in (("CR", OTHER), ("static", np.add(ONE, 3)))
    ]
    claim = replace(HIGHER, match=["model"])
    assert verdict(claim, *PAIR, *more).n == 4
    found = verdict(replace(claim, each=True), *PAIR, *more)
    assert found.verdict == CONTRADICTED and found.estimate == pytest.approx(np.mean(OTHER) - np.mean(ONE) - 3)
    assert "in every cell" in found.rule
    either = replace(claim, b=[{"schedule": "static"}, {"schedule": "LR"}])
    for each in (False, True):
        assert verdict(replace(either, each=each), *PAIR, cell(schedule="LR")).verdict == NOT_TESTED, (
            "an arm without runs"
        )


def test_whether_the_published_size_lies_in_the_interval():
    sizes = {2.0: True, 9.0: False}
    assert {value: verdict(replace(HIGHER, value=value), *PAIR).published_inside for value in sizes} == sizes
    assert verdict(HIGHER, *PAIR).published_inside is None


def test_without_a_test_nothing_is_said_of_the_published_size():
    """Perplexities of a proxy, which cannot be compared with published ones, excluded the size by which these differ."""
    claim = Claim(
        "x/y-c1", "beats 80 %", predicate="at_least", a={"schedule": "CR"}, reference=80.0, margin=0.0, value=9.0
    )
    found = verdict(claim, *PAIR)
    assert (found.verdict, found.published_inside) == (NO_TEST, None) and "cannot be compared" in found.reason
    assert found.high < 9.0, "it would be excluded"


def test_the_scope_tells_length_and_baseline():
    assert verdict(HIGHER, *PAIR).scope == "proxy: ResNet-8, CIFAR-10, 1,000 steps; schedule static: 71.5 test accuracy"
    several = replace(HIGHER, b=[{"schedule": "static"}, {"schedule": "RTH"}])
    shown = verdict(several, *PAIR, cell(*OTHER, schedule="RTH")).scope
    assert shown.endswith("; schedule static: 71.5 test accuracy")  # the one that the estimate is against


def test_the_scope_tells_what_the_compared_runs_of_the_baseline_reach():
    """Seeds that the other arm lacks counted, too: a mean of ninety runs stood beside a difference of 48 pairs."""
    shown = verdict(HIGHER, cell(*ONE, schedule="CR"), cell(*OTHER, 10.0, schedule="static")).scope
    assert shown.endswith("; schedule static: 71.5 test accuracy")


def test_the_scope_names_every_network_however_many_lengths_the_others_have():
    """One with four lengths was left out as soon as another had fewer."""
    lengths = [
        cell(*values, schedule=name, training__steps=steps, steps=steps)
        for steps in (1000, 2000, 3000, 4000)
        for name, values in (("CR", ONE), ("static", OTHER))
    ]
    small = {"model": "resnet14", "actual": {"model": "resnet14"}}
    other = [cell(*values, schedule=name, **small) for name, values in (("CR", ONE), ("static", OTHER))]
    found = verdict(replace(HIGHER, match=["model", "steps"]), *lengths, *other)
    assert found.scope.startswith("proxy: ResNet-8, CIFAR-10 / ResNet-14, CIFAR-10, 1,000 steps")


def test_a_comparison_with_another_moment_of_the_same_runs_names_it_and_what_it_reached():
    """It read as a comparison of the arm with itself, and told what that reached in the end."""
    claim = Claim(
        "x/y-c1",
        "little is lost",
        predicate="higher",
        a={"schedule": "CR"},
        b={"schedule": "CR"},
        metric=["final", "initial weights"],
    )
    found = verdict(claim, cell(*ONE, schedule="CR", curve={"initial_weights": 60.0}))
    assert found.estimate == pytest.approx(np.mean(ONE) - 60.0)
    assert "b: schedule CR, its initial weights" in found.rule
    assert found.scope.endswith("; schedule CR, its initial weights: 60 test accuracy")


def test_every_arm_counts_in_a_comparison_by_a_statistic():
    """The trainings of the first arm b alone were counted and checked."""
    curve = {"evaluations": {"step": [100, 200], "value": [50.0, 70.0], "gbitops": [1.0, 2.0]}}
    cells = [cell(*ONE, schedule=name, curve=curve) for name in ("CR", "static", "RTH")]
    arms = [{"schedule": "static"}, {"schedule": "RTH"}]
    claim = replace(HIGHER, b=arms, function="cost_to_reach", display="ratio")
    assert verdict(claim, *cells).trainings == 12


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"predicate": "rising", "by": "steps", "b": [{"schedule": "CR"}, {"schedule": "static"}]}, "has 2 arms"),
        ({"predicate": "smaller_spread", "b": {"schedule": "CR"}, "minus": {"schedule": "static"}}, "no effect"),
        ({"predicate": "higher", "function": "cost_to_reach", "b": {"schedule": "CR"}, "each": True}, "no effect"),
        ({"predicate": "smaller_spread"}, "is missing"),
    ],
)
def test_arms_that_a_test_would_leave_out_or_lacks_are_refused(changes, problem):
    with pytest.raises(SettingError, match=problem):
        _claim("x", {"id": "y-c1", "sentence": "one is better", "a": {"schedule": "RTH"}, **changes})


def test_a_margin_in_percent_takes_the_published_effect_in_percent():
    """The gap of 3.58 to a perplexity of 103 was compared with 5 % of another network's 64, and no number of seeds would do."""
    claim = replace(HIGHER, predicate="at_most", margin_percent=8.0, value=2.0)
    assert verdict(claim, *PAIR).power > 0.9
    large = replace(claim, value=8.0)
    assert verdict(large, *PAIR).power < 0.05
    shared = verdict(replace(large, value_base=4 * 71.5), *PAIR)  # the mean of arm b is 71.5
    assert shared.power == verdict(claim, *PAIR).power
    low, high = shared.low, shared.high
    assert shared.published_inside == (low <= 2.0 <= high) and not verdict(large, *PAIR).published_inside
    assert planned_power(replace(large, value_base=286.0), 0.75, 5.72, 4) == planned_power(claim, 0.75, 5.72, 4)
    with pytest.raises(SettingError, match=r"a margin of 8 % of a mean that no earlier training tells.*--power"):
        planned_power(claim, 0.75, None, 4)  # it was the power of another test, that of a direction


def test_how_many_seeds_would_decide():
    assert rule.seeds_needed(1.0, 1.0, tests=1) == 10  # statsmodels' TTestPower: 9.94
    assert rule.seeds_needed(1.0, 1.0, tests=20) > 10
    wide_enough = (
        (stats.t.ppf(0.975, 15) + stats.t.ppf(0.9, 15)) * 2.0 / 4
    )  # both ends of an interval have to be inside
    assert rule.provable_margin(2.0, 16, 15) == pytest.approx(wide_enough)
    assert rule.seeds_needed(None, 1.0, 1) is None and rule.seeds_needed(1.0, 0.0, 1) is None
    wide = cell(71.0, 78.0, 74.0, schedule="CR"), cell(70.0, 73.0, 76.0, schedule="static")
    found = verdict(replace(HIGHER, value=1.0), *wide)
    assert found.verdict == NOT_TESTED and found.seeds_needed > 30 and "power 0.0" in found.reason


# Claims as data


def test_every_claim_of_every_paper_is_an_entry():
    assert len(CLAIMS) == 111 and {claim.paper for claim in CLAIMS.values()} == set(PAPERS)
    assert {claim.item for claim in CLAIMS.values()} <= {item.id for item in read_items(PUBLISHED)}
    assert {claim.predicate for claim in CLAIMS.values()} == set(PREDICATES) and len(PREDICATES) == 12
    for claim in CLAIMS.values():
        assert claim.section and claim.effect and rule_of(claim)
        assert bool(claim.reason) == (claim.predicate == "none")
        for name in [*claim.where, *claim.a, *claim.match, *(key for arm in claim.arms for key in arm)]:
            assert name in {*FACTS, *GROUPS} or "." in name, (claim.id, name)
        assert all(
            m in METRICS or m in ("final", "best", "best_at_q_max", "q_min", "gbitops") or ": " in m
            for m in claim.metrics
        ), claim.id


def test_deleting_the_claims_of_a_paper_leaves_the_others_working(tmp_path):
    shutil.copytree(PUBLISHED / "claims", tmp_path / "claims")
    for paper in PAPERS:
        (tmp_path / "claims" / f"{paper}.yaml").unlink()
        left = read_claims(tmp_path)
        assert {claim.paper for claim in left} == {
            one for one in PAPERS if (tmp_path / "claims" / f"{one}.yaml").exists()
        }
        assert [row.claim_id for row in judge(left, {}, Pool([]))] == [claim.id for claim in left]
    for claim in CLAIMS.values():
        assert all(item.startswith(f"{claim.paper}/") for item in claim.items)


def test_wrong_entries_are_refused(tmp_path):
    (tmp_path / "claims").mkdir()
    file = tmp_path / "claims" / "x.yaml"
    wrong = {"predicate: higer": "higher", "predicate: higher, metrik: final": "metric"}
    for entry, word in {**wrong, "predicate: higher, looks: 0": "looks=0"}.items():
        file.write_text(f"defaults: {{}}\nclaims:\n  - {{id: t-c1, sentence: s, {entry}}}\n")
        with pytest.raises(SettingError, match=word):
            read_claims(tmp_path)


def test_without_runs_only_formulas_say_something():
    rows = judge(list(CLAIMS.values()), {}, Pool([]))
    computed = [row for row in rows if row.verdict == COMPUTED]
    assert len(computed) == 6 and all(row.holds and row.reason for row in computed)
    assert {row.verdict for row in rows} == {COMPUTED, NO_TEST, NOT_TESTED}
    assert all(row.reason for row in rows if row.verdict == NO_TEST)


def test_verdicts_are_read_as_they_were_written(tmp_path):
    found = [
        ClaimResult("a/t-c1", "a/t", "a", 'one, "two"', verdict=SUPPORTED, decided=True, estimate=1.25, n=3, df=2.0),
        ClaimResult("a/t-c2", "a/t", "a", "three", verdict=UNDECIDED, holds=False, p_raw=0.25, seeds_needed=9),
    ]
    write_claims(found, tmp_path / "x" / "claims.csv")
    assert read_claim_results(tmp_path / "x" / "claims.csv") == found


def test_an_epoch_of_a_text_is_one_pass_through_its_words():
    """A GRU that read 105,000 words 21 times was said to have trained for 1.07 epochs."""
    (run,) = cell(70.0, steps=5600).runs
    run.row["train_samples"] = "105000"
    run.settings["training"] = {"batch_size": 20}
    assert run.epochs == pytest.approx(5600 * 20 / 105_000)
    run.settings["task"] = {"name": "language_modelling", "sequence_length": 20}
    assert run.epochs == pytest.approx(5600 * 20 * 20 / 105_000)


def test_a_step_on_a_whole_graph_is_one_epoch():
    """Citeseer has 120 training nodes and `training.batch_size` 140: its 200 epochs were said to be 233."""
    row = {"total_steps": "200", "train_samples": "120", "scale": "mini", "metric": "test_accuracy"}
    run = Run(row, {"training": {"batch_size": 140}})
    assert (run.epochs, run.group.batch) == (200, "120")


def test_a_scope_tells_how_many_images_are_left_for_training():
    """59.7 epochs of 10,000 images were those of the 9,000 that HLHLp does not hold out."""
    pair = [
        replace(
            one,
            runs=tuple(
                Run({**run.row, "train_samples": "9000"}, {**run.settings, "dataset": data}) for run in one.runs
            ),
        )
        for data in [{"name": "cifar10_16", "train_samples": 10_000, "validation": 0.1}]
        for one in PAIR
    ]
    for run in (run for one in pair for run in one.runs):
        vars(run).update(curve={}, analyses=[])
    assert "CIFAR-10 at 16x16, 10,000 images (9,000 for training)" in verdict(HIGHER, *pair).scope


def test_trainings_on_half_of_the_classes_are_told_from_the_others():
    """They were pooled with those of all ten classes, and stood beside them in the table of what regimes reach."""
    whole, half = (
        cell(70.0, actual={"dataset": "cifar10_16"}, dataset__part=part) for part in ("all", "second_classes")
    )
    for one, part in ((whole, "all"), (half, "second_classes")):
        one.runs[0].settings["dataset"]["part"] = part
    assert whole.runs[0].group.data == "cifar10_16" and "the other half of the classes" in half.runs[0].group.data
    assert our_data(half) == our_data(whole) + ", the other half of the classes"


def test_a_margin_in_percent_is_that_of_the_seeds_that_are_compared():
    """Seeds of the baseline without a partner moved the margin from 1.43 to 4.1 points."""
    claim = replace(HIGHER, predicate="at_most", margin_percent=2.0)
    more = cell(*OTHER, 200.0, 200.0, schedule="static")
    assert verdict(claim, PAIR[0], more).margin == verdict(claim, *PAIR).margin == pytest.approx(1.43)


def test_a_partner_without_a_base_leaves_the_comparison():
    """Both partners kept half of the weight, while the base of only one was subtracted: 3 instead of 0."""
    one = cell(10.0, 10.0, schedule="CR", schedule__q_max=8)
    pair = [cell(10.0, 10.0, schedule="static", schedule__q_max=bits) for bits in (8, 6)]
    base = cell(4.0, 4.0, schedule="LR", schedule__q_max=8)
    found = contrast([one], pair, ["model"], ["final", "final"], ([base], ["schedule.q_max"]))
    assert [unit.by_seed for unit in found.units] == [{"0": 0.0, "1": 0.0}]


def test_the_scope_names_the_baseline_that_the_estimate_is_against():
    """hlhlp/table6-c1 printed the mean of three baselines beside the difference to one of them."""
    claim = replace(
        HIGHER, b=[{"schedule": "static", "schedule.q_max": 8}, {"schedule": "static", "schedule.q_max": 6}]
    )
    strong = cell(*[value + 3 for value in OTHER], schedule="static", schedule__q_max=8)
    found = verdict(claim, PAIR[0], strong, cell(*OTHER, schedule="static", schedule__q_max=6))
    assert found.estimate == pytest.approx(-1.375) and "q_max 8" in found.reason.replace("q max", "q_max")
    assert "74.5 test accuracy" in found.scope and " or " not in found.scope


def test_a_claim_about_every_cell_names_the_one_that_its_estimate_is_of():
    """Nothing told which of several cells it was."""
    pairs = [
        cell(*np.add(values, shift), schedule=name, schedule__q_max=bits)
        for bits, gap in ((8, 5.0), (6, -30.0))
        for name, values, shift in (("CR", OTHER, gap), ("static", ONE, 0.0))
    ]
    found = verdict(replace(HIGHER, each=True, match=["high"]), *pairs)
    assert found.estimate == pytest.approx(np.mean(OTHER) - np.mean(ONE) - 30) and found.verdict == CONTRADICTED
    assert "the estimate is that of ResNet-8, CPT at 3-6 bits against SBM at 6 bits" in found.reason
    lower = cell(*np.subtract(ONE, 20), schedule="LR", schedule__q_max=6)
    arms = [{"schedule": "LR"}, {"schedule": "static"}]
    several = verdict(replace(HIGHER, b=arms, each=True, match=["high"]), *pairs, lower)
    assert several.scope.endswith(f"; SBM at 6 bits: {np.mean(ONE):.3g} test accuracy")
