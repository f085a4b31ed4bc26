"""Makes the folder `sweeps/` beside `conf/` a configuration group, so that +sweeps=PAPER/ITEM finds its files."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class SweepsSearchPath(SearchPathPlugin):
    """Adds the repository's root behind its `conf/`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in list(search_path.get_path()):
            folder = Path(str(element.path).removeprefix("file://"))
            if element.provider == "main" and (folder.parent / "sweeps").is_dir():
                search_path.append(provider="bitcycle", path=f"file://{folder.parent}")
