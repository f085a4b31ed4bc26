"""The learning rate equals the released code's points."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcycle.files import read_records
from bitcycle.recipe.learning_rate import LearningRateOptions
from bitcycle.settings import SettingError
from bitcycle.training.outcome import ReduceOnPlateau
from bitcycle.training.run import execute
from tests.conftest import configure, golden_json
from tests.settings import RESUME

NAMES = {"piecewise": "piecewise", "linear": "linear", "anneal_cosine": "cosine"}


@pytest.mark.parametrize("case", golden_json("learning_rate"), ids=lambda c: f"{c['schedule']}-warmup-{c['warm_up']}")
def test_equals_released_code(case):
    warmup = 400 / 64_000 if case["warm_up"] else 0.0
    options = LearningRateOptions(
        name=NAMES[case["schedule"]], initial=case["base_lr"], factor=case["step_ratio"], warmup=warmup
    )
    for step, rate in case["points"]:
        # Their cosine is computed with fewer digits: 2e-9 relative at the worst point.
        assert options.rate(step, case["iters"]) == pytest.approx(rate, rel=1e-8), step


def test_milestones_are_relative():
    options = LearningRateOptions()
    assert [round(options.rate(step, 8), 6) for step in range(8)] == [0.1] * 4 + [0.01] * 2 + [0.001] * 2


def test_delay_shifts_the_shape():
    options = LearningRateOptions(delay=0.5)
    assert [round(options.rate(step, 16), 6) for step in (0, 7, 8, 11, 12, 14)] == [0.1, 0.1, 0.1, 0.1, 0.01, 0.001]


def test_linear_warmup_rises_to_the_initial_rate():
    options = LearningRateOptions(initial=0.4, warmup=0.25, warmup_shape="linear")
    assert [options.rate(step, 16) for step in (0, 1, 3, 4, 7, 8)] == pytest.approx([0, 0.1, 0.3, 0.4, 0.4, 0.04])


def test_cyclic_restarts_where_doubled_cycles_end():
    """15 equal parts: restarts after 1, 3 and 7 of them, and the last cycle is over with the run."""
    options = LearningRateOptions(name="cyclic")
    rates = [options.rate(step, 15_000) for step in range(15_000)]
    assert [step for step in range(1, 15_000) if rates[step] > rates[step - 1]] == [1000, 3000, 7000]
    for start, steps in ((0, 1000), (1000, 2000), (3000, 4000), (7000, 8000)):
        assert rates[start] == 0.1
        assert rates[start + steps // 2] == pytest.approx(0.05)
        assert rates[start + steps // 4] == pytest.approx(0.1 * (1 + math.sqrt(0.5)) / 2)
        assert rates[start + steps - 1] == pytest.approx(0.05 * (1 + math.cos(math.pi * (1 - 1 / steps))))


@pytest.mark.parametrize(("warmup", "steps", "first"), [(0.07, 100, 7), (0.14, 6000, 840), (0.00625, 2000, 13)])
def test_the_warm_up_ends_at_its_fraction_of_the_run(warmup, steps, first):
    """0.07 of 100 steps were 8 steps, as 0.07 * 100 is slightly more than 7."""
    options = LearningRateOptions(name="constant", warmup=warmup)
    assert [options.rate(step, steps) for step in (first - 1, first)] == [0.01, 0.1]


def test_cyclic_options():
    equal = LearningRateOptions(name="cyclic", cycles=2, cycle_growth=1, cycle_end_factor=0.5, delay=0.5, initial=1.0)
    assert [equal.rate(step, 16) for step in range(16)] == pytest.approx(
        [1.0] * 8 + [0.75 + 0.25 * math.cos(math.pi * z / 4) for z in (0, 1, 2, 3, 0, 1, 2, 3)]
    )
    one = LearningRateOptions(name="cyclic", cycles=1)
    cosine = LearningRateOptions(name="cosine", final_factor=0)
    assert [one.rate(step, 99) for step in range(99)] == [cosine.rate(step, 99) for step in range(99)]


@given(
    cycles=st.integers(1, 12),
    growth=st.floats(1, 3),
    end=st.floats(0, 1),
    steps=st.integers(1, 300),
)
def test_cyclic_rates_stay_between_their_ends(cycles, growth, end, steps):
    """Also where a run has fewer steps than cycles."""
    options = LearningRateOptions(name="cyclic", cycles=cycles, cycle_growth=growth, cycle_end_factor=end)
    rates = [options.rate(step, steps) for step in range(steps)]
    assert all(0.1 * end - 1e-12 <= rate <= 0.1 + 1e-12 for rate in rates)
    assert sum(later > earlier for earlier, later in pairwise(rates)) <= cycles - 1


@pytest.mark.parametrize("initial", [0.1, 0.06, 0.03, 0.01])
def test_stages_of_cpt_table_1(initial):
    """Any rate at first, then 0.01 and 0.001 whatever it was; 4 bits at first, then float."""
    config = configure(
        "schedule=pfq_manual",
        *("schedule.stages=[4,32,32]", "schedule.gradient_stages=[8,32,32]", "schedule.boundaries=[0.5,0.75]"),
        *(f"training.learning_rate.initial={initial}", "training.learning_rate.rates=[0.01,0.001]"),
    )
    bound, rate = config.schedule.bind(160), config.training.learning_rate.rate
    stages = [(bound(step), rate(step, 160)) for step in range(160)]
    first, rest = (4, 4, 8), (32, 32, 32)
    assert stages == [(first, initial)] * 80 + [(rest, 0.01)] * 40 + [(rest, 0.001)] * 40


@pytest.mark.parametrize(
    "options",
    [
        {"rates": [0.1]},
        {"cycles": 0},
        {"cycle_growth": 0.5},
        {"milestones": [0.7, 0.2]},
        {"name": "linear", "linear_start": 0.9, "linear_end": 0.5},
        {"name": "step"},
    ],
)
def test_nonsense_is_refused(options):
    with pytest.raises(SettingError):
        LearningRateOptions(**options)


def test_exponential_and_inverse_square_root():
    """HLHLp, PTB: rate * 0.9^(epoch - 10) after 10 of 50 epochs; Transformer: up to the warm-up's end, then 1 / sqrt(step)."""
    options = LearningRateOptions(name="exponential", initial=1.0, delay=0.2, final_factor=0.9**40)
    assert [options.rate(epoch, 50) for epoch in (0, 9, 10, 11, 30)] == pytest.approx([1, 1, 1, 0.9, 0.9**20])
    rounded = LearningRateOptions(
        name="exponential", initial=1.0, delay=0.19, final_factor=0.5
    )  # held for 1.9 of 10 steps
    assert [rounded.rate(step, 10) for step in (1, 2, 3)] == pytest.approx([1, 1, 0.5 ** (1 / 8)])
    options = LearningRateOptions(name="inverse_sqrt", initial=5e-4, warmup=0.08, warmup_shape="linear")
    assert [options.rate(step, 50_000) for step in (0, 2000, 4000, 16_000)] == pytest.approx([0, 2.5e-4, 5e-4, 2.5e-4])
    with pytest.raises(SettingError, match="set warmup above 0"):
        LearningRateOptions(name="inverse_sqrt")


def test_plateau_drops_the_rate_where_validation_stops_improving(digits):
    """The recorded rate of every stretch follows from the recorded validations before it."""
    plan = digits(*RESUME["learning_rate=plateau"])
    execute(plan)
    records = read_records(plan.folder.metrics)
    assert records, "the run is recorded"
    rate, best, dropped = 0.5, -1.0, 0
    for record in records:
        if record["kind"] == "train":
            assert record["learning_rate"] == pytest.approx(rate)
        else:
            improved = record["validation_accuracy"] > best
            best, rate = max(best, record["validation_accuracy"]), rate if improved else rate * 0.1
            dropped += not improved
    assert dropped >= 2


def test_the_state_of_plateaus_goes_on():
    """A drop at the third validation without a new best, two of which were before the interruption."""
    options = LearningRateOptions(name="plateau", factor=0.5, patience=3)
    whole, first, second = (ReduceOnPlateau(options, higher_is_better=True) for _ in range(3))
    values, multipliers = (3.0, 2.0, 1.0, 3.0, 2.5, 4.0, 3.0), []
    for value in values:
        whole.observe(value)
        multipliers.append(whole.multiplier)
    assert multipliers == [1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    for value in values[:3]:
        first.observe(value)
    second.load_state_dict(first.state_dict())
    for value in values[3:]:
        second.observe(value)
    assert vars(second) == vars(whole)


def test_plateau_needs_validation(digits):
    plan = digits("training.learning_rate.name=plateau")
    assert plan.config.dataset.validation == 0.1
    with pytest.raises(SettingError, match=r"needs validation data.*hold out"):
        digits("training.learning_rate.name=plateau", "dataset.validation=0")


def test_patient_weight_averaging_needs_validation(digits):
    """Without validation data it silently never began."""
    assert digits("training.weight_averaging.patience=5").config.dataset.validation == 0.1
    assert digits("training.weight_averaging.start=0.5").config.dataset.validation is None
    with pytest.raises(SettingError, match=r"patience needs validation data.*start instead"):
        digits("training.weight_averaging.patience=5", "dataset.validation=0")


@pytest.mark.parametrize(("cycles", "steps"), [(2000, 64_000), (7, 60)])
def test_cycles_shorter_than_a_step_are_refused(cycles, steps):
    with pytest.raises(SettingError, match=f"cycles={cycles}: a cycle would be shorter than one of {steps}"):
        LearningRateOptions(name="cyclic", cycles=cycles).check_length(steps)
    LearningRateOptions(name="cyclic", cycles=6).check_length(60)
    LearningRateOptions(name="cyclic", cycles=cycles, delay=1.0).check_length(steps)
    LearningRateOptions(name="cosine", cycles=cycles).check_length(steps)


def test_more_cycles_than_steps_are_refused():
    """Of a hundred equal cycles of 64 steps, 36 were once left out."""
    options = LearningRateOptions(name="cyclic", cycles=100, cycle_growth=1)
    with pytest.raises(SettingError, match=r"cycles=100: .* shorter than one of 64 steps"):
        options.check_length(64)
    options.check_length(100)


@pytest.mark.parametrize("field", ["final_factor", "epoch_factor"])
def test_an_exponential_decay_to_zero_is_refused(field):
    """It trained in its first step or epoch only; a run inherited it from a recipe whose cosine ends at zero."""
    with pytest.raises(SettingError, match=f"{field}=0: .* rate is zero .* name=cosine"):
        LearningRateOptions(name="exponential", **{field: 0})
    assert LearningRateOptions(name="cosine", final_factor=0)


def test_a_warm_up_above_the_initial_rate_is_refused():
    """The rate of the default warm-up, 0.01, is that of SGD in the released code: twenty times the usual one of Adam."""
    with pytest.raises(SettingError, match=r"warmup_rate=0.01: is above initial=0.0005.* warmup_shape=linear"):
        LearningRateOptions(name="cosine", initial=5e-4, warmup=0.1)
    assert LearningRateOptions(name="cosine", initial=5e-4)
    assert LearningRateOptions(name="cosine", initial=5e-4, warmup=0.1, warmup_shape="linear")


def test_cycles_must_fit_into_each_phase(digits):
    options = ["schedule=fine_tuning", "schedule.later_length=1", "training.learning_rate.name=cyclic"]
    assert digits(*options, "training.learning_rate.cycles=5")
    with pytest.raises(SettingError, match=r"training.learning_rate.cycles=7: .*32 steps"):
        digits(*options, "training.learning_rate.cycles=7")


def test_a_rate_that_falls_once_an_epoch():
    """Findings on networks of others, line 16: HLHLp's Penn Treebank, 0.9^max(0, e - 10)."""
    options = LearningRateOptions(name="exponential", initial=1.0, epoch_factor=0.9, delay_epochs=10)
    rates = [options.rate(step, 30 * 7, epoch_steps=7) for step in (0, 76, 77, 83, 84, 209)]
    assert rates == pytest.approx([1, 1, 0.9, 0.9, 0.81, 0.9**19])


@pytest.mark.parametrize(
    "setting",
    ["schedule=fine_tuning", "training.learning_rate.name=plateau", "training.weight_averaging.patience=1"],
)
def test_a_validation_split_that_is_switched_off_validates_nothing(setting):
    """Runs ended in an IndexError after a phase, or the rate never fell, without a word."""
    words = ["dataset=sick", "model=bert_tiny", "scale=smoke", setting]
    configure(*words)
    with pytest.raises(SettingError, match=r"dataset.validation=0.0: .*omit it"):
        configure(*words, "dataset.validation=0")
