"""The sub-commands, and the library's one door to `bitcycle.reproduction`, the five papers: no other module imports it, and it
may be absent."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

REPRODUCTION = "bitcycle.reproduction"


class SubCommand(NamedTuple):
    """A sub-command: the module it runs, as `python -m MODULE` does, and its help text."""

    module: str
    help: str


LIBRARY = {
    "doctor": SubCommand("bitcycle.doctor", "whether a run or sweep can work on this machine, and how long it takes"),
    "status": SubCommand("bitcycle.sweep.status", "all runs and sweeps with their progress and the time left"),
    "bench": SubCommand("bitcycle.benchmark", "time and memory of steps, quantizers, data and runs"),
}
"""The sub-commands of the library."""


def reproduction(module: str = "") -> ModuleType | None:
    """The package of the papers, or one of its modules such as "manifest"; None if the package is absent. Raises
    ModuleNotFoundError if the package is there, but something that the module needs is not installed."""
    if find_spec(REPRODUCTION) is None:
        return None
    return import_module(f"{REPRODUCTION}.{module}" if module else REPRODUCTION)


def sub_commands() -> dict[str, SubCommand]:
    """The sub-commands of the command line by their words, with those of the papers if they are there."""
    papers = reproduction()
    return LIBRARY if papers is None else {**LIBRARY, **papers.SUB_COMMANDS}


def parser_of(word: str, description: str | None = None) -> ArgumentParser:
    """The parser of a sub-command, still without arguments; without a description, its line in the list of sub-commands."""
    text = description or sub_commands()[word].help
    return ArgumentParser(f"bitcycle {word}", description=text, formatter_class=RawDescriptionHelpFormatter)
