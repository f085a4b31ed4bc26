"""The command line of an analysis: run folders, options, and data root."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bitcycle.guard import guarded
from bitcycle.measurement.job import AnalysisOptions, Job, Network
from bitcycle.settings import SettingError, default_of, nearest


def parser(kind: type[AnalysisOptions], description: str) -> argparse.ArgumentParser:
    """The argument parser of a kind of analysis, with one option for each of its settings."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"bitcycle {kind.kind}", description=description, formatter_class=form)
    help = "folder of a finished run, ending in seed=N; with @PHASE, the weights from which the next phase started"
    made.add_argument("networks", nargs=kind.networks, metavar="RUN_FOLDER[@PHASE]", help=help)
    for field in dataclasses.fields(kind):
        choices = field.metadata.get("choices")
        listed = f"; one of {', '.join(choices)}" if choices else ""
        text = f"{field.metadata['help']}{listed} (default: {json.dumps(default_of(field))})".replace("%", "%%")
        made.add_argument(f"--{field.name.replace('_', '-')}", dest=field.name, metavar="VALUE", help=text)
    made.add_argument("--data-root", help="data root, if it has moved")
    return made


def read_options(kind: type[AnalysisOptions], given: dict[str, Any]) -> AnalysisOptions:
    """Read options from strings of a command line or values of a sweep file. Raises SettingError for an unknown option or an
    invalid value."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if strangers := [name for name in given if name not in types]:
        problem = f"is not an option of analysis={kind.kind}"
        raise SettingError(strangers[0], given[strangers[0]], problem, nearest(strangers[0], types))
    return kind(**{name: _value(value, types[name]) for name, value in given.items()})


def _value(given: Any, declared: str) -> Any:
    """Convert a value to the declared type: null, a list written as a,b or [a,b], a number, or text."""
    if given is None or given == "null":
        return None
    if "list" in declared:
        words = [part.strip() for part in given.strip("[]").split(",")] if isinstance(given, str) else given
        return [_value(word, declared.replace("list", "")) for word in words if word != ""]
    if "str" in declared:
        return str(given)
    try:
        value = json.loads(str(given))
    except json.JSONDecodeError:
        return given
    return float(value) if "float" in declared and isinstance(value, int) else value


def run_command(kind: type[AnalysisOptions], description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run the command of a kind of analysis and return its exit code."""
    given = vars(parser(kind, description or "").parse_args(arguments))
    networks, data_root = given.pop("networks"), given.pop("data_root")

    def run() -> None:
        options = read_options(kind, {name: value for name, value in given.items() if value is not None})
        job = Job(options, tuple(map(Network.parse, networks)), data_root)
        print(f"{job.path}: {len(job.run().rows)} rows; `make collect` adds it to results/summary")

    return guarded(run)
