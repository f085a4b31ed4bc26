"""Averaged weights: the plain mean, with statistics of their own, beside a training that does not notice."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.files import read_json, read_records
from bitcycle.recipe.weight_averaging import WeightAverage, WeightAveragingOptions, estimate_statistics
from bitcycle.settings import SettingError
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute

CPU = torch.device("cpu")
AVERAGING = ["training.weight_averaging.start=0.5", "training.weight_averaging.every=0.25"]
FEW_SEARCHES = ["uniform_l2", "schedule.gradient_min=32", "schedule.q_min=2", "schedule.q_max=3"]
"""uniform_l2 searches its steps when the bits change."""


def test_when_the_released_code_would_average():
    options = WeightAveragingOptions(start=0.75)
    assert [step for step in range(64_001) if options.due(step, 64_000)] == list(range(48_000, 64_001, 1170))
    assert not any(WeightAveragingOptions().due(step, 100) for step in range(101))
    assert [step for step in range(9) if WeightAveragingOptions(start=0, every=0).due(step, 8)] == list(range(1, 9))
    rounded = WeightAveragingOptions(start=0.78, every=0.19)
    assert [step for step in range(11) if rounded.due(step, 10)] == [8, 10]  # from step 7.8 of 10, every 1.9 steps


def test_statistics_are_estimated_on_the_batches_of_the_current_epoch(digits, monkeypatch):
    trainer = Trainer(digits("schedule=static"), CPU)
    batches, asked = trainer.task.batches, []
    monkeypatch.setattr(trainer.task, "batches", lambda step: (asked.append(step), batches(step))[1])
    trainer.begin_phase()
    trainer.train_step(next(batches(0)))
    trainer.step = 20
    trainer.average_weights()
    assert asked == [16]  # of 16 steps per epoch


def test_the_average_is_the_plain_mean_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average, seen = WeightAverage(), []
    for _ in range(5):
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        seen.append(model[0].weight.detach().clone())
        average.add(model)
        torch.testing.assert_close(average.state["0.weight"], torch.stack(seen).mean(0))
        assert torch.equal(model[0].weight, seen[-1])
    with average.in_place_of(model):
        torch.testing.assert_close(model[0].weight, torch.stack(seen).mean(0))
        model[1].running_mean += 1
    assert torch.equal(model[0].weight, seen[-1])
    assert torch.equal(average.state["1.running_mean"], torch.zeros(2))
    with average.in_place_of(model, keep=True):
        model[1].running_mean += 1
    assert torch.equal(model[1].running_mean, torch.zeros(2))
    assert torch.equal(average.state["1.running_mean"], torch.ones(2))


def test_statistics_are_means_over_all_samples():
    """Also where the last batch is smaller; the variance is the mean of the unbiased ones of the batches, as in the code."""
    batches = list(torch.randn(10, 2, generator=torch.Generator().manual_seed(0)).mul(3).add(7).split(4))
    model = nn.BatchNorm1d(2, momentum=0.3)
    model.running_mean.fill_(99.0)
    estimate_statistics(model.train(), batches, model)
    torch.testing.assert_close(model.running_mean, torch.cat(batches).mean(0))
    variance = sum(len(batch) * batch.var(0, correction=1) for batch in batches) / 10
    torch.testing.assert_close(model.running_var, variance)
    assert model.momentum == 0.3


def test_statistics_of_a_layer_that_runs_several_times_are_means_over_all_of_its_inputs():
    """As in the blocks of DFQ, which run once for each option."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bn(x) + self.bn(3 * x + 1)

    batches = list(torch.randn(10, 2, generator=torch.Generator().manual_seed(0)).split(4))
    model = Twice().train()
    estimate_statistics(model, batches, model)
    rows = torch.cat(batches)
    torch.testing.assert_close(model.bn.running_mean, torch.cat([rows, 3 * rows + 1]).mean(0))


def test_choices_of_gates_are_counted_in_training_only(digits, tmp_path):
    """Neither cost nor choices of DFQ know of the passes that estimate statistics for the average."""
    options = ["schedule=dfq", "training.steps=8", "training.evaluation_steps=4"]
    plain = execute(digits(*options, f"results_root={tmp_path}/plain"))
    averaging = execute(digits(*options, *AVERAGING, f"results_root={tmp_path}/averaging"))
    assert averaging["averaged"]["weights"] == 3
    for key in ("samples", "cost", "gates", "final"):
        assert averaging[key] == plain[key]


def test_a_loop_of_ones_own_counts_no_pass_that_trains_nothing():
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", total_steps=2))
    control.step(0)
    model(torch.randn(5, 3))
    with control.uncounted():
        model(torch.randn(7, 3))
    assert control.cost().samples == 5
    control.step(1)
    model(torch.randn(5, 3))
    assert control.cost().samples == 10


def test_each_phase_has_an_average_of_its_own(digits):
    """The weights of two phases, float ones and such with few bits, are not mixed."""
    plan = digits(
        *("schedule=partial_pretrain", "quantizer=pact_binary", "model=resnet8_extra_skip", "schedule.split=0.5"),
        *("training.weight_averaging.start=0.25", "training.weight_averaging.every=0.125"),
    )
    summary = execute(plan)
    assert (
        summary["averaged"]["weights"] == 4
    )  # after steps 40, 48, 56, 64; those after 16, 24, 32 belong to the first phase
    evaluations = [record for record in read_records(plan.folder.metrics) if record["kind"] == "evaluation"]
    assert ["test_accuracy_averaged" in record for record in evaluations] == [True, True]


@pytest.mark.parametrize("quantizer", [["sbm"], FEW_SEARCHES], ids=lambda q: q[0])
def test_training_does_not_notice_the_average(digits, tmp_path, quantizer):
    options = ["schedule=CR", f"quantizer={quantizer[0]}", *quantizer[1:], "training.steps=12"]
    options += ["training.evaluation_steps=6", "schedule.cycles=2"]
    plain = digits(*options, f"results_root={tmp_path}/plain")
    averaging = digits(*options, *AVERAGING, f"results_root={tmp_path}/averaging")
    summaries = execute(plain), execute(averaging)
    states = [plan.folder.checkpoint.load() for plan in (plain, averaging)]
    torch.testing.assert_close(states[1]["model"], states[0]["model"], rtol=0, atol=0)
    assert states[0]["average"] == {"count": 0, "state": {}}
    assert summaries[0]["final"] == summaries[1]["final"] and "averaged" not in summaries[0]
    steps = range(6, 13, 3)
    assert states[1]["average"]["count"] == len(steps) == summaries[1]["averaged"]["weights"]
    evaluations = [record for record in read_records(averaging.folder.metrics) if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations if "test_accuracy_averaged" in record] == [6, 12]
    assert summaries[1]["averaged"]["final"] == evaluations[-1]["test_accuracy_averaged"]
    assert read_json(averaging.folder.summary)["averaged"]["best"] == max(
        r["test_accuracy_averaged"] for r in evaluations
    )


def test_the_average_of_a_run_is_that_of_its_weights(digits):
    """Weights of the last steps, gathered by hand; accuracy and statistics from a model that holds their mean."""
    plan = digits("schedule=CR", "training.weight_averaging.start=0.9", "training.weight_averaging.every=0.05")
    trainer, batches, weights = Trainer(plan, CPU), None, []
    batches = trainer.task.batches(0)
    while trainer.step < 64:
        trainer.train_step(next(batches))
        if trainer.step in (58, 61, 64):
            weights.append(trainer.model.conv1.weight.detach().clone())
            trainer.average_weights()
    torch.testing.assert_close(trainer.average.state["conv1.weight"], torch.stack(weights).mean(0))
    values = trainer.evaluate_average(trainer.controller.precision)
    trainer.model.load_state_dict(trainer.average.state)
    assert values == {f"{name}_averaged": v for name, v in trainer.task.evaluate(trainer.model.eval()).items()}
    trainer.model.train()
    own = trainer.model.bn1.running_mean.clone()
    train = partial(trainer.task.train, trainer.model)
    estimate_statistics(trainer.model, islice(trainer.task.batches(48), 16), train)
    assert not torch.equal(
        own, trainer.model.bn1.running_mean
    )  # step 64 begins an epoch: its batches, not those before
    estimate_statistics(trainer.model, islice(trainer.task.batches(64), 16), train)
    torch.testing.assert_close(own, trainer.model.bn1.running_mean)


@pytest.mark.parametrize("options", [{"start": 1.5}, {"start": -0.1}, {"every": 2}])
def test_nonsense_is_refused(options):
    with pytest.raises(SettingError):
        WeightAveragingOptions(**options)
