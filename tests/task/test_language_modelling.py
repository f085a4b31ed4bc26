"""Language modelling: state, perplexity, losses, and small runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bitcycle import distributed
from bitcycle.dataset.text import TEXT_SIZES
from bitcycle.files import read_records
from bitcycle.settings import SettingError
from bitcycle.task import TaskSetup
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.text_data import write_text

CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path):
    """Plans of smoke runs on a small made-up text."""
    write_text(tmp_path / "text")

    def make(*overrides: str):
        transformer = any(override.startswith("model=transformer") for override in overrides)
        size = ("model.width=16", "model.heads=2", "model.feedforward=32") if transformer else ("model.hidden=12",)
        small = (*size, "task.sequence_length=5", "dataset.train_samples=40", "dataset.test_samples=20")
        folders = (f"dataset.path={tmp_path}/text", f"results_root={tmp_path}/runs")
        return plan("dataset=text", "scale=smoke", "training.batch_size=4", *small, *folders, *overrides)

    return make


def task_of(planned, batch_size: int = 4):
    config = planned.config
    return config.task.build(TaskSetup(config.dataset, config.data_folder, planned.info, batch_size, config.seed, CPU))


def test_the_state_goes_on_as_values_and_begins_anew_with_each_epoch(text):
    planned = text("model.dropout=0", "quantizer=none")
    task, model = task_of(planned), planned.build_model()
    batches = task.batches(0)
    first, second = next(batches), next(batches)
    task.train(model, first)
    assert not any(part.requires_grad for part in task.state)
    carried = task.train(model, second).loss
    both, _ = model(torch.cat([first.inputs, second.inputs]))
    expected = nn.functional.cross_entropy(both[5:].flatten(0, 1), second.targets.flatten())
    torch.testing.assert_close(carried, expected)
    again = next(task.batches(planned.epoch.steps))
    torch.testing.assert_close(task.train(model, again).loss, task.train(model, first).loss, rtol=0, atol=0)


def test_guessing_has_the_perplexity_of_equal_probabilities(text):
    planned = text()
    task, model = task_of(planned), planned.build_model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert task.evaluate(model.eval())["test_perplexity"] == pytest.approx(task.chance)


def test_evaluation_leaves_the_carried_state_alone(text):
    planned = text()
    task, model = task_of(planned), planned.build_model()
    task.train(model, next(task.batches(0)))
    before = [part.clone() for part in task.state]
    task.evaluate(model.eval())
    task.validate(model)
    assert all(torch.equal(*parts) for parts in zip(before, task.state))


@pytest.mark.parametrize("kind", ["language_modelling", "language_modelling_blocks"])
def test_perplexity_is_that_of_all_tokens(text, kind):
    """Against torchmetrics, which needs the logits of all tokens at once."""
    from torchmetrics.text import Perplexity

    planned = text(f"task={kind}", "task.sequence_length=5", "task.evaluation_batch_size=3", "quantizer=none")
    task, model = task_of(planned), planned.build_model().eval()
    metric, state = Perplexity(), None
    for batch in task.splits["test"].of_epoch():
        logits, state = model(batch.inputs, state if batch.continues else None)
        metric.update(logits.transpose(0, 1), batch.targets.T)
    values = task.evaluate(model)
    assert values["test_perplexity"] == pytest.approx(float(metric.compute()), rel=1e-5)
    assert values["test_perplexity"] == pytest.approx(math.exp(values["test_loss"]))


def test_a_process_without_evaluated_blocks_joins_the_sum_of_the_others(text, monkeypatch):
    """A text of fewer blocks than processes: all of them must give sums of the same shape."""
    planned = text("task=language_modelling_blocks")
    task, joined = task_of(planned), []

    def all_sum(x):
        joined.append(x)
        return x + torch.tensor([2.0, 1.0])

    monkeypatch.setattr(distributed, "local_shard", lambda x, dim: x.narrow(dim, 0, 0))
    monkeypatch.setattr(distributed, "all_sum", all_sum)
    assert task.evaluate(planned.build_model().eval())["test_loss"] == 2
    assert [sums.shape for sums in joined] == [(2,)]


@pytest.mark.parametrize("kind", ["language_modelling", "language_modelling_blocks"])
def test_a_text_too_short_to_be_evaluated_is_refused(text, tmp_path, kind):
    planned = text(f"task={kind}")
    (tmp_path / "text" / "valid.txt").write_text("\n")
    with pytest.raises(SettingError, match=r"task.evaluation_batch_size=.*the validation text is too short"):
        task_of(planned)


def test_time_sum_is_the_mean_times_the_tokens_of_a_stream(text):
    planned = [text("model.dropout=0", "quantizer=none", f"task.loss={loss}") for loss in ("token_mean", "time_sum")]
    losses = []
    for each in planned:
        task = task_of(each)
        losses.append(task.train(each.build_model(), next(task.batches(0))).loss)
    torch.testing.assert_close(losses[1], 5 * losses[0])


def test_chance_is_the_share_of_the_most_frequent_token(text):
    planned = text("dataset.train_samples=null")
    tokens = planned.config.dataset.load(planned.config.data_folder, 0).train
    assert task_of(planned).majority_baseline == pytest.approx(float(tokens.bincount().max()) / len(tokens))


def test_it_learns_and_costs_what_was_foretold(text):
    """The made-up text is a chain of words, each followed by one of two: far below what single words tell."""
    recipe = (
        "training.steps=300",
        "training.learning_rate.initial=5",
        "training.evaluation_steps=100",
        "model.dropout=0",
    )
    planned = text("schedule=CR", "schedule.q_min=4", "model.hidden=32", "training.batch_size=8", *recipe)
    summary = execute(planned)
    split = planned.config.dataset.load(planned.config.data_folder, 0)
    assert summary["metric"] == "test_perplexity" and summary["unit"] == ""
    shares = split.train.bincount(minlength=len(split.vocabulary)).double() / len(split.train)
    without_context = math.exp(-float(shares.log()[split.test].mean()))
    assert summary["best"] < 0.4 * without_context
    assert summary["cost"]["total"] == planned.cost().summary()
    evaluations = [r for r in read_records(planned.folder.metrics) if r["kind"] == "evaluation"]
    assert summary["best"] == min(r["test_perplexity"] for r in evaluations)
    assert summary["validation"]["best"] == min(r["validation_perplexity"] for r in evaluations)


MATRIX = [
    "quantizer=sbm schedule=RTH schedule.q_min=5 model=lstm2",
    "quantizer=wageubn schedule=CR schedule.q_min=4",
    "quantizer=dorefa schedule=LT schedule.q_min=4 task=language_modelling_blocks",
    "quantizer=multibit schedule=static schedule.q_max=2 schedule.gradient=32 model=gru_hlhlp",
    "quantizer=sbm schedule=CR schedule.q_min=4 model=transformer model.layers=2 task=language_modelling_blocks"
    " dataset.order=frequency",
    "quantizer=uniform_l2 schedule=static schedule.gradient=32 model=transformer model.layers=2",
    "quantizer=sbm schedule=pfq schedule.epoch_steps=2 schedule.epsilon=0.5 schedule.alpha=1",
]


@pytest.mark.parametrize("overrides", MATRIX)
def test_schedules_and_quantizers(text, overrides):
    summary = execute(text(*overrides.split(), "training.steps=24", "training.evaluation_steps=12"))
    assert math.isfinite(summary["final"])


@pytest.mark.parametrize("name", ["wikitext2", "wikitext2_small"])
def test_dry_runs_need_no_data(name, tmp_path):
    planned = plan(f"dataset={name}", f"data_root={tmp_path}", "model=lstm", "model.hidden=8")
    assert planned.info.shape.vocabulary == TEXT_SIZES[name].vocabulary
    assert planned.cost().summary()


def test_what_the_command_line_says_wins_over_the_data_sets_recipe():
    planned = plan("dataset=ptb", "model=gru_hlhlp", "training=hlhlp_ptb", "task=language_modelling_blocks")
    config = planned.config
    assert (config.model.cell, config.training.clip_norm, config.task.sequence_length) == ("gru", 1.0, 256)


def test_the_trainer_clips_and_validates(text):
    trainer = Trainer(text(), CPU)
    assert trainer.options.clip_norm == 0.25
    assert set(trainer.task.validate(trainer.model.eval())) == {"validation_perplexity", "validation_loss"}
