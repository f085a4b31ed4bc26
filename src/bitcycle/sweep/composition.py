"""Fast composition of many configurations that share their config group choices and differ in values.

It takes a tenth of Hydra's time per configuration.
"""

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bitcycle.configuration import PRESETS, RunConfig, read_config
from bitcycle.files import resource_root
from bitcycle.guard import explain_hydra
from bitcycle.presets import Preset
from bitcycle.settings import SettingError, Settings
from bitcycle.sweep.grid import Overrides, command_line

INDEPENDENT = ("schedule", "quantizer")
"""Groups whose presets set nothing outside the group, and no other file of ours sets anything inside it."""


class Composer:
    """Composes configurations: calls Hydra (`compose`, without the node `hydra`) once per combination of config group choices
    and then sets the values."""

    def __init__(self, compose: Callable[[list[str]], DictConfig]) -> None:
        self._compose = compose
        self._composed: dict[str, bytes] = {}
        self._checked: dict[str, RunConfig | str] = {}
        self._parser = OverridesParser.create()

    def __call__(self, run: Overrides) -> DictConfig:
        """The configuration of a run; raises Hydra's errors for an unknown setting or a value of the wrong type."""
        independent = self._independent(run)
        choices = {k: v for k, v in run.items() if (k in PRESETS or not _is_plain(k)) and k not in independent}
        try:
            found = self._chosen(choices, independent)
            values = {key: value for key, value in run.items() if key not in choices | independent}
            for override in self._parser.parse_overrides(command_line(values)):
                if override.is_sweep_override():
                    name, problem = override.get_key_element(), "is a list of values, where a run has one"
                    raise SettingError(name, values[name], problem, "write one value, in quotes if it contains a comma")
                OmegaConf.update(found, override.get_key_element(), override.value(), merge=True)
            return found
        except (HydraException, OmegaConfBaseException):
            return self._compose(command_line(run))  # raises Hydra's own error

    def checked(self, run: Overrides) -> RunConfig | str:
        """The validated configuration of a run or an error message. A configuration is cached for runs that differ only in a
        valid seed, unless the seed sets others of their settings, as in training.steps=${seed}. An error is not: weights that a
        run starts from may have been trained since."""
        key = str(sorted((name, value) for name, value in run.items() if name != "seed" or not value.isdigit()))
        if key in self._checked:
            return self._checked[key]
        found: RunConfig | str
        follows_seed = False
        try:
            config = self(run)
            follows_seed = "seed}" in str(OmegaConf.to_container(config, resolve=False))
            found = read_config(config)
        except SettingError as error:
            found = str(error)
        except (HydraException, OmegaConfBaseException) as error:
            found = explain_hydra(error)
        if isinstance(found, RunConfig) and not follows_seed:
            self._checked[key] = found
        return found

    @staticmethod
    def _independent(run: Overrides) -> Overrides:
        """The choices of independent groups in which Hydra's syntax (+schedule.x) adds nothing, if no own preset among the run's
        others may set something inside them."""
        chosen = {group: PRESETS[group].get(option) for group, option in run.items() if group in PRESETS}
        ours = resource_root() / "conf"
        if not all(p is None or p.self_contained or p.path.is_relative_to(ours) for p in chosen.values()):
            return {}
        changed = {re.split("[.@]", key.lstrip("+~"))[0] for key in run if not _is_plain(key)}
        alone = {group for group, preset in chosen.items() if preset is not None and preset.self_contained}
        return {group: run[group] for group in INDEPENDENT if group in alone - changed}

    def _chosen(self, choices: Overrides, independent: Overrides) -> DictConfig:
        """A new configuration with these group choices, in which presets of independent groups are inserted.

        Hydra's composition is kept as a pickle, which loads in a seventh of a deep copy's time.
        """
        name = str(sorted(choices.items()))
        if name not in self._composed:
            self._composed[name] = pickle.dumps(self._compose(command_line(choices)))
        found: DictConfig = pickle.loads(self._composed[name])
        OmegaConf.set_readonly(found, False)
        for group, option in independent.items():
            found[group] = _node(PRESETS[group][option])
        OmegaConf.set_struct(found, True)
        return found


@cache
def _node(preset: Preset[Settings]) -> DictConfig:
    return OmegaConf.merge(OmegaConf.structured(preset.kind), preset.values)  # type: ignore[return-value]


def _is_plain(key: str) -> bool:
    """Whether a key names a setting of a run rather than using Hydra's syntax (hydra.x, +x, ~x, group/x, group@x)."""
    return key.replace(".", "").replace("_", "").isalnum() and not key.startswith("hydra.")


def without_hydra(config: DictConfig) -> DictConfig:
    """Remove the node `hydra` from a configuration."""
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    return config


@contextmanager
def composing(conf: Path) -> Iterator[Callable[[Overrides], RunConfig | str]]:
    """Provide `Composer.checked` for the configuration files in `conf`."""
    with initialize_config_dir(str(conf.absolute()), version_base="1.3"):
        yield Composer(lambda arguments: compose("config", overrides=arguments)).checked
