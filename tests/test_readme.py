"""The documents are true: generated parts are current, examples run, named files and commands exist."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bitcycle.door import sub_commands
from bitcycle.help import help_text
from tests.conftest import ROOT, configure, run_train

README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (document.name, kind, block)
    for document in DOCUMENTS
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
]
"""(document, language, text) of every code block."""


def test_generated_parts_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = runpy.run_path(str(ROOT / "scripts" / "readme.py"))
    for document in script["DOCUMENTS"]:
        assert script["fill"](document) == document.read_text(), f"{document.name}: run `make readme`"


def test_readme_is_short():
    assert len(README.split()) <= 1400


SNIPPETS = {f"{name} {count}": block for count, (name, kind, block) in enumerate(BLOCKS) if kind == "python"}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_snippets_run(snippet, capsys, monkeypatch):
    """In the order of a reader, each by itself; what a comment behind print(...) says is what is printed."""
    code = SNIPPETS[snippet]
    monkeypatch.setattr(subprocess, "run", lambda command, **_: run_train(*command[3:]))  # python -m bitcycle ...
    exec(compile(code, snippet, "exec"), {"__name__": snippet})
    printed = capsys.readouterr().out.splitlines()
    for line, expected in zip(printed, re.findall(r"^print\(.*\)  # (Precision\(.*\))$", code, re.MULTILINE)):
        assert line == expected


COMMANDS = {
    f"{name}: {line.partition(' #')[0].strip()}": shlex.split(line, comments=True)
    for name, kind, block in BLOCKS
    if kind == "bash"
    for line in block.splitlines()
    if line.strip() and not line.startswith("#") and "--config-dir" not in line  # tests/test_own_presets.py runs these
}
PROGRAMS = {("python", "train.py"), ("torchrun", "--nproc-per-node=4")}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_documents_can_be_typed(command, tmp_path, monkeypatch):
    """Settings compose, the models of plain runs are known, sub-commands and make targets exist; anything else is refused."""
    words = COMMANDS[command]
    begins = [index for index, word in enumerate(words) if word in ("bitcycle", "python", "make", "torchrun")]
    program, *words = words[begins[0] :] if begins else words  # without PYTHONPATH=... and `timeout 8m`
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.search(r"^\.(?:\[(.*)\])?$", words[-1])
        assert extras and set((extras[1] or "").split(",")) <= {"", *project["optional-dependencies"]}
    elif program in ("mkdir", "tar") or (program == "bitcycle" and words[0] in sub_commands()):
        pass
    elif program == "pip":
        named = re.findall(r"\.\[(.*)\]", " ".join(words))
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[0] == "install" and {extra for names in named for extra in names.split(",")} <= set(extras)
    elif program == "python" and words[0] == "-m":
        assert importlib.util.find_spec(words[1])
    elif words[:1] == ["--help"] or words[1:2] == ["--help"]:
        assert help_text(*words[words.index("--help") + 1 :])
    else:
        assert program == "bitcycle" or (program, words[0]) in PROGRAMS, program
        words = [word for word in words if "=" in word and not word.startswith(("hydra", "--"))]
        sweeps = [word for word in words if word.startswith("+sweeps=")]
        assert all((ROOT / "sweeps" / f"{word.partition('=')[2]}.yaml").is_file() for word in sweeps)
        assert configure(*(first_value(word) for word in words if word not in sweeps)).model.name


def first_value(word: str) -> str:
    """The first of several values that a word sweeps over."""
    key, _, value = word.partition("=")
    value = re.sub(r"^(?:range|choice)\((.*?)[,)].*", r"\1", value)
    return f"{key}={value if value[:1] in '[{' else value.split(',')[0]}"


RECIPES = [
    row[1]
    for document in DOCUMENTS
    for row in re.finditer(r"^\| .* \| `([\w.]+=[^`]*)` \|$", document.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_compose(recipe):
    assert configure(*recipe.split()).model.name
    assert len(RECIPES) >= 5


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    page = (tmp_path / "site" / "api" / "bitcycle" / "index.html").read_text()
    assert "quantize_model" in page and "PrecisionController" in page
    assert "How to add something" in (tmp_path / "site" / "adding" / "index.html").read_text()


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
    for document in (*DOCUMENTS, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"`make ([a-z-]+)", document.read_text()):
            if target not in ("PYTHON",):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_rooms_mirror_the_configuration():
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} - {"scale", "hydra"}
    packages = {path.parent.name for path in (ROOT / "src" / "bitcycle").glob("*/__init__.py")}
    assert groups <= packages


ROOMS = (
    *(
        {
            "settings",
            "errors",
            "cache",
            "files",
            "signals",
            "threads",
            "optional_imports",
            "precision",
            "module",
            "door",
        },
        {"presets", "device"},
    ),
    *(
        {"randomness", "distributed", "shapes", "schedule"},
        {"cpp"},
        {"quantizer", "hardware"},
        {"model"},
        {"layer"},
        {"dataset"},
    ),
    *(
        {"task"},
        {"recipe"},
        {"configuration", "guard"},
        {"training"},
        {"sweep"},
        {"integrations"},
    ),
    *({"picture"}, {"benchmark"}, {"train_command", "doctor", "help", "cli", "__main__"}, {"reproduction"}),
)
"""Modules and packages from the bottom to the top: each knows what stands below it and its own set, never what stands above."""

IMPORT = re.compile(r"^\s*(?:from bitcycle\.(\w+)|from bitcycle import (\w+)|import bitcycle\.(\w+))", re.MULTILINE)
PACKAGE = ROOT / "src" / "bitcycle"
SOURCES = sorted(set(PACKAGE.glob("**/*.py")) - {PACKAGE / "__init__.py"})


@pytest.mark.parametrize("floor", range(len(ROOMS)), ids=lambda floor: "-".join(sorted(ROOMS[floor])))
def test_rooms_know_only_what_lies_below(floor):
    above = set().union(*ROOMS[floor + 1 :])
    for path in SOURCES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ROOMS[floor]:
            known = {name for names in IMPORT.findall(path.read_text()) for name in names if name} - {room}
            assert not known & above, f"{path} imports {sorted(known & above)} from above"


def test_the_library_reaches_the_papers_through_one_door():
    """Whoever deletes src/bitcycle/reproduction keeps a library that works."""
    library = [path for path in (ROOT / "src").glob("**/*.py") if PACKAGE / "reproduction" not in path.parents]
    names = re.compile(r"bitcycle\.reproduction|from bitcycle import .*reproduction")
    naming = {path.name for path in library if names.search(path.read_text())}
    assert naming == {"door.py"}
    assert any("bitcycle_plugins" in path.parts for path in library)


def test_every_room_has_its_place():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert rooms <= set().union(*ROOMS), "put new modules and packages into ROOMS"


def test_the_drawing_shows_every_room_on_its_floor():
    drawing = (ROOT / "CONTRIBUTING.md").read_text().partition("```text")[2].partition("```")[0]
    lines = [re.split(r"\s{8,}", line[20:].strip())[0].split() for line in drawing.strip("\n").splitlines()]
    floors = [{next(i for i, floor in enumerate(ROOMS) if room in floor) for room in line} for line in lines]
    assert {room for line in lines for room in line} == set().union(*ROOMS) - {"__main__"}
    assert all(len(floor) == 1 for floor in floors) and floors == sorted(floors, key=max, reverse=True)


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
