"""`python train.py --help [GROUP | GROUP=NAME]`: groups, options and settings, generated from their declarations."""

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from bitcycle.configuration import GROUPS, PRESETS, RunConfig
from bitcycle.door import sub_commands
from bitcycle.recipe.options import LoggingOptions, TrainingOptions
from bitcycle.settings import MISSING, SettingError, Settings, default_of, nearest
from bitcycle.sweep.grid import as_text

WIDTH = 120
INTRODUCTION = """\
bitcycle trains neural networks at a precision that varies during training.

    python train.py schedule=RTH model=resnet74                one run; finished runs are skipped, interrupted ones resumed
    python train.py schedule=RTH model=resnet74 dry_run=true   the plan of the run and its cost; trains nothing
    python train.py -m schedule=static,CR,RTH seed=0,1,2       every combination; -m +sweeps=cpt/table2: a table of a paper
    python train.py --help schedule                            options and settings of a group; --help schedule=RTH: of one

If the package is installed, `bitcycle` is the same command from any folder. GROUP=NAME chooses an option of a group,
GROUP.SETTING=VALUE changes a setting; lists are written [0.5,0.75], no value is null."""
CLOSING = """\
Exit codes: 0 done or already done; 1 the run failed; 2 the configuration is invalid; 3 the data is missing; 75 interrupted,
run the same command again. --hydra-help explains Hydra's own flags (-m, --cfg job, -sc for tab completion)."""
COMMON = (
    *("schedule.q_min", "schedule.q_max", "schedule.cycles", "training.steps", "training.batch_size"),
    *("training.learning_rate.initial", "training.device", "seed", "data_root", "dry_run"),
)
"""The most frequently changed settings."""
HELPS = {field.name: field.metadata["help"] for field in dataclasses.fields(RunConfig)}
TOP, LOGGING = "settings", "logging"
"""Topics besides the groups: settings outside of groups, and logging."""


def help_text(topic: str = "") -> str:
    """Return the help on a topic: none (overview, at most 70 lines), a group, GROUP=NAME, settings, or logging. Raises
    SettingError for an unknown topic."""
    group, _, name = topic.partition("=")
    if not topic:
        return "\n".join(_overview())
    if group == TOP:
        return "\n".join(_settings(RunConfig))
    if group == LOGGING:
        return "\n".join(_settings(LoggingOptions, "logging."))
    if group not in PRESETS:
        raise SettingError("--help", topic, "is not a help topic", nearest(group, [*groups(), TOP, LOGGING]))
    if not name:
        return "\n".join(_group(group))
    if name not in PRESETS[group]:
        raise SettingError("--help", topic, "does not exist", nearest(name, PRESETS[group]))
    return "\n".join(_option(group, name))


def groups() -> list[str]:
    """The groups in the order of the configuration."""
    return [field.name for field in dataclasses.fields(RunConfig) if field.name in PRESETS]


def _overview() -> Iterator[str]:
    yield from INTRODUCTION.splitlines()
    yield ""
    for group in groups():
        names = ", ".join(_listed(names, 4) for names in _options(group).values())
        listed = f"{group + '=':<10} {HELPS[group]}: {names}"
        yield from textwrap.wrap(listed, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    yield ""
    yield "Most frequently changed settings:"
    owners = {"": RunConfig, "training.": TrainingOptions, "schedule.": GROUPS["schedule"]["CR"].kind}
    lines = [line for prefix, kind in owners.items() for line in _settings(kind, prefix)]
    declared = {line.split("=")[0].strip(): line for line in lines}
    yield from (declared[name] for name in COMMON)
    yield ""
    yield "Sub-commands of `bitcycle` (--help explains each):"
    for word, command in sub_commands().items():
        yield f"  {word:<12} {command.help}"
    yield ""
    yield from CLOSING.splitlines()


def _group(group: str) -> Iterator[str]:
    yield f"{group.upper()}: {HELPS[group]}"
    for summary, names in _options(group).items():
        listed = f"  {group}={', '.join(names):<18} {summary}"
        yield from textwrap.wrap(listed, 160, subsequent_indent=" " * 6, break_on_hyphens=False)
    kinds = PRESETS[group].kinds() if group != "scale" else {}
    shown: set[str] = set()
    several = set(kinds.values())
    for kind in dict.fromkeys(kinds.values()):
        lines = [line for line in _settings(kind, f"{group}.") if line not in shown]
        if lines:
            names = [name for name, option in kinds.items() if option is kind]
            yield "settings" + (f" of {_listed(names, 12)}" if len(several) > 1 else "") + ":"
            yield from lines
            shown |= set(lines)


def _option(group: str, name: str) -> Iterator[str]:
    """An option's summary, its source and equation, and its settings with their values."""
    preset = PRESETS[group][name]
    yield f"{group}={name}: {preset.summary}"
    if preset.source:
        yield f"Source: {preset.source}"
    yield ""
    if group == "scale":
        yield OmegaConf.to_yaml(OmegaConf.create(preset.values)).rstrip()
        return
    own, module = (inspect.getdoc(part) or "" for part in (preset.kind, inspect.getmodule(preset.kind)))
    yield from (own if "\n" in own or "\n" not in module else module).splitlines()
    yield ""
    yield from _settings(preset.kind, f"{group}.", preset.values)


def _options(group: str) -> dict[str, list[str]]:
    """Summary -> names of the options of a group."""
    together: dict[str, list[str]] = {}
    for name, preset in PRESETS[group].items():
        together.setdefault(preset.summary, []).append(name)
    return together


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names) if len(names) <= most else f"{names[0]} ... {names[-1]}"


def _settings(kind: type[Settings], prefix: str = "", values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A line for each setting of a dataclass, with its default or the option's value."""
    for field in dataclasses.fields(kind):
        if (field.name == "name" and prefix.count(".") == 1) or (not prefix and field.name in (*GROUPS, "training")):
            continue  # chosen by GROUP=NAME
        if field.metadata.get("unused"):
            continue
        value = (values or {}).get(field.name, default_of(field))
        nested: Any = field.default_factory
        if isinstance(nested, type) and issubclass(nested, Settings):
            if prefix:
                yield from _settings(nested, f"{prefix}{field.name}.", value if isinstance(value, Mapping) else None)
            continue
        text = field.metadata.get("help", "")
        choices = [word for word in field.metadata.get("choices") or () if word != MISSING]
        words = "" if all(word in text for word in choices) else f" [{' | '.join(choices)}]"
        shown = "?" if value == MISSING else as_text(value)
        yield f"  {prefix + field.name + '=' + shown:<44} {text}{words}"
