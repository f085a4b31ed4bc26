"""The documents are true: generated parts are current, examples run, named files and commands exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.conftest import ROOT, configure

README = (ROOT / "README.md").read_text()


def test_generated_parts_are_current():
    script = runpy.run_path(str(ROOT / "scripts" / "readme.py"))
    for document in script["DOCUMENTS"]:
        assert script["fill"](document) == document.read_text(), f"{document.name}: run `make readme`"


def test_python_example_runs(capsys):
    """The example trains torchvision's ResNet-18 in a loop of its own."""
    example = re.search(r"<!-- executed .*?-->\n```python\n(.*?)```", README, re.DOTALL)[1]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Precision(weight=8, activation=8, gradient=8)"
    assert re.fullmatch(r"\d+ GBitOps, \d+ % less than static 8 bits", printed[1])


COMMANDS = [
    line.split("#")[0].split("train.py ")[1].strip()
    for line in README.splitlines()
    if line.startswith("    ") and "train.py " in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command):
    words = [word.split(",")[0] for word in command.split() if word != "-m"]
    assert configure(*words).model.name


RECIPES = [row[1] for row in re.finditer(r"^\| .* \| `([\w.]+=[^`]*)` \|$", README, re.MULTILINE)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_compose(recipe):
    assert configure(*recipe.split()).model.name
    assert len(RECIPES) >= 5


def test_tour_names_five_files_that_exist():
    tour = re.search(r"<!-- tour -->(.*?)<!-- end tour -->", README, re.DOTALL)[1]
    files = re.findall(r"`(src/[^`]+)`", tour)
    assert len(files) == 5
    assert all((ROOT / file).is_file() for file in files)


def test_pictures_exist():
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / picture).is_file()


def test_make_targets_named_in_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"`?make ([a-z]+)", (ROOT / document).read_text()):
            if target not in ("PYTHON",):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_rooms_mirror_the_configuration():
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} - {"scale", "hydra"}
    packages = {path.parent.name for path in (ROOT / "src" / "bitcycle").glob("*/__init__.py")}
    assert groups <= packages


# What each room may know of: data flows one way (reference design). Modules without a room stand below all rooms.
BELOW = {
    "schedule": set(),
    "quantizer": {"schedule"},
    "hardware": {"schedule"},
    "layer": {"schedule", "quantizer", "hardware"},
    "model": {"layer"},
    "dataset": {"model", "layer"},
    "task": {"dataset", "model"},
    "training": {"schedule", "quantizer", "hardware", "layer", "model", "dataset", "task"},
    "analysis": {"training", "schedule", "hardware", "layer", "dataset", "task"},
    "figure": {"training", "schedule", "analysis"},
}


@pytest.mark.parametrize("room", BELOW)
def test_rooms_know_only_what_lies_below(room):
    for path in (ROOT / "src" / "bitcycle" / room).glob("**/*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) bitcycle\.(\w+)", path.read_text(), re.MULTILINE))
        rooms = {name for name in imported if name in BELOW}
        assert rooms <= BELOW[room] | {room}, path


def test_schedules_need_no_torch():
    for path in (ROOT / "src" / "bitcycle" / "schedule").glob("*.py"):
        assert "torch" not in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE), path


def test_importing_the_package_does_nothing_else(tmp_path):
    import subprocess
    import sys

    code = """
import logging, sys, torch
before = torch.random.get_rng_state()
import bitcycle
print(len(logging.getLogger("bitcycle").handlers))
print(torch.equal(before, torch.random.get_rng_state()), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["0", "True", "False"], done.stderr
    assert list(Path(tmp_path).iterdir()) == []
