"""Whole runs in phases, and settings that do not fit each other."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from bitcycle.errors import RunError
from bitcycle.files import read_records
from bitcycle.layer import step_ratio
from bitcycle.precision import Precision
from bitcycle.settings import SettingError
from bitcycle.task.classification import Classification
from bitcycle.training.checkpoint import CheckpointFolder
from bitcycle.training.loop import Trainer
from bitcycle.training.phases import CandidateWeights, best_candidates, choose
from bitcycle.training.report import plan_report, summary_report
from bitcycle.training.run import execute
from tests.settings import CHOOSING
from tests.training.test_resume import Crash, assert_equal, crash_at, result

CPU = torch.device("cpu")


def records(plan, kind):
    return [record for record in read_records(plan.folder.metrics) if record["kind"] == kind]


# Whole runs


def test_a_run_goes_through_its_phases(digits, monkeypatch):
    """Weights at the first step of each phase are those that its record names; rates and bits are as planned."""
    started, evaluated, dropped = {}, {}, {}
    train_step, consider = Trainer.train_step, Trainer.record_validation

    def watched_step(self, batch):
        if self.step in (16, 32, 48):
            started[self.step] = copy.deepcopy(dict(self.model.named_parameters()))
            dropped[self.step] = len(self.optimizer.state)
        train_step(self, batch)

    def watched_consider(self, validation):
        evaluated[self.step] = copy.deepcopy(dict(self.model.named_parameters()))
        return consider(self, validation)

    monkeypatch.setattr(Trainer, "train_step", watched_step)
    monkeypatch.setattr(Trainer, "record_validation", watched_consider)
    plan = digits("schedule=hlhlp", *CHOOSING, "training.log_steps=1")
    summary = execute(plan)
    phases, evaluations = records(plan, "phase"), records(plan, "evaluation")
    assert [phase["step"] for phase in phases] == [0, 16, 32, 48]
    for phase in phases[1:]:
        before = [r for r in evaluations if phase["step"] - 16 < r["step"] <= phase["step"]]
        found = [CandidateWeights(r["step"], r["validation_accuracy"], r.get("trace_sqrt_v")) for r in before]
        kept = best_candidates(found, 3 if phase["start_from"] == "flattest" else 1, higher_is_better=True)
        assert choose(kept, phase["start_from"])[0].step == phase["from_step"]
        chosen = evaluated[phase["from_step"]]
        assert all(torch.equal(value, chosen[name]) for name, value in started[phase["step"]].items())
        assert dropped[phase["step"]] == 0
    assert {r["step"] for r in evaluations if "trace_sqrt_v" in r} == {20, 25, 30, 32}
    train = records(plan, "train")
    assert [tuple(r["precision"]) for r in train] == [plan.schedule(step) for step in range(64)]
    eta = 0.05
    assert [r["learning_rate"] for r in train][::16] == pytest.approx(
        [eta, phases[1]["rate_factor"] * eta, 0.1 * eta, 0.1 * eta]
    )
    assert 0.1 * 20 < phases[1]["rate_factor"] < 0.1 * 90  # alpha D_2 / D_8
    assert [phase["from_step"] for phase in summary["phases"]] == [phase["from_step"] for phase in phases]
    assert summary["phases"][-1]["final"] == summary["final"]
    assert all(r["test_accuracy_at_q_max"] == r["test_accuracy"] for r in evaluations)  # the phase's bits, no others
    assert " at q_max" not in summary_report(summary, plan.schedule.reference)[0]
    assert summary["best"] == max(r["test_accuracy"] for r in evaluations if r["step"] > 48)
    begun_from = {phase["from_step"] for phase in phases[1:]}  # analyses ask for these networks, and for no others
    assert {path.name for path in plan.folder.path.glob("checkpoint/candidate-*")} == {
        f"candidate-{step}.pt" for step in begun_from
    }


def test_the_test_images_choose_nothing(digits, finished_digits, monkeypatch):
    """With other values of the test metric a run trains the same weights."""
    plain, other = (make("schedule=hlhlp", *CHOOSING) for make in (finished_digits, digits))
    values = iter(range(1000))
    monkeypatch.setattr(
        Classification, "evaluate", lambda self, model: {"test_accuracy": float((7 * next(values)) % 50)}
    )
    execute(other)
    weights = [plan.folder.checkpoint.load()["model"] for plan in (plain, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=hlhlp", *CHOOSING],
        ["schedule=partial_pretrain", "quantizer=pact_binary", "model=resnet8_extra_skip", "schedule.split=0.25"],
        ["schedule=partial_pretrain", "quantizer=none"],
    ],
    ids=lambda overrides: " ".join(overrides[:2]),
)
def test_cost_of_a_run_in_phases_equals_its_prediction(finished_digits, overrides):
    plan = finished_digits(*overrides)
    assert execute(plan)["cost"]["total"] == plan.describe()["cost"]


@pytest.mark.parametrize("split", [0, 0.25, 1])
def test_splits_of_partial_pretraining_train(digits, split):
    plan = digits(
        *("schedule=partial_pretrain", "quantizer=pact_binary", "model=resnet8_extra_skip", "training.log_steps=1"),
        f"schedule.split={split}",
    )
    summary = execute(plan)
    bits = [tuple(record["precision"]) for record in records(plan, "train")]
    first = round(64 * split)
    assert bits == [(32, 32, 32)] * first + [(1, 1, 32)] * (64 - first)
    assert ("phases" in summary) == (split == 0.25)
    state = plan.folder.checkpoint.load()["model"]
    alphas = [value for name, value in state.items() if name.endswith("alpha")]
    assert len(alphas) == 6
    assert all((alpha == 3) == (split == 1) for alpha in alphas)


def test_fine_tuning_and_hlhlp_share_their_first_phase(finished_digits):
    """Same seed, same length of a phase: the float networks are equal, as the paper compares them."""
    whole = finished_digits("schedule=hlhlp", *CHOOSING)
    tuning = finished_digits("schedule=fine_tuning", *CHOOSING, "training.steps=32")
    measured = [
        [{**r, "cost": None} for r in records(plan, "evaluation") if r["step"] <= 16] for plan in (whole, tuning)
    ]
    assert measured[0] == measured[1]
    assert records(whole, "phase")[1]["from_step"] == records(tuning, "phase")[1]["from_step"]


def test_a_float_run_follows_the_phases_too(digits):
    plan = digits("schedule=partial_pretrain", "quantizer=none", "training.log_steps=1")
    execute(plan)
    rates = [record["learning_rate"] for record in records(plan, "train")]
    assert rates[:32] == rates[32:]
    assert plan.schedule.run_lengths == [(Precision(32, 32, 32), 64)]
    assert len(records(plan, "phase")) == 2


def test_a_run_without_phases_says_nothing_of_them(digits):
    plan = digits("schedule=RTH")
    summary = execute(plan)
    assert records(plan, "phase") == []
    assert "phases" not in summary
    assert "validation" not in summary
    assert not any(key.startswith("validation") for record in records(plan, "evaluation") for key in record)


def test_validation_without_choosing_is_reported(digits, monkeypatch):
    """With the test metric at the bits of the run, not at q_max: no two evaluations have the same one here."""
    values = iter(range(1000))
    monkeypatch.setattr(Classification, "evaluate", lambda *_: {"test_accuracy": float(next(values))})
    plan = digits("schedule=RTH", "dataset.validation=0.25", "training.evaluation_steps=4")
    summary = execute(plan)
    found = [(r["validation_accuracy"], r["test_accuracy"]) for r in records(plan, "evaluation")]
    assert len(found) == 16
    best = max(found, key=lambda pair: pair[0])
    assert summary["validation"] == {"final": found[-1][0], "best": best[0], "test_at_best": best[1]}
    assert summary["train_samples"] == 192
    assert summary["cost"]["total"] == plan.describe()["cost"]


@pytest.mark.parametrize(
    ("checkpoint_step", "crash_step", "ratio"),
    [
        (31, 32, ["schedule.ratio=40"]),
        (32, 33, ["schedule.ratio=40"]),
        (33, 34, ["schedule.ratio=40"]),
        (30, 40, []),
        (20, 22, []),
    ],
)
def test_a_crash_around_a_change_of_phase_leaves_no_trace(
    digits, finished_digits, monkeypatch, checkpoint_step, crash_step, ratio
):
    """The ratio of step sizes is given, or measured at the beginning of the second phase."""
    overrides = ["schedule=hlhlp", *CHOOSING, *ratio]
    cut = digits(*overrides)
    with monkeypatch.context() as patch:
        crash_at(patch, crash_step, checkpoint_step)
        with pytest.raises(Crash):
            execute(cut)
    execute(cut)
    assert_equal(result(cut.folder), result(finished_digits(*overrides).folder))


def test_the_previous_checkpoint_finds_the_weights_that_it_chooses_from(digits, finished_digits, monkeypatch):
    """The last checkpoint, after a change of phase, is damaged: the one before it still has all its candidates."""
    overrides = ["schedule=hlhlp", *CHOOSING, "schedule.ratio=40"]
    cut = digits(*overrides, "training.checkpoint_seconds=0")
    train_step = Trainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer,
            "train_step",
            lambda self, batch: (_ for _ in ()).throw(Crash) if self.step == 33 else train_step(self, batch),
        )
        with pytest.raises(Crash):
            execute(cut)
    folder = cut.folder.checkpoint
    assert folder.load()["step"] == 33
    folder.last.write_bytes(b"torn")
    previous = folder.load()
    assert previous["step"] == 32
    assert all(folder.candidate(found["step"]).exists() for found in previous["phases"]["candidates"])
    execute(cut)
    assert_equal(result(cut.folder), result(finished_digits(*overrides).folder))


def test_damaged_weights_to_choose_from_are_an_error_with_a_remedy(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(RunError, match="Delete the folder to restart"):
        folder.load_candidate(3)
    folder.save_candidate(3, {"weight": torch.ones(2)})
    folder.save_candidate(4, {"weight": torch.ones(2)})
    assert folder.load_candidate(3)["weight"].tolist() == [1, 1]
    folder.keep_candidates({4})
    assert [path.name for path in tmp_path.iterdir()] == ["candidate-4.pt"]
    folder.candidate(4).write_bytes(b"torn")
    with pytest.raises(RunError, match="candidate-4"):
        folder.load_candidate(4)


def test_a_phase_begins_with_the_full_rate_after_plateaus(digits, monkeypatch):
    """The drops of the learning rate in one phase do not count in the next, as for HLHLp on speech."""
    validations = iter(
        range(1000)
    )  # of an accuracy that falls: each validation after the first of a phase is a plateau
    monkeypatch.setattr(Classification, "validate", lambda *_: {"validation_accuracy": -float(next(validations))})
    plan = digits(
        *("schedule=fine_tuning", *CHOOSING, "training.learning_rate.name=plateau", "training.log_steps=1"),
        *("training.learning_rate.patience=1", "training.learning_rate.factor=0.5"),
    )
    execute(plan)
    rates = {record["step"]: record["learning_rate"] for record in records(plan, "train")}
    first, second = (phase["learning_rate"] for phase in records(plan, "phase"))
    assert first == pytest.approx(10 * second)
    assert (rates[1], rates[33]) == pytest.approx((first, second))
    assert (rates[32], rates[64]) == pytest.approx((first / 2**5, second / 2**5))  # evaluated at 5, 10, ..., 30 and 32


def test_a_phase_that_ends_worse_than_guessing_shows_in_the_record(digits, monkeypatch, caplog):
    """`phases` of summary.json tells of each phase its name, its steps, the metric at its end and its level by guessing."""
    monkeypatch.setattr(Classification, "chance", 12.5)
    at_end, original = {16: 20.0, 32: 12.0, 48: 12.5, 64: 50.0}, Trainer.evaluate

    def evaluate(self, bar):
        monkeypatch.setattr(Classification, "evaluate", lambda *_: {"test_accuracy": at_end.get(self.step, 99.0)})
        original(self, bar)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    summary = execute(digits("schedule=hlhlp", *CHOOSING))
    shown = [tuple(phase[key] for key in ("name", "steps", "metric", "chance")) for phase in summary["phases"]]
    assert shown == [
        ("float", 16, 20.0, 12.5),
        ("2/32 bits", 16, 12.0, 12.5),
        ("8/32 bits", 16, 12.5, 12.5),
        ("2/32 bits", 16, 50.0, 12.5),
    ]
    assert summary["chance"] == 12.5
    warnings = [record.message for record in caplog.records if "worse than guessing" in record.message]
    assert len(warnings) == 1
    assert warnings[0].startswith("phase 2 (2/32 bits) ends at 12")


def test_the_level_of_guessing(digits):
    """Without a chance of its own, an accuracy has that of the most frequent class."""
    plan = digits("schedule=static")
    labels = plan.config.dataset.load(plan.config.data_folder, plan.config.seed).train.labels
    assert execute(plan)["chance"] == pytest.approx(100 * float(labels.bincount().max()) / len(labels))


# Settings that do not fit each other


def test_the_split_for_choosing_is_held_out_unasked_and_named(digits):
    unasked, asked = digits("schedule=hlhlp", *CHOOSING), digits("schedule=hlhlp", *CHOOSING, "dataset.validation=0.1")
    assert unasked.config.dataset.validation == 0.1
    assert unasked.info.train_samples == 230
    assert unasked.folder.path == asked.folder.path
    assert digits("schedule=partial_pretrain", "quantizer=pact_binary").config.dataset.validation is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["schedule=hlhlp", "quantizer=uniform_l2", "dataset.validation=0"], r"set dataset.validation=0.1"),
        (["schedule=hlhlp", "quantizer=uniform_l2", "training.steps=3"], r"less than one for some of its 4 phases"),
        (["schedule=hlhlp", "quantizer=pact_binary"], r"pact_binary: quantizes weights to 1 bit"),
        (["schedule=partial_pretrain", "quantizer=uniform_l2"], r"uniform_l2: quantizes weights to 2 to 8 bits"),
        (["dataset.validation=0.9", "dataset.train_samples=1"], r"leaves none of 1 training samples"),
        (["dataset.validation=-0.1"], r"use 0 or more"),
        (
            ["schedule=dfq", "model=resnet8", "schedule.backward=chosen", "training.compute=codes"],
            r"schedule.backward=chosen: replays float32 products.*use training.compute=simulate",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_data_are_read(digits, monkeypatch, overrides, words):
    monkeypatch.setattr("bitcycle.dataset.image_sets.Digits.read", lambda *_: pytest.fail("data were read"))
    with pytest.raises(SettingError, match=words):
        digits(*overrides)


def test_dry_run_describes_the_phases(digits):
    described = digits("schedule=hlhlp", "quantizer=uniform_l2", "schedule.later_length=1").describe()["phases"]
    assert [phase["first_step"] for phase in described] == [0, 16, 32, 48]
    assert [phase["learning_rate"] for phase in described] == pytest.approx([0.05, None, 0.0005, 0.0005])
    assert [phase["start_from"] for phase in described] == ["previous", "best", "flattest", "best"]
    assert len(digits("schedule=RTH").describe()["phases"]) == 1


@pytest.mark.parametrize("interval", [16, 7, 100])
def test_dry_run_counts_the_evaluations_of_each_phase(digits, interval):
    plan = digits("schedule=partial_pretrain", "quantizer=none", f"training.evaluation_steps={interval}")
    execute(plan)
    steps = [record["step"] for record in records(plan, "evaluation")]
    counted = [sum(start < step <= start + 32 for step in steps) for start in (0, 32)]
    assert [phase["evaluations"] for phase in plan.describe()["phases"]] == counted


def test_reports_tell_of_phases(finished_digits):
    plan = finished_digits("schedule=hlhlp", *CHOOSING)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_report(plan))
    planned = console.export_text()
    assert "from step 32, rate 0.005, flattest weights, 4 evaluations" in planned
    assert "rate by the weights' step sizes, best weights" in planned
    summary = execute(plan)
    told = "\n".join(summary_report(summary, plan.schedule.reference))
    third = summary["phases"][2]
    assert "phase 1: 32/32/32 bits from step 0, with initial weights: test_accuracy" in told
    assert f"phase 3: 8/32/32 bits from step 32, with the weights after step {third['from_step']} (flattest)" in told
    assert f"best {summary['validation']['best']:.2f} with test_accuracy" in told


def test_reference_ratio_of_normally_distributed_weights():
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 20_000)))
    layer = nn.Linear(20_000, 1, bias=False)
    layer.weight.data = weights
    assert step_ratio(nn.Sequential(layer), 2, 8) == pytest.approx(39.5, rel=0.05)
