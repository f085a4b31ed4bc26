"""Find and read image data sets on disk: class folders, Hugging Face parquet files, and CIFAR's official files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet
import torch
from pyarrow import types
from torch import Tensor

from bitcycle.dataset.images import EncodedImage
from bitcycle.errors import DataError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation", "testing")}
"""Names under which each split is looked for, in this order."""


class Encoded(NamedTuple):
    """A split as it lies on disk: encoded images, their labels and the names of the classes."""

    images: Sequence[EncodedImage]
    labels: Tensor
    class_names: tuple[str, ...]


def find_class_folders(folder: Path, split: str | None) -> Path | None:
    """The folder of class sub-folders of a split, or of all images (`split` None), if there is one."""
    candidates = [folder] if split is None else [folder / name for name in SPLITS[split]]
    for candidate in candidates:
        if candidate.is_dir() and any(_image_files(sub) for sub in _subfolders(candidate)):
            return candidate
    return None


def read_class_folders(folder: Path, class_names: tuple[str, ...] | None = None) -> Encoded:
    """Images of a folder that has one sub-folder for each class.

    Args:
        folder: the folder.
        class_names: those of the training split, whose order numbers the classes; None numbers them in the order of names.

    Raises:
        DataError: if there is no image, or a class that is not one of `class_names`.
    """
    images, labels = [], []
    classes = [sub for sub in _subfolders(folder) if _image_files(sub)]
    names = class_names or tuple(sub.name for sub in classes)
    if strangers := {sub.name for sub in classes} - set(names):
        raise DataError(
            f"{folder} has classes that the training split lacks: {', '.join(sorted(strangers))}. Name the class folders of both "
            "splits alike, or remove these."
        )
    for sub in classes:
        for path in _image_files(sub):
            images.append(EncodedImage(str(path), path.read_bytes))
            labels.append(names.index(sub.name))
    if not images:
        raise DataError(f"no images in the class sub-folders of {folder}; expected {folder}/CLASS/IMAGE.png or similar")
    return Encoded(images, torch.tensor(labels), names)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def find_parquet(folder: Path, split: str) -> list[Path]:
    """The parquet files of a split: those whose name begins with the split's, as in train-00000-of-00001.parquet."""
    files = sorted(folder.rglob("*.parquet"))
    for name in SPLITS[split]:
        found = [path for path in files if path.name.startswith((f"{name}-", f"{name}.")) or path.parent.name == name]
        if found:
            return found
    return []


class _CellReader:
    """Reads one image's bytes from a parquet column that is held in memory."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __call__(self) -> bytes:
        data: bytes = self.cell.as_py()
        return data


def read_parquet(files: Sequence[Path], label_column: str | None = None) -> Encoded:
    """Images of Hugging Face image parquet files: a struct column with `bytes`, and an integer column of labels.

    Args:
        files: the files of one split.
        label_column: the column of labels; None means label, labels, fine_label or the only integer column.

    Raises:
        DataError: if a file cannot be read, has no such columns, or several that could be the labels.
    """
    parts: list[Encoded] = []
    for file in files:
        try:
            table = parquet.read_table(file)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {file}: {error}. Fetch the file again.") from error
        parts.append(read_table(table, str(file), label_column))
    names = {part.class_names for part in parts}
    if len(names) > 1:
        raise DataError(f"{files[0].parent}: the files of one split name their classes differently; fetch them again")
    together = torch.cat([part.labels for part in parts])
    return Encoded([image for part in parts for image in part.images], together, names.pop() or numbered(together))


def read_table(table: Any, origin: str, label_column: str | None = None) -> Encoded:
    """The images and labels of an Arrow table, as `read_parquet` explains; no class names where the table has none.

    Raises:
        DataError: if it has no such columns, or several that could be the labels.
    """
    image_column = next((field.name for field in table.schema if _has_bytes(field)), None)
    if image_column is None:
        raise DataError(f"{origin} has columns {table.column_names}; expected one of images (a struct with `bytes`)")
    column = _label_column(table.schema, label_column, origin)
    cells = table[image_column].combine_chunks().field("bytes")
    images = [EncodedImage(f"row {row} of {origin}", _CellReader(cells[row])) for row in range(table.num_rows)]
    return Encoded(images, _labels(table[column], column, origin), _class_names(table.schema.metadata, column))


def numbered(labels: Tensor) -> tuple[str, ...]:
    """Names of classes that have none: their numbers."""
    return tuple(str(label) for label in range(int(labels.max()) + 1)) if len(labels) else ()


def _label_column(schema: Any, wanted: str | None, file: str) -> str:
    """The column of labels: the wanted one, one that is called so, or the only integer column."""
    integers = [field.name for field in schema if types.is_integer(field.type)]
    usual = [name for name in ([wanted] if wanted else ["label", "labels", "fine_label"]) if name in integers]
    found: list[str] = usual or ([] if wanted else integers)
    if len(found) == 1 or usual:
        return found[0]
    problem = f"{wanted} is not one of them" if wanted else f"{len(found) or 'none'} could be the labels"
    raise DataError(f"{file} has the integer columns {integers}: {problem}; set dataset.label_column to one of them")


def _labels(column: Any, name: str, file: str) -> Tensor:
    if column.null_count:
        raise DataError(f"column {name} of {file} lacks {column.null_count} labels; remove these rows")
    labels = torch.from_numpy(column.to_numpy().astype(np.int64))
    if len(labels) and int(labels.min()) < 0:
        problem = f"{int((labels < 0).sum())} negative labels, which often stand for images without one"
        raise DataError(f"column {name} of {file} has {problem}; remove these rows, or set dataset.label_column")
    return labels


def _has_bytes(field: Any) -> bool:
    return str(field.type).startswith("struct") and "bytes" in {child.name for child in field.type}


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    """Class names that the `datasets` library wrote into a parquet file's metadata, if any."""
    features = json.loads((metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return tuple(features.get(column, {}).get("names", ()))


def read_cifar_pickles(folder: Path, files: Sequence[str], label_key: bytes) -> tuple[Tensor, Tensor]:
    """(pixels uint8 [N, 32, 32, 3], labels) of CIFAR's official python files.

    Raises:
        DataError: if one cannot be read.
    """
    pixels, labels = [], []
    for name in files:
        try:
            with open(folder / name, "rb") as stream:
                batch = pickle.load(stream, encoding="bytes")  # the official format; from the official archive only
            pixels.append(torch.from_numpy(batch[b"data"].reshape(-1, 3, 32, 32)))
            labels += batch[label_key]
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"cannot read {folder / name}: {type(error).__name__}: {error}. Delete {folder} and fetch the archive again."
            ) from error
    return torch.cat(pixels).permute(0, 2, 3, 1).contiguous(), torch.tensor(labels)
