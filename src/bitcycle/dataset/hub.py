"""Datasets of the Hugging Face hub, read by `datasets`: from a folder of parquet files, or by name.

Names are searched in the library's cache and on the hub, respecting `HF_HOME`, `HF_ENDPOINT` (a mirror),
`HF_HUB_OFFLINE` and the login token.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import pyarrow.parquet as parquet

from bitcycle.errors import DataError


def load_hub(
    where: Path | str, remedy: str, needed: Sequence[str], subset: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """Load the splits of a folder, or of the dataset OWNER/NAME. Raises DataError with `remedy` if one `needed` is missing."""
    import datasets  # takes a second to import

    try:
        if isinstance(where, Path) and has_parquet(where):
            _check_class_names(where, datasets)
            found: dict[str, Any] = datasets.load_dataset("parquet", data_dir=str(where))
        else:
            with _offline_without_network(datasets):
                found = datasets.load_dataset(str(where), subset, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        lines = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        raise DataError(f"{where} cannot be loaded ({lines[0].rstrip('.')}). {remedy}") from error
    if absent := [split for split in needed if split not in found]:
        raise DataError(f"{where} has the splits {', '.join(found)}, but not {', '.join(absent)}. {remedy}")
    return found


@contextmanager
def _offline_without_network(datasets: Any) -> Iterator[None]:
    """Context that uses only the library's cache if the hub's host is unknown, which saves half a minute."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        if not getproxies():
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _check_class_names(folder: Path, datasets: Any) -> None:
    """Reject files with different class numbers, as `datasets` applies those of the first file to all."""
    names: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        for column, feature in datasets.Features.from_arrow_schema(parquet.read_schema(file)).items():
            found = getattr(feature, "names", None)
            if found and names.setdefault(column, found) != found:
                problem = f"{file} has other class numbers in {column} ({', '.join(found[:5])} ...)"
                raise DataError(f"{problem} than other files ({', '.join(names[column][:5])} ...). Export all alike.")


def has_parquet(folder: Path) -> bool:
    """Whether there is a parquet file anywhere below a folder."""
    return next(folder.rglob("*.parquet"), None) is not None


def columns(split: Any, names: Sequence[str], origin: object) -> list[list[Any]]:
    """Values of the named columns of a split. Raises DataError if the split lacks one of them."""
    if lacking := [name for name in names if name not in split.column_names]:
        raise DataError(f"{origin} has the columns {split.column_names}, not {', '.join(lacking)}. Download it again.")
    return [split.data.table[name].to_pylist() for name in names]


def file_bytes(cells: Any, row: int) -> bytes:
    """Bytes of a file in a column of images or recordings, which contains bytes or paths."""
    cell = cells[row].as_py()
    data: bytes = Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"]
    return data
