"""The learning rate equals the released code's points."""

from __future__ import annotations

import pytest

from bitcycle.settings import SettingError
from bitcycle.training.learning_rate import LearningRateOptions
from tests.conftest import golden_json

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


@pytest.mark.parametrize(
    "options",
    [{"milestones": [0.7, 0.2]}, {"name": "linear", "linear_start": 0.9, "linear_end": 0.5}, {"name": "step"}],
)
def test_nonsense_is_refused(options):
    with pytest.raises(SettingError):
        LearningRateOptions(**options)
