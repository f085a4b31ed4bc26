"""The precision range test: bounds of given curves, its run, and the runs that wait for its result."""

from __future__ import annotations

import io
import json
import math
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from bitcycle.files import read_json, read_records
from bitcycle.layer import PrecisionController
from bitcycle.precision import Precision
from bitcycle.reproduction.analysis.collect import summary_row
from bitcycle.schedule import schedule
from bitcycle.schedule.range_test import FirstRangeTest
from bitcycle.settings import SettingError
from bitcycle.training.loop import Trainer
from bitcycle.training.naming import run_hash
from bitcycle.training.report import plan_report
from bitcycle.training.run import execute
from tests.conftest import GOLDEN, configure
from tests.made_data import with_made_data
from tests.settings import SMALL_TEXT
from tests.training.test_resume import UNTIMED, Crash

CURVES = json.loads((GOLDEN.parent / "golden-domains" / "range_test.json").read_text())
CPU = torch.device("cpu")


def run_on(bound, accuracies: dict[int, list[float]], losses: dict[int, float] | None = None) -> int:
    """Feed step-by-step accuracies of each precision, as the training loop does; the steps until it was finished."""
    every, step = bound.observation_steps, 0
    while not bound.finished:
        bits = bound(step).weight
        mine = accuracies[bits]
        for first in range(0, len(mine), every):
            assert bound(step).weight == bits and not bound.finished
            part = mine[first : first + every]
            bound.observe((losses or {}).get(bits, 1.0), sum(part) / len(part))
            step += len(part)
    return step


@pytest.mark.parametrize("curve", CURVES, ids=lambda c: f"{c['case']}-{c['window']}")
def test_bounds_of_given_curves(curve):
    accuracies = {int(bits): values for bits, values in curve["accuracy"].items()}
    bound = schedule(
        "range_test",
        total_steps=10_000,
        q_max=curve["q_max"],
        level_steps=60,
        window=curve["window"],
        threshold=curve["threshold"],
    )
    bound.begin(curve["chance"])
    steps = run_on(bound, accuracies)
    assert bound.result["q_min"] == curve["bound"]
    assert steps == 60 * len(curve["trace"])
    levels = bound.result["range_test"]["levels"]
    for level, (bits, accuracy, rise) in zip(levels, curve["trace"], strict=True):
        assert level["bits"] == bits
        assert (level["accuracy"], level["rise"]) == (pytest.approx(accuracy, abs=1e-9), pytest.approx(rise, abs=1e-9))


def small(**options):
    return schedule("range_test", total_steps=100, q_max=6, level_steps=4, window=2, **options)


def test_by_hand():
    """From chance 0.1: 2 bits reach 0.11, 3 bits 0.12 and 4 bits 0.14, the first rise above 0.015 over the best before."""
    bound = small(threshold=0.015)
    bound.begin(0.1)
    assert (bound.observation_steps, bound.steps, bound(0), bound.result) == (2, 16, Precision(2, 2, 6), {})
    run_on(bound, {2: [0, 0, 0.1, 0.12], 3: [1, 1, 0.12, 0.12], 4: [0, 0, 0.13, 0.15]})
    assert bound.result["q_min"] == 4
    assert [level["bits"] for level in bound.result["range_test"]["levels"]] == [2, 3, 4]


def test_going_on_for_the_picture_changes_nothing():
    curves = {2: [0.1] * 4, 3: [0.5] * 4, 4: [0.9] * 4, 5: [0.95] * 4}
    bounds = small(), small(stop=False)
    assert [run_on(bound, curves) for bound in bounds] == [4, 16]  # without begin: from 0
    for bound in bounds:
        bound.begin(0.1)
    assert [run_on(bound, curves) for bound in bounds] == [8, 16]
    assert [bound.result["q_min"] for bound in bounds] == [3, 3]


def test_a_diverged_precision_makes_training_begin_anew():
    bound = small()
    bound.begin(0.1)
    anew = []
    for step, loss in enumerate([1.0, math.nan, 1.0, 1.0, math.inf, 1.0, 1.0, 1.0]):
        bound.observe(loss, 0.9 if step < 2 or step == 5 else 0.1)  # what a diverged precision shows does not count
        anew.append(bound.should_reset)
        assert bound(0).weight == 2 + (step + 1) // 2 or bound.finished
    assert anew == [False, True, False, False, False, True, False, False]
    assert bound.result["q_min"] == 6
    assert "no lower precision" in bound.result["reason"]


def tanh_network(channels: int, size: int, classes: int) -> nn.Sequential:
    """Its second layer has negative inputs, which the first batch shows."""
    layers = nn.Linear(channels * size**2, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes)
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.parametrize("options", [["uniform_l2"], ["uniform_l2", "quantizer.activation_levels=unit"], ["dorefa"]])
def test_training_that_begins_anew_forgets_the_inputs_it_has_met(options, digits):
    """uniform_l2 could not load the new weights, and DoReFa kept its trained range."""
    network = f"model.target={__name__}:tanh_network"
    quantizer = f"quantizer={options[0]}", "quantizer.float_layers=[]", *options[1:]
    plan = digits("schedule=range_test", "schedule.gradient=32", "model=custom", network, *quantizer)
    trainer, fresh = Trainer(plan, CPU), plan.build_model().train()
    trainer.schedule.indicator.diverged = True
    batches = trainer.task.batches(0)
    for _ in range(trainer.schedule.lengths[0]):
        trainer.train_step(next(batches))
    assert trainer.schedule.should_reset
    controllers = trainer.controller, PrecisionController(fresh, plan.schedule)
    images = torch.rand(8, *next(batches).inputs.shape[1:]) - 0.5
    outputs = []
    for controller, model in zip(controllers, (trainer.model, fresh)):
        assert model[3].activation_quantizer.non_negative
        controller.use(Precision(3, 3, 32))
        outputs.append(model(images))
        assert not model[3].activation_quantizer.non_negative
    assert torch.equal(*outputs)
    torch.testing.assert_close(trainer.model.state_dict(), fresh.state_dict(), rtol=0, atol=0)


def test_training_that_begins_anew_forgets_the_text_before(digits, tmp_path, monkeypatch):
    """The recurrent state of the diverged network made all later precisions diverge, up to the beginning of the text."""
    words = *SMALL_TEXT, "model=lstm2", "model.hidden=8", "schedule=range_test"
    plan = digits(*with_made_data(words, tmp_path, monkeypatch), "schedule.level_steps=4", "schedule.window=2")
    trainer = Trainer(plan, CPU)
    batches = [batch for batch, _ in zip(trainer.task.batches(0), range(8))]
    assert batches[4].continues
    for batch in batches[:3]:
        trainer.train_step(batch)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(math.nan)
    for batch in batches[3:]:
        trainer.train_step(batch)
    assert len(trainer.schedule.indicator.trace) == 2
    assert not trainer.schedule.should_reset


@given(
    accuracies=st.lists(st.floats(0, 1), min_size=16, max_size=16),
    threshold=st.floats(0, 0.5),
    chance=st.floats(0, 1),
    cut=st.integers(0, 15),
)
def test_found_is_the_first_rise_and_survives_a_restart(accuracies, threshold, chance, cut):
    one, other = (small(threshold=threshold, stop=False) for _ in range(2))
    one.begin(chance)
    for index in range(0, 16, 2):
        if index == cut // 2 * 2:
            other.begin(chance)
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
            one = other
        one.observe(1.0, sum(accuracies[index : index + 2]) / 2)
    reached = [sum(accuracies[4 * level + 2 : 4 * level + 4]) / 2 for level in range(4)]
    rises = [value - max([chance, *reached[:level]]) for level, value in enumerate(reached)]
    expected = [bits for bits, rise in zip(range(2, 6), rises) if rise > threshold]
    assert one.result["q_min"] == (expected[0] if expected else 6)


def test_lengths_of_the_papers_run_and_of_shorter_ones():
    found = {total: schedule("range_test", total_steps=total).lengths for total in (64_000, 2500, 64, 16, 6)}
    assert found == {64_000: (390, 100), 2500: (156, 40), 64: (4, 1), 16: (1, 1), 6: (1, 1)}
    assert schedule("range_test", total_steps=64, q_min=1, q_max=32).steps == 62


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("range_test", {"q_min": 8}, r"q_min=8: there is nothing to test below q_max=8"),
        ("range_test", {"level_steps": 20}, r"level_steps=20: 6 precisions of 20 steps do not fit.*use at most 16"),
        ("range_test", {"total_steps": 5}, r"use 6 steps or more"),
        ("range_test", {"level_steps": 4, "window": 5}, r"window=5: is longer than the 4 steps"),
        ("range_test", {"threshold": 2}, r"threshold=2: is too large"),
        ("RTH", {"q_min": "three"}, r"q_min=three: has the wrong type. Remedy: give a whole number .*, or auto"),
        ("RTH", {"q_min": 3.5}, r"q_min=3.5: has the wrong type"),
        ("RTH", {"q_min": True}, r"q_min=True: has the wrong type"),
        ("dfq", {"q_min": None}, r"q_min=null: cannot be null"),
        (
            "delayed",
            {"q_min": "auto", "start": 1, "range_test": FirstRangeTest(20)},
            r"range_test.level_steps=20: .*most 16",
        ),
        ("RTH", {"q_min": "auto", "q_max": 2}, r"range_test.start=2: there is nothing to test below q_max=2"),
        (
            "RTH",
            {"q_min": "auto", "total_steps": 5, "cycles": 2},
            r"range_test.level_steps=null: .*use 6 steps or more",
        ),
    ],
)
def test_nonsense_is_refused(name, options, words):
    with pytest.raises(SettingError, match=words):
        schedule(name, **{"total_steps": 100, **options})


def test_auto_knows_its_bounds_and_becomes_the_schedule_that_follows():
    bound = schedule("RTH", total_steps=100, q_min="auto", steps_per_epoch=10)
    assert not bound.fixed
    assert (bound.lowest, bound.reference) == (Precision(2, 2, 8), Precision(8, 8, 8))
    with pytest.raises(SettingError, match=r"q_min=auto: is not known yet"):
        bound(0)
    for bits in range(2, 9):
        settled = bound.resolve({"q_min": bits})
        expected = schedule("RTH", total_steps=100, q_min=bits, steps_per_epoch=10)
        assert settled == expected
        assert settled.precisions <= bound.precisions
    test = schedule("CR", total_steps=100, q_min="auto", gradient_min=6, gradient_max=10).preliminary
    assert (test.q_min, test.q_max, test.gradient) == (2, 8, 10)


def test_the_test_has_the_length_of_the_whole_run_also_before_a_late_start():
    options = {"start": 0.5, "cycles": 2, "range_test": FirstRangeTest(15)}
    assert schedule("delayed", total_steps=100, q_min="auto", **options).preliminary.levels == range(2, 8)


def test_the_cost_of_the_first_test_is_counted_as_asked(digits):
    options = ["schedule=CR", "schedule.q_min=auto", "schedule.range_test.threshold=0"]
    before, plan = execute(digits(*options)), digits(*options, "hardware.convention=cpt")
    after = execute(plan)
    test = execute(plan.preliminary)["cost"]["total"]
    assert after["preliminary"]["range_test"]["cost"] == test != before["preliminary"]["range_test"]["cost"]


def test_the_name_of_a_run_says_auto():
    def name(*options: str) -> str:
        return run_hash(configure("schedule=RTH", *options))

    assert (
        len({name(), name("schedule.q_min=auto"), name("schedule.q_min=4"), name("schedule.range_test.start=3")}) == 4
    )


@pytest.mark.parametrize("name", ["static", "pfq", "pfq_manual", "dfq", "fractrain"])
def test_schedules_without_q_min_accept_the_word(name):
    assert configure(f"schedule={name}", "schedule.q_min=auto").schedule.q_min == "auto"


def test_dry_run_shows_bounds(digits):
    described = digits("schedule=RTH", "schedule.q_min=auto").describe()
    assert described["precision"] is None and described["cost"]["gbitops"] is None
    costs = described["cost_bounds"]
    for bits in (2, 5, 8):
        known = digits("schedule=RTH", f"schedule.q_min={bits}").describe()["cost"]["gbitops"]
        assert costs["least"]["gbitops"] <= known <= costs["most"]["gbitops"]
    test = digits("schedule=range_test").describe()
    assert (test["total_steps"], test["precision"]) == (24, None)
    assert [(phase["steps"], phase["evaluations"]) for phase in test["phases"]] == [(24, 1)]
    assert described["preliminary"]["total_steps"] == 24
    assert described["preliminary"]["cost_bounds"] == test["cost_bounds"]


@pytest.mark.parametrize("options", [["schedule.threshold=0"], ["schedule.threshold=1"], ["schedule.stop=false"]])
def test_bounds_enclose_a_test_wherever_it_ends(digits, options):
    plan = digits("schedule=range_test", *options)
    costs, total = plan.describe()["cost_bounds"], execute(plan)["cost"]["total"]["gbitops"]
    assert costs["least"]["gbitops"] <= total <= costs["most"]["gbitops"]
    assert (costs["most"]["gbitops"] == total) == (options != ["schedule.threshold=0"])


def test_dry_run_knows_of_a_test_that_has_begun(digits):
    plan = digits("schedule=CR", "schedule.q_min=auto", "schedule.range_test.threshold=0")
    assert plan.describe()["state"] == "new"
    execute(plan.preliminary)
    described = plan.describe()
    assert (described["state"], described["preliminary"]["state"]) == ("resumable", "done")
    shown = io.StringIO()
    Console(file=shown, width=200).print(plan_report(plan))
    assert "preceded by: range_test, at most 24 steps, between" in shown.getvalue()


def test_bounds_of_a_known_cost_are_the_cost(digits):
    """Also of a float run, which costs more than the static precision that it is compared with."""
    for options in ("quantizer=none", "quantizer=sbm"):
        described = digits("schedule=CR", options).describe()
        assert described["cost"] == described["cost_bounds"]["least"] == described["cost_bounds"]["most"]


def test_the_learning_rate_is_that_of_the_beginning_of_the_whole_run(digits):
    plan = digits("schedule=range_test", "schedule.threshold=1", "training.learning_rate.milestones=[0.25,0.5]")
    execute(plan)
    rates = {r["step"]: r["learning_rate"] for r in read_records(plan.folder.metrics) if r["kind"] == "train"}
    assert rates == {8: 0.05, 16: 0.05, 24: pytest.approx(0.005)}  # the drop after a quarter of 64 steps, not of 24


def test_a_run_ends_when_q_min_is_found(digits):
    plan = digits("schedule=range_test", "schedule.threshold=0")
    summary = execute(plan)
    levels = summary["found"]["range_test"]["levels"]
    assert summary["total_steps"] == 4 * len(levels) < plan.total_steps
    assert levels[-1]["rise"] > 0 and all(level["rise"] <= 0 for level in levels[:-1])
    assert summary["found"]["q_min"] == levels[-1]["bits"]
    status = plan.folder.read_status()
    assert (status["state"], status["step"], status["total_steps"]) == ("done", *[summary["total_steps"]] * 2)
    told = [record for record in read_records(plan.folder.metrics) if record["kind"] == "observation"]
    assert [record["accuracy"] for record in told][3::4] == [pytest.approx(100 * level["accuracy"]) for level in levels]


def test_the_gap_before_the_summary(digits, monkeypatch):
    """Killed after the last checkpoint and before the summary: it is still finished."""
    plan = digits("schedule=range_test", "schedule.threshold=0", "training.checkpoint_seconds=0")
    with monkeypatch.context() as patch:
        patch.setattr("bitcycle.training.run.summarise", lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            execute(plan)
    last = plan.folder.checkpoint.load()["step"]
    assert execute(plan)["total_steps"] == last < plan.total_steps


def test_auto_runs_the_test_once_and_then_begins_from_fresh_weights(digits, monkeypatch, tmp_path):
    """Killed in the test, between test and run, and in the run: the same as undisturbed, and the same as q_min by hand."""
    auto = ["schedule=CR", "schedule.q_min=auto", "schedule.range_test.threshold=0.05", "training.checkpoint_seconds=0"]
    whole, broken = (digits(*auto, f"results_root={tmp_path}/{name}") for name in ("whole", "broken"))
    summary = execute(whole)
    first = whole.folder.below("range_test")
    steps: list[tuple[str, int]] = []
    train_step = Trainer.train_step

    def crashing(crashes):
        def step(self, batch):
            here = (self.folder.path.name, self.step)
            if here in crashes:
                crashes.remove(here)
                raise Crash
            train_step(self, batch)
            steps.append(here)

        return step

    crashes = {("range_test", 3), ("seed=0", 0), ("seed=0", 20)}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", crashing(crashes))
        for _ in range(3):
            with pytest.raises(Crash):
                execute(broken)
        again = execute(broken)
    assert len(steps) == len(set(steps)) == summary["preliminary"]["range_test"]["total_steps"] + 64
    for name in UNTIMED:
        del summary[name], again[name]
    assert again == summary
    for folder, other in ((whole.folder, broken.folder), (first, broken.folder.below("range_test"))):
        assert folder.metrics.read_bytes() == other.metrics.read_bytes()
    found = summary["found"]["q_min"]
    row = summary_row(whole.folder)
    assert (row["q_min"], json.loads(row["settings"])["schedule"]["q_min"]) == (str(found), "auto")
    assert read_json(first.summary)["found"] == summary["found"]
    by_hand = digits("schedule=CR", f"schedule.q_min={found}", f"results_root={tmp_path}/hand")
    execute(by_hand)
    assert by_hand.folder.metrics.read_bytes() == whole.folder.metrics.read_bytes()


def test_a_signal_during_the_test_interrupts_the_run(command, monkeypatch, tmp_path):
    arguments = ("dataset=digits", "model=resnet8", "scale=smoke", "schedule=CR", "schedule.q_min=auto")
    train_step, steps = Trainer.train_step, []

    def step(self, batch):
        steps.append((self.folder.path.name, self.step))
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", step)
    assert command(*arguments)[0] == 75
    assert steps[-1] == ("range_test", 2)
    assert command(*arguments)[0] == 0
    assert steps[3] == ("range_test", 3) and len(steps) == len(set(steps))


def test_weights_begin_anew_after_divergence(digits):
    """Made to diverge at 2 and 3 bits: 4 bits start from the initial weights, without momentum, and learn as if first."""
    plan = digits("schedule=range_test", "schedule.stop=false", "schedule.q_max=6", "schedule.level_steps=16")
    trainer = Trainer(plan, CPU)

    def state() -> dict[str, torch.Tensor]:
        return {name: value for name, value in trainer.model.state_dict().items() if "precision" not in name}

    initial = {name: value.clone() for name, value in state().items()}
    batches = trainer.task.batches(0)
    while trainer.step < 32:
        if trainer.step in (0, 16):
            torch.testing.assert_close(state(), initial, rtol=0, atol=0)
            assert not trainer.optimizer.state
        trainer.train_step(next(batches))
        if trainer.step in (3, 19):
            with torch.no_grad():
                trainer.model.conv1.weight.fill_(math.nan)
            trainer.average.add(trainer.model)
    torch.testing.assert_close(state(), initial, rtol=0, atol=0)
    assert trainer.average.count == 0  # of weights that are no more
    while trainer.step < 64:
        trainer.train_step(next(batches))
    result = plan.schedule.result
    assert result["q_min"] in (4, 5, 6)  # 2 and 3 bits diverged
    assert all(math.isfinite(level["accuracy"]) for level in result["range_test"]["levels"])


def test_the_command_prints_and_draws(command, tmp_path):
    common = ["dataset=digits", "model=resnet8", "scale=smoke"]
    code, out, _ = command(*common, "schedule=range_test", "schedule.threshold=1")
    assert code == 0
    assert "found q_min: 8, reason: training accuracy rose at no lower precision" in out
    pictures = list(tmp_path.rglob("*.png"))
    assert [str(path) in out for path in pictures] == [True]
    code, out, _ = command(*common, "schedule=CR", "schedule.q_min=auto", "logging.picture=true")
    assert code == 0
    assert "preceded by: range_test" in out
    assert len(list(tmp_path.rglob("*.png"))) == 3


def test_without_quantizer_there_is_nothing_to_find(command):
    code, _, err = command("schedule=range_test", "quantizer=none", "dry_run=true")
    assert (code, "choose a quantizer" in err) == (2, True)
    whole_run = "training.steps=60", "schedule.level_steps=10"  # which was once trained in float
    code, _, err = command("schedule=range_test", "quantizer=none", "dry_run=true", *whole_run)
    assert (code, "choose a quantizer" in err) == (2, True)
    code, out, _ = command("schedule=CR", "schedule.q_min=auto", "quantizer=none", "dry_run=json", "dataset=digits")
    assert code == 0 and json.loads(out)["precision"] == [[32, 32, 32, 4000]]


def test_what_is_observed_is_a_number_whatever_becomes_of_its_tensor():
    """A reused buffer changed the accuracies that were observed before, and a state with tensors cannot be saved."""
    bound, buffer = schedule("range_test", total_steps=1000, steps_per_epoch=10), torch.zeros(())
    for accuracy in (0.25, 0.5):
        bound.observe(torch.tensor(1.0, requires_grad=True), buffer.fill_(accuracy))
    assert bound.indicator.accuracies == [0.25, 0.5]
    assert json.dumps(bound.state_dict())
