"""The library works for someone who deletes src/bitcycle/reproduction."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from bitcycle import door
from tests.conftest import ROOT

SHORT = ("scale=smoke", "model=resnet8", "dataset=digits", "training.steps=8", "training.evaluation_steps=8")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Runs Python in a folder with a copy of the package that lacks the papers."""
    root = tmp_path_factory.mktemp("library")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("reproduction", "__pycache__"))
    shutil.copytree(ROOT / "conf", root / "conf")
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}

    def run(*words):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=root, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_door_opens_here_and_its_sub_commands_are_known():
    assert door.reproduction("manifest").__name__ == "bitcycle.reproduction.manifest"
    assert {"figures", "collect", "advise"} <= set(door.sub_commands())


def test_a_network_is_quantized_without_the_papers(library):
    code = """
import torch, bitcycle
from bitcycle.door import reproduction, sub_commands
network = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in [(4, 8), (8, 8), (8, 2)]))
bitcycle.quantize_model(network)
print(reproduction(), *sub_commands(), network(torch.ones(1, 4)).shape)
"""
    assert library("-c", code).split("\n")[0] == "None doctor status bench torch.Size([1, 2])"


def test_a_run_is_planned_and_trained_without_the_papers(library):
    code = """
import sys
from bitcycle import cli
sys.argv[0] = "bitcycle"
for more in (["dry_run=true"], []):
    sys.argv[1:] = [*settings, *more]
    assert cli.main() == 0
"""
    printed = library("-c", f"settings = {SHORT}\n{code}")
    assert "bits w/a/g x steps" in printed and "run folder" in printed


def test_a_sweep_of_ones_own_ends_with_a_plain_table_without_the_papers(library):
    printed = library("-m", "bitcycle", "-m", *SHORT, "schedule=static,RTH", "schedule.q_max=8")
    table = printed[printed.index("Finished runs") :]
    assert "schedule.name" in table and "static" in table and "RTH" in table, printed
