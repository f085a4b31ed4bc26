"""Runs on a machine that is lent for a while and reaches nothing: code, data and unfinished runs go there, results come back.

    python -m bitcycle.sweep.parcel pack parcel --data cifar10 --job "+sweeps=better/fig3 dataset=cifar10 model=resnet74"
    # there, with the packages of this repository installed; pack prints the whole lines
    mkdir work && cat parcel/bitcycle.tar.* | tar -x -C work && cd work
    PYTHONPATH=src:$PYTHONPATH python -m bitcycle.sweep.parcel run --minutes 9 --out ../out
    python -m bitcycle.sweep.parcel unpack results.tar.*            # here, with what came back

Runs that are finished here are not trained there; runs that the lease cuts off come back with their checkpoints, and the next
parcel takes them along: a sweep goes on from lease to lease, on one machine or another, as if it had not been cut.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_WRONG_CONFIGURATION, RunError
from bitcycle.settings import SettingError
from bitcycle.sweep.execution import worst
from bitcycle.training.checkpoint import write_atomically
from bitcycle.training.environment import COMMIT_VARIABLE, commit
from bitcycle.training.run_folder import RunFolder, read_object

logger = logging.getLogger("bitcycle.sweep.parcel")  # as a command this module has another name

CODE = ("train.py", "pyproject.toml", "conf", "src", "sweeps")
"""What is packed of the repository."""
RUNS = Path("results/runs")
JOBS = "parcel.json"
GRACE_SECONDS = 60.0
"""Time for runs to write their checkpoints when the lease ends."""
MIB = 2**20


@dataclass(frozen=True)
class Found:
    """A run folder below results/runs: its path from there, and its state."""

    name: Path
    folder: RunFolder
    state: str


def runs_below(root: Path) -> list[Found]:
    """The runs below a folder SCALE/NAME/seed=N, finished ones first."""
    folders = [
        (path.parent.relative_to(root), RunFolder(path.parent)) for path in sorted(root.glob("*/*/*/status.json"))
    ]
    found = [Found(name, folder, folder.state()) for name, folder in folders]
    return sorted(found, key=lambda run: run.state != "done")


def pack(
    root: Path, target: Path, jobs: Sequence[str], data: Sequence[str], data_root: Path, part_mib: float
) -> list[Path]:
    """Write the parts of a parcel; returns their paths.

    Args:
        root: of the repository; its finished runs go along as names, its unfinished ones of the jobs' scales with checkpoints.
        target: folder of the parts bitcycle.tar.01-of-03, ...
        jobs: arguments of `python train.py -m`, each in one text, in the order of their worth.
        data: names of data sets below data_root, as cifar10 or nli/sick; they lie below the folder `data` of the parcel.
        data_root: folder of the data sets.
        part_mib: MiB of a part.

    Raises:
        SettingError: outside of the repository, without jobs, for data that are not there, or a part of no size.
    """
    _check_root(root)
    if not jobs:
        raise SettingError("job", "", "names nothing to run", 'give --job "+sweeps=PAPER/ITEM", once or several times')
    if missing := [name for name in data if not (data_root / name).exists()]:
        remedy = (
            "point --data-root (or BITCYCLE_DATA) at the folder that holds it; a short run here downloads what is free"
        )
        raise SettingError("data", missing[0], f"is not below {data_root}", remedy)
    arguments = [shlex.split(job) for job in jobs]
    scales = {value for job in arguments for key, _, value in (word.partition("=") for word in job) if key == "scale"}
    scales |= {"paper"} if any(all(not word.startswith("scale=") for word in job) for job in arguments) else set()
    found = runs_below(root / RUNS)
    content = {"jobs": arguments, "commit": commit(), "done": [str(run.name) for run in found if run.state == "done"]}

    def write(tar: tarfile.TarFile) -> None:
        for name in CODE:
            tar.add(root / name, name, filter=_without_caches)
        for name in data:
            tar.add(data_root / name, f"data/{name}")
        for run in found:
            if run.state == "done":
                files: Iterable[Path] = (run.folder.status, run.folder.summary)
            else:
                files = _files(run) if run.name.parts[0] in scales else ()
            for file in files:
                tar.add(file, RUNS / run.name / file.relative_to(run.folder.path))
        _add_text(tar, JOBS, json.dumps(content))

    return write_parts(target, "bitcycle.tar", write, part_mib)


def _check_root(root: Path) -> None:
    if missing := [name for name in CODE if not (root / name).exists()]:
        raise SettingError("folder", root, f"has no {missing[0]}", "start this in the repository's root")


def run(folder: Path, seconds: float, out: Path, part_mib: float, weights: bool = False) -> int:
    """Train the jobs of an unpacked parcel until the time is up, and write results after each; returns the worst exit code.

    Args:
        folder: the unpacked parcel.
        seconds: the time; then runs are stopped, each with a checkpoint, in at most GRACE_SECONDS more.
        out: folder of the parts results.tar.01-of-03, ...
        part_mib: MiB of a part.
        weights: whether the weights of finished runs come back, too, as analyses of them need.

    Raises:
        SettingError: if there is no parcel in the folder.
    """
    content = read_object(folder / JOBS)
    if not content:
        raise SettingError(
            "folder", folder, f"holds no {JOBS}", "start this in the folder that the parcel was unpacked in"
        )
    if seconds <= 0:
        problem = "leaves no time to train"
        raise SettingError(
            "minutes", (seconds + GRACE_SECONDS) / 60, problem, "give more than 1, which is for checkpoints"
        )
    deadline = time.monotonic() + seconds
    paths = os.pathsep.join(filter(None, [str(folder / "src"), os.environ.get("PYTHONPATH")]))  # packages may lie there
    environment = {**os.environ, "PYTHONPATH": paths, COMMIT_VARIABLE: content["commit"] or ""}
    codes = []
    for job in content["jobs"]:
        if time.monotonic() >= deadline:
            codes.append(EXIT_INTERRUPTED)
            break
        logger.info("%.0f s left: %s", deadline - time.monotonic(), shlex.join(job))
        command = [sys.executable, str(folder / "train.py"), "-m", *job, f"data_root={folder / 'data'}"]
        codes.append(until(deadline, command, folder, environment))
        write_results(folder, out, part_mib, weights, set(content["done"]))
        if codes[-1] == EXIT_INTERRUPTED:
            break
    return worst(codes)


def until(deadline: float, command: Sequence[str], folder: Path, environment: dict[str, str]) -> int:
    """The exit code of a command that is asked to end at the deadline or a signal, and made to end GRACE_SECONDS later."""
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        return process.wait(max(deadline - time.monotonic(), 0))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        logger.error("still running %.0f s after it was asked to stop: killed", GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return EXIT_INTERRUPTED


def write_results(folder: Path, out: Path, part_mib: float, weights: bool, known: set[str]) -> list[Path]:
    """Write the parts of what comes back: finished runs, then unfinished ones; returns their paths."""
    found = [run for run in runs_below(folder / RUNS) if str(run.name) not in known]

    def write(tar: tarfile.TarFile) -> None:
        for run in found:
            kept = _files(run) if weights or run.state != "done" else _files(run, "checkpoint")
            for file in kept:
                tar.add(file, run.name / file.relative_to(run.folder.path))

    logger.info("%d runs come back, %d of them finished", len(found), sum(run.state == "done" for run in found))
    return write_parts(out, "results.tar", write, part_mib)


def unpack(parts: Sequence[Path], root: Path) -> dict[str, str]:
    """Put the runs of a parcel's results among ours, each in one piece: name -> what was done.

    A run that is finished here, or is further here, stays as it is.

    Raises:
        RunError: if a process trains one of the runs here, or the parts are not there or not one whole parcel.
    """
    if missing := [path for path in parts if not path.is_file()]:
        raise RunError(f"{missing[0]} is not there. Give the results.tar.* that came back.")
    if len(parts) != len({path.name for path in parts}) or any(_count(path) != len(parts) for path in parts):
        raise RunError(
            f"{', '.join(path.name for path in parts)}: not all parts of one parcel. Give all of NAME.01-of-NN to NN."
        )
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".parcel-") as temporary:
        try:
            with tempfile.TemporaryFile(dir=root) as whole:
                for part in sorted(parts):
                    whole.write(part.read_bytes())
                whole.seek(0)
                with tarfile.open(fileobj=whole) as tar:
                    tar.extractall(temporary, filter="data")
        except tarfile.TarError as error:
            raise RunError(f"{', '.join(map(str, parts))}: {error}. Fetch the parts again.") from error
        came = runs_below(Path(temporary))
        if busy := [run for run in came if RunFolder(root / run.name).is_in_use()]:
            raise RunError(f"a process trains {root / busy[0].name} here. Wait for it, or stop it.")
        return {str(run.name): _take_in(run, root / run.name) for run in came}


def _count(part: Path) -> int:
    """How many parts there are, as the name of one says; 0 if it is none."""
    count = part.name.rpartition("-of-")[2]
    return int(count) if count.isdecimal() else 0


def _take_in(came: Found, place: Path) -> str:
    ours = RunFolder(place)
    step, our_step = came.folder.read_status().get("step", 0), ours.read_status().get("step", 0)
    if ours.state() == "done":
        return "is finished here"
    if came.state != "done" and our_step >= step and ours.state() == "resumable":
        return f"is as far here (step {our_step})"
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        shutil.move(place, came.folder.path.with_name(f".replaced-{place.name}"))  # goes with the temporary folder
    came.folder.path.rename(place)
    return "finished" if came.state == "done" else f"{came.state}, step {step}"


def write_parts(folder: Path, name: str, write: Callable[[tarfile.TarFile], None], part_mib: float) -> list[Path]:
    """Write a tar file in parts `name`.01-of-03, ... in place of those that are there; returns their paths."""
    if part_mib <= 0:
        raise SettingError("part_mib", part_mib, "is no size", "give a positive number of MiB")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as whole:
        with tarfile.open(fileobj=whole, mode="w") as tar:
            write(tar)
        size, part = whole.tell(), int(part_mib * MIB)
        whole.seek(0)
        count = -(-size // part)
        paths = [folder / f"{name}.{number:02d}-of-{count:02d}" for number in range(1, count + 1)]
        for path in paths:
            write_atomically(path, lambda stream: stream.write(whole.read(part)))
    for old in set(folder.glob(f"{name}.[0-9]*")) - set(paths):
        old.unlink()
    return paths


def _files(run: Found, without: str = "") -> list[Path]:
    """The files of a run that another machine needs to go on or to report."""
    files = (path for path in sorted(run.folder.path.rglob("*")) if path.is_file())
    return [path for path in files if path.name not in (".lock", "previous.pt") and path.parent.name != without]


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name or member.name.endswith(".egg-info") else member


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    tar.addfile(member, io.BytesIO(text.encode()))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bitcycle.sweep.parcel", description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="write a parcel")
    packing.add_argument("target", type=Path, help="folder of its parts")
    packing.add_argument(
        "--job", action="append", default=[], help="arguments of train.py -m; several in the order of worth"
    )
    packing.add_argument("--data", action="append", default=[], help="a data set by its name below --data-root")
    packing.add_argument(
        "--data-root", type=Path, default=os.environ.get("BITCYCLE_DATA", "data"), help="folder of the data sets"
    )
    running = verbs.add_parser("run", help="train its jobs there until the time is up")
    running.add_argument(
        "--minutes", type=float, required=True, help="time, of which the last minute may go to checkpoints"
    )
    running.add_argument("--out", type=Path, required=True, help="folder of what comes back")
    running.add_argument("--weights", action="store_true", help="bring the weights of finished runs back, too")
    for verb in (packing, running):
        verb.add_argument("--part-mib", type=float, default=15.0, help="MiB of a part")
    unpacking = verbs.add_parser("unpack", help="put what came back among the runs here")
    unpacking.add_argument("parts", type=Path, nargs="+")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Pack, run or unpack as the command line says; the exit code is that of the worst run."""
    from bitcycle.training.display import set_up_console

    arguments = _arguments(words)
    set_up_console()
    try:
        if arguments.verb == "pack":
            chosen = arguments.job, arguments.data, arguments.data_root.expanduser()
            parts = pack(Path.cwd(), arguments.target, *chosen, arguments.part_mib)
            size = sum(part.stat().st_size for part in parts) / MIB
            print(f"{len(parts)} parts, {size:.1f} MiB: {arguments.target}. Beside it, on the other machine:")
            print(
                f"[ -d work ] || (mkdir work && cat {arguments.target.name}/bitcycle.tar.* | tar -x -C work); cd work && \\"
            )
            print("  PYTHONPATH=src:$PYTHONPATH python -m bitcycle.sweep.parcel run --minutes 9 --out ../out")
        elif arguments.verb == "run":
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            seconds = 60 * arguments.minutes - GRACE_SECONDS
            return run(Path.cwd(), seconds, arguments.out, arguments.part_mib, arguments.weights)
        else:
            _check_root(Path.cwd())
            for name, done in unpack(arguments.parts, RUNS).items():
                print(f"{name}: {done}")
    except SettingError as error:
        print(f"wrong configuration: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
