"""`python train.py --help`: every group and every setting in plain words, from the dataclasses and the files of `conf/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitcycle.configuration import GROUPS, PRESETS, RunConfig
from bitcycle.settings import MISSING, Settings, default_of
from bitcycle.training.options import TrainingOptions

INTRODUCTION = """\
bitcycle trains neural networks with few bits whose number changes along the way.

    python train.py schedule=RTH model=resnet74                   one run; finished runs are skipped, interrupted ones resumed
    python train.py schedule=RTH model=resnet74 dry_run=true      what would run and what it would cost; trains nothing
    python train.py -m schedule=static,CR,RTH seed=0,1,2          every combination, one after the other

GROUP=NAME chooses an option of a group, GROUP.SETTING=VALUE changes a setting. Lists are written [0.5,0.75], nothing is null.
Exit codes: 0 done or already done; 1 the run failed; 2 the configuration is wrong; 3 the data are missing; 75 interrupted,
run the same command again. `python train.py --hydra-help` explains Hydra's own flags (-m, --cfg job, -sc for tab completion).
"""


def help_text(conf: Path) -> str:
    """The whole help text; `conf` is the folder of the configuration files."""
    return "\n".join([INTRODUCTION, *_groups(conf), "SETTINGS OF NO GROUP", *_settings(RunConfig, "", only_plain=True)])


def _groups(conf: Path) -> Iterator[str]:
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(RunConfig)}
    for group in sorted({*GROUPS, *(path.parent.name for path in conf.glob("*/*.yaml"))}, key=_group_order):
        yield f"{group.upper()}: {helps[group]}"
        for names, summary in _options(group, conf):
            yield f"  {group}={names:<18} {summary}"
        kinds = list(dict.fromkeys(GROUPS[group].values())) if group in GROUPS else []
        if group == "training":
            kinds = [TrainingOptions]
        shown: set[str] = set()
        for kind in kinds:
            lines = [line for line in _settings(kind, f"{group}.") if line not in shown]
            if lines:
                yield "  settings" + (f" of {_names(group, kind)}" if len(kinds) > 1 else "") + ":"
                yield from (f"  {line}" for line in lines)
                shown |= set(lines)
        yield ""


def summaries(group: str, conf: Path) -> dict[str, str]:
    """What each option of a group is, in one line: from its preset, or the first comment of its file in `conf`."""
    found = {path.stem: first_comment(path) for path in conf.glob(f"{group}/*.yaml")}
    return found | {name: preset.summary for name, preset in PRESETS.get(group, {}).items()}


def _options(group: str, conf: Path) -> Iterator[tuple[str, str]]:
    """Names and summary of a group's options, those with the same summary together."""
    together: dict[str, list[str]] = {}
    for name, summary in sorted(summaries(group, conf).items(), key=lambda option: _natural(option[0])):
        together.setdefault(summary, []).append(name)
    for summary, names in together.items():
        yield ", ".join(names), summary


def _group_order(group: str) -> tuple[int, str]:
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    return (fields.index(group) if group in fields else len(fields), group)


def _natural(name: str) -> tuple[str, int]:
    digits = "".join(letter for letter in name if letter.isdigit())
    return ("".join(letter for letter in name if not letter.isdigit()), int(digits or 0))


def _names(group: str, kind: type[Settings]) -> str:
    names = [name for name, option in GROUPS[group].items() if option is kind]
    return ", ".join(names) if len(names) <= 12 else f"{names[0]} ... {names[-1]}"


def first_comment(path: Path) -> str:
    """The first comment line of a configuration file: what it is, in one line."""
    for line in path.read_text().splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ")
    return ""


def _settings(kind: type[Settings], prefix: str, only_plain: bool = False) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        default = default_of(field)
        is_group_name = field.name == "name" and prefix.count(".") == 1  # chosen by GROUP=NAME
        if isinstance(default, Settings):
            if not (only_plain and field.name == "training"):
                yield from _settings(type(default), f"{prefix}{field.name}.")
        elif not is_group_name and not (only_plain and field.name in GROUPS):
            text, choices = field.metadata.get("help", ""), field.metadata.get("choices") or ()
            words = "" if all(word in text for word in choices) else f" [{' | '.join(choices)}]"
            yield f"  {prefix + field.name + '=' + _shown(default):<52} {text}{words}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if value == MISSING:
        return "?"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value)
