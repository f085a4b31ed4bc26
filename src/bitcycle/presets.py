"""Presets of the configuration groups: the files `conf/GROUP/NAME.yaml`, the only place of their names, values and summaries.

The first comment of a file is its summary, the second its source; `# label: NAME` is its name in figures and tables. Its defaults
name the dataclass that declares its settings:

    # REX, triangular, mirrored in time: low for long, saves most
    # Better Schedules, section 3.2
    defaults: [/schema@_here_: bitcycle.schedule.cyclic.Cyclic, _self_]

    name: RTH
    profile: rex
    form: horizontal

Hydra composes these files for the command line, and `Presets` reads them for the Python interface, help, sweeps and figures.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from bitcycle.files import resource_root
from bitcycle.settings import SettingError, Settings, nearest

FOLDERS = "BITCYCLE_CONF"
"""Environment variable: folders of a user's own configuration files, separated as in PATH."""
ENTRY_POINTS = "bitcycle.conf"
"""Entry points of installed packages whose sub-folder `conf` holds configuration files."""
FLAGS = ("--config-dir", "-cd")
"""Hydra's flags for a folder of configuration files."""
SCHEMA = "/schema"
LABEL = "label: "
"""Beginning of the comment with the name of a preset in figures and tables."""

S_co = TypeVar("S_co", bound=Settings, covariant=True)


def own_folders() -> tuple[Path, ...]:
    """Folders of configuration files besides bitcycle's own: those of BITCYCLE_CONF, then those of installed packages. Raises
    SettingError for a folder of BITCYCLE_CONF that does not exist."""
    named = [Path(name).expanduser().absolute() for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name]
    for folder in named:
        if not folder.is_dir():
            raise SettingError(
                FOLDERS,
                folder,
                "is not a folder",
                "name those with folders of groups, as conf with conf/model/NAME.yaml",
            )
    return (*named, *_installed_folders())


@cache
def _installed_folders() -> tuple[Path, ...]:
    specs = [find_spec(point.value) for point in entry_points(group=ENTRY_POINTS)]
    return tuple(Path(folder) / "conf" for spec in specs if spec for folder in spec.submodule_search_locations or ())


def add_folder(folder: Path) -> None:
    """Search a folder of configuration files too, in this process and in those that it starts."""
    folder = folder.absolute()
    known = [name for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name]
    if str(folder) not in known:
        os.environ[FOLDERS] = os.pathsep.join([*known, str(folder)])


def add_sources(sources: Iterable[Any]) -> None:
    """Search the folders that Hydra searches: `hydra.runtime.config_sources`."""
    for source in sources:
        if source.schema == "file" and source.provider not in ("main", "bitcycle"):  # conf/ and sweeps/ of this package
            add_folder(Path(source.path))


def named_folders(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders that `--config-dir` and `hydra.searchpath` name among the arguments of a command, and its other arguments.

    >>> named_folders(["--config-dir", "a", "hydra.searchpath=[file:///b,file:///c]", "seed=1"])
    ([PosixPath('a'), PosixPath('/b'), PosixPath('/c')], ['seed=1'])
    """
    folders: list[str] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, _, value = word.partition("=")
        if word in FLAGS:
            folders += [*islice(words, 1)]
        elif flag in FLAGS:
            folders.append(value)
        elif flag == "hydra.searchpath":
            parts = (part.strip(" '\"") for part in value.strip("[]'\"").split(","))
            folders += [part.removeprefix("file://") for part in parts if not part.startswith("pkg://")]
        else:
            others.append(word)
    return [Path(folder).expanduser() for folder in folders], others


def search_named_folders(arguments: Sequence[str]) -> list[str]:
    """Search these folders too, for what Hydra does not compose: the arguments without them. Raises SettingError for a folder
    that does not exist."""
    folders, others = named_folders(arguments)
    for folder in folders:
        if not folder.is_dir():
            raise SettingError(
                "--config-dir",
                folder,
                "is not a folder",
                "name one with folders of groups, as conf with conf/model/NAME.yaml",
            )
        add_folder(folder)
    return others


def import_here(module: str) -> ModuleType:
    """Import a module, which is also searched in the current folder. Raises ImportError, and ValueError for an empty name."""
    if (here := str(Path.cwd())) not in sys.path:  # not in sys.path of an installed command
        sys.path.append(here)
    return import_module(module)


def settings_class(path: str) -> type[Settings]:
    """The dataclass `package.module.Class`; modules are also searched in the current folder. Raises SettingError if there is no
    such class, or it does not derive from `Settings`."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(import_here(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        remedy = "name an importable class as package.module.Class, and run the command in the folder of its module"
        raise SettingError(SCHEMA, path, f"cannot be imported: {error}", remedy) from error
    if not (isinstance(found, type) and issubclass(found, Settings)):
        raise SettingError(SCHEMA, path, "declares no settings", "derive it from an options class, as ScheduleOptions")
    return found


class Preset(Generic[S_co]):
    """A named option of a configuration group, such as schedule=RTH: a file whose content is read when it is needed."""

    def __init__(self, path: Path, others: "Presets[S_co]") -> None:
        self.path, self._others = path, others

    @cached_property
    def _comments(self) -> list[str]:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [line.lstrip("# ") for line in lines if line.startswith("#") and not line.startswith("# @")]

    @property
    def summary(self) -> str:
        """One line for `--help`: the first comment."""
        return self._comments[0] if self._comments else ""

    @property
    def source(self) -> str:
        """Paper and section, and how to use it: the other comments at the beginning of lines."""
        return "\n".join(line for line in self._comments[1:] if not line.startswith(LABEL))

    @property
    def label(self) -> str:
        """Its name in figures and tables, by default that of the file."""
        named = [line.removeprefix(LABEL) for line in self._comments if line.startswith(LABEL)]
        return named[0] if named else self.path.stem

    @cached_property
    def _content(self) -> dict[str, Any]:
        from omegaconf import OmegaConf  # slow to import, and only needed for values

        # not yaml.safe_load, which follows YAML 1.1 and takes 1e-4 for text
        content: Any = OmegaConf.to_container(OmegaConf.load(self.path))
        return content or {}

    @cached_property
    def _bases(self) -> list["Preset[S_co]"]:
        """Presets of the same group that the file starts from, as in `defaults: [RTH, _self_]`."""
        names = [entry for entry in self._content.get("defaults", ()) if isinstance(entry, str) and entry != "_self_"]
        return [self._others[name] for name in names]

    @cached_property
    def self_contained(self) -> bool:
        """Whether the file sets nothing outside of its group."""
        entries = self._content.get("defaults", ())
        alone = all(isinstance(entry, str) or f"{SCHEMA}@_here_" in entry for entry in entries)
        return alone and not self.path.read_text(encoding="utf-8").startswith("# @package")

    @cached_property
    def kind(self) -> type[S_co]:
        """The dataclass that declares the settings. Raises SettingError if the file names none."""
        if schema := re.search(rf"{SCHEMA}@_here_: *([\w.]+)", self.path.read_text(encoding="utf-8")):
            return settings_class(schema[1])  # type: ignore[return-value]
        if not self._bases:
            remedy = f"begin the file with `defaults: [{SCHEMA}@_here_: package.module.Class, _self_]`"
            raise SettingError(
                f"{self._others.group}/{self.path.stem}", self.path, "names no class of its settings", remedy
            )
        return self._bases[0].kind

    @cached_property
    def values(self) -> dict[str, Any]:
        """The settings that define the preset."""
        own = {name: value for name, value in self._content.items() if name != "defaults"}
        inherited = [base.values for base in self._bases]
        return {name: value for values in (*inherited, own) for name, value in values.items()}

    def __call__(self, **values: Any) -> S_co:
        """The options with some values changed. Raises SettingError for a setting that this class does not have, or an
        invalid value."""
        for name, value in values.items():
            if name not in self.kind.__dataclass_fields__:
                problem = f"{self.path.stem} has no such setting"
                raise SettingError(name, value, problem, nearest(name, self.kind.__dataclass_fields__))
        return self.kind(**{**self.values, **values})


class Presets(Mapping[str, Preset[S_co]]):
    """The presets of a configuration group by name: bitcycle's, then those of the user's own folders.

    >>> len(Presets("hardware")["bitops"].values)
    1
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._found: dict[tuple[Path, ...], dict[str, Preset[S_co]]] = {}

    @property
    def _presets(self) -> dict[str, Preset[S_co]]:
        folders = (resource_root() / "conf", *own_folders())
        if folders not in self._found:
            paths = [path for folder in reversed(folders) for path in (folder / self.group).glob("*.yaml")]
            unsorted = {path.stem: Preset(path, self) for path in paths}
            self._found[folders] = {name: unsorted[name] for name in sorted(unsorted, key=_natural)}
        return self._found[folders]

    def __getitem__(self, name: str) -> Preset[S_co]:
        return self._presets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._presets)

    def __len__(self) -> int:
        return len(self._presets)

    def chosen(self, name: str) -> Preset[S_co]:
        """The preset of this name. Raises SettingError for an unknown name."""
        if name not in self:
            raise SettingError(self.group, name, "does not exist", nearest(str(name), self))
        return self[name]

    def kinds(self) -> dict[str, type[S_co]]:
        """Name -> the dataclass of its settings."""
        return {name: preset.kind for name, preset in self.items()}


def _natural(name: str) -> tuple[str, int]:
    """resnet8 before resnet20."""
    return re.sub(r"\d", "", name), int(re.sub(r"\D", "", name) or 0)
