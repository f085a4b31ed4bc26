"""The command line: exit codes, dry runs, run folders, and what is refused."""

from __future__ import annotations

import csv
import json
import time
from functools import cache
from pathlib import Path

import pytest
import yaml

from bitcycle.files import read_json
from bitcycle.sweep.grid import quoted
from bitcycle.training.run_folder import RunFolder
from tests.conftest import ROOT, plan, run_train

WRONG = {
    "+train.lrr=1": ("train", "unknown setting"),
    "train.lrr=1": ("train.lrr", "did you mean 'training.learning_rate'"),
    "training.lr=0.1": ("training.lr", "did you mean 'training.learning_rate'"),
    "+training.optimizer.momentun=0": ("training.optimizer.momentun", "did you mean 'training.optimizer.momentum'"),
    "schedule.qmin=3": ("schedule.qmin", "did you mean 'schedule.q_min'"),
    "schedule=RTX": ("schedule=RTX", "did you mean 'RT"),
    "schedule=RHT": ("schedule=RHT", "did you mean 'RTH'"),
    "training.steps": ("'training.steps'", "write SETTING=VALUE"),
    "schedule=rth": ("schedule=rth", "did you mean 'RTH'"),
    "training.device=gpu": ("training.device=gpu", "cuda:NUMBER"),
    "model=resnet75": ("model=resnet75", "did you mean 'resnet74'"),
    "quantizer=smb": ("quantizer=smb", "did you mean 'sbm'"),
    "dataset=cifar": ("dataset=cifar", "did you mean 'cifar10'"),
    "scale=tiny": ("scale=tiny", "mini"),
    "hardware=fpga": ("hardware=fpga", "bitops"),
    "schedule=RTH schedule.q_min=9": ("schedule.q_min=9", "choose q_min <= q_max"),
    "schedule=RTH schedule.cycles=5": ("schedule.cycles=5", "even number such as 6"),
    "schedule=RTH schedule.cycles=100000": ("schedule.cycles=100000", "at most 64000"),
    "schedule=RTH schedule.q_min=three": ("schedule.q_min=three", "type Integer"),
    "schedule=RTH schedule.form=up": ("schedule.form=up", "annealing, horizontal"),
    "schedule=dfq schedule.options=papre": ("schedule.options=papre", "did you mean 'paper'"),
    "schedule=dfq schedule.options=[[3,6],[0,6]]": ("schedule.options", "[0, 6] is not an option"),
    "schedule=dfq quantizer=uniform_l2": ("quantizer.name=uniform_l2", "has no quantizer of gradients"),
    "training.steps=0": ("training.steps=0", "use 1 or more"),
    "training.epochs=3": ("training.steps=64000", "add training.steps=null"),
    "training.learning_rate.milestones=[0.7,0.1]": ("training.learning_rate.milestones", "write [0.1, 0.7]"),
    "dataset.train_samples=60000": ("dataset.train_samples=60000", "at most 50000"),
    "dataset.mean=[0.1,0.2]": ("dataset.mean", "3 channels"),
    "dataset=image_folder": ("dataset.path", "is not given"),
    "model.depth=21": ("model.depth=21", "use 20 or 26"),
    "quantizer.float_layers=[frist]": ("quantizer.float_layers=frist", "first, last, shortcut, depthwise"),
    "quantizer.depthwise_bits=[8]": ("quantizer.depthwise_bits", "two numbers"),
    "seed=-1": ("seed=-1", "use 0 or more"),
    "schedule=null": ("a group is set to null", "choose one of its options"),
    "schedule.q_max=null": ("schedule.q_max=null", "cannot be null"),
    "schedule=CR schedule.q_min=null": ("schedule.q_min=null", "a whole number"),
    "schedule.name=RTH": ("schedule.name=RTH", "write schedule=RTH"),
    "schedule.form=within": ("schedule.form", "these have: CR, CT, ER"),
    "training.learning_rate.milestones=0.5": ("milestones=0.5", "write training.learning_rate.milestones=[0.5]"),
    "training.optimizer=adam": ("training.optimizer=adam", "training.optimizer.SETTING=adam", "name, momentum"),
    "schedule=CR schedule.range_test=4": ("schedule.range_test=4: is a group", "level_steps, window"),
    "training.learning_rate=0.1": ("training.learning_rate=0.1", "one of name, initial, milestones"),
    "training.learning_rate.milestones=[0.5,null]": ("milestones=[0.5,null]: has an entry of the wrong type", "float"),
    "training.steps=null": ("training.steps=null", "set exactly one of"),
    "training.steps=null training.epochs=inf": ("training.epochs=inf", "finite"),
    "training.optimizer.beta1=1": ("training.optimizer.beta1=1", "a value below 1"),
    "logging.picture=maybe": ("logging.picture=maybe", "write logging.picture=true or logging.picture=false"),
    "dry_run=yes": ("dry_run=yes", "use one of: false, json, true"),
    "schedule": ("schedule", "write SETTING=VALUE"),
    "logging.objective=[validation]": (
        "logging.objective=validation: this run has no validation data",
        "dataset.validation=0.1",
    ),
    "logging.objective=[]": ("logging.objective=[]: names no value", "logging.objective=[final]"),
    "-m +sweeps=cpt/table6,cpt/table8": ("+sweeps=cpt/table6,cpt/table8: is several sweeps", "a command for each"),
    "~training.steps": ("~training.steps: a setting cannot be removed", "write training.steps=null"),
    "training.steps=${oc.env:NOPE}": (
        "Environment variable 'NOPE' not found, to which a setting refers",
        "write the value itself",
    ),
    "schedule=CR,RR": ("schedule=CR,RR: is several values", "add -m for one run for each value"),
    "quantizer.depthwise_bits=[8,16": ("quantizer.depthwise_bits=[8,16", "check its brackets"),
    "results_root=/data/{a}": ("results_root=/data/{a}", "results_root='/data/{a}'"),
    "data_root=/data/jörg,a": ("data_root=/data/jörg,a", "data_root='/data/jörg,a'"),
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_configuration_names_field_value_and_remedy(command, arguments):
    code, out, err = command(*arguments.split())
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    for words in WRONG[arguments]:
        assert words in err


@pytest.mark.parametrize("quote", ["", "'"])
def test_the_home_folder_is_written_as_in_a_shell(monkeypatch, quote):
    """The unquoted path was once refused, and the quoted one became a folder named ~ in the current folder."""
    monkeypatch.setenv("HOME", "/home/a b")
    assert quoted(f"results_root={quote}~/runs{quote}") == f"results_root={quote}/home/a b/runs{quote}"


def test_a_model_that_does_not_fit_the_data(command, tmp_path):
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "tiny" / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (4, 4)).save(tmp_path / "tiny" / name / f"{index}.png")
    code, _, err = command("dataset=image_folder", f"dataset.path={tmp_path}/tiny", "model=mobilenet_v2")
    assert code == 2
    assert "model.name=mobilenet_v2: cannot take images of 4 pixels" in err


def test_missing_data_exit_with_3_within_seconds(tmp_path):
    started = time.monotonic()
    done = run_train("dataset=image_folder", "dataset.path=absent", f"results_root={tmp_path}")
    assert done.returncode == 3
    assert "data missing: dataset.path=absent" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 30  # seconds on an idle machine; most of it is importing PyTorch
    done = run_train(
        "dataset=cifar100",
        "scale=smoke",
        f"data_root={tmp_path}/empty",
        f"results_root={tmp_path}/runs",
        env={"https_proxy": "http://127.0.0.1:9"},
    )
    assert done.returncode == 3
    assert "cifar100 cannot be loaded" in done.stderr
    assert "BITCYCLE_DATA" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_diverging_run_fails_with_the_reason(command, tmp_path):
    arguments = (
        "dataset=digits",
        "model=resnet8",
        "scale=smoke",
        "quantizer=none",
        "training.learning_rate.initial=1e30",
    )
    code, _, err = command(*arguments)
    assert code == 1
    assert "training diverged" in err
    folder = plan(*arguments, f"results_root={tmp_path}/runs").folder
    assert folder.read_status()["state"] == "failed"
    assert "diverged" in folder.read_status()["reason"]


def test_dry_run_needs_no_data_and_leaves_nothing_behind(command, tmp_path):
    code, out, _ = command("schedule=RTH", "model=resnet74", "dry_run=true", f"data_root={tmp_path}/absent")
    assert code == 0
    for words in ("64000 of 128 samples", "1,147,418", "168,215,168", "60.1 % less than static 8/8/8", "state", "new"):
        assert words in out
    assert list(tmp_path.iterdir()) == []


def test_a_batch_larger_than_the_data_is_said(command):
    _, _, errors = command("model=resnet8", "dataset=digits", "scale=smoke", "training.batch_size=1000", "dry_run=true")
    assert (
        "training.batch_size=1000 is more than an epoch has: each of the 64 steps trains on all 256 samples" in errors
    )
    _, _, errors = command("model=resnet8", "dataset=digits", "scale=smoke", "training.batch_size=256", "dry_run=true")
    assert "more than an epoch" not in errors


@cache
def dry_run(*arguments: str):
    return plan(*arguments, "dry_run=json").describe()


def test_dry_run_json_is_one_object_with_what_the_contract_promises(command):
    code, out, _ = command("schedule=RTH", "model=resnet74", "dry_run=json")
    assert code == 0
    described = json.loads(out)
    assert {"run_dir", "state", "total_steps", "batch_size", "precision", "macs_per_sample", "cost"} <= set(described)
    assert {"gbitops", "effective_macs", "relative_to_static", "energy_j", "latency_s"} <= set(described["cost"])
    assert (described["state"], described["total_steps"], described["batch_size"]) == ("new", 64_000, 128)
    assert described["precision"][0] == [8, 8, 8, 88]
    assert sum(row[3] for row in described["precision"]) == 64_000
    assert (
        described["macs_per_sample"]["total"] == sum(described["macs_per_sample"]["by_layer"].values()) == 168_215_168
    )
    assert described["cost"]["relative_to_static"] == pytest.approx(0.3990, abs=2e-4)


def test_dry_run_of_a_schedule_that_reacts(command):
    code, out, _ = command("schedule=pfq", "model=resnet38", "dry_run=json")
    described = json.loads(out)
    assert code == 0
    assert described["precision"] is None
    assert described["cost"]["gbitops"] is None
    assert "energy_j" in described["cost"]
    bounds = described["cost_bounds"]
    assert bounds["least"]["relative_to_static"] == pytest.approx((9 + 2 * 18) / 192, rel=0.01)
    assert bounds["most"]["relative_to_static"] == 1
    out = command("schedule=pfq", "model=resnet38", "dry_run=true")[1]
    assert "the schedule depends on training: between" in out


def test_dry_run_of_a_schedule_that_depends_on_the_input(command):
    code, out, _ = command("schedule=fractrain", "model=resnet38", "dry_run=json")
    described = json.loads(out)
    assert code == 0
    assert described["precision"] is None
    assert described["cost"]["gbitops"] is None
    assert described["parameters"] == 564_122 + 32_309 + 2 * 17  # released gates but the unread one; two more options
    bounds = described["cost_bounds"]
    assert 0 < bounds["least"]["relative_to_static"] < 0.2  # the float layers and two stage changes remain
    assert bounds["most"]["relative_to_static"] == pytest.approx(144 / 192, rel=0.05)
    out = command("schedule=dfq", "model=resnet38", "dry_run=true")[1]
    assert "depends on the input: 0/0 2/6 3/6 4/6 4/12 6/8 6/12 (a/g)" in out
    assert "the schedule depends on the input: between" in out


def test_a_network_is_traced_once_for_all_cost_targets(command, monkeypatch):
    kept = {}

    def cached(kind, identity, make):
        return kept[identity] if identity in kept else kept.setdefault(identity, make())

    monkeypatch.setattr("bitcycle.training.network.cached", cached)
    settings = ["schedule=dfq", "model=resnet8", "dataset=digits", "dry_run=json"]
    first, second = (json.loads(command(*settings, f"schedule.target={target}")[1]) for target in (1.5, 3.0))
    assert len(kept) == 2  # its blocks and its operations
    assert first["cost_bounds"] == second["cost_bounds"]
    command(*settings, "schedule.options=[[0,0],[3,6]]")
    assert len(kept) == 3


def test_networks_without_blocks_are_refused_before_any_data_are_read(command, monkeypatch, tmp_path):
    monkeypatch.setattr("bitcycle.training.network.cached", lambda kind, identity, make: make())
    monkeypatch.delattr("bitcycle.model.resnet.CifarResNet.block_family")
    network = "bitcycle.model.resnet.CifarResNet"
    monkeypatch.setattr(f"{network}.block_names", property(lambda _: (), lambda *_: None), raising=False)
    code, _, err = command("schedule=dfq", "model=resnet20", f"data_root={tmp_path}/absent")
    assert code == 2
    assert "schedule.name=dfq: chooses bits block by block, and the network names no blocks" in err
    assert "model=mobilenet_v2" in err


def published_rows():
    with open(ROOT / "tests" / "data" / "hardware" / "cost_expectations.csv") as stream:
        rows = [
            row
            for row in csv.DictReader(stream)
            if row["metric"] in ("gbitops", "gbitops_saving_pct", "effective_macs")
        ]
    networks = {
        "ResNet-74": "resnet74",
        "MobileNetV2": "mobilenet_v2",
        "ResNet-18": "resnet18",
        "ResNet-34": "resnet34",
    }
    return [row for row in rows if row["model"] in networks and row["bw"].isdigit()], networks


@pytest.mark.parametrize(
    "row", published_rows()[0], ids=lambda r: f"{r['paper']}-{r['model']}-{r['method']}-{r['fw']}-{r['metric']}"
)
def test_published_costs_of_fixed_schedules(row):
    low, _, high = row["fw"].partition("-")
    kind = (
        ["schedule=CR", f"schedule.q_min={low}", f"schedule.q_max={high}", "schedule.cycles=32"]
        if high
        else ["schedule=static", f"schedule.q_max={low}"]
    )
    convention = {"CPT": "cpt", "FracTrain": "fractrain"}[row["paper"]]
    dataset = row["dataset"].replace("CIFAR-10/100", "cifar10").replace("-", "").lower()
    model = published_rows()[1][row["model"]]
    cost = dry_run(*kind, f"model={model}", f"dataset={dataset}", f"hardware.convention={convention}")["cost"]
    ours = {**cost, "gbitops_saving_pct": 100 * (1 - cost["relative_to_static"])}[row["metric"]]
    assert ours == pytest.approx(float(row["published"]), rel=float(row["tolerance_rel"]))
    # The reference counts 64,000 steps for ImageNet too; a cycle of 450,450 steps rounds a little differently.
    assert ours == pytest.approx(float(row["formula_value"]), rel=1e-3)


def test_run_folder_holds_what_the_contract_promises(command, tmp_path):
    code, out, err = command(
        "dataset=digits",
        "model=resnet8",
        "scale=smoke",
        "schedule=RTH",
        "logging.picture=true",
    )
    assert code == 0, err
    folder = RunFolder(Path(out.splitlines()[-1].removeprefix("run folder: ")))
    assert folder.read_status()["state"] == "done"
    summary = read_json(folder.summary)
    for key in ("final", "best", "best_step", "mean_of_last", "cost"):
        assert key in summary
    assert set(summary["cost"]) == {"total", "to_best"}
    assert f"final {summary['final']:.2f}, best {summary['best']:.2f}" in out
    assert f"{summary['cost']['total']['gbitops']:.4g} GBitOps" in out
    resolved = yaml.safe_load(folder.config.read_text())
    assert resolved["schedule"]["name"] == "RTH"
    assert resolved["training"]["steps"] == 64
    assert read_json(folder.environment)["packages"]["torch"]
    assert folder.picture.stat().st_size > 10_000
    assert folder.picture.with_suffix(".svg").exists()
    assert "step 64/64" in folder.log.read_text()
    assert "\x1b" not in folder.log.read_text()
    again = command("dataset=digits", "model=resnet8", "scale=smoke", "schedule=RTH")
    assert again[0] == 0
    assert "already done" in again[2]
    assert f"final {summary['final']:.2f}" in again[1]
    folder.picture.unlink()
    folder.picture.mkdir()  # it cannot be written, as on a full disk; the finished run counted as a bug
    code, out, err = command("dataset=digits", "model=resnet8", "scale=smoke", "schedule=RTH", "logging.picture=true")
    assert code == 0 and "no picture: " in err and "run folder: " in out


def test_multirun_trains_what_is_missing_and_reports_the_worst_code(command, tmp_path):
    few = ("-m", "dataset=digits", "model=resnet8", "scale=smoke", "training.steps=4", "training.evaluation_steps=4")
    code, _, err = command(*few, "schedule=static,RTH", "schedule.cycles=2,3")
    assert code == 2  # RTH with three cycles, which keeps no other from running
    assert "3 runs: 2 missing, 1 wrong" in err  # static is one run, whatever cycles say
    assert "wrong configuration: schedule.cycles=3: a triangular schedule" in err
    folders = [RunFolder(path.parent) for path in (tmp_path / "runs").rglob("status.json")]
    assert [folder.state() for folder in folders] == ["done"] * 2
    logs = {folder.path: folder.log.read_text() for folder in folders}
    code, _, err = command(*few, "schedule=static,RTH", "schedule.cycles=2")
    assert code == 0 and "2 runs: 2 done" in err
    assert {folder.path: folder.log.read_text() for folder in folders} == logs  # no run was begun again
