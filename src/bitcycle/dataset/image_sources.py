"""Stored labelled images: class folders, and tables in the layout of the Hugging Face hub."""

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.image_dataset import draw_of_classes
from bitcycle.dataset.images import EncodedImage, EncodedImages
from bitcycle.dataset.sources import file_bytes, load_hub
from bitcycle.errors import DataError

logger = logging.getLogger(__name__)

TRAIN_FOLDERS, TEST_FOLDERS = ("train", "training"), ("test", "val", "valid", "validation", "testing")
"""Names of the folders of each split; the first with class folders counts."""
MOST_CLASSES = 1_000_000
"""Number from which labels without names are refused: a network has an output for each."""
USUAL_LABELS = ("label", "labels", "fine_label")
"""Names of columns of labels; the first that has integers counts."""


@lru_cache(maxsize=4)
def read_folders(folder: Path, test_fraction: float) -> tuple[EncodedImages, EncodedImages]:
    """Images of class folders below train/ and test/ (or val/), or directly in `folder`. Raises DataError if there are none."""
    train = _first_split(folder, TRAIN_FOLDERS, None)
    test = train and _first_split(folder, TEST_FOLDERS, train.class_names)
    if train and not test:
        _warn_of_unused_tests(folder)
    return both_splits(train or _without_splits(folder), test, test_fraction, folder)


def _warn_of_unused_tests(folder: Path) -> None:
    """Warn of folders that are meant as the test split, but have another case, or no class folders."""
    if unused := sorted(sub.name for sub in folder.iterdir() if sub.is_dir() and sub.name.lower() in TEST_FOLDERS):
        problem = "%s is not used: a test split has images in %s/test/CLASS, in lower case; training images are held out instead"
        logger.warning(problem, folder / unused[0], folder)


def _without_splits(folder: Path) -> EncodedImages:
    """Images of class folders directly in `folder`. Raises DataError if these are splits, which would be learned as classes."""
    found = read_class_folders(folder)
    if {name.lower() for name in found.class_names} <= {*TRAIN_FOLDERS, *TEST_FOLDERS}:
        problem = f"{folder} has no classes, only the folders {', '.join(found.class_names)}"
        raise DataError(f"{problem}. Sort the images into {folder}/train/CLASS and {folder}/test/CLASS, in lower case.")
    return found


def _first_split(folder: Path, names: Sequence[str], class_names: tuple[str, ...] | None) -> EncodedImages | None:
    return next((found for name in names if (found := _class_folders(folder / name, class_names))), None)


def read_class_folders(folder: Path) -> EncodedImages:
    """Images of a folder with a subfolder per class, numbered in the order of names. Raises DataError if there are none."""
    if (found := _class_folders(folder, None)) is None:
        raise DataError(
            f"no images in class subfolders of {folder}; expected {folder}/CLASS/IMAGE.png or {folder}/train/CLASS/IMAGE.png"
        )
    return found


def _class_folders(folder: Path, class_names: tuple[str, ...] | None) -> EncodedImages | None:
    """Images of class folders, numbered as in the training split; None if there are no images."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    subs = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [sub.name for sub in subs if sub.is_dir() and not sub.name.startswith(".")]
    if not names:
        return None
    numbers = {name: number for number, name in enumerate(names)}
    samples = make_dataset(str(folder), numbers, (*IMG_EXTENSIONS, ".gif"), allow_empty=True)
    found = tuple(names[number] for number in sorted({number for _, number in samples}))
    classes = class_names or found
    if strangers := set(found) - set(classes):
        raise DataError(
            f"{folder} has classes that the training split lacks: {', '.join(sorted(strangers))}. Use the same class "
            "folders in both splits, or remove these."
        )
    images = [EncodedImage(path, Path(path).read_bytes) for path, _ in samples]
    labels = torch.tensor([classes.index(names[number]) for _, number in samples])
    return EncodedImages(images, labels, classes) if images else None


REMEDY = (
    "Check dataset.path, dataset.subset, the split names and the network, log in for gated data, or give a folder in"
    " the hub's layout."
)


@lru_cache(maxsize=4)
def read_hub_images(
    where: Path | str,
    remedy: str = REMEDY,
    subset: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    label_column: str | None = None,
    test_fraction: float = 0.2,
) -> tuple[EncodedImages, EncodedImages]:
    """Training and test images of the hub or of a folder in its layout; arguments as in `HubImages`. Raises DataError."""
    splits = load_hub(where, remedy, [train_split, *([test_split] if test_split else [])], subset, revision)
    usual = (name for name in ("test", "validation") if name in splits and name != train_split)
    found = test_split or next(usual, None)
    train = read_table(splits[train_split], f"{where}, {train_split}", label_column)
    test = read_table(splits[found], f"{where}, {found}", label_column) if found else None
    return both_splits(train, test, test_fraction, where)


def read_table(split: Any, origin: str, label_column: str | None = None) -> EncodedImages:
    """Images of a split loaded by `datasets`, with a column of images (`bytes`, or the `path` of a file) and one of labels.

    Without `label_column`, labels are label, labels, fine_label or the only integer column. Raises DataError for others.
    """
    from pyarrow import types

    table = split.data.table
    structs = (field for field in table.schema if types.is_struct(field.type))
    image_column = next((field.name for field in structs if "bytes" in {child.name for child in field.type}), None)
    if image_column is None:
        raise DataError(f"{origin} has columns {table.column_names}; expected one of images (a struct with `bytes`)")
    column = _label_column(table.schema, label_column, origin)
    labels = _labels(table[column], column, origin)
    names = tuple(getattr(split.features[column], "names", ())) or _numbered(labels, column, origin)
    cells = table[image_column]
    images = [EncodedImage(f"row {row} of {origin}", partial(file_bytes, cells, row)) for row in range(len(labels))]
    return EncodedImages(images, labels, names)


def _label_column(schema: Any, wanted: str | None, origin: str) -> str:
    """Name of the column of labels: the wanted one, one with a common name, or the only integer column."""
    from pyarrow import types

    integers = [field.name for field in schema if types.is_integer(field.type)]
    asked = [name for name in ([wanted] if wanted else USUAL_LABELS) if name in schema.names]
    usual = [name for name in asked if name in integers]
    if asked and not usual:
        problem = f"column {asked[0]} of {origin} has values of type {schema.field(asked[0]).type}, not integers"
        raise DataError(f"{problem}. Number the classes 0, 1, ..., or set dataset.label_column to another column.")
    found: list[str] = usual or ([] if wanted else integers)
    if len(found) == 1 or usual:
        return found[0]
    problem = f"{wanted} is not one of them" if wanted else f"{len(found) or 'none'} could be the labels"
    raise DataError(f"{origin} has the integer columns {integers}: {problem}; set dataset.label_column to one of them")


def _labels(column: Any, name: str, origin: str) -> Tensor:
    if column.null_count or not len(column):
        raise DataError(f"column {name} of {origin} lacks {column.null_count or 'all'} labels; remove those rows")
    labels = torch.from_numpy(column.to_numpy().astype(np.int64))
    if int(labels.min()) < 0:
        problem = f"{int((labels < 0).sum())} negative labels, which often denote unlabelled images"
        raise DataError(f"column {name} of {origin} has {problem}; remove those rows, or set dataset.label_column")
    return labels


def _numbered(labels: Tensor, name: str, origin: str) -> tuple[str, ...]:
    """The numbers of all classes as their names. Raises DataError for numbers that can only be identifiers."""
    if (highest := int(labels.max())) >= MOST_CLASSES:
        problem = f"column {name} of {origin} has the label {highest}, which is no class number"
        raise DataError(f"{problem}. Number the classes 0, 1, ..., or set dataset.label_column to another column.")
    return tuple(map(str, range(highest + 1)))


def both_splits(
    train: EncodedImages, test: EncodedImages | None, test_fraction: float, origin: object
) -> tuple[EncodedImages, EncodedImages]:
    """Training and test images, the latter held out if there is no test split. Raises DataError for unknown test classes."""
    used = train.labels.bincount(minlength=len(train.class_names)) > 0
    if unused := [name for name, is_used in zip(train.class_names, used.tolist()) if not is_used]:
        problem = "%s: no training image has the class %s; the network has an output for each of %d classes%s"
        hint = ", which are numbered from 0" if unused == ["0"] else ""
        logger.warning(problem, origin, " or ".join(unused[:3]), len(used), hint)
    if test is None:
        held_out = hold_out(train.labels, test_fraction)
        return train.subset(~held_out), train.subset(held_out)
    if int(test.labels.max()) >= len(train.class_names):
        problem = f"the test split has label {int(test.labels.max())}; training has {len(train.class_names)} classes"
        raise DataError(f"{origin}: {problem}. Export both splits alike.")
    return train, test


def hold_out(labels: Tensor, fraction: float) -> Tensor:
    """Mask of held-out samples: a fraction of each class, fixed, at least one and not all. Raises DataError for one sample."""
    sizes = dict(zip(*(column.tolist() for column in labels.unique(return_counts=True))))
    for label, size in sizes.items():
        if size < 2:
            raise DataError(f"class {label} has a single image; add another, or a test split")
    counts = {label: min(max(1, round(fraction * size)), size - 1) for label, size in sizes.items()}
    return draw_of_classes(labels, counts, torch.Generator().manual_seed(0))
