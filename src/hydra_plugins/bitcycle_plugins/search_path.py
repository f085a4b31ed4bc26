"""Where Hydra finds what a configuration file names: the dataclass of its settings, and the files of a user's own folders."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from bitcycle.presets import SCHEMA, own_folders, settings_class

SCHEME = "settings"


class SettingsSource(ConfigSource):
    """Provides the dataclass `package.module.Class` as the configuration `/schema/package.module.Class`."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        node = OmegaConf.structured(settings_class(_class_path(config_path)))
        return ConfigResult(provider=self.provider, path=self.full_path(), config=node, header={"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") == SCHEMA.strip("/")

    def is_config(self, config_path: str) -> bool:
        return config_path.strip("/").startswith(SCHEMA.strip("/") + "/")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _class_path(config_path: str) -> str:
    return config_path.strip("/").removeprefix(SCHEMA.strip("/") + "/").removesuffix(".yaml")


class OwnFolders(SearchPathPlugin):
    """Adds the dataclasses of settings, and the folders of BITCYCLE_CONF and of installed packages."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("bitcycle-settings", f"{SCHEME}://")
        for folder in own_folders():
            search_path.append("bitcycle-own", f"file://{folder}")


class SweepsSearchPath(SearchPathPlugin):
    """Appends the parent folder of `conf/` to the search path, so that `sweeps/` is the group of +sweeps=PAPER/ITEM."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in list(search_path.get_path()):
            folder = Path(str(element.path).removeprefix("file://"))
            if element.provider == "main" and (folder.parent / "sweeps").is_dir():
                search_path.append(provider="bitcycle", path=f"file://{folder.parent}")
