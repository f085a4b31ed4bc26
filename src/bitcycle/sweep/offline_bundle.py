"""Offline machines: code, data and unfinished runs go there in a tar file, results and checkpoints come back in another.

    bitcycle bundle pack bundle.tar --data cifar10         # prints what to type on the other machine
    bitcycle bundle unpack results.tar                     # here, with what came back

Runs that are finished here are not trained there; runs that the end of the time cuts off continue exactly from the next bundle.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_CONFIGURATION, RunError
from bitcycle.settings import SettingError
from bitcycle.training.environment import COMMIT_VARIABLE, commit
from bitcycle.training.run_folder import RunFolder

CODE = ("train.py", "pyproject.toml", "conf", "src", "sweeps")
RUNS = Path("results/runs")
LEFT_OUT = ("__pycache__", ".egg-info", "/.lock", "/previous.pt")
THERE = """On the other machine, with the packages of this repository and 9 minutes, for example:
mkdir -p work && tar -xf {file} -C work && cd work
{variable}={commit} PYTHONPATH=src:$PYTHONPATH timeout 8m python train.py -m data_root=data +sweeps=PAPER/ITEM
tar -cf ../results.tar -C results/runs ."""


def pack(root: Path, target: Path, data: Sequence[str], data_root: Path) -> None:
    """Write a bundle: code, data sets below data_root, all of unfinished runs, and of finished ones that they are finished.

    `data` are names below data_root, such as cifar10 or nli/sick.

    Raises:
        SettingError: outside of the repository, or for data that are not there.
    """
    if missing := [name for name in CODE if not (root / name).exists()]:
        raise SettingError("folder", root, f"has no {missing[0]}", "start this in the repository's root")
    if missing := [name for name in data if not (data_root / name).exists()]:
        remedy = "point --data-root at the folder that holds it"
        raise SettingError("data", missing[0], f"is not below {data_root}", remedy)
    with tarfile.open(target, "w") as tar:
        for name in CODE:
            tar.add(root / name, name, filter=_needed)
        for name in data:
            tar.add(data_root / name, f"data/{name}")
        for name, folder in runs_below(root / RUNS).items():
            for path in (folder.status, folder.summary) if folder.state() == "done" else (folder.path,):
                tar.add(path, RUNS / name / path.relative_to(folder.path), filter=_needed)


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(LEFT_OUT) else member


def runs_below(root: Path) -> dict[str, RunFolder]:
    """The runs below a folder SCALE/NAME/seed=N."""
    files = sorted(root.glob("*/*/*/status.json"))
    return {str(file.parent.relative_to(root)): RunFolder(file.parent) for file in files}


def unpack(file: Path, root: Path) -> dict[str, str]:
    """Put the runs that came back among ours, each in one piece: name -> what was done. A run that is as far here stays.

    Raises:
        RunError: if a process trains one of the runs here, or the file cannot be read.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".bundle-") as temporary:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(temporary, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise RunError(f"{file}: {error}. Fetch it again.") from error
        came = runs_below(Path(temporary))
        if busy := [name for name in came if RunFolder(root / name).is_in_use()]:
            raise RunError(f"a process trains {root / busy[0]} here. Wait for it, or stop it.")
        return {name: _take_in(folder, root / name) for name, folder in came.items()}


def _take_in(came: RunFolder, place: Path) -> str:
    ours, step = RunFolder(place), came.read_status().get("step", 0)
    as_far = ours.state() == "resumable" and ours.read_status().get("step", 0) >= step and came.state() != "done"
    if ours.state() == "done" or as_far:
        return "is as far here"
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    came.path.rename(place)
    return f"{ours.state()}, step {step}"


def main(words: Sequence[str] | None = None) -> int:
    """Pack or unpack as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bitcycle bundle", description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing, unpacking = verbs.add_parser("pack"), verbs.add_parser("unpack")
    packing.add_argument("--data", action="append", default=[], help="a data set by its name below --data-root")
    packing.add_argument("--data-root", type=Path, default=os.environ.get("BITCYCLE_DATA", "data"))
    for verb in (packing, unpacking):
        verb.add_argument("file", type=Path)
    given = parser.parse_args(words)
    try:
        if given.verb == "pack":
            pack(Path.cwd(), given.file, given.data, given.data_root.expanduser())
            print(THERE.format(file=given.file.name, variable=COMMIT_VARIABLE, commit=commit() or ""))
        else:
            print("\n".join(f"{name}: {done}" for name, done in unpack(given.file, RUNS).items()))
    except (SettingError, RunError) as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION if isinstance(error, SettingError) else EXIT_FAILED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
