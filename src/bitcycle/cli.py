"""The command `bitcycle`, also `python -m bitcycle` and `python train.py`: a run, a sweep (-m), or one of the sub-commands."""

import argparse
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

from bitcycle.errors import EXIT_WRONG_CONFIGURATION
from bitcycle.files import resource_root
from bitcycle.settings import SettingError, nearest
from bitcycle.signals import stop_at_once
from bitcycle.threads import choose_threads


class SubCommand(NamedTuple):
    """A sub-command: the module it runs, as `python -m MODULE` does, and its help text."""

    module: str
    help: str
    arguments: tuple[str, str, str] | tuple[()] | None = None
    """Name, number (as argparse writes it) and help text of its arguments, if the module has no parser of its own."""


SUB_COMMANDS = {
    "doctor": SubCommand("bitcycle.doctor", "whether a run or sweep can work on this machine, and how long it takes"),
    "status": SubCommand(
        "bitcycle.sweep.status",
        "all runs and sweeps with their progress and the time left",
        ("SCALE", "*", "paper, mini or smoke; default: every scale with runs in results/runs"),
    ),
    "collect": SubCommand(
        "bitcycle.reproduction.analysis.collect",
        "gather finished runs and their curves into results/summary",
        ("FOLDER", "?", "folder of the run folders; default: results/runs"),
    ),
    "figures": SubCommand(
        "bitcycle.reproduction.figure.make", "draw the figures and tables of the papers, results/index.html", ()
    ),
    "manifest": SubCommand(
        "bitcycle.reproduction.manifest",
        "which run fills which cell of every figure and table",
        ("SCALE", "*", "paper, mini or smoke; default: all"),
    ),
    "reproduce": SubCommand(
        "bitcycle.reproduction.reproduce", "train, analyse and draw every item of the papers at one scale"
    ),
    "gpu-day": SubCommand(
        "bitcycle.reproduction.gpu_day", "train sweeps in the order of claims per hour, within some hours"
    ),
    "campaign": SubCommand(
        "bitcycle.reproduction.campaign", "train a plan of sweeps in the background, in the order of the plan"
    ),
    "freeze": SubCommand(
        "bitcycle.reproduction.analysis.frozen", "freeze the tests of claims before the first run that decides them"
    ),
    "advise": SubCommand(
        "bitcycle.reproduction.advise", "the schedules within a cost budget, with their recorded accuracy"
    ),
    "bench": SubCommand("bitcycle.benchmark", "time and memory of steps, quantizers, data and runs"),
    "analyse": SubCommand(
        "bitcycle.reproduction.measurement.after_sweep", "the analyses of finished runs that a sweep file lists"
    ),
    "surface": SubCommand(
        "bitcycle.reproduction.measurement.surface", "loss along random directions around a finished network"
    ),
    "plane": SubCommand("bitcycle.reproduction.measurement.plane", "loss on the plane through three finished networks"),
    "sharpness": SubCommand(
        "bitcycle.reproduction.measurement.sharpness", "epsilon-sharpness of the loss at a finished network"
    ),
    "corruption": SubCommand(
        "bitcycle.reproduction.measurement.corruption", "accuracy of a finished network on corrupted images"
    ),
    "noise": SubCommand(
        "bitcycle.reproduction.measurement.noise", "error rates of a finished speech recognizer on noisy recordings"
    ),
}
"""Sub-command on the command line -> its module."""


def main(conf: Path | None = None) -> int:
    """Run the command line in `sys.argv` and return the exit code; `conf` is the folder of the configuration files. Raises
    SystemExit if a sub-command raises it, and for arguments that it does not have."""
    stop_at_once()  # importing PyTorch takes seconds; a cluster may send a signal meanwhile
    choose_threads()
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in SUB_COMMANDS:
        chosen = SUB_COMMANDS[word]
        if chosen.arguments is not None:
            parser = argparse.ArgumentParser(f"bitcycle {word}", description=chosen.help)
            if chosen.arguments:
                name, number, text = chosen.arguments
                parser.add_argument(name, nargs=number, help=text)
            parser.parse_args(sys.argv[2:])
        del sys.argv[1]
        from bitcycle.guard import guarded

        return guarded(lambda: runpy.run_module(chosen.module, run_name="__main__", alter_sys=True))
    if word.isidentifier():
        error = SettingError("sub-command", word, "there is no such sub-command", nearest(word, SUB_COMMANDS))
        print(f"wrong configuration: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION
    from bitcycle import command

    return command.main(conf or resource_root() / "conf")
