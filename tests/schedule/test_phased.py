"""Schedules in phases: where each phase begins, its bits, its rate and the weights that it asks for."""

from __future__ import annotations

import json

import pytest

from bitcycle.precision import Precision
from bitcycle.recipe.learning_rate import LearningRateOptions
from bitcycle.schedule import SCHEDULES, Phase, Schedule, schedule
from bitcycle.settings import SettingError
from bitcycle.training.phases import phase_rate
from tests.conftest import ROOT, configure

FLOAT, BINARY, TWO, EIGHT = (Precision(32, 32, 32), Precision(1, 1, 32), Precision(2, 32, 32), Precision(8, 32, 32))


def rate(bound: Schedule, options: LearningRateOptions, step: int) -> float:
    phase = next(phase for phase in bound.phases if phase.start <= step < phase.end)
    return phase_rate(options, phase, step)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (0, [(BINARY, 4000)]),
        (0.25, [(FLOAT, 1000), (BINARY, 3000)]),
        (0.5, [(FLOAT, 2000), (BINARY, 2000)]),
        (1, [(FLOAT, 4000)]),
    ],
)
def test_any_split_of_partial_pretraining(split, expected):
    bound = schedule("partial_pretrain", split=split, total_steps=4000)
    assert bound.run_lengths == expected
    assert [phase.steps for phase in bound.phases] == [steps for _, steps in expected]
    assert bound.reference == FLOAT
    # float means nothing to weights of 1 bit, also where no phase came before
    assert all(bound.highest(bits) == bits for bits, _ in expected)
    assert all(phase.start_from == "previous" for phase in bound.phases)
    assert not bound.options.chooses


DOMAINS = ROOT / "tests" / "data" / "golden-domains"
GOLDEN = [case for case in json.loads((DOMAINS / "partial_lr.json").read_text()) if case["task"] == "cifar"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["total"])
def test_rates_of_partial_pretraining_equal_the_reference(case):
    bound, options = schedule("partial_pretrain", total_steps=case["total"]), configure("training=partial")
    assert [phase.steps for phase in bound.phases] == [case["phase1"], case["phase2"]]
    for step, phase, expected in case["points"]:
        assert (step < bound.phases[0].end) == (phase == 1)
        assert rate(bound, options.training.learning_rate, step) == pytest.approx(expected, rel=1e-12), step


def test_rate_for_imagenet_equals_the_reference():
    points = next(case for case in json.loads((DOMAINS / "partial_lr.json").read_text()) if case["task"] == "imagenet")
    options = configure("training=partial_imagenet", "dataset=imagenet", "training=partial_imagenet")
    per_epoch = 10_000
    for epoch, expected in points["points"]:
        found = options.training.learning_rate.rate(round(epoch * per_epoch), 90 * per_epoch)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-12), epoch


def test_the_split_leaves_the_whole_rate_to_each_part():
    """By hand: 0.1 until half of a part, 0.01 until three quarters, 0.001 to its end."""
    bound, options = schedule("partial_pretrain", split=0.25, total_steps=80), LearningRateOptions()
    expected = [0.1] * 10 + [0.01] * 5 + [0.001] * 5 + [0.1] * 30 + [0.01] * 15 + [0.001] * 15
    assert [rate(bound, options, step) for step in range(80)] == pytest.approx(expected)


def test_hlhlp_by_hand():
    bound = schedule("hlhlp", total_steps=700, alpha=0.05, ratio=40.0, later_length=1)
    assert bound.run_lengths == [(FLOAT, 175), (TWO, 175), (EIGHT, 175), (TWO, 175)]
    assert [phase.start_from for phase in bound.phases] == ["previous", "best", "flattest", "best"]
    assert [phase.kept for phase in bound.phases] == [0, 1, 5, 1]
    # eta, alpha eta r, alpha eta, alpha eta; 0.1 and 0.01 times that from 75/175 and 125/175 of each phase on
    options = configure("training=hlhlp").training.learning_rate
    for start, eta in ((0, 0.1), (175, 0.1 * 0.05 * 40), (350, 0.1 * 0.05), (525, 0.1 * 0.05)):
        found = [rate(bound, options, start + step) for step in (0, 74, 75, 124, 125, 174)]
        assert found == pytest.approx([eta, eta, eta / 10, eta / 10, eta / 100, eta / 100])


@pytest.mark.parametrize(
    ("name", "steps", "options", "expected"),
    [
        ("hlhlp", 140, {}, [50, 30, 30, 30]),
        ("hlhlhlp", 200, {}, [50, 30, 30, 30, 30, 30]),
        ("fine_tuning", 80, {}, [50, 30]),
        ("hlhlp", 140, {"lengths": [1, 1, 1, 4]}, [20, 20, 20, 80]),
        (
            "hlhlp",
            60,
            {"bits": [2, 8, 2], "rates": ["coarse", "fine", "fine"], "start_from": ["previous"] * 3},
            [20] * 3,
        ),
    ],
)
def test_later_phases_have_the_lengths_of_table_6(name, steps, options, expected):
    """Three fifths of the float phase; equal lengths where the float network is given, as on ImageNet."""
    assert [phase.steps for phase in schedule(name, total_steps=steps, **options).phases] == expected


def test_the_coarse_rate_is_measured_unless_it_is_given():
    measured, given = (schedule("hlhlp", total_steps=400, ratio=ratio) for ratio in (None, 30))
    assert [phase.rate_ratio for phase in measured.phases] == [None, (2, 8), None, None]
    assert [phase.rate_ratio for phase in given.phases] == [None] * 4
    assert [phase.rate_factor for phase in given.phases] == pytest.approx([1, 0.3, 0.01, 0.01])


ABLATIONS = {
    "A": [],
    "B": ["schedule.bits=[32,32,32,2]"],
    "C": ["schedule.bits=[32,2,2,2]"],
    "D": [
        "schedule.bits=[32,2]",
        "schedule.rates=[initial,fine]",
        "schedule.start_from=[previous,best]",
        "schedule.lengths=[110,30]",
    ],
}
"""hlhlp/table6: the overrides that schedule/registry.py names."""


@pytest.mark.parametrize(
    ("case", "lengths", "factors"),
    [
        ("A", [(FLOAT, 50), (TWO, 30), (EIGHT, 30), (TWO, 30)], [1, 0.4, 0.01, 0.01]),
        ("B", [(FLOAT, 110), (TWO, 30)], [1, 0.4, 0.01, 0.01]),
        ("C", [(FLOAT, 50), (TWO, 90)], [1, 0.4, 0.01, 0.01]),
        ("D", [(FLOAT, 110), (TWO, 30)], [1, 0.01]),
    ],
)
def test_ablations_of_table_6(case, lengths, factors):
    options = configure("schedule=hlhlp", "schedule.lengths=[50,30,30,30]", "schedule.ratio=40", *ABLATIONS[case])
    bound = options.schedule.bind(140)
    assert bound.run_lengths == lengths
    assert [phase.rate_factor for phase in bound.phases] == pytest.approx(factors)
    steps = [50, 30, 30, 30] if case != "D" else [110, 30]
    assert [phase.steps for phase in bound.phases] == steps


def test_six_phases():
    bound = schedule("hlhlhlp", total_steps=600)
    assert [precision for precision, _ in bound.run_lengths] == [FLOAT, TWO, EIGHT, TWO, EIGHT, TWO]
    assert [phase.rate_ratio is not None for phase in bound.phases] == [False, True, False, True, False, False]
    assert [phase.start_from for phase in bound.phases][2:] == ["flattest", "best", "flattest", "best"]


def test_fine_tuning_is_the_last_phase_of_hlhlp_after_its_first():
    tuning, whole = schedule("fine_tuning", total_steps=160), schedule("hlhlp", total_steps=280)
    assert tuning.phases[0] == whole.phases[0]
    assert tuning.phases[1] == Phase(**{**vars(whole.phases[3]), "start": 100})


def test_activations_may_have_few_bits_too():
    bound = schedule("hlhlp", activation_bits=[32, 2, 8, 2], total_steps=4, gradient=8, later_length=1)
    assert [bound(step) for step in range(4)] == [FLOAT, (2, 2, 8), (8, 8, 8), (2, 2, 8)]
    assert bound.reference == FLOAT


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [64, 1003])
def test_phases_fill_every_run_without_gaps(name, steps):
    bound = schedule(name, total_steps=steps, steps_per_epoch=10)
    starts = [phase.start for phase in bound.phases]
    assert starts == [0, *(phase.end for phase in bound.phases[:-1])]
    assert bound.phases[-1].end == steps
    if name not in ("hlhlp", "hlhlhlp", "fine_tuning", "partial_pretrain"):
        assert bound.phases == (Phase(0, steps),)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("hlhlp", {"rates": ["initial", "fine"]}, "give one value for each phase"),
        ("hlhlp", {"lengths": [1, 2, 3]}, "give one value for each phase"),
        ("hlhlp", {"start_from": ["best", "best", "best", "best"]}, "set the first to previous"),
        ("hlhlp", {"start_from": ["previous", "bets", "best", "best"]}, "best, flattest, previous|'best'"),
        ("hlhlp", {"bits": []}, "give bits"),
        ("hlhlp", {"total_steps": 3}, "less than one for some of its 4 phases"),
        ("hlhlp", {"lengths": [1e6, 1, 1, 1]}, "train longer"),
        ("partial_pretrain", {"total_steps": 1}, "less than one"),
        ("partial_pretrain", {"split": 1.5}, "use 1 or less"),
        ("partial_pretrain", {"q_min": 8, "q_max": 2}, "choose q_min <= q_max"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(name, options, words):
    with pytest.raises(SettingError, match=words):
        schedule(name, **{"total_steps": 400, **options})
