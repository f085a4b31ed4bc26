"""Labelled images as they are stored: class folders, and tables in the layout of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pyarrow import types
from torch import Tensor

from bitcycle.dataset.images import EncodedImage
from bitcycle.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation", "testing")}
"""Names under which each split is looked for, in this order."""


class Encoded(NamedTuple):
    """A split as it is stored: encoded images, their labels and the names of the classes."""

    images: Sequence[EncodedImage]
    labels: Tensor
    class_names: tuple[str, ...]


def read_folder_split(folder: Path, split: str, class_names: tuple[str, ...] | None = None) -> Encoded | None:
    """The images of FOLDER/SPLIT/CLASS/, as `read_class_folders`; None if there are none."""
    for name in SPLITS[split]:
        if (found := _class_folders(folder / name, class_names)) is not None:
            return found
    return None


def read_class_folders(folder: Path, class_names: tuple[str, ...] | None = None) -> Encoded:
    """Images of a folder that has one sub-folder for each class; torchvision lists them.

    Args:
        folder: the folder.
        class_names: those of the training split, whose order numbers the classes; None numbers them in the order of names.

    Raises:
        DataError: if there is no image, or a class that is not one of `class_names`.
    """
    found = _class_folders(folder, class_names)
    if found is None:
        raise DataError(
            f"no images in class sub-folders of {folder}; expected {folder}/CLASS/IMAGE.png or {folder}/train/CLASS/IMAGE.png"
        )
    return found


def _class_folders(folder: Path, class_names: tuple[str, ...] | None) -> Encoded | None:
    from torchvision.datasets import ImageFolder

    if not folder.is_dir() or not any(sub.is_dir() for sub in folder.iterdir()):
        return None
    listed = ImageFolder(str(folder), is_valid_file=lambda path: path.lower().endswith(SUFFIXES), allow_empty=True)
    samples = [(path, name) for path, label in listed.samples if not (name := listed.classes[label]).startswith(".")]
    if not samples:
        return None
    found = sorted({name for _, name in samples})
    names = class_names or tuple(found)
    if strangers := set(found) - set(names):
        raise DataError(
            f"{folder} has classes that the training split lacks: {', '.join(sorted(strangers))}. Name the class folders of both "
            "splits alike, or remove these."
        )
    numbers = {name: number for number, name in enumerate(names)}
    images = [EncodedImage(path, Path(path).read_bytes) for path, _ in samples]
    return Encoded(images, torch.tensor([numbers[name] for _, name in samples]), names)


def read_table(split: Any, origin: str, label_column: str | None = None) -> Encoded:
    """The images of a split that `datasets` has loaded: a column of images (`bytes`, or the `path` of a file) and one of labels.

    Args:
        split: with its table and its features, which may name the classes.
        origin: where it comes from, for messages.
        label_column: the column of labels; None means label, labels, fine_label or the only integer column.

    Raises:
        DataError: if it has no such columns, or several that could be the labels.
    """
    table = split.data.table
    image_column = next((field.name for field in table.schema if _has_bytes(field)), None)
    if image_column is None:
        raise DataError(f"{origin} has columns {table.column_names}; expected one of images (a struct with `bytes`)")
    column = _label_column(table.schema, label_column, origin)
    labels = _labels(table[column], column, origin)
    names = tuple(getattr(split.features[column], "names", ())) or tuple(map(str, range(int(labels.max()) + 1)))
    cells = table[image_column]
    images = [EncodedImage(f"row {row} of {origin}", partial(_bytes, cells, row)) for row in range(len(labels))]
    return Encoded(images, labels, names)


def _bytes(cells: Any, row: int) -> bytes:
    cell = cells[row].as_py()
    data: bytes = Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"]
    return data


def _has_bytes(field: Any) -> bool:
    return types.is_struct(field.type) and "bytes" in {child.name for child in field.type}


def _label_column(schema: Any, wanted: str | None, origin: str) -> str:
    """The column of labels: the wanted one, one that is called so, or the only integer column."""
    integers = [field.name for field in schema if types.is_integer(field.type)]
    usual = [name for name in ([wanted] if wanted else ["label", "labels", "fine_label"]) if name in integers]
    found: list[str] = usual or ([] if wanted else integers)
    if len(found) == 1 or usual:
        return found[0]
    problem = f"{wanted} is not one of them" if wanted else f"{len(found) or 'none'} could be the labels"
    raise DataError(f"{origin} has the integer columns {integers}: {problem}; set dataset.label_column to one of them")


def _labels(column: Any, name: str, origin: str) -> Tensor:
    if column.null_count or not len(column):
        raise DataError(f"column {name} of {origin} lacks {column.null_count or 'all'} labels; remove these rows")
    labels = torch.from_numpy(column.to_numpy().astype(np.int64))
    if int(labels.min()) < 0:
        problem = f"{int((labels < 0).sum())} negative labels, which often stand for images without one"
        raise DataError(f"column {name} of {origin} has {problem}; remove these rows, or set dataset.label_column")
    return labels


def both_splits(train: Encoded, test: Encoded | None, test_fraction: float, origin: object) -> tuple[Encoded, Encoded]:
    """Training and test images, the latter held out where there is no test split.

    Raises:
        DataError: where the splits number their classes differently.
    """
    if test is None:
        held_out = hold_out(train.labels, test_fraction)
        return _part(train, ~held_out), _part(train, held_out)
    if test.class_names != train.class_names[: len(test.class_names)]:
        raise DataError(
            f"{origin}: the test split numbers its classes otherwise ({', '.join(test.class_names[:5])} ...) than the training "
            f"split ({', '.join(train.class_names[:5])} ...); export both alike"
        )
    if int(test.labels.max()) >= len(train.class_names):
        problem = f"the test split has label {int(test.labels.max())}; training has {len(train.class_names)} classes"
        raise DataError(f"{origin}: {problem}. Export both splits alike.")
    return train, test


def _part(whole: Encoded, mask: Tensor) -> Encoded:
    indices = mask.nonzero().flatten()
    return Encoded([whole.images[index] for index in indices.tolist()], whole.labels[indices], whole.class_names)


def hold_out(labels: Tensor, fraction: float) -> Tensor:
    """A mask of the samples held out for testing: a share of each class, at least one; the same for every run.

    Raises:
        DataError: for a class with fewer than two samples.
    """
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        if len(members) < 2:
            raise DataError(f"class {int(label)} has a single image: add another, or a test split")
        count = max(1, round(fraction * len(members)))
        held_out[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return held_out
