"""Expansion of a sweep, a list of grids, to lists of overrides. Pure functions of plain values."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitcycle.settings import SettingError

Overrides = dict[str, str]
"""Setting -> value, both as on the command line."""


def expand(grids: Sequence[Mapping[str, Any]], fixed: Mapping[str, str]) -> list[Overrides]:
    """Every run of a list of grids, in order and without duplicates; `fixed` settings override those of the grids.

    A grid maps settings to a value or a list of values. A value that is itself a mapping sets several settings at once, and its
    key is only a label. A setting whose value is a list is written as text, such as "[8,16]". Raises SettingError for an empty
    list of values.

    >>> expand([{"model": ["a", "b"], "range": [{"q": 8, "p": 3}, {"q": 6, "p": 3}]}, {"model": "c"}], {"p": "4"})[:2]
    [{'model': 'a', 'q': '8', 'p': '4'}, {'model': 'a', 'q': '6', 'p': '4'}]
    """
    return distinct_settings({**run, **fixed} for grid in grids or [{}] for run in _combinations(grid))


def distinct_settings(runs: Iterable[Overrides]) -> list[Overrides]:
    """The runs without duplicates, in order.

    >>> distinct_settings([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}])
    [{'a': '1', 'b': '2'}]
    """
    found: dict[tuple[tuple[str, str], ...], Overrides] = {}
    for run in runs:
        found.setdefault(tuple(sorted(run.items())), run)
    return list(found.values())


def _combinations(grid: Mapping[str, Any]) -> Iterator[Overrides]:
    axes = []
    for key, values in grid.items():
        values = values if isinstance(values, (list, tuple)) else [values]
        if not values:
            raise SettingError(key, [], "has no values to sweep over", "list at least one value, or remove the key")
        named = [value if isinstance(value, Mapping) else {key: value} for value in values]
        axes.append([{str(name): as_text(entry) for name, entry in settings.items()} for settings in named])
    for combination in itertools.product(*axes):
        yield {name: value for settings in combination for name, value in settings.items()}


def as_text(value: Any) -> str:
    """Format a value as on the command line.

    >>> as_text(True), as_text(None), as_text([8, 16]), as_text(1e-5)
    ('true', 'null', '[8,16]', '1e-05')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(as_text, value)) + "]"
    return str(value)


def substitute(run: Overrides, replacements: Mapping[str, Any]) -> Overrides:
    """Replace values of a run, as for a smaller scale.

    A mapping replaces the listed values of a setting ({"model": {"resnet152": "resnet20"}}); any other value is set in
    every run. A mapping with `by` chooses the value by another setting of the run, and `else` is for its other values,
    which keep theirs without it. A seed of null removes the run's seed.

    >>> substitute({"model": "resnet152", "seed": "1"}, {"model": {"resnet152": "resnet20"}, "dataset.test_samples": 500})
    {'model': 'resnet20', 'seed': '1', 'dataset.test_samples': '500'}
    >>> substitute({"schedule.cycles": "32"}, {"schedule.cycles": {32: 4}})
    {'schedule.cycles': '4'}
    >>> substitute({"training.epochs": "80"}, {"training.steps": {"by": "training.epochs", 80: 3200, "else": 2000}})
    {'training.epochs': '80', 'training.steps': '3200'}
    >>> substitute({"model": "gru", "training.steps": "9"}, {"training.steps": {"by": "model", "lstm": 5}})
    {'model': 'gru', 'training.steps': '9'}
    >>> substitute({"model": "resnet8", "seed": "3"}, {"seed": None})
    {'model': 'resnet8'}
    """
    found = dict(run)
    for key, replacement in replacements.items():
        if not isinstance(replacement, Mapping):
            found[key] = as_text(replacement)
            continue
        by_text = {as_text(old): new for old, new in replacement.items()}  # YAML reads 32: 4 as numbers
        if "by" in by_text:
            chosen = run.get(by_text["by"], "")
            if chosen in by_text or "else" in by_text:
                found[key] = as_text(by_text[chosen if chosen in by_text else "else"])
        elif key in found:
            found[key] = as_text(by_text.get(found[key], found[key]))
    if found.get("seed") == "null":
        del found["seed"]
    return found


def command_line(run: Overrides) -> list[str]:
    """A run as arguments of train.py.

    >>> command_line({"seed": "1", "model.initial_weights": "runs/seed=0"})
    ['seed=1', "model.initial_weights='runs/seed=0'"]
    """
    return [quoted(f"{key}={value}") for key, value in run.items()]


def quoted(argument: str) -> str:
    """Quote the value of an override if Hydra could not parse it, such as a run folder (seed=0) or a path with an umlaut; values
    with brackets, commas, quotes or backslashes are Hydra's syntax and stay as they are, as do options such as --config-dir=PATH.
    A leading ~/ is the home folder.

    >>> quoted("model.initial_weights=results/seed=0"), quoted("schedule.q_min=3"), quoted("data_root=/home/jörg/a b")
    ("model.initial_weights='results/seed=0'", 'schedule.q_min=3', "data_root='/home/jörg/a b'")
    """
    argument = re.sub(r"^([^=]+=['\"]?)~/", lambda start: f"{start[1]}{Path.home()}/", argument)
    key, _, value = argument.partition("=")
    is_odd = re.search(r"[=&#;!]|[^\x00-\x7f]", value) and not re.search(r"[][(){},'\"\\]", value)
    return f"{key}='{value}'" if is_odd and not key.startswith("-") else argument
