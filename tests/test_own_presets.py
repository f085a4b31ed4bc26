"""docs/own-presets.md, followed literally in an empty folder: presets of a user that live outside of the package."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import bitcycle
from bitcycle import presets
from bitcycle.presets import Presets
from bitcycle.schedule import SCHEDULES
from bitcycle.settings import SettingError
from bitcycle.training.naming import run_hash
from tests.conftest import ROOT, ForkedTraining, configure, plan

PAGE = (ROOT / "docs" / "own-presets.md").read_text()
FILES = re.findall(r'```\w+ title="(.*?)"\n(.*?)```', PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the files of the page, which is the current one."""
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(presets.FOLDERS, str(tmp_path / "conf"))
    yield tmp_path
    for name, _ in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a folder; that it needs nothing but the wheel is tested with the package."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as output:
        patch.delenv(presets.FOLDERS, raising=False)
        return ForkedTraining(Path(output), *words, cwd=cwd, module="bitcycle").wait()


def test_the_page_works_in_an_empty_folder(folder):
    assert len(FILES) == 5 and len(COMMANDS) == 3
    for command in COMMANDS:
        done = run(shlex.split(command)[1:], folder)
        assert done.returncode == 0, (command, done.stderr)
    runs = {path.parent.parent.name.split("-")[3] for path in folder.rglob("summary.json")}
    assert runs == {"sawtooth", "RTH", "RTH4"}


def test_hydras_search_path_finds_presets_too(folder):
    words = ["schedule=sawtooth", "model=resnet8", "dataset=digits", "dry_run=json", "training.steps=100"]
    done = run([*words, f"hydra.searchpath=[file://{folder}/conf]"], folder)
    assert done.returncode == 0, done.stderr
    bits = [weight for weight, *_ in json.loads(done.stdout)["precision"]]
    assert bits == [3, 4, 5, 6, 7, 8] * 2
    refused = run(words, folder)
    assert refused.returncode == 2 and "schedule=sawtooth: does not exist" in refused.stderr


def test_sub_commands_and_help_find_presets_where_runs_do(folder):
    """They refused the flag, or did not know the preset; a run of an own preset could not be analysed."""
    own = ["schedule=RTH4", "model=two_layers", "dataset=digits", "scale=smoke", "training.steps=8"]
    assert run(["--config-dir", "conf", *own], folder).returncode == 0
    (trained,) = folder.rglob("seed=0")
    refused = run(["sharpness", str(trained)], folder)
    assert refused.returncode == 1 and "schedule=RTH4 is not known here" in refused.stderr, refused.stderr
    settings = ["dataset=digits", "model=two_layers", "scale=smoke"]
    for words in (
        ["--config-dir", "conf", "--help", "schedule=sawtooth"],
        ["--help", "schedule=sawtooth", f"hydra.searchpath=[file://{folder}/conf]"],
        ["doctor", "--config-dir=conf", "schedule=sawtooth", *settings],
        ["--config-dir", "conf", "advise", "budget=60", "model=two_layers", "dataset=digits"],
        ["sharpness", "-cd", "conf", str(trained)],
    ):
        done = run(words, folder)
        assert done.returncode == 0, (words, done.stderr)
    refused = run(["doctor", "--config-dir", "nowhere", *settings], folder)
    assert refused.returncode == 2 and "--config-dir=nowhere: is not a folder" in refused.stderr, refused.stderr


def test_python_reads_own_presets(folder):
    bound = bitcycle.schedule("sawtooth", total_steps=120)
    assert [bound(step).weight for step in (0, 10, 59, 60)] == [3, 4, 8, 3]
    assert bitcycle.schedule("sawtooth", total_steps=120, teeth=1)(60).weight == 6
    variant = SCHEDULES["RTH4"]()
    assert vars(variant) == vars(SCHEDULES["RTH"](name="RTH4", q_min=4, cycles=4))
    assert configure("schedule=RTH4").schedule == variant
    with pytest.raises(SettingError, match="teeth=0: is too small"):
        SCHEDULES["sawtooth"](teeth=0)


def test_changed_code_is_another_run(folder):
    before, of_package = run_hash(configure("schedule=sawtooth")), run_hash(configure("schedule=RTH"))
    assert run_hash(configure("schedule=sawtooth")) == before
    (folder / "sawtooth.py").write_text((folder / "sawtooth.py").read_text() + "\n# changed\n")
    assert run_hash(configure("schedule=sawtooth")) != before
    assert run_hash(configure("schedule=RTH")) == of_package


def test_changed_code_of_a_base_class_is_another_run(folder):
    """Only the file of the class itself was part of the name: runs with the old code of its base counted as done."""
    (folder / "steeper.py").write_text("from sawtooth import Sawtooth\n\n\nclass Steeper(Sawtooth):\n    pass\n")
    text = "# steeper\n# not of a paper\ndefaults: [/schema@_here_: steeper.Steeper, _self_]\nname: steeper\n"
    (folder / "conf" / "schedule" / "steeper.yaml").write_text(text)
    before = run_hash(configure("schedule=steeper"))
    (folder / "sawtooth.py").write_text((folder / "sawtooth.py").read_text() + "\n# changed\n")
    assert run_hash(configure("schedule=steeper")) != before


def test_a_changed_cost_model_counts_finished_runs_again(folder):
    """Its code is no part of their names, as it changes no result: their old costs were shown."""
    imports = "from dataclasses import dataclass\nfrom bitcycle.hardware import BitOps\n"
    code = f"{imports}\n\n@dataclass\nclass Chip(BitOps):\n    pass\n"
    (folder / "chip.py").write_text(code)
    (folder / "conf" / "hardware").mkdir()
    text = "# a chip\n# not of a paper\ndefaults: [/schema@_here_: chip.Chip, _self_]\nname: chip\n"
    (folder / "conf" / "hardware" / "chip.yaml").write_text(text)
    words = ("dataset=digits", "model=resnet8", "scale=smoke")
    own, of_package = plan(*words, "hardware=chip"), plan(*words)
    before, name = own.counting(), own.hash
    assert own.counting() == before and set(of_package.counting()) == set(vars(of_package.config.hardware))
    (folder / "chip.py").write_text(code + "# changed\n")
    assert own.counting() != before and plan(*words, "hardware=chip").hash == name == of_package.hash


def test_names_of_the_package_come_first(folder):
    (folder / "conf" / "schedule" / "CR.yaml").write_text("defaults: [RTH, _self_]\nname: CR\n")
    assert Presets("schedule")["CR"].values["profile"] == "cosine"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("defaults: [/schema@_here_: nowhere.Thing, _self_]", "nowhere.Thing: cannot be imported"),
        ("defaults: [/schema@_here_: pathlib.Path, _self_]", "pathlib.Path: declares no settings"),
        ("q_min: 3", "names no class of its settings"),
    ],
)
def test_files_that_name_no_class_of_settings(folder, text, problem):
    (folder / "conf" / "schedule" / "wrong.yaml").write_text(f"# wrong\n# wrong\n{text}\nname: wrong\n")
    with pytest.raises(SettingError, match=problem):
        Presets("schedule")["wrong"]()


def test_the_command_refuses_a_file_that_names_no_class(folder):
    (folder / "conf" / "schedule" / "wrong.yaml").write_text("# wrong\n# wrong\nq_min: 3\nname: wrong\n")
    done = run(["--config-dir", "conf", "schedule=wrong", "dry_run=true"], folder)
    assert done.returncode == 2 and "Remedy" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_folder_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv(presets.FOLDERS, "/nowhere/at/all")
    with pytest.raises(SettingError, match=r"BITCYCLE_CONF=/nowhere/at/all: is not a folder"):
        list(SCHEDULES)
