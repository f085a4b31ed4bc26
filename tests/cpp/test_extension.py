"""Operators in C++: compiled once, in PyTorch's own threads, and done without where that cannot be."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bitcycle.cpp import extension
from bitcycle.cpp.operators import AFFINE


def test_the_page_lists_every_operator():
    folder = Path(extension.__file__).parent
    sources = "".join(path.read_text() for path in folder.rglob("*.cpp"))
    listed = set(re.findall(r"`(\w+)`", (folder / "README.md").read_text()))
    assert listed >= set(re.findall(r'library.def\("(\w+)"', sources)) != set()


def test_a_file_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    try:
        made = extension._compiled(source)
    except OSError as error:
        pytest.skip(str(error))
    assert ctypes.CDLL(str(made)).seven() == 7
    written = made.stat().st_mtime_ns
    assert extension._compiled(source) == made
    assert made.stat().st_mtime_ns == written
    source.write_text('extern "C" int seven() { return 8; }\n')
    assert extension._compiled(source) != made


@pytest.mark.parametrize("problem", ["the CPU", "the compiler", "the file"])
def test_without_operators_the_log_says_so(problem, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("no C++")
    if problem == "the compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level("INFO", "bitcycle"):
        assert extension.operators(source, ("no_such_thing",) if problem == "the CPU" else ()) is None
    assert "broken.cpp is not used" in caplog.text


def test_there_is_one_openmp_library():
    """Two of them would have two pools of threads, whose waiting threads keep each other from working."""
    if extension.operators(AFFINE) is None:
        pytest.skip("no compiler")
    # In a process of its own: other libraries, such as scikit-learn, bring one of theirs into this one.
    program = "from bitcycle.cpp.operators import *; operators(AFFINE); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert len({line.split()[-1] for line in maps.splitlines() if "gomp" in line}) == 1
