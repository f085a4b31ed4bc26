"""What several tests need: golden data, composed configurations, and runs of the command line."""
# ruff: noqa: E402 - threads are chosen before PyTorch is imported

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import pytest

from bitcycle.threads import choose_threads

choose_threads()  # as the command does, before PyTorch is imported

import torch
from hydra import compose, initialize_config_dir
from hypothesis import settings
from omegaconf import DictConfig

from bitcycle.configuration import RunConfig, read_config
from bitcycle.layer.codes import product as code_product
from bitcycle.sweep import forkserver
from bitcycle.sweep.composition import Composer
from bitcycle.train_command import main
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.run import execute

# The same examples in every run, and no deadline: a busy machine is no failure.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# The other modules are of no use to runs on small images, and importing them takes seconds.
OTHERS = ("datasets", "pandas", "transformers")
forkserver.PRELOAD = [name for name in forkserver.PRELOAD if not name.startswith(OTHERS)]

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "data" / "golden"


def golden_device() -> torch.device:
    """Where the golden tests compute: `bitcycle gpu-day` names the device of its runs."""
    return torch.device(os.environ.get("BITCYCLE_GOLDEN_DEVICE", "cpu"))


def golden_arrays(name: str, folder: Path = GOLDEN) -> dict[str, torch.Tensor]:
    with np.load(folder / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(np.asarray(arrays[key])).to(golden_device()) for key in arrays.files}


@pytest.fixture(autouse=True)
def golden_tests_on_their_device(request):
    """What a golden test makes lies on the device of its arrays."""
    with golden_device() if request.node.get_closest_marker("golden") else nullcontext():
        yield


def golden_json(name: str):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def configure(*overrides: str) -> RunConfig:
    """The configuration of `python train.py OVERRIDES`; the last value of a setting counts."""
    return read_config(COMPOSER(dict(override.partition("=")[::2] for override in overrides)))


def hydra_config(arguments: list[str]) -> DictConfig:
    """What Hydra makes of the arguments of train.py, from the beginning: a quarter of a second."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=arguments)


COMPOSER = Composer(hydra_config)


def plan(*overrides: str) -> Plan:
    return make_plan(configure(*overrides))


def pytest_configure() -> None:
    """The tests compute on the CPU, wherever they run: their expectations are its numbers. The golden tests may go elsewhere, and
    `python -m tests.accelerator.hardware` tries an accelerator."""
    if golden_device().type == "cpu":
        os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one fixture prepares for half a minute comes first, when no worker waits for another one's last tests."""
    items.sort(key=lambda item: item.path.name != "test_distributed.py")


def pytest_collection_finish() -> None:
    """Full garbage collections, for which statsmodels and others ask, pass over what was imported: half a second each."""
    gc.freeze()


@pytest.fixture(autouse=True)
def log_of_its_own():
    """A test that sets up the console leaves no handler, which would write into the closed streams of that test later."""
    logger = logging.getLogger("bitcycle")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def no_hub(tmp_path_factory):
    """The library `datasets` asks no network and writes into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_power_failure():
    """Nothing is forced onto the disk, which takes a tenth of the time; a killed process loses nothing without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def digits_plan(root: Path, *overrides: str) -> Plan:
    return plan("dataset=digits", "model=resnet8", "scale=smoke", f"results_root={root}", *overrides)


@pytest.fixture
def codes_everywhere(monkeypatch):
    """Layers of compute=codes multiply codes where floats would take less time, too, as in most tests."""
    monkeypatch.setattr(code_product, "LARGEST_WEIGHT", float("inf"))
    monkeypatch.setattr(code_product, "LEAST_INTENSITY", 0)


@pytest.fixture
def digits(tmp_path):
    """Plans of smoke runs on the digits, below a temporary folder."""
    return partial(digits_plan, tmp_path / "runs")


@pytest.fixture(scope="session")
def finished_digits(tmp_path_factory):
    """Plans of finished smoke runs on the digits, each trained once for all tests that read it."""

    @cache
    def make(*overrides: str) -> Plan:
        made = digits_plan(tmp_path_factory.mktemp("finished"), *overrides)
        execute(made)
        return made

    return make


@pytest.fixture
def copied_digits(digits, finished_digits):
    """Plans of finished smoke runs on the digits, each in a folder of its own."""

    def make(*overrides: str) -> Plan:
        made = digits(*overrides)
        shutil.copytree(finished_digits(*overrides).folder.path, made.folder.path)
        return made

    return make


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `python train.py ARGUMENTS` in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, f"results_root={tmp_path}/runs"])
        code = main(ROOT / "conf")
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def train_command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *overrides]


def run_train(
    *overrides: str, env: dict[str, str] | None = None, timeout: float | None = None, launches: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own and wait for it; a sweep that launches runs begins with a fresh interpreter.

    `timeout` in seconds is for sweeps, which may wait for a cluster.
    """
    if "-m" in overrides and launches:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        command = train_command(*overrides)
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        return ForkedTraining(Path(folder), *overrides, env=env).wait(timeout)


class ForkedTraining:
    """A command in a process of its own, forked from one that has imported everything, with its output in a folder."""

    def __init__(
        self, folder: Path, *overrides: str, env: dict[str, str] | None = None, cwd: Path = ROOT, module: str = ""
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.overrides, self.outputs = overrides, [folder / name for name in ("out", "err")]
        arguments = (module, overrides, environment, self.outputs, cwd)
        self.process = _processes().Process(target=_command, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        self.process.join(timeout)
        code, texts = self.process.exitcode, [path.read_text() for path in self.outputs]
        return subprocess.CompletedProcess(train_command(*self.overrides), code, *texts)


@cache
def _processes() -> BaseContext:
    """Forks of the server from which sweeps fork their runs, as a process has only one; starting it takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(forkserver.PRELOAD)
    return context


def _command(
    module: str, arguments: Sequence[str], environment: dict[str, str], outputs: Sequence[Path], cwd: Path
) -> None:
    """`python train.py`, or `python -m MODULE`, with these arguments, environment variables, output files and working folder."""
    os.setsid()
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    multiprocessing.set_start_method(None, force=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [module or "train.py", *arguments]
    if module:
        sys.path.insert(0, str(cwd))
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
