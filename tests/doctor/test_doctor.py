"""`bitcycle doctor`: exit codes, JSON, and machines on which something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections import namedtuple
from importlib import metadata

import pytest
import torch

from bitcycle.cpp import extension
from bitcycle.cpp.operators import AFFINE
from bitcycle.doctor import __main__ as doctor
from bitcycle.doctor import duration, machine, numerics, work
from bitcycle.doctor.finding import CONFIGURATION, DATA, OK, PROBLEM, WARNING, Finding, describe, exit_code
from bitcycle.errors import EXIT_DATA_MISSING, EXIT_DONE, EXIT_FAILED, EXIT_WRONG_CONFIGURATION
from bitcycle.quantizer import QUANTIZERS, Sbm
from bitcycle.quantizer.sbm import SbmWeight
from bitcycle.settings import SettingError
from bitcycle.sweep.registry import SweepRun
from tests.conftest import plan

GIB = 2**30
SMALL = ["dataset=digits", "model=resnet8", "scale=smoke", "schedule=RTH"]


@pytest.fixture
def quick(monkeypatch):
    """An idle machine with memory and space, and little time for steps."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(machine, "available_memory", lambda: 16 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(100 * GIB))
    monkeypatch.setattr(work, "RUN_BUDGET", 0.05)
    monkeypatch.setattr(work, "SWEEP_BUDGET", 0.05)


@pytest.fixture
def asked(quick, monkeypatch, capsys, tmp_path):
    """Runs `bitcycle doctor json SETTINGS`: (exit code, object on standard output, standard error)."""

    def run(*settings: str) -> tuple[int, dict, str]:
        monkeypatch.setattr(sys, "argv", ["doctor", "json", *settings, f"results_root={tmp_path}/runs"])
        code = doctor.main()
        captured = capsys.readouterr()
        return code, json.loads(captured.out or "{}"), captured.err

    return run


def by_topic(described: dict) -> dict[str, dict]:
    return {finding["topic"]: finding for finding in described["findings"]}


def test_a_run_that_can_work(asked, tmp_path):
    code, found, _ = asked(*SMALL)
    assert code == found["exit_code"] == EXIT_DONE
    topics = by_topic(found)
    assert {"load", "device", "cpu", "compiler", "threads", "memory", "disk (runs)", "versions", "optional"} <= set(
        topics
    )
    assert topics["versions"]["values"]["torch"] == metadata.version("torch")
    assert "digits" in topics["data sets"]["values"]["found"]
    expected = plan(*SMALL)
    assert topics["run"]["values"]["total_steps"] == expected.total_steps
    time = topics["time"]["values"]
    assert time["steps"] == expected.total_steps
    assert time["hours"] == pytest.approx(
        (time["start"] + time["steps"] * time["step"] + time["evaluations"] * time["evaluation"]) / 3600
    )
    assert all(finding["remedy"] for finding in found["findings"] if finding["state"] != OK)
    assert not (tmp_path / "runs").exists(), "nothing is written"


def test_without_settings_the_run_of_the_demo(asked):
    code, found, _ = asked()
    assert code == EXIT_DONE
    assert found["settings"].items() >= doctor.DEMO.items()


def test_missing_data(asked, tmp_path):
    code, found, _ = asked("dataset=cora", "schedule=RTH", f"data_root={tmp_path}")
    assert code == EXIT_DATA_MISSING
    data = by_topic(found)[DATA]
    assert data["state"] == PROBLEM and data["values"]["missing"] == ["cora"]
    assert "cora.npz" in data["remedy"]
    assert "time" not in by_topic(found)


@pytest.mark.parametrize(
    "setting", ["model=resnet75", "schedule.qmin=3", "schedule.name=RTH", "schedule", "+sweeps=better/fig99"]
)
def test_wrong_settings(asked, setting):
    code, found, error = asked(setting)
    assert code == EXIT_WRONG_CONFIGURATION and not found
    assert error.startswith("wrong configuration: ")


def test_settings_that_are_incompatible(asked):
    code, _, error = asked(*SMALL, "schedule.cycles=5")
    assert code == EXIT_WRONG_CONFIGURATION and "even number" in error


def test_a_device_that_does_not_exist(asked):
    code, found, _ = asked(*SMALL, "training.device=cuda:7")
    assert code == EXIT_FAILED
    assert "training.device=cpu" in by_topic(found)["device"]["remedy"]


def test_a_sweep(asked):
    code, found, _ = asked("+sweeps=better/fig3", "scale=smoke", "dataset=digits", "model=resnet8")
    topics = by_topic(found)
    assert code == EXIT_DONE
    assert topics["sweep"]["values"]["left"] == topics["sweep"]["values"]["runs"] > 1
    assert topics["time"]["values"]["hours_left"] > 0
    assert topics["time"]["values"]["unknown"] == 0, "runs of one network and data set take about as long"


def test_a_table_for_people(quick, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["doctor", *SMALL, f"results_root={tmp_path}/runs"])
    assert doctor.main() == EXIT_DONE
    shown = capsys.readouterr().out
    assert "it can work here" in shown and "memory" in shown


# Machines on which something is wrong.


def test_exit_codes():
    problems = {topic: Finding(topic, "", PROBLEM, "do this") for topic in ("disk", DATA, CONFIGURATION)}
    assert exit_code([Finding("load", "", WARNING, "wait")]) == EXIT_DONE
    assert exit_code([problems["disk"]]) == EXIT_FAILED
    assert exit_code([problems["disk"], problems[DATA]]) == EXIT_DATA_MISSING
    assert exit_code([*problems.values()]) == EXIT_WRONG_CONFIGURATION
    assert describe([problems["disk"]])["findings"][0]["remedy"] == "do this"
    with pytest.raises(AssertionError, match="what to do"):
        Finding("load", "", WARNING)


def test_operators_are_compiled_at_the_same_time(monkeypatch):
    together = threading.Barrier(len(machine.SOURCES), timeout=60)
    monkeypatch.setattr(machine, "load", lambda source, instructions: together.wait())
    assert machine.compiler_finding().state == OK


def test_a_compilation_is_announced(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(extension, "_compiler", lambda: "true")
    monkeypatch.setattr(os, "replace", lambda *paths: None)
    caplog.set_level("INFO", "bitcycle")
    assert "affine" in machine.why_not_loaded((AFFINE, ()))
    assert "compiling affine.cpp for this machine (once)" in caplog.text


def test_an_accelerator_of_any_kind(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda number: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(machine, "device_name", lambda device: "Arc")
    found = machine.device_finding("auto")
    assert found.text == "runs use xpu; accelerators: xpu:0 Arc (6.0 of 8.0 GiB free)"
    monkeypatch.delattr(torch.accelerator, "get_memory_info")  # as on Metal, which does not say
    assert machine.device_finding("auto").text.endswith("xpu:0 Arc")


def test_no_compiler(monkeypatch):
    def fails(source, instructions=()):
        raise OSError("no C++ compiler (g++) found")

    monkeypatch.setattr(machine, "load", fails)
    found = machine.compiler_finding()
    assert found.state == WARNING and "install g++" in found.remedy
    assert "no C++ compiler" in found.text


@pytest.mark.parametrize(("gib", "state"), [(0.5, PROBLEM), (2, WARNING), (8, OK)])
def test_memory(gib, state, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: int(gib * GIB))
    assert machine.memory_finding().state == state


@pytest.mark.parametrize(("gib", "state"), [(0.1, PROBLEM), (2, WARNING), (8, OK)])
def test_disk(gib, state, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(gib * GIB))
    assert machine.disk_finding("runs", tmp_path / "not" / "yet", "another disk").state == state


def test_a_disk_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine.disk_finding("runs", tmp_path, "another disk").state == PROBLEM


@pytest.mark.parametrize(("load", "state"), [(0.2, OK), (6.0, WARNING)])
def test_load(load, state, monkeypatch):
    monkeypatch.setattr(machine, "allowed_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    found = machine.load_finding()
    assert found.state == state
    assert state == OK or "up to 4.0 times" in found.remedy


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(machine, "allowed_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    found = machine.threads_finding()
    assert found.state == WARNING and "OMP_NUM_THREADS=1" in found.remedy


def test_an_nvidia_driver_that_pytorch_does_not_use(monkeypatch):
    monkeypatch.setattr(machine, "accelerators", lambda: iter(()))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert machine.device_finding("cpu").state == WARNING


def test_optional_packages_that_are_missing(monkeypatch):
    def nothing_but(name: str) -> str:
        if name in ("wandb", "optuna"):
            raise machine_imports.PackageNotFoundError
        return version(name)

    import bitcycle.optional_imports as machine_imports

    version = machine_imports.version
    monkeypatch.setattr(machine_imports, "version", nothing_but)
    complete, missing = machine.optional_packages()
    assert missing["wandb"] == ["wandb"]
    assert "wandb" not in complete and "tensorboard" in complete


# Numbers.


def test_the_self_check_sees_a_wrong_operator(monkeypatch):
    forward = SbmWeight.forward
    device = torch.device("cpu")
    assert numerics.compare(QUANTIZERS["sbm"](), device)[0] == 0

    def wrong(module, x, bits):
        y = forward(module, x, bits)
        return y + (y > 1) if module.compile_kernel else y

    monkeypatch.setattr(SbmWeight, "forward", wrong)
    found = [one for one in numerics.numerics_findings(device) if one.state == PROBLEM]
    if numerics.operators(numerics.operators_of(Sbm("sbm"))) is None:
        pytest.skip("no compiler")
    assert [one.topic for one in found] == ["quantizer sbm"]
    assert "the weight's value at " in found[0].text
    assert "training.compile=false" in found[0].remedy


def test_sums_that_cancel_are_compared_by_the_size_of_their_terms():
    """The gradient of one number is a sum of thousands, 0.331 on a CPU, whose last bits are those of the order of summation."""
    found, expected = torch.tensor(0.331 + 2e-5), torch.tensor(0.331)
    assert numerics.differing(found, expected) == 1 and numerics.differing(found, expected, terms=4608) == 0
    assert numerics.differing(torch.tensor(0.34), expected, terms=4608) == 1


def test_shares_of_differing_elements():
    x = torch.arange(10.0)
    assert numerics.differing(x * (1 + 1e-6), x) == 0
    assert numerics.differing(x.index_fill(0, torch.tensor([3]), torch.nan), x) == pytest.approx(0.1)


# Duration.


def test_the_typical_time_leaves_out_the_first_calls(monkeypatch):
    times = iter([9.0, 5.0, 1.0, 3.0, 2.0])
    monkeypatch.setattr(duration, "timed", lambda action, device, clock: next(times))
    assert duration.typical_seconds(lambda: None, torch.device("cpu"), budget=100, most=5) == 2.0


def test_large_batches_are_timed_in_part_on_a_cpu(monkeypatch):
    run = plan(*SMALL)
    monkeypatch.setattr(duration, "MOST_MACS", 8 * 3 * run.workload.macs_of_sample)
    found = duration.measure(run, 0.05)
    assert found.timed_samples == 8 < run.batch_size
    assert found.steps == run.total_steps


def test_the_accuracy_of_a_few_timed_steps_is_not_reported(caplog):
    """Two lines with it once stood among the findings."""
    caplog.set_level("INFO", "bitcycle")
    assert duration.measure(plan(*SMALL), 0.05).evaluation > 0
    assert "test_accuracy" not in caplog.text


def test_one_run_of_each_kind_and_each_network_first():
    names = ["a-x-sbm-CR", "a-x-sbm-LR", "b-x-sbm-CR", "a-x-sbm-CR"]
    runs = [SweepRun({}, f"runs/smoke/{name}-hash{number}/seed=0") for number, name in enumerate(names)]
    assert [run.path for run in duration.one_of_each_kind(runs)] == [runs[0].path, runs[2].path, runs[1].path]


def test_a_failing_kind_does_not_stop_the_others(monkeypatch):
    config = plan(*SMALL).config
    paths = [f"runs/smoke/resnet8-digits-sbm-{name}-h/seed=0" for name in ("CR", "RTH")]

    def measured(made, budget):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(duration, "measure", measured)
    found = [*duration.measure_kinds([SweepRun({}, path, config=config) for path in paths], 10)]
    assert [str(error) for _, error in found] == ["out of memory"] * 2


def test_a_package_that_the_run_needs_and_that_is_missing(asked, monkeypatch):
    def measured(plan, budget):
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr(work, "measure", measured)
    code, found, _ = asked(*SMALL)
    step = by_topic(found)["step"]
    assert code == EXIT_FAILED and step["text"] == "digits: sklearn is not installed"
    assert step["remedy"].startswith("pip install 'scikit-learn")


def test_words_without_a_value():
    with pytest.raises(SettingError, match="write SETTING=VALUE"):
        doctor.parse(["schedule"])
