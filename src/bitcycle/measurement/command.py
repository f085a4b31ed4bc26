"""The command line of an analysis: run folders, its options, and where the data lie."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from bitcycle.errors import (
    EXIT_DATA_MISSING,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_CONFIGURATION,
    DataError,
    RunError,
)
from bitcycle.measurement.job import AnalysisOptions, Job, Network
from bitcycle.settings import SettingError, default_of, nearest


def parser(kind: type[AnalysisOptions], description: str) -> argparse.ArgumentParser:
    """The command line of a kind of analysis: one option for each of its settings."""
    made = argparse.ArgumentParser(
        prog=f"bitcycle {kind.kind}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    word = "RUN_FOLDER[@PHASE]"
    help = "folder of a finished run, whose name ends with seed=N; with @PHASE the weights that the phase after it began from"
    made.add_argument("networks", nargs=kind.networks, metavar=word, help=help)
    for field in dataclasses.fields(kind):
        choices = field.metadata.get("choices")
        listed = f"; one of {', '.join(choices)}" if choices else ""
        text = f"{field.metadata['help']}{listed} (default: {json.dumps(default_of(field))})".replace("%", "%%")
        made.add_argument(f"--{field.name.replace('_', '-')}", dest=field.name, metavar="VALUE", help=text)
    made.add_argument("--data-root", help="data root, if it has moved")
    return made


def read_options(kind: type[AnalysisOptions], given: dict[str, Any]) -> AnalysisOptions:
    """Options from words of a command line or values of a sweep file.

    Raises:
        SettingError: for a value that an option cannot have.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if strangers := [name for name in given if name not in fields]:
        problem = f"analysis={kind.kind} has no such option"
        raise SettingError(strangers[0], given[strangers[0]], problem, nearest(strangers[0], fields))
    return kind(**{name: _value(value, fields[name]) for name, value in given.items()})


def _value(given: Any, field: dataclasses.Field[Any]) -> Any:
    """A value of the type of a field; lists may be written as a,b or [a,b]."""
    declared = str(field.type)
    if "list" in declared and isinstance(given, str):
        given = [part.strip() for part in given.strip("[]").split(",") if part.strip()]
    if "list" in declared and isinstance(given, list):
        return [_word(entry, declared) for entry in given]
    return _word(given, declared)


def _word(given: Any, declared: str) -> Any:
    """A number or null where the type has one, else the text."""
    if given is None or given == "null":
        return None
    if "str" in declared:
        return str(given)
    try:
        value = json.loads(str(given))
    except json.JSONDecodeError:
        return given
    return float(value) if "float" in declared and isinstance(value, int) else value


def run_command(kind: type[AnalysisOptions], description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run the command line of a kind of analysis and return its exit code."""
    given = vars(parser(kind, description or "").parse_args(arguments))
    networks, data_root = given.pop("networks"), given.pop("data_root")
    given = {name: value for name, value in given.items() if value is not None}
    try:
        job = Job(read_options(kind, given), tuple(map(Network.parse, networks)), data_root)
        result = job.run()
    except (RunError, DataError, SettingError) as error:
        print(error, file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print("interrupted; what is done is stored, and the same command goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{job.path}: {len(result.rows)} rows; `make collect` adds it to results/summary")
    return EXIT_DONE


def exit_code(error: Exception) -> int:
    """The exit code of an error that a user can act on."""
    if isinstance(error, DataError):
        return EXIT_DATA_MISSING
    return EXIT_FAILED if isinstance(error, RunError) else EXIT_WRONG_CONFIGURATION
