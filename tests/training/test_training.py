"""The loop and what it records: precision as scheduled, cost as predicted, metrics that mean what they say."""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest
import torch

from bitcycle.cpp.extension import is_compiled
from bitcycle.cpp.operators import AFFINE
from bitcycle.dataset import DatasetOptions
from bitcycle.errors import RunError
from bitcycle.files import read_json, read_records, write_atomically
from bitcycle.hardware import CostMeter
from bitcycle.model import check_kind
from bitcycle.precision import Precision
from bitcycle.quantizer import compiler_works
from bitcycle.randomness import derive
from bitcycle.recipe.options import OptimizerOptions
from bitcycle.settings import SettingError
from bitcycle.task.classification import Classification
from bitcycle.training.compilation import wants_compilation
from bitcycle.training.display import ProgressBar
from bitcycle.training.loop import Trainer
from bitcycle.training.metrics_log import JsonLines
from bitcycle.training.report import status_table
from bitcycle.training.run import execute
from tests.settings import OPTIONS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=RTH"],
        ["schedule=static"],
        ["schedule=gradient_cycle"],
        ["quantizer=none"],
        ["schedule=CR", "model=mobilenet_v2", "quantizer.depthwise_bits=[8,16]", "training.steps=16"],
    ],
    ids=" ".join,
)
def test_cost_of_a_run_equals_its_prediction_to_the_last_digit(digits, overrides):
    plan = digits(*overrides)
    summary = execute(plan)
    assert summary["cost"]["total"] == plan.cost().summary()
    assert summary["cost"]["total"] == plan.describe()["cost"]


def test_recorded_precision_and_rate_are_those_of_the_schedule(digits):
    plan = digits("schedule=RTH", "training.log_steps=1")
    execute(plan)
    train = [record for record in read_records(plan.folder.metrics) if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 65))
    assert [tuple(record["precision"]) for record in train] == [plan.schedule(step) for step in range(64)]
    rates = plan.config.training.learning_rate
    assert [record["learning_rate"] for record in train] == [rates.rate(step, 64) for step in range(64)]


def test_pfq_goes_through_its_stages_and_costs_what_it_trained(digits):
    plan = digits("schedule=pfq", *OPTIONS["pfq"], "training.log_steps=1")
    summary = execute(plan)
    train = [record for record in read_records(plan.folder.metrics) if record["kind"] == "train"]
    bits = [(record["precision"][0], record["precision"][2]) for record in train]
    assert list(dict.fromkeys(bits)) == [(3, 6), (4, 6), (6, 8), (8, 8)]
    histogram = Counter(Precision(*record["precision"]) for record in train)
    samples = {precision: 16 * steps for precision, steps in histogram.items()}
    expected = plan.config.hardware.cost(plan.workload, samples, Precision(8, 8, 8))
    assert summary["cost"]["total"] == expected.summary()


def test_logged_loss_is_the_mean_since_the_last_record(digits, tmp_path):
    every, eighth = (digits(f"training.log_steps={n}", f"results_root={tmp_path}/{n}") for n in (1, 8))
    for plan in (every, eighth):
        execute(plan)
    losses = [r["loss"] for r in read_records(every.folder.metrics) if r["kind"] == "train"]
    means = [r["loss"] for r in read_records(eighth.folder.metrics) if r["kind"] == "train"]
    assert means == pytest.approx([sum(losses[i : i + 8]) / 8 for i in range(0, 64, 8)], rel=1e-12)


def test_the_network_learns(digits):
    plan = digits(
        "schedule=RTH",
        "training.steps=300",
        "training.batch_size=64",
        "training.evaluation_steps=150",
        "dataset.train_samples=null",
        "dataset.test_samples=null",
    )
    summary = execute(plan)
    assert summary["final"] > 90
    losses = [record["loss"] for record in read_records(plan.folder.metrics) if record["kind"] == "train"]
    assert losses[-1] < 0.3 * losses[0]


def test_summary_follows_from_the_metrics(digits):
    plan = digits("schedule=RTH", "training.evaluation_steps=8")
    summary = execute(plan)
    tests = [record for record in read_records(plan.folder.metrics) if record["kind"] == "evaluation"]
    accuracy = [record["test_accuracy"] for record in tests]
    best = max(range(len(tests)), key=lambda i: accuracy[i])
    assert summary["final"] == accuracy[-1]
    assert (summary["best"], summary["best_step"]) == (accuracy[best], tests[best]["step"])
    assert summary["cost"]["to_best"] == tests[best]["cost"]
    assert summary["cost"]["total"] == tests[-1]["cost"]
    for part in ("to_best", "total"):  # from which costs of other hardware are computed later
        meter = CostMeter(plan.workload, plan.config.hardware, plan.schedule.reference)
        meter.load_state_dict(summary["samples"][part])
        assert meter.cost().summary() == summary["cost"][part]
    assert summary["mean_of_last"] == {"mean": pytest.approx(sum(accuracy[-5:]) / 5), "evaluations": 5}
    assert summary["at_q_max"]["best"] == max(record["test_accuracy_at_q_max"] for record in tests)


def test_of_equal_evaluations_the_first_is_the_best(digits, monkeypatch):
    """The cost to the best evaluation would otherwise grow with every repetition of its value."""
    accuracies = iter([10.0, 30.0, 30.0, 20.0])
    monkeypatch.setattr(Classification, "evaluate", lambda *_: {"test_accuracy": next(accuracies)})
    plan = digits("schedule=static", "training.evaluation_steps=16")
    summary = execute(plan)
    assert (summary["best"], summary["best_step"]) == (30.0, 32)
    assert summary["cost"]["to_best"]["gbitops"] == pytest.approx(summary["cost"]["total"]["gbitops"] / 2)


def test_the_network_at_q_max_is_another_one_if_only_activations_differ(digits, monkeypatch):
    plan = digits("schedule=RTH")
    trainer, used = Trainer(plan, CPU), []
    trainer.begin_phase()
    trainer.train_step(next(trainer.task.batches(0)))
    monkeypatch.setattr(
        Trainer, "evaluate_at", lambda self, bits, *_, **__: used.append(bits) or {"test_accuracy": 1.0}
    )
    monkeypatch.setattr(Trainer, "record_validation", lambda self, validation: {})
    for activation, evaluations in ((4, [4, 8, 4]), (8, [8, 8])):  # at the step's bits, at q_max, for validation
        monkeypatch.setattr(trainer.controller, "precision", Precision(8, activation, 32))
        trainer.evaluate(ProgressBar(64, 0, False))
        assert [bits.activation for bits in used] == evaluations
        used.clear()


def test_random_numbers_of_a_step_are_those_of_seed_and_step(digits, monkeypatch):
    seeds = []
    monkeypatch.setattr("bitcycle.training.loop.seed_step", lambda device, seed: seeds.append(seed))
    for seed in (0, 3):
        trainer = Trainer(digits("schedule=static", f"seed={seed}"), CPU)
        trainer.begin_phase()
        batches = trainer.task.batches(0)
        for _ in range(2):
            trainer.train_step(next(batches))
    assert seeds == [derive(seed, "step", step) for seed in (0, 3) for step in (0, 1)]


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_an_optimizer_has_its_options(name, kind):
    options = OptimizerOptions(name=name, momentum=0.7, weight_decay=0.01, beta1=0.8, beta2=0.95, epsilon=1e-6)
    optimizer = options.build(torch.nn.Linear(2, 1))
    assert type(optimizer) is kind
    expected = {"momentum": 0.7} if name == "sgd" else {"betas": (0.8, 0.95), "eps": 1e-6}
    assert expected.items() | {"weight_decay": 0.01}.items() <= optimizer.defaults.items()


def test_a_run_is_evaluated_at_the_precision_of_its_last_step(digits):
    plan = digits("schedule=RTH", "training.evaluation_steps=10")
    execute(plan)
    first = next(record for record in read_records(plan.folder.metrics) if record["kind"] == "evaluation")
    assert plan.schedule(9) == Precision(3, 3, 8)
    assert first["precision"] == [3, 3, 8]


def test_an_undefined_metric_is_worse_than_any_other(digits, monkeypatch):
    evaluate_at = Trainer.evaluate_at

    def undefined_at_first(self, *arguments, **options):
        values = evaluate_at(self, *arguments, **options)
        return dict.fromkeys(values, math.nan) if self.step < 32 else values

    monkeypatch.setattr(Trainer, "evaluate_at", undefined_at_first)
    plan = digits("training.evaluation_steps=16", "dataset.validation=0.1")
    summary = execute(plan)
    defined = [record for record in read_records(plan.folder.metrics) if record["kind"] == "evaluation"][1:]
    for best, metric in (
        (summary["best"], "test_accuracy"),
        (summary["at_q_max"]["best"], "test_accuracy_at_q_max"),
        (summary["validation"]["best"], "validation_accuracy"),
    ):
        assert best == max(record[metric] for record in defined)


def test_evaluation_leaves_training_undisturbed(digits, tmp_path):
    seldom, often = (
        digits("schedule=RTH", f"training.evaluation_steps={n}", f"results_root={tmp_path}/{n}") for n in (64, 3)
    )
    for plan in (seldom, often):
        execute(plan)
    models = [plan.folder.checkpoint.load()["model"] for plan in (seldom, often)]
    torch.testing.assert_close(*models, rtol=0, atol=0)


def test_float_baseline_is_the_plain_model(digits):
    trainer = Trainer(digits("quantizer=none"), CPU)
    assert not any("quantizer" in name for name, _ in trainer.model.named_modules())
    assert trainer.controller.schedule(0) == Precision(32, 32, 32)
    assert digits("quantizer=none", "hardware.convention=better").cost().relative_to_static == 3072 / 192


def test_epochs_and_steps_are_two_ways_to_say_the_same(digits):
    plan = digits("training.steps=null", "training.epochs=2.5")
    assert plan.total_steps == 40  # 256 samples in batches of 16


def test_automatic_compilation_weighs_the_length_of_the_run(digits, monkeypatch):
    assert wants_compilation(digits(), CPU) == is_compiled(AFFINE)
    assert not wants_compilation(digits("quantizer=dorefa"), CPU)
    assert not wants_compilation(digits("training.compute=codes"), CPU)
    monkeypatch.setattr("bitcycle.distributed.world_size", lambda: 2)
    assert not wants_compilation(digits(), CPU)
    monkeypatch.undo()
    assert wants_compilation(digits("training.steps=1000000"), CPU) == compiler_works("cpu")
    assert wants_compilation(digits("training.steps=1000000", "quantizer=dorefa"), CPU) == compiler_works("cpu")
    assert wants_compilation(digits("training.compile=true"), CPU) == compiler_works("cpu")
    assert not wants_compilation(digits("training.steps=1000000", "training.compile=false"), CPU)
    assert not wants_compilation(digits("training.steps=1000000", "quantizer=none"), CPU)


def test_a_gpu_that_is_not_there(digits):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(RunError, match="sees no CUDA device"):
        execute(digits("training.device=cuda"))


def test_failed_runs_start_again_from_their_checkpoint(digits, monkeypatch):
    plan = digits("training.checkpoint_seconds=0")
    train_step = Trainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", lambda self, batch: 1 / 0 if self.step == 20 else train_step(self, batch))
        with pytest.raises(ZeroDivisionError):
            execute(plan)
    status = plan.folder.read_status()
    assert (status["state"], status["step"]) == ("failed", 20)
    assert "ZeroDivisionError" in status["reason"]
    assert "Traceback" in plan.folder.log.read_text()
    assert plan.folder.state() == "resumable"
    assert execute(plan)["total_steps"] == 64


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_published_update(nesterov):
    """v = 0.9 v + g + wd w;  w -= rate (v, or g + wd w + 0.9 v with Nesterov)."""
    model = torch.nn.Linear(2, 1, bias=False)
    weight, velocity = model.weight.detach().clone(), torch.zeros(1, 2)
    optimizer = OptimizerOptions(nesterov=nesterov, weight_decay=0.01).build(model)
    for step in range(3):
        gradient = torch.tensor([[1.0, -2.0]]) * (step + 1)
        model.weight.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        decayed = gradient + 0.01 * weight
        velocity = 0.9 * velocity + decayed
        weight = weight - 0.1 * (decayed + 0.9 * velocity if nesterov else velocity)
        torch.testing.assert_close(model.weight.detach(), weight)


def test_atomic_writes_leave_the_old_file_on_failure(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda stream: stream.write(b"old"))

    def fail(stream):
        stream.write(b"new, but not whole")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_files_are_written_where_folders_cannot_be_opened(tmp_path, monkeypatch):
    def open_folder(folder, flags):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("os.open", open_folder)
    write_atomically(tmp_path / "file", lambda stream: stream.write(b"whole"))
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_metrics_on_a_full_disk_say_so():
    """/dev/full refuses every write as a full disk does."""
    lines = JsonLines.__new__(JsonLines)
    lines.stream = open("/dev/full", "ab")
    with pytest.raises(RunError, match="Free space"):
        lines.write({"step": 1})


def test_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert read_records(path) == [{"step": 1}, {"step": 2}]
    assert read_records(tmp_path / "absent") == []
    (tmp_path / "status.json").write_text('{"state": ')
    assert read_json(tmp_path / "status.json") is None


def test_status_table_lists_every_run(digits, tmp_path):
    execute(digits())
    table = status_table(tmp_path / "runs")
    assert table.row_count == 1
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells[1] == "done"
    assert cells[2] == "64/64"
    assert cells[4].startswith("test_accuracy ")


def test_gradients_are_clipped_to_the_norm(digits):
    trainer = Trainer(digits("training.clip_norm=0.01", "training.optimizer.momentum=0", "quantizer=none"), CPU)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.options.optimizer.weight_decay = 0.0
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.0
    trainer.train_step(next(trainer.task.batches(0)))
    moved = [old - new for old, new in zip(before, trainer.model.parameters())]
    length = torch.cat([change.detach().flatten() for change in moved]).norm()
    assert float(length) == pytest.approx(0.01 * trainer.optimizer.param_groups[0]["lr"], rel=1e-3)


def test_evaluation_after_each_epoch(digits):
    plan = digits("training.evaluation_steps=null")
    execute(plan)
    steps = [record["step"] for record in read_records(plan.folder.metrics) if record["kind"] == "evaluation"]
    assert steps == list(range(plan.epoch.steps, 65, plan.epoch.steps))


def test_a_task_refuses_data_and_a_model_shapes_of_another_kind(digits):
    class Songs(DatasetOptions):
        pass

    with pytest.raises(SettingError, match="omit task="):
        digits().config.task.check(Songs(name="songs"))
    with pytest.raises(SettingError, match="does not accept the data of dataset=songs"):
        check_kind(digits().config.model, "songs", (1, 2))
