"""Stages: at given fractions, and at the turning points that the released code of PFQ finds."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
import torch

from bitcycle.precision import Precision
from bitcycle.schedule import PlateauIndicator, schedule
from bitcycle.settings import SettingError
from tests.conftest import golden_json

SERIES = golden_json("pfq_indicator")
RUNS = [(series, run) for series in SERIES for run in series["runs"]]


@pytest.mark.parametrize(("series", "run"), RUNS, ids=lambda value: value.get("name", value.get("epsilon")))
def test_turning_points_equal_the_released_code(series, run):
    losses = series["epoch_losses"]
    bound = schedule(
        "pfq",
        total_steps=len(losses),
        steps_per_epoch=1,
        stages=run["forward_bits"],
        gradient_stages=run["backward_bits"],
        epsilon=run["epsilon"],
        alpha=run["alpha"],
        max_decays=2,
    )
    bits, turning = [], []
    for epoch, loss in enumerate(losses):
        bits.append((bound(epoch).weight, bound(epoch).gradient))
        before = bound.stage
        bound.observe(loss, 0.0)
        if bound.stage > before:
            turning.append(epoch + 1)
        if epoch < 10 and bound.stage < len(run["forward_bits"]) - 1:
            assert bound.indicator.loss_scale == pytest.approx(
                series["loss_scale_after_each_of_the_first_10_epochs"][epoch], rel=1e-12
            )
    assert turning == run["turning_epochs"]
    assert [[list(pair), len(list(group))] for pair, group in groupby(bits)] == run["bits_per_epoch_rle"]
    assert bound.indicator.threshold == pytest.approx(run["final_threshold"], rel=1e-12)


def test_every_turning_point_shrinks_the_threshold_by_default():
    """The paper's rule; in a schedule of four stages it makes no difference, since the third turning point is the last."""
    for series, run in RUNS:
        if len(run["forward_bits"]) > 4:
            continue
        options = {
            "stages": run["forward_bits"],
            "gradient_stages": run["backward_bits"],
            "epsilon": run["epsilon"],
            "alpha": run["alpha"],
        }
        bound = schedule("pfq", total_steps=1000, steps_per_epoch=1, **options)
        stages = []
        for loss in series["epoch_losses"]:
            bound.observe(loss, 0.0)
            stages.append(bound.stage)
        assert [epoch + 1 for epoch in range(len(stages)) if stages[epoch] > ([0, *stages])[epoch]] == run[
            "turning_epochs"
        ]


def test_a_stage_lasts_at_least_a_window():
    indicator = PlateauIndicator(threshold=1e9, alpha=1.0, window=5)
    assert [indicator.update(1.0) for _ in range(11)] == [False] * 4 + [True] + [False] * 4 + [True] + [False]


def test_differences_are_those_to_the_last_loss_relative_to_the_mean():
    slow = [10.0, 9.6, 9.2, 8.8, 8.4]  # neighbours differ by 0.4, the first and the last by 1.6: 0.1739 of their mean
    for threshold, turns in ((0.173, False), (0.175, True)):
        indicator = PlateauIndicator(threshold, 1.0)
        assert [indicator.update(loss) for loss in slow][-1] is turns


def test_the_sign_of_a_loss_does_not_matter_and_zeros_are_flat():
    """With the cost term of DFQ a loss can be negative: any such course was once flat, and losses of zero an error."""
    steep, flat = [3.0, 2.5, 2.0, 1.5, 1.0], [1.0] * 5
    for losses, turns in ((steep, False), (flat, True), ([0.0] * 5, True)):
        for sign in (1, -1):
            indicator = PlateauIndicator(0.05, 0.3)
            assert [indicator.update(sign * loss) for loss in losses][-1] is turns


@pytest.mark.parametrize(("steps", "reached"), [(50, 1), (51, 2), (100, 2), (150, 3), (151, 0)])
def test_a_run_that_is_too_short_for_the_stages_says_so(steps, reached):
    """PFQ stayed at its first bits and reported their cost, without a word."""
    text = schedule("pfq", total_steps=steps, steps_per_epoch=10).shortfall
    assert text == "" if not reached else f"reaches at most {reached} of its 4 stages in {steps} steps" in text
    flat = schedule("pfq", total_steps=steps, steps_per_epoch=10)
    stages = []
    for step in range(steps):
        stages.append(flat(step))
        if (step + 1) % flat.observation_steps == 0:
            flat.observe(1.0, 0.5)
    assert len(set(stages)) == (reached or 4)


def test_what_is_observed_is_a_number_whatever_becomes_of_its_tensor():
    """All losses in a reused buffer were the same tensor, hence flat; those with a graph could not be saved."""
    buffer, bound = torch.ones((), requires_grad=True), schedule("pfq", total_steps=100, steps_per_epoch=1)
    loss = buffer.detach()
    for epoch in range(6):
        loss.fill_(0.8**epoch)
        bound.observe(buffer * 1, torch.tensor(0.5))
    assert bound.stage == 0 and json.dumps(bound.state_dict())
    assert bound.indicator.recent == pytest.approx([0.8**epoch for epoch in range(6)][-len(bound.indicator.recent) :])


def test_state_goes_on_where_it_was():
    losses = SERIES[0]["epoch_losses"]
    whole = schedule("pfq", total_steps=1000, steps_per_epoch=1)
    for loss in losses:
        whole.observe(loss, 0.0)
    first, second = (schedule("pfq", total_steps=1000, steps_per_epoch=1) for _ in range(2))
    for loss in losses[:24]:
        first.observe(loss, 0.0)
    second.load_state_dict(first.state_dict())
    for loss in losses[24:]:
        second.observe(loss, 0.0)
    assert second.state_dict() == whole.state_dict()
    assert second(999) == whole(999) == Precision(8, 8, 8)


def test_saved_losses_stay_as_they_were_saved():
    """Later observations once changed the losses of a state kept in memory, and so the scale of a run that went back to it."""
    bound = schedule("pfq", total_steps=100, steps_per_epoch=1)
    bound.observe(1.0, 0.5)
    saved = bound.state_dict()
    for _ in range(2):
        bound.observe(3.0, 0.5)
        assert bound.indicator.loss_scale == 2
        bound.load_state_dict(saved)
        assert bound.indicator.loss_scale == 1


def test_manual_stages_are_equally_long_unless_told():
    equal = schedule("pfq_manual", total_steps=100)
    assert [(p.weight, p.gradient, n) for p, n in equal.run_lengths] == [(3, 6, 25), (4, 6, 25), (6, 8, 25), (8, 8, 25)]
    told = schedule(
        "pfq_manual", total_steps=100, stages=[4, 32, 32], gradient_stages=[4, 32, 32], boundaries=[0.5, 0.75]
    )
    assert [(p.weight, n) for p, n in told.run_lengths] == [(4, 50), (32, 50)]
    assert equal.reference == Precision(8, 8, 8)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("pfq", {"stages": [3, 4]}, "as many gradient bits"),
        ("pfq", {"stages": [], "gradient_stages": []}, r"stages=\[\]: is empty"),
        ("pfq", {"stages": [3, 40, 6, 8]}, "use 32 or less"),
        ("pfq", {"epsilon": -1}, "use 0 or more"),
        ("pfq", {"steps_per_epoch": None}, "set epoch_steps"),
        ("pfq_manual", {"boundaries": [0.5]}, "4 stages have 3 boundaries"),
        ("pfq_manual", {"boundaries": [0.5, 0.2, 0.9]}, "are not ascending"),
    ],
)
def test_nonsense_is_refused(name, options, words):
    with pytest.raises(SettingError, match=words):
        schedule(name, **{"total_steps": 100, "steps_per_epoch": 10, **options})
