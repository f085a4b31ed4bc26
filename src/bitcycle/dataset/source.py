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


def read_class_folders(folder: Path) -> Encoded:
    """Images of a folder that has one sub-folder for each class, in the order of names.

    Raises:
        DataError: if there is no image.
    """
    images, labels = [], []
    classes = [sub for sub in _subfolders(folder) if _image_files(sub)]
    for label, sub in enumerate(classes):
        for path in _image_files(sub):
            images.append(EncodedImage(str(path), path.read_bytes))
            labels.append(label)
    if not images:
        raise DataError(f"no images in the class sub-folders of {folder}; expected {folder}/CLASS/IMAGE.png or similar")
    return Encoded(images, torch.tensor(labels), tuple(sub.name for sub in classes))


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
        label_column: the column of labels; None means label, fine_label or the only integer column.

    Raises:
        DataError: if a file cannot be read or has no such columns.
    """
    images: list[EncodedImage] = []
    labels: list[Tensor] = []
    names: tuple[str, ...] = ()
    for file in files:
        try:
            table = parquet.read_table(file)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {file}: {error}. Fetch the file again.") from error
        image_column = next((field.name for field in table.schema if _has_bytes(field)), None)
        integers = [field.name for field in table.schema if "int" in str(field.type)]
        wanted = [label_column] if label_column else ["label", "fine_label", *integers[:1]]
        column = next((name for name in wanted if name in integers), None)
        if image_column is None or column is None:
            raise DataError(
                f"{file} has columns {table.column_names}; expected an image column (struct with `bytes`) and an integer label"
            )
        cells = table[image_column].combine_chunks().field("bytes")
        images += [EncodedImage(f"row {row} of {file}", _CellReader(cells[row])) for row in range(table.num_rows)]
        labels.append(torch.from_numpy(table[column].to_numpy().astype(np.int64)))
        names = _class_names(table.schema.metadata, column)
    together = torch.cat(labels)
    return Encoded(images, together, names or tuple(str(label) for label in range(int(together.max()) + 1)))


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
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise DataError(
                f"cannot read {folder / name}: {error}. Delete {folder} and fetch the archive again."
            ) from error
        pixels.append(torch.from_numpy(batch[b"data"].reshape(-1, 3, 32, 32)))
        labels += batch[label_key]
    return torch.cat(pixels).permute(0, 2, 3, 1).contiguous(), torch.tensor(labels)
