"""Composing many configurations that differ in values more than in the options of their groups, a tenth of the time each."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bitcycle.configuration import TYPES, RunConfig, read_config, register_schemas
from bitcycle.hydra_errors import explain_hydra
from bitcycle.settings import SettingError
from bitcycle.sweep.grid import Overrides, command_line

GROUPS = (*TYPES, "training", "scale")
"""Settings that choose a file of `conf/`; all others are values inside what these choose."""
ALONE = ("schedule", "quantizer")
"""Those whose files set nothing outside of their group, and in whose group no other file sets anything."""


class Composer:
    """Composes settings as Hydra does, which is asked once for each choice of options; the values are then put in.

    Args:
        compose: what Hydra makes of command line arguments, without its own settings.
    """

    def __init__(self, compose: Callable[[list[str]], DictConfig]) -> None:
        self._compose = compose
        self._composed: dict[str, bytes] = {}
        self._checked: dict[str, RunConfig | str] = {}
        self._parser = OverridesParser.create()

    def __call__(self, run: Overrides) -> DictConfig:
        """The configuration of a run's settings.

        Raises:
            HydraException, OmegaConfBaseException: as Hydra does for settings that do not exist or have the wrong type.
        """
        choices = {key: value for key, value in run.items() if key in GROUPS or not _is_plain(key)}
        try:
            return self._with_values(self._chosen(choices), {k: v for k, v in run.items() if k not in choices})
        except (HydraException, OmegaConfBaseException):
            return self._compose(command_line(run))  # which says what is wrong in Hydra's words

    def checked(self, run: Overrides) -> RunConfig | str:
        """The validated configuration of a run, or what is wrong with it; each once, seeds apart."""
        key = str(sorted((name, value) for name, value in run.items() if name != "seed"))
        if key not in self._checked:
            try:
                self._checked[key] = read_config(self(run))
            except SettingError as error:
                self._checked[key] = str(error)
            except (HydraException, OmegaConfBaseException) as error:
                self._checked[key] = explain_hydra(error)
        return self._checked[key]

    def _chosen(self, choices: Overrides) -> DictConfig:
        """A new configuration with these options: those that stand alone, put into what the others give."""
        alone = {key: value for key, value in choices.items() if key in ALONE}
        found = self._once({key: value for key, value in choices.items() if key not in alone})
        OmegaConf.set_readonly(found, False)
        for group, option in alone.items():
            found[group] = self._once({group: option})[group]
        return found

    def _once(self, choices: Overrides) -> DictConfig:
        """A copy of what Hydra makes of them; reading a pickle takes a seventh of the time of a deep copy."""
        name = str(sorted(choices.items()))
        if name not in self._composed:
            self._composed[name] = pickle.dumps(self._compose(command_line(choices)))
        found: DictConfig = pickle.loads(self._composed[name])
        return found

    def _with_values(self, found: DictConfig, values: Mapping[str, str]) -> DictConfig:
        OmegaConf.set_struct(found, True)
        for override in self._parser.parse_overrides(command_line(dict(values))):
            OmegaConf.update(found, override.get_key_element(), override.value(), merge=True)
        return found


def _is_plain(key: str) -> bool:
    """Whether a key names a value of a run, and nothing of Hydra's (hydra.x, +x, ~x, group/x, group@x)."""
    return key.replace(".", "").replace("_", "").isalnum() and not key.startswith("hydra.")


def without_hydra(config: DictConfig) -> DictConfig:
    """The settings of the run alone."""
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    return config


@contextmanager
def composing(conf: Path) -> Iterator[Callable[[Overrides], RunConfig | str]]:
    """`Composer.checked` with the files of a folder `conf`."""
    register_schemas()
    with initialize_config_dir(str(conf.absolute()), version_base="1.3"):
        yield Composer(lambda arguments: compose("config", overrides=arguments)).checked
