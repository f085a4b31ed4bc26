"""The configuration of a run: one dataclass for each group, checked before anything is loaded.

Hydra composes the files of `conf/` with the command line; this module turns the result into dataclasses. It rejects what Hydra
accepts: unknown keys (including those added with +) and incompatible values.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bitcycle.dataset import DATASETS, DatasetOptions
from bitcycle.files import RUNS
from bitcycle.hardware import HARDWARE, HardwareOptions
from bitcycle.model import MODELS, ModelOptions
from bitcycle.presets import Presets
from bitcycle.quantizer import QUANTIZERS, QuantizerOptions
from bitcycle.recipe.options import LoggingOptions, TrainingOptions
from bitcycle.schedule import SCHEDULES, Dfq, ScheduleOptions
from bitcycle.settings import MISSING, SettingError, Settings, nearest, setting
from bitcycle.task import TASKS, TaskOptions

SCALES = ("paper", "mini", "smoke")
"""Sizes of an experiment, each a file of conf/scale."""
VALIDATION_SHARE = 0.1
"""Default fraction of training data held out if something is chosen by validation (our choice)."""


@dataclasses.dataclass
class RunConfig(Settings):
    """The configuration of one run: a field for each configuration group, and settings outside of groups."""

    schedule: ScheduleOptions = setting(MISSING, "precision of each training step")
    model: ModelOptions = setting(MISSING, "network to train")
    dataset: DatasetOptions = setting(MISSING, "training and evaluation data")
    task: TaskOptions = setting(MISSING, "loss and metrics")
    quantizer: QuantizerOptions = setting(MISSING, "how tensors are quantized, and which layers stay float")
    hardware: HardwareOptions = setting(MISSING, "how cost is counted", affects_result=False)
    training: TrainingOptions = setting(
        TrainingOptions, "length, optimizer, learning rate, evaluation, devices, checkpoints"
    )
    logging: LoggingOptions = setting(LoggingOptions, "destinations of metrics", affects_result=False)
    scale: str = setting("paper", "size of the experiment", choices=SCALES, affects_result=False)
    seed: int = setting(0, "seed of weights, data order, augmentation and noise", minimum=0, affects_result=False)
    data_root: str = setting(
        "${oc.env:BITCYCLE_DATA,data}",
        "folder of the datasets; default: BITCYCLE_DATA, else ./data",
        affects_result=False,
    )
    results_root: str = setting(RUNS.as_posix(), "folder of the run folders", affects_result=False)
    dry_run: str = setting(
        "false",
        "true: print the plan and its cost without reading data; json: the same as JSON",
        choices=("false", "true", "json"),
        affects_result=False,
    )

    @property
    def data_folder(self) -> Path:
        """data_root as a path."""
        return Path(self.data_root).expanduser()

    def validate(self) -> None:
        """Hold out validation data if they are needed and not set. Raises SettingError if they are disabled, or if integer
        products cannot be replayed."""
        schedule = self.schedule
        if self.training.compute == "codes" and isinstance(schedule, Dfq) and schedule.backward == "chosen":
            problem = "replays float32 products, and training.compute=codes has none"
            remedy = "use training.compute=simulate, or schedule.backward=all"
            raise SettingError("schedule.backward", "chosen", problem, remedy)
        share, by_plateau = self.dataset.validation, self.training.learning_rate.name == "plateau"
        by_patience = self.training.weight_averaging.patience is not None
        if self.dataset.validates or not (schedule.chooses or by_plateau or by_patience):
            return
        if share == 0:
            hold_out = f"set dataset.validation={VALIDATION_SHARE:g} to hold out validation data"
            have = "omit it" if self.dataset.has_validation else hold_out
            problem = f"schedule={schedule.name} chooses starting weights by validation"
            remedy = f"{have}, or set all of schedule.start_from to previous"
            if by_patience:
                problem = "weight_averaging.patience needs validation data"
                remedy = f"{have}, or set weight_averaging.start instead"
            if by_plateau:
                problem, remedy = "learning_rate.name=plateau needs validation data", f"{have}, or choose another"
            raise SettingError("dataset.validation", share, problem, remedy)
        self.dataset = dataclasses.replace(self.dataset, validation=VALIDATION_SHARE)


GROUPS: dict[str, Presets[Any]] = {
    "schedule": SCHEDULES,
    "model": MODELS,
    "dataset": DATASETS,
    "task": TASKS,
    "quantizer": QUANTIZERS,
    "hardware": HARDWARE,
}
"""Configuration groups of which a run has one option, by its name."""
PRESETS: dict[str, Presets[Any]] = {**GROUPS, "training": Presets("training"), "scale": Presets("scale")}
"""All groups with files in `conf`; those of `scale` set several groups at once, and declare no settings."""


def read_config(config: DictConfig) -> RunConfig:
    """The validated configuration of a run. Raises SettingError for an unknown key, a value of the wrong type or out of
    range, naming field and remedy."""
    for key, value in _undeclared(config, ""):
        raise unknown_setting(key, value)
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
        run: RunConfig = _to_settings(config, values, "")
    except OmegaConfBaseException as error:
        raise SettingError(str(error.full_key or "configuration"), "?", str(error.msg), "correct this value") from error
    for group, options in GROUPS.items():
        name: str = getattr(run, group).name
        if name not in options:
            raise SettingError(f"{group}.name", name, "is not one of the options", nearest("", options))
        assert isinstance(getattr(run, group), options[name].kind), "Hydra and Presets read the same file"
    return run


def refuse_renamed_options(overrides: Iterable[str]) -> None:
    """Raise SettingError if the command line overrides GROUP.name instead of choosing another option."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        if group in GROUPS and name == "name":
            raise SettingError(key, value, "the name of a group cannot be overridden", f"write {group}={value}")


def unused_settings(overrides: Iterable[str], config: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings on the command line that the chosen options accept but do not use, with these options."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        *path, name = key.split(".")
        options: Any = config
        for part in path:
            options = getattr(options, part, None)
        field = getattr(options, "__dataclass_fields__", {}).get(name)
        if field is None:
            continue
        if field.metadata.get("unused"):
            yield key, f"{path[0]}={options.name}"
        used_by = field.metadata.get("used_by")
        if used_by is not None and options.name not in used_by:
            yield key, f"{'.'.join(path)}.name={options.name}"


def unknown_setting(key: str, value: object = "...") -> SettingError:
    """The error for a setting that the chosen options do not have, naming the options that have it."""
    group = key.split(".")[0]
    kinds = GROUPS[group].kinds() if group in GROUPS else {}
    owners = [name for name, kind in kinds.items() if key in set(fields_below(kind, f"{group}."))]
    if owners:
        return SettingError(key, value, f"the chosen {group} has no such setting", f"these have: {', '.join(owners)}")
    return SettingError(key, value, "unknown setting", nearest_key(key))


def nearest_key(key: str) -> str:
    """A remedy for an unknown key: the most similar known key, by its full name, last part or initials.

    >>> nearest_key("train.lrr")
    "did you mean 'training.learning_rate'? `python train.py --help GROUP` lists the settings of a group"
    """
    known = sorted(all_keys())
    group, _, leaf = key.rpartition(".")
    spellings: dict[str, str] = {}
    for name in known:
        its_group, _, last = name.rpartition(".")
        parts = itertools.product(group.split("."), its_group.split("."))
        alike = any(difflib.SequenceMatcher(None, *pair).ratio() > 0.6 for pair in parts) or not group
        initials = "".join(word[0] for word in last.split("_")) if alike else ""  # too short to match alone
        for spelling in (name, last, *([initials] if len(initials) > 1 else [])):
            spellings.setdefault(spelling, name)
    similar = [spellings[word] for word in difflib.get_close_matches(leaf, spellings, 5, 0.7)]
    close = difflib.get_close_matches(key, known, 1, 0.85) or difflib.get_close_matches(key, similar, 1, 0.0)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}`python train.py --help GROUP` lists the settings of a group"


def all_keys() -> Iterator[str]:
    """Every setting of every option of every group, by dotted name."""
    yield from fields_below(RunConfig, "")
    for group, presets in GROUPS.items():
        for kind in set(presets.kinds().values()):
            yield from fields_below(kind, f"{group}.")


def fields_below(kind: type[Settings], prefix: str) -> Iterator[str]:
    """Every setting of a dataclass and of those inside it, by dotted name."""
    for field in dataclasses.fields(kind):
        yield f"{prefix}{field.name}"
        nested: Any = field.default_factory
        if isinstance(nested, type) and issubclass(nested, Settings):
            yield from fields_below(nested, f"{prefix}{field.name}.")


def _undeclared(node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys that the dataclass of their node does not declare, with their values."""
    kind = OmegaConf.get_type(node)
    declared = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for key, child in node.items_ex(resolve=False):
        name = prefix + str(key)
        if key not in declared:
            yield name, child
        elif OmegaConf.is_dict(child) and OmegaConf.get_type(child) is not dict and not OmegaConf.is_missing(node, key):
            yield from _undeclared(child, f"{name}.")


def _to_settings(node: DictConfig, values: dict[str, Any], path: str) -> Any:
    """A configuration node with these plain values as an instance of its dataclass; errors name the full key."""
    kind = OmegaConf.get_type(node)
    if kind is None or not dataclasses.is_dataclass(kind):
        problem = "is not one of the known options of this group"
        raise SettingError(path, values, problem, f"give a name, as in {path}=NAME")
    for key, value in values.items():
        full_key = f"{path}.{key}".lstrip(".")
        if value == MISSING:
            raise SettingError(full_key, MISSING, "is not given and has no default", f"set {full_key}=...")
        if isinstance(value, dict) and OmegaConf.get_type(node, key) is not dict:
            values[key] = _to_settings(node[key], value, full_key)
    try:
        return kind(**values)
    except SettingError as error:
        raise error.within(path) from None
