"""Kill runs at random moments, resume them, and compare them bit by bit with unbroken ones: `make fuzz KILLS=1000 JOBS=2`.

What is run is drawn: rows of the settings table, crossings of its tasks with all schedules and quantizers, and trainings by
other libraries with our callbacks, each with a seed of its own. Each start is forked from a process that has imported everything,
gets SIGKILL after a random time, and goes on from what then lies in its folder. Draws can be repeated, moments cannot.
Each run is recorded when it ends, and the same command goes on from the record; to try a run again, delete its row.
"""

import argparse
import csv
import dataclasses
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import torch

from bitcycle.quantizer import QUANTIZERS
from bitcycle.schedule import SCHEDULES
from bitcycle.settings import SettingError
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.run import execute
from tests.conftest import ROOT, configure
from tests.fuzz_callbacks import CALLBACKS, preload
from tests.made_data import MAKERS, placed
from tests.settings import FEWER_CYCLES, OPTIONS, RESUME, SMALL_IMAGES, TASKS, run_of
from tests.training.test_resume import assert_equal, result

RECORD = ROOT / "results" / "summary" / "fuzz.csv"
MOST_KILLS = 16
"""Of one run."""
PATIENCE = 1800.0
"""Seconds after which a start has hung, on a machine with much else to do."""
BITS = [
    [],
    ["schedule.q_min=4"],
    ["schedule.q_min=2", "schedule.q_max=4"],
    ["schedule.q_min=1", "schedule.q_max=32"],
    ["schedule.q_min=4", "schedule.q_max=32"],
]
"""Drawn until a schedule stays within the bits of a quantizer."""


@dataclasses.dataclass
class Case:
    """One run that was killed and resumed; a row of the record."""

    number: int
    source: str
    task: str
    schedule: str
    quantizer: str
    seed: int
    kills: int = 0
    resumed: int = 0
    """Kills after which a checkpoint was there to go on from."""
    outcome: str = "equal"


def draw_plan(case: int, generator: random.Random, folder: Path) -> tuple[Case, Callable[[str], Plan]]:
    """A drawn run, and what plans it below a folder of `folder`."""
    while True:
        seed = generator.randrange(1000)
        if generator.random() < 0.5:
            source = generator.choice(list(RESUME))
            overrides = run_of(source)
        else:
            task, schedule, quantizer = (generator.choice(list(table)) for table in (TASKS, SCHEDULES, QUANTIZERS))
            source = f"{task} x {schedule} x {quantizer}"
            overrides = _crossing(task, schedule, quantizer) + generator.choice(BITS)
        overrides = [*placed(overrides, folder), "training.device=cpu", "training.threads=1", f"seed={seed}"]
        overrides.append(f"training.checkpoint_seconds={generator.choice([0, 0.05, 0.2])}")
        settings = dict(override.partition("=")[::2] for override in overrides)
        base = {"dataset": "digits", "model": "resnet8", "scale": "smoke"}
        words = [f"{key}={value}" for key, value in (base | settings).items()]

        def planned(name: str, words: list[str] = words) -> Plan:
            return make_plan(configure(*words, f"results_root={folder}/runs/{case}/{name}"))

        try:
            config = planned("unbroken").config
        except (SettingError, ValueError):
            continue  # a crossing that does not go together, and says so
        return Case(case, source, config.task.name, config.schedule.name, config.quantizer.name, seed), planned


def _crossing(task: str, schedule: str, quantizer: str) -> list[str]:
    row = TASKS[task]
    base = row if "dataset=" in " ".join(row) else [f"{key}={value}" for key, value in SMALL_IMAGES.items()] + row
    options = OPTIONS.get(schedule, FEWER_CYCLES.get(schedule, []))
    own = [option for option in options if not option.startswith(("model=", "quantizer="))]
    return [*base, *own, f"schedule={schedule}", f"quantizer={quantizer}"]


def start(action: Callable[[], object], log: Path) -> int:
    """The process id of a forked action, whose output goes to `log`; it exits with 0 or 1."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        random.seed(os.urandom(8))  # nothing may depend on these
        np.random.seed(int.from_bytes(os.urandom(4)))
        torch.manual_seed(int.from_bytes(os.urandom(4)))
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(child: int, patience: float) -> int | None:
    """The exit code of a process, or None if it goes on after so many seconds."""
    deadline = time.monotonic() + patience
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(min(0.002, patience))


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def torment(
    case: Case, generator: random.Random, action: Callable[[], object], seconds: float, folder: Path, saved: str
) -> None:
    """Start an action again and again, killed after up to a drawn part of `seconds`, then let it end.

    Short parts give many kills, of which some fall into the setup, long ones late kills.

    Args:
        saved: pattern of a file below `folder` that is there once something can be resumed.
    """
    longest = generator.uniform(0.3, 1) * seconds
    for _ in range(generator.randint(1, MOST_KILLS)):
        child = start(action, folder / "log")
        code = finish(child, generator.uniform(0, longest))
        if code is not None:
            case.outcome = "equal" if code == 0 else f"exit code {code}"
            return
        kill(child)
        case.kills += 1
        case.resumed += next(folder.rglob(saved), None) is not None
    child = start(action, folder / "log")
    code = finish(child, PATIENCE)
    if code is None:
        kill(child)
    if code != 0:
        case.outcome = "hangs" if code is None else f"exit code {code}"


def fuzz_run(number: int, seed: int, folder: Path) -> Case:
    """Draw a run, do it unbroken and killed, and compare."""
    generator = random.Random(f"{seed} {number}")
    here = folder / "runs" / str(number)
    if CALLBACKS and generator.random() < 0.1:
        name = generator.choice(list(CALLBACKS))
        callback = CALLBACKS[name]
        case = Case(number, f"callback of {name}", name, callback.schedule, "sbm", generator.randrange(1000))
        actions = [lambda part=part: callback.train(here / part, case.seed) for part in ("unbroken", "killed")]
        compare, saved = callback.compare, callback.saved
    else:
        case, planned = draw_plan(number, generator, folder)
        plans = [planned(part) for part in ("unbroken", "killed")]
        actions = [lambda plan=plan: execute(plan) for plan in plans]
        saved = "last.pt"

        def compare(_killed: Path, _unbroken: Path) -> None:
            assert_equal(result(plans[1].folder), result(plans[0].folder))

    for part in ("unbroken", "killed"):
        (here / part).mkdir(parents=True)
    began = time.monotonic()
    code = finish(child := start(actions[0], here / "unbroken" / "log"), PATIENCE)
    if code is None:
        kill(child)
    if code != 0:
        case.outcome = f"unbroken: {'hangs' if code is None else f'exit code {code}'}"
    else:
        torment(case, generator, actions[1], time.monotonic() - began, here / "killed", saved)
    if case.outcome == "equal":
        try:
            compare(here / "killed", here / "unbroken")
        except (AssertionError, OSError, LookupError, RuntimeError) as error:
            case.outcome = f"differs: {str(error).strip().splitlines()[0]}"
    if case.outcome == "equal":
        shutil.rmtree(here)
    return case


def fuzz(kills: int, jobs: int, seed: int, folder: Path, known: list[Case]) -> Iterator[Case]:
    """Cases that are not known yet, as they end, until there are that many kills with those of the known ones."""
    context = multiprocessing.get_context("fork")
    known_numbers = {case.number for case in known}
    numbers = (number for number in itertools.count() if number not in known_numbers)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        done, running = sum(case.kills for case in known), set()
        while done < kills:
            while len(running) < jobs:
                running.add(pool.submit(fuzz_run, next(numbers), seed, folder))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                case = future.result()
                done += case.kills
                yield case
        for future in running:
            yield future.result()


def read_record(path: Path) -> list[Case]:
    """The cases of a record; none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as stream:
        return [
            Case(**{each.name: each.type(row[each.name]) for each in dataclasses.fields(Case)})
            for row in csv.DictReader(stream)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--record", type=Path, default=RECORD, help="gets a row when a run ends; those it has count")
    parser.add_argument("--folder", type=Path, help="for the runs; those that ended otherwise stay there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bitcycle-fuzz-"))
    cases = read_record(options.record)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, open(options.record, "a", newline="", buffering=1) as stream:
        writer = csv.DictWriter(stream, [field.name for field in dataclasses.fields(Case)], lineterminator="\n")
        if not stream.tell():
            writer.writeheader()
        patch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing without it
        for name, make in MAKERS.values():
            make(folder / name, patch)
        for case in fuzz(options.kills, options.jobs, options.seed, folder, list(cases)):
            cases.append(case)
            writer.writerow(dataclasses.asdict(case))
            if case.outcome != "equal":
                print(f"{case.number} {case.source}, seed {case.seed}: {case.outcome}", flush=True)
            elif len(cases) % 20 == 0:
                print(f"{len(cases)} runs, {sum(case.kills for case in cases)} kills", flush=True)
    unequal = sum(case.outcome != "equal" for case in cases)
    kills = sum(case.kills for case in cases)
    print(f"{kills} kills of {len(cases)} runs, of which {unequal} ended otherwise; {time.monotonic() - began:.0f} s")
    if unequal:
        print(f"their run folders are in {folder}/runs")
    else:
        shutil.rmtree(folder)
    return int(unequal > 0)


if __name__ == "__main__":
    sys.exit(main())
