"""Image data sets of the Hugging Face hub by their name there, through the library `datasets` with its caches and mirrors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from bitcycle.dataset.custom import CustomImages, both_splits
from bitcycle.dataset.source import Encoded, numbered, read_table
from bitcycle.errors import DataError
from bitcycle.optional_imports import require
from bitcycle.settings import MISSING, setting

TEST_SPLITS = ("test", "validation", "valid", "val")
"""Names under which a split to test with is looked for, in this order."""


@dataclass
class HubImages(CustomImages):
    """A data set of the hub with a column of images and one of labels: dataset=hub dataset.path=owner/name.

    `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and the token of the login are respected. A folder in the hub's layout, absolute or
    below data_root, is read without network. Runs are named by path, subset and revision, not by what these hold.
    """

    path: str = setting(MISSING, "owner/name at the hub, or a folder in its layout")
    subset: Optional[str] = setting(None, "configuration of a data set that has several; null: its default")
    revision: Optional[str] = setting(None, "commit, branch or tag at the hub; null: the newest")
    train_split: str = setting("train", "name of the split to train on")
    test_split: Optional[str] = setting(
        None, "name of the split to test on; null: test, else validation, else test_fraction of the training split"
    )

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / Path(self.path).expanduser()
        path = str(folder) if folder.is_dir() else self.path
        return _load(
            path, self.subset, self.revision, self.train_split, self.test_split, self.label_column, self.test_fraction
        )


@lru_cache(maxsize=4)
def _load(
    path: str,
    subset: str | None,
    revision: str | None,
    train_split: str,
    test_split: str | None,
    label_column: str | None,
    test_fraction: float,
) -> tuple[Encoded, Encoded]:
    library = require("datasets", "entailment")
    try:
        splits: Any = library.load_dataset(path, subset, revision=revision)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # not found, not reachable, another configuration is to be named
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(
            f"dataset.path={path} cannot be loaded: {lines[0]} Check name, dataset.subset and network, log in for gated data, "
            "or give a folder in the hub's layout."
        ) from error
    for name in (train_split, *([test_split] if test_split else [])):
        if name not in splits:
            raise DataError(
                f"dataset.path={path} has the splits {', '.join(splits)}, not {name}; set dataset.train_split"
            )
    found = test_split or next((name for name in TEST_SPLITS if name in splits and name != train_split), None)
    train = _read(splits[train_split], f"{path}, {train_split}", label_column)
    test = _read(splits[found], f"{path}, {found}", label_column) if found else None
    return both_splits(train, test, test_fraction, path)


def _read(split: Any, origin: str, label_column: str | None) -> Encoded:
    encoded = read_table(split.data.table, origin, label_column)
    return encoded if encoded.class_names else encoded._replace(class_names=numbered(encoded.labels))
