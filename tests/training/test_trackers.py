"""What trackers show: bits, learning rate and cost of every step, and names that people can find; read from what was written."""

from __future__ import annotations

import io
import struct
import time
from pathlib import Path

import pytest

from bitcycle.errors import RunError
from bitcycle.files import read_records
from bitcycle.sweep.grid import as_text
from bitcycle.training.metrics_log import TensorBoardTracker, WandbTracker, wandb_id
from bitcycle.training.run import execute
from tests.conftest import configure, digits_plan

LENGTH = (
    "training.steps=8",
    "training.log_steps=4",
    "training.evaluation_steps=8",
    "schedule=RTH",
    "schedule.cycles=2",
)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, as TensorBoard shows them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_tensorboard_shows_bits_rate_and_cost_of_every_step(digits):
    plan = digits(*LENGTH, "logging.tensorboard=true")
    summary = execute(plan)
    shown = scalars(plan.folder.path)
    for step in range(8):
        precision = plan.schedule(step)
        bits = tuple(shown[f"bits/{role}"][step + 1] for role in ("weight", "activation", "gradient"))
        assert bits == precision, step
    assert len(shown["learning_rate"]) == 8 and min(shown["learning_rate"].values()) > 0
    gbitops = [shown["cost/gbitops"][step] for step in range(1, 9)]
    assert gbitops == sorted(gbitops)
    assert gbitops[-1] == pytest.approx(summary["cost"]["total"]["gbitops"], rel=1e-6)
    assert shown["cost/relative_to_static"][8] == pytest.approx(
        summary["cost"]["total"]["relative_to_static"], rel=1e-6
    )
    [evaluation] = [record for record in read_records(plan.folder.metrics) if record["kind"] == "evaluation"]
    assert shown["evaluation/test_accuracy"] == {8: pytest.approx(evaluation["test_accuracy"], rel=1e-6)}
    assert set(shown["train/loss"]) == {4, 8}


def test_tensorboard_hides_what_was_written_after_the_checkpoint(tmp_path):
    for first, last, value in ((0, 6, 1.0), (4, 8, 2.0)):
        tracker = TensorBoardTracker(tmp_path, first)
        for step in range(first + 1, last + 1):
            tracker.write(step, {"loss": value})
        tracker.close()
    assert scalars(tmp_path)["loss"] == {step: 1.0 if step <= 4 else 2.0 for step in range(1, 9)}


def test_tensorboard_hides_what_was_written_before_a_run_began_again(tmp_path):
    """Of a run that was killed before its first checkpoint, both attempts were shown, one over the other."""
    for last, value in ((6, 1.0), (4, 2.0)):
        tracker = TensorBoardTracker(tmp_path, 0)
        for step in range(last + 1):
            tracker.write(step, {"loss": value})
        tracker.close()
    assert scalars(tmp_path)["loss"] == dict.fromkeys(range(5), 2.0)


def wandb_records(file: Path):
    """The records of an offline run: LevelDB's log format behind seven bytes of W&B's."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory):
    """A plan, and the records of its offline run."""
    pytest.importorskip("wandb")
    labels = (
        "logging.group=cpt/table2",
        "logging.tags=[night]",
        "logging.wandb_project=mine",
    )
    plan = digits_plan(tmp_path_factory.mktemp("wandb"), "schedule=RTH", "seed=3", "logging.wandb=offline", *labels)
    plan.folder.path.mkdir(parents=True)
    tracker = WandbTracker(plan)
    tracker.write(1, {"bits/weight": 8.0, "cost/gbitops": 0.5})
    tracker.write(2, {"bits/weight": 3.0, "cost/gbitops": 0.75})
    tracker.close()
    [file] = plan.folder.path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while not any(record.WhichOneof("record_type") == "exit" for record in wandb_records(file)):
        assert time.monotonic() < deadline, "W&B's own process has not written the run to its end"
        time.sleep(0.1)
    return plan, list(wandb_records(file))


def test_wandb_run_has_id_name_group_tags_and_project(wandb_run):
    """The id, which a resumed run has too, does not depend on settings of the tracker."""
    plan, records = wandb_run
    [run] = {record.run.run_id: record.run for record in records if record.WhichOneof("record_type") == "run"}.values()
    assert run.run_id == f"{digits_plan(plan.folder.path, 'schedule=RTH').hash}-seed3-smoke"
    assert (run.display_name, run.run_group) == ("resnet8-RTH-seed3", "cpt/table2")
    assert (run.project, set(run.tags)) == ("mine", {"cpt", "smoke", "sbm", "night"})


def test_a_preliminary_run_is_another_one_than_a_direct_one_at_wandb(tmp_path):
    """Both have the same settings, and thus the same hash: one overwrote the other."""
    auto = [digits_plan(tmp_path, f"schedule={name}", "schedule.q_min=auto").preliminary for name in ("CR", "RR")]
    own = vars(auto[0].config.schedule).items()
    options = [f"schedule.{name}={as_text(value)}" for name, value in own if name != "name"]
    direct = digits_plan(tmp_path, "schedule=range_test", *options)
    assert {plan.hash for plan in auto} == {direct.hash}
    assert len({wandb_id(plan) for plan in (*auto, direct)}) == 3
    assert wandb_id(auto[0]) == f"{auto[0].folder.path.parent.parent.name[-10:]}-seed0-smoke-range_test"


def test_wandb_without_a_login_is_no_bug(tmp_path, monkeypatch):
    """It was called one, with a traceback."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    plan = digits_plan(tmp_path, "logging.wandb=online")
    plan.folder.path.mkdir(parents=True)
    words = (
        r"logging\.wandb=online: No API key configured.*Remedy: log in with `wandb login`, or set logging.wandb=offline"
    )
    with pytest.raises(RunError, match=words):
        WandbTracker(plan)


def test_wandb_history_has_the_bits_and_cost_of_every_step(wandb_run):
    histories = [record.history for record in wandb_run[1] if record.WhichOneof("record_type") == "history"]
    rows = [{"/".join(item.nested_key) or item.key: float(item.value_json) for item in row.item} for row in histories]
    assert [(row["_step"], row["bits/weight"], row["cost/gbitops"]) for row in rows] == [(1, 8, 0.5), (2, 3, 0.75)]


def test_nothing_is_tracked_unless_asked():
    assert configure().logging.wandb == "disabled"
    assert not configure().logging.tensorboard


def test_a_sweep_file_names_the_group_of_its_runs():
    from types import SimpleNamespace

    from hydra_plugins.bitcycle_plugins.grid_sweeper import GridSweeper

    def launched(names, fixed):
        sweeper = GridSweeper.__new__(GridSweeper)
        arguments = []
        sweeper.runner = SimpleNamespace(launch=lambda batch, initial_job_idx: arguments.extend(batch) or [])
        assert sweeper._launch([SimpleNamespace(arguments=["seed=0"])], names, fixed) == []
        return arguments

    offline = {"logging.wandb": "offline"}
    assert launched(["cpt/table2"], offline) == [["seed=0", "logging.group=cpt/table2"]]
    assert launched(["cpt/table2"], {}) == launched([], offline) == [["seed=0"]]
    assert launched(["cpt/table2"], {**offline, "logging.group": "mine"}) == [["seed=0"]]
