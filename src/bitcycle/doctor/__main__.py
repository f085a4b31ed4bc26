"""`bitcycle doctor [json] [SETTING=VALUE ...]`: whether the named run or sweep can work on this machine, and how long it takes.

    bitcycle doctor                                     the machine; the run of `make demo`
    bitcycle doctor schedule=RTH model=resnet74         and this run
    bitcycle doctor +sweeps=better/fig3 scale=mini      and all runs of a sweep
    bitcycle doctor json schedule=RTH model=resnet74    as one JSON object

Exit codes: 0 it can work; 3 its data are missing; 2 its configuration is invalid; 1 anything else.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from bitcycle.configuration import refuse_renamed_options
from bitcycle.device import choose_device
from bitcycle.doctor.finding import Finding, describe, exit_code, row
from bitcycle.doctor.machine import machine_findings
from bitcycle.doctor.numerics import numerics_findings
from bitcycle.doctor.work import dataset_findings, run_findings, sweep_findings
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DATA_MISSING, EXIT_DONE, EXIT_WRONG_CONFIGURATION, RunError
from bitcycle.files import resource_root
from bitcycle.guard import guarded
from bitcycle.settings import SettingError, nearest
from bitcycle.sweep.composition import composing
from bitcycle.sweep.grid import Overrides
from bitcycle.sweep.registry import Compose, SweepRun, index_runs, read_sweep, sweep_files
from bitcycle.sweep.table import PLACES
from bitcycle.training.display import console

SWEEP = "+sweeps"
DEMO = {"dataset": "digits", "model": "resnet8", "schedule": "RTH", "scale": "mini"}
"""The run of `make demo`, which needs no data; examined if no run is named."""
ANSWERS = {EXIT_DONE: "it can work here", EXIT_DATA_MISSING: "its data are missing"}


def main() -> int:
    """Run the command; returns the exit code."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("words", nargs="*", metavar="SETTING=VALUE", help="settings of train.py; json: print JSON")
    given = parser.parse_args()
    settings = [word for word in given.words if word != "json"]
    return guarded(lambda: examine(parse(settings), as_json="json" in given.words))


def parse(words: list[str]) -> Overrides:
    """Settings as on the command line of train.py. Raises SettingError for a word without a value."""
    bare = next((word for word in words if "=" not in word), None)
    if bare is not None:
        raise SettingError(bare, "", "is not a setting with a value", "write SETTING=VALUE, such as schedule=RTH")
    refuse_renamed_options(words)
    found = {key: value for key, _, value in (word.partition("=") for word in words)}
    return found if set(found) - set(PLACES) else {**DEMO, **found}


def examine(settings: Overrides, as_json: bool) -> int:
    """Print the findings on this machine and what is asked of it, each as soon as it is known; returns the exit code. Raises
    SettingError for settings that are not accepted or incompatible."""
    screen, found = console(120), []
    with composing(resource_root() / "conf") as compose:
        for finding in findings(settings, compose):
            found.append(finding)
            if not as_json:
                screen.print(row(finding))
    code = exit_code(found)
    if as_json:
        print(json.dumps({"settings": settings, **describe(found)}))
    else:
        screen.print(f"{' '.join(f'{key}={value}' for key, value in settings.items())}: ", end="", highlight=False)
        screen.print(ANSWERS.get(code, "it cannot work here"), highlight=False)
    return code


def findings(settings: Overrides, compose: Compose) -> Iterator[Finding]:
    """Yield all findings, those on the machine first. Raises SettingError as `examine`."""
    sweep = settings.get(SWEEP)
    runs = runs_of(sweep, {key: value for key, value in settings.items() if key != SWEEP}, compose) if sweep else []
    config = next((run.config for run in runs if run.config), None) or compose({} if sweep else settings)
    if isinstance(config, str):
        raise _Refused(config)
    yield from machine_findings(config.training.device, Path(config.results_root))
    yield from dataset_findings(config.data_folder)
    yield from numerics_findings(_device(config.training.device))
    yield from sweep_findings(sweep, runs) if sweep else run_findings(config)


class _Refused(RunError):
    """Settings that were refused; the message says which, and the remedy."""

    kind, exit_code = "wrong configuration", EXIT_WRONG_CONFIGURATION


def _device(name: str) -> torch.device:
    """The device of runs, or the CPU if there is no such device, which is a finding of its own."""
    try:
        return choose_device(name)
    except RunError:
        return torch.device("cpu")


def runs_of(sweep: str, fixed: Mapping[str, str], compose: Compose) -> list[SweepRun]:
    """The runs of a sweep with settings that override its own. Raises SettingError if there is no such sweep."""
    files = sweep_files(resource_root())
    if sweep not in files:
        raise SettingError(SWEEP, sweep, "does not exist", nearest(sweep, files))
    scale = fixed.get("scale", "paper")
    return index_runs(read_sweep(files[sweep]).expand(scale, {**fixed, "scale": scale}), compose)


if __name__ == "__main__":
    sys.exit(main())
