"""Schedules: equal to the released code step by step, and the properties that the papers state for any options."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitcycle
from bitcycle.precision import Precision, joined
from bitcycle.schedule import SCHEDULES, SUITE, schedule
from bitcycle.schedule.base import RunLength, ScheduleOptions
from bitcycle.schedule.cyclic import Cyclic
from bitcycle.schedule.phased import Hlhlp, PartialPretrain
from bitcycle.schedule.staged import Staged
from bitcycle.schedule.static import Deficit, Static
from bitcycle.settings import SettingError
from tests.conftest import golden_json

LARGE, MEDIUM, SMALL = ("RR", "RTH"), ("LR", "LT", "CR", "CT", "RTV", "ETV"), ("ER", "ETH")
AS_RELEASED = {"period_rounding": "floor", "end_at_q_max": False}


def forward_lengths(bound) -> list[list[int]]:
    return [[precision.weight, steps] for precision, steps in bound.run_lengths]


def relative_cost(bound) -> float:
    """Mean of (w a + w g + a g) over the steps, relative to static q_max, written down again from the paper."""
    total = sum(
        steps * (p.weight * p.activation + p.weight * p.gradient + p.activation * p.gradient)
        for p, steps in bound.run_lengths
    )
    w, a, g = bound.reference
    return total / (bound.length.total_steps * (w * a + w * g + a * g))


@pytest.mark.parametrize("length", [10.5, float("nan"), "10", True, 0, -1])
@pytest.mark.parametrize("name", ["total_steps", "steps_per_epoch"])
def test_a_length_is_a_positive_whole_number(name, length):
    with pytest.raises(SettingError, match=f"{name}=.*1 or more"):
        schedule("CR", **{"total_steps": 10, name: length})


@pytest.mark.parametrize(
    "case",
    golden_json("schedules")["cases"],
    ids=lambda c: f"{c['schedule']}-{c['q_min']}-{c['q_max']}-{c['cycles']}-{c['total_steps']}",
)
def test_suite_equals_released_code_step_by_step(case):
    options = {key: case[key] for key in ("q_min", "q_max", "cycles", "total_steps")}
    bound = schedule(case["schedule"], **options, **AS_RELEASED)
    assert forward_lengths(bound) == case["bits_rle"]
    assert relative_cost(bound) == pytest.approx(case["cost_relative_to_static"], rel=1e-12)


@pytest.mark.parametrize(
    "case",
    golden_json("cyclic_precision"),
    ids=lambda c: f"{c['min_bits']}-{c['max_bits']}-{c['iters']}-{c['num_cycles']}",
)
def test_cosine_equals_released_code_step_by_step(case):
    bound = schedule(
        "CR",
        q_min=case["min_bits"],
        q_max=case["max_bits"],
        cycles=case["num_cycles"],
        total_steps=case["iters"],
        **AS_RELEASED,
    )
    bits = [bound(step).weight for step in range(case["iters"])]
    if "sequence_rle" in case:
        assert bits == [b for b, count in case["sequence_rle"] for _ in range(count)]
    else:
        first = [b for b, count in case["first_period_rle"] for _ in range(count)]
        assert bits == [first[step % case["period"]] for step in range(case["iters"])]
        assert bits[-20:] == case["last_20"]
    assert {bound(step).gradient for step in range(case["iters"])} == set(case["backward_bits"])
    assert relative_cost(bound) == pytest.approx(case["relative_to_static_max"], rel=1e-12)


def test_patterns_of_cpt_table_6():
    names = {"cosine": "CR", "triangular": "triangular", "cosine_anneal": "cosine_anneal"}
    for case in golden_json("table6_schedules"):
        options = {
            "q_min": case["q_min"],
            "q_max": case["q_max"],
            "cycles": case["cycles"],
            "total_steps": case["iters"],
        }
        for pattern, name in names.items():
            bound = schedule(name, **options, **AS_RELEASED)
            assert forward_lengths(bound) == case[pattern], (pattern, options)
            assert relative_cost(bound) == pytest.approx(case["mean_cost"][pattern], rel=1e-12)


# Better Schedules' groups and CPT's printed savings, computed in the reference from the papers' formulas (q 3 to 8, n = 8).
PUBLISHED_COST = {
    "RR": 0.3990,
    "RTH": 0.3990,
    "LR": 0.6276,
    "LT": 0.6276,
    "CR": 0.6334,
    "CT": 0.6334,
    "ETV": 0.6348,
    "RTV": 0.6373,
    "ER": 0.8224,
    "ETH": 0.8225,
}


@pytest.mark.parametrize("name", SUITE)
def test_relative_cost_of_the_suite(name):
    bound = schedule(name, q_min=3, q_max=8, cycles=8, total_steps=64_000)
    assert relative_cost(bound) == pytest.approx(PUBLISHED_COST[name], abs=5.1e-5)
    assert bound(0).weight == (8 if name[1] == "T" else 3)


@given(
    q_min=st.integers(1, 8),
    spread=st.integers(2, 8),
    cycles=st.integers(1, 6).map(lambda half: 2 * half),
    steps_per_cycle=st.integers(100, 400),
)
def test_groups_are_ordered_by_cost(q_min, spread, cycles, steps_per_cycle):
    costs = {
        name: relative_cost(
            schedule(
                name,
                q_min=q_min,
                q_max=q_min + spread,
                cycles=cycles,
                total_steps=cycles * steps_per_cycle,
            )
        )
        for name in SUITE
    }
    assert max(costs[name] for name in LARGE) < min(costs[name] for name in MEDIUM)
    assert max(costs[name] for name in MEDIUM) < min(costs[name] for name in SMALL)


@given(
    name=st.sampled_from([*SUITE, "static", "deficit", "delayed", "cosine_anneal", "triangular", "gradient_cycle"]),
    bounds=st.lists(st.integers(1, 32), min_size=2, max_size=2).map(sorted),
    half_cycles=st.integers(1, 10),
    steps=st.integers(20, 600),
    data=st.data(),
)
def test_bits_stay_within_bounds_and_end_at_q_max(name, bounds, half_cycles, steps, data):
    q_min, q_max = bounds
    options = {"gradient_min": None, "gradient_max": None} if name == "gradient_cycle" else {}
    if name == "delayed":
        options["start"] = data.draw(st.sampled_from([0.0, 0.3, 0.5]))
        half_cycles = min(half_cycles, steps // 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an exponential that ends low says so
        bound = schedule(
            name, q_min=q_min, q_max=q_max, cycles=max(2, 2 * half_cycles), total_steps=max(steps, 20), **options
        )
    forward = [precision.weight for precision, _ in bound.run_lengths]
    assert min(forward) >= (q_max if name == "static" else q_min)
    assert max(forward) <= q_max
    assert {precision.gradient for precision, _ in bound.run_lengths} == {q_max}
    if name not in ("cosine_anneal", "triangular"):  # those end low by definition
        assert bound(bound.length.total_steps - 1) == Precision(q_max, q_max, q_max)
    assert sum(steps for _, steps in bound.run_lengths) == bound.length.total_steps


@given(cycles=st.integers(1, 20), steps=st.integers(20, 500))
def test_period_rounded_up_has_no_spurious_cycle(cycles, steps):
    bound = schedule("LR", q_min=2, q_max=8, cycles=cycles, total_steps=steps, end_at_q_max=False)
    restarts = sum(bound(t).weight < bound(t - 1).weight for t in range(1, steps))
    assert restarts <= cycles - 1


def test_leftover_steps_of_the_released_code():
    bound = schedule("CR", q_min=3, q_max=8, cycles=7, total_steps=64_000, **AS_RELEASED)
    assert [bound(step).weight for step in range(63_994, 64_000)] == [3] * 6
    assert schedule("CR", q_min=3, q_max=8, cycles=7, total_steps=64_000)(63_999).weight == 8


def test_bits_are_the_nearest():
    assert schedule("LR", q_min=3, q_max=8, cycles=1, total_steps=1000)(150).weight == 4  # S = 3.75
    assert schedule("LR", q_min=3, q_max=8, cycles=1, total_steps=1000)(50).weight == 3  # S = 3.25


@pytest.mark.parametrize("name", ["LR", "delayed"])
@pytest.mark.parametrize("steps", [100, 104])
def test_epoch_unit_changes_precision_at_epoch_borders_only(name, steps):
    """A delayed schedule once counted its epochs from a step within one: 0.33 of 100 steps is step 33."""
    start = {"start": 0.33} if name == "delayed" else {}
    bound = schedule(name, q_min=2, q_max=8, cycles=1, total_steps=steps, steps_per_epoch=10, unit="epoch", **start)
    changes = [t for t in range(1, steps - 1) if bound(t) != bound(t - 1)]
    assert len(changes) > 3
    assert all(t % 10 == 0 for t in changes)
    with pytest.raises(SettingError, match="steps_per_epoch"):
        schedule("LR", total_steps=100, unit="epoch")


def test_gradient_cycle_moves_the_gradient_only():
    bound = schedule("gradient_cycle", total_steps=3200)
    assert {p.weight for p, _ in bound.run_lengths} == {6}
    assert {p.gradient for p, _ in bound.run_lengths} == {6, 7, 8}
    assert bound.reference == Precision(6, 6, 8)


def test_delayed_start():
    late = schedule("delayed", cycles=4, total_steps=400, start=0.5)
    assert {late(step) for step in range(200)} == {Precision(3, 3, 8)}
    half = schedule("CR", cycles=4, total_steps=200)
    assert [late(200 + step) for step in range(200)] == [half(step) for step in range(200)]
    never = schedule("delayed", total_steps=400, start=1.0)
    assert {never(step) for step in range(400)} == {Precision(3, 3, 8)}


def test_a_delayed_start_is_rounded_to_the_nearest_unit():
    rest = schedule("CR", cycles=4, total_steps=69)
    late = schedule("delayed", cycles=4, total_steps=99, start=0.3)  # step 29.7
    assert [late(step) for step in range(30, 99)] == [rest(step) for step in range(69)]
    late = schedule(
        "delayed", profile="linear", cycles=1, total_steps=104, steps_per_epoch=10, unit="epoch", start=0.33
    )
    assert [late(step).weight for step in (49, 50)] == [3, 4]  # 5 bits in 7 epochs from epoch 3.63 of 11


def test_deficit_window():
    bound = schedule("deficit", total_steps=100, start=0.2, end=0.5)
    assert [bound(t).weight for t in (19, 20, 49, 50)] == [8, 3, 3, 8]
    assert {bound(t).gradient for t in range(100)} == {8}
    released = schedule("deficit", total_steps=100, start=0, end=16, unit="step", inclusive=True)
    assert sum(released(t).weight == 3 for t in range(100)) == 17  # t <= R, as in the CIFAR scripts
    by_epoch = schedule("deficit", total_steps=100, steps_per_epoch=10, start=1, end=3, unit="epoch")
    assert [t for t in range(100) if by_epoch(t).weight == 3] == list(range(10, 30))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deficit", {"start": 0, "end": 0}),
        ("deficit", {"start": 3, "end": 3, "unit": "step", "inclusive": True}),
        ("late_switch", {"share": 0}),
        ("late_switch", {"share": 1}),
        ("pfq_manual", {"boundaries": [0.5, 0.5, 1]}),
    ],
)
def test_a_part_of_no_steps_can_be_asked_for(name, options):
    """As the end of a series; what is refused is a part that rounding leaves without a step."""
    assert schedule(name, total_steps=100, **options).run_lengths[0][1] >= 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("RTX", {}, "did you mean 'RT"),
        ("RTH", {"qmin": 3}, "did you mean 'q_min'"),
        ("RTH", {"q_min": 9}, "choose q_min <= q_max"),
        ("RTH", {"cycles": 3}, "even number such as 4"),
        ("RTH", {"cycles": 0}, "use 1 or more"),
        ("RTH", {"cycles": 2000}, "use at most 1000"),
        ("RTH", {"cycles": 2000, "total_steps": 7}, "only 7 iterations.* use at most 6 cycles"),
        ("RTH", {"cycles": 2, "total_steps": 1}, "only 1 iteration,.*Remedy: train longer"),
        ("RTH", {"period_rounding": "up"}, "ceil"),
        ("RTH", {"q_max": 33}, "use 32 or less"),
        ("gradient_cycle", {"gradient_min": 9, "gradient_max": 8}, "gradient_min <= gradient_max"),
        ("deficit", {"start": 0.5, "end": 0.2}, "start <= end"),
        ("deficit", {"end": 2}, "set unit to step"),
        ("deficit", {"q_min": "auto"}, "q_min=auto: only a cyclic schedule can find it"),
        ("deficit", {"q_min": None}, "q_min=null: cannot be null"),
        ("deficit", {"start": 1000, "end": 2000, "unit": "step"}, "none of the run's 1000 steps"),
        ("deficit", {"start": 1000, "end": 1000.5, "unit": "step", "inclusive": True}, "none of the run's 1000 steps"),
        ("deficit", {"start": 0.9999, "end": 1}, "schedule=static"),
        ("late_switch", {"share": 0.0001}, "leaves none of the run's 1000 steps"),
        ("pfq_manual", {"boundaries": [0.5, 0.9999, 1]}, "from 0.9999 to 1 of the run has none of its 1000 steps"),
        ("pfq_manual", {"boundaries": [0.25, 0.5, 0.75], "total_steps": 3}, "has none of its 3 steps.* train longer"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(name, options, words):
    with pytest.raises(SettingError, match=words):
        schedule(name, **{"total_steps": 1000, **options})


def test_step_outside_the_run_is_refused():
    bound = schedule("RTH", total_steps=100)
    for step in (-1, 100):
        with pytest.raises(ValueError, match="outside the run"):
            bound(step)


@pytest.mark.parametrize("name", ["RTH", "static", "deficit", "pfq"])
def test_a_step_is_a_whole_number_of_any_library(name):
    """Fractions were once accepted: positions between two steps, at which no network trains."""
    bound = schedule(name, total_steps=100, steps_per_epoch=10)
    assert bound(numpy.int64(3)) == bound(torch.tensor(3)) == bound(3)
    for step in (1.5, 2.0, float("nan"), torch.tensor(1.0), "1"):
        with pytest.raises(TypeError, match="integer"):
            bound(step)


def test_every_schedule_is_printable_and_repeatable():
    for name in SCHEDULES:
        first, second = (schedule(name, total_steps=3200, steps_per_epoch=100) for _ in range(2))
        assert first == second
        assert name in repr(first)


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
@pytest.mark.parametrize("form", ["repeated", "vertical", "horizontal", "within", "annealing"])
@pytest.mark.parametrize("profile", ["linear", "cosine", "exponential", "rex"])
def test_course_found_by_bisection_is_that_of_every_step(profile, form, unit):
    for period_rounding, end, steps, cycles in (
        *(("floor", False, 977, 8), ("ceil", True, 1000, 6), ("floor_plus_one", True, 512, 8)),
        *(("floor", True, 64, 2), ("ceil", False, 6400, 2)),
    ):
        for low, gradient in ((3, None), (2, 4)):
            options = Cyclic(
                name="x", profile=profile, form=form, q_min=low, q_max=8, cycles=cycles, unit=unit,
                period_rounding=period_rounding, end_at_q_max=end, gradient_min=gradient,
            )  # fmt: skip
            length = RunLength(steps, 7)
            assert options.course(length) == ScheduleOptions.course(options, length)


def test_precision_changes_only_where_a_schedule_says_so():
    edges = (0, 0.25, 0.333, 1, 2, 2.5, 7, 90)
    windows = [(start, end) for start in edges for end in edges if start <= end]
    schedules = [Staged(), Staged(boundaries=[0, 0.5, 1]), Staged(boundaries=[0.1, 0.1, 0.7]), Hlhlp(), Static()]
    schedules += [Hlhlp(lengths=[50, 30, 1e-9, 30]), *(PartialPretrain(split=split) for split in (0, 0.3, 1))]
    for unit in ("fraction", "step", "epoch"):
        for start, end in windows:
            if end <= 1 or unit != "fraction":
                schedules += [Deficit(start=start, end=end, unit=unit, inclusive=kind) for kind in (False, True)]
    for options in schedules:
        for length in (RunLength(1, 1), RunLength(7, 3), RunLength(40, 6)):
            expected = joined((options.precision(step, length), 1) for step in range(length.total_steps))
            assert options.course(length) == expected, (options, length)


def test_cycles_that_do_not_divide_the_run_end_well_when_exact():
    """32 cycles in 1,000 steps: rounded up, the 32nd has 8 steps."""
    bits = {}
    for rounding in ("ceil", "exact"):
        schedule = bitcycle.schedule("CR", cycles=32, total_steps=1000, period_rounding=rounding, end_at_q_max=False)
        bits[rounding] = [schedule(step).weight for step in range(1000)]
        assert schedule.run_lengths and sum(count for _, count in schedule.run_lengths) == 1000
    starts = {name: [t for t in range(1, 1000) if found[t] < found[t - 1]] for name, found in bits.items()}
    assert len(starts["exact"]) == 31
    assert bits["exact"][-4:] == [8, 8, 8, 8]
    assert bits["ceil"][-1] < 8
    even = [bitcycle.schedule("CR", cycles=8, total_steps=64, period_rounding=name) for name in ("ceil", "exact")]
    assert even[0].run_lengths == even[1].run_lengths


@pytest.mark.parametrize("profile", ["linear", "cosine", "exponential", "rex"])
@pytest.mark.parametrize(
    ("bits", "steps", "cycles"), [((3, 8), 2 * 10**6, 1), ((31, 32), 9 * 10**6, 8), ((2, 32), 10**9, 1)]
)
def test_the_course_of_a_long_run_is_found_at_once(bits, steps, cycles, profile):
    """Every step was computed: 14 s for 2e6 steps."""
    options = Cyclic(name="CR", profile=profile, q_min=bits[0], q_max=bits[1], cycles=cycles)
    bound = options.bind(steps)
    start, calls = 0, []
    original, options.level = options.level, lambda *arguments: calls.append(1) or original(*arguments)
    course = options.course(bound.length)
    assert len(calls) < 10**4 and sum(length for _, length in course) == steps
    for precision, length in course:
        near = [k for k in (*range(200), *range(length - 200, length), length // 2) if 0 <= k < length]
        assert {bound(start + k) for k in near} == {precision}
        start += length


@dataclass
class Own(ScheduleOptions):
    """A schedule of a user."""

    name: str = "own"
    bits: Any = None

    def precision(self, step, length):
        return self.bits


def test_an_own_schedule_may_return_three_numbers():
    bound = Own(bits=(4, 4, 8)).bind(10)
    assert bound(3) == Precision(4, 4, 8) and bound.precisions == {Precision(4, 4, 8)}
    assert bound(3).gradient == bound.lowest.gradient == 8
    for wrong in (None, 4, (4, 8), (4.0, 4, 8)):
        with pytest.raises(SettingError, match=r"precision=.*: is not a precision. Remedy: use three numbers"):
            Own(bits=wrong).bind(10)(0)


@pytest.mark.parametrize("name", ["pfq", "range_test", "dfq"])
def test_a_course_that_depends_on_training_is_not_known_in_advance(name):
    """It was a NotImplementedError with a text for schedules of one's own."""
    bound = bitcycle.schedule(name, total_steps=100, steps_per_epoch=10)
    with pytest.raises(
        SettingError, match=rf"schedule={name}: has no course that is known in advance: it \w+ on .*min_cost"
    ):
        _ = bound.run_lengths
