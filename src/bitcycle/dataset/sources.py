"""Sources of data: archives from the official site of a dataset, and the Hugging Face hub, read by `datasets`.

Archives are downloaded where no registration is needed, checked and unpacked. Datasets of the hub are read from a folder of
parquet files, or by name. Names are searched in the library's cache and on the hub, respecting `HF_HOME`, `HF_ENDPOINT` (a
mirror), `HF_HUB_OFFLINE` and the login token.
"""

import hashlib
import shutil
import socket
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, urlopen

from filelock import FileLock

from bitcycle.cache import cache_folder
from bitcycle.dataset.base import logger
from bitcycle.errors import DataError

TIMEOUT_SECONDS = 20
_downloads = ContextVar("downloads", default=True)


@contextmanager
def without_downloads() -> Iterator[None]:
    """Context in which data that would be downloaded are missing: DataError instead."""
    token = _downloads.set(False)
    try:
        yield
    finally:
        _downloads.reset(token)


def fetch(url: str, path: Path, remedy: str, md5: str | None = None) -> Path:
    """Download `url` to `path`, which is complete or absent afterwards.

    An interrupted download is kept in PATH.part, where the next call continues. If several processes call this, one downloads
    and the others wait. Raises DataError if the download fails or does not have the checksum `md5`; contains `remedy`.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not path.is_file():
                logger.info("%s is missing; downloading it from %s", path, url)
                _download(url, part)
                if md5 is not None and (found := _md5(part)) != md5:
                    part.unlink()
                    raise OSError(f"its MD5 checksum is {found} instead of {md5}")
                part.replace(path)
    except (HTTPException, OSError) as error:
        raise DataError(f"{path} is missing and cannot be downloaded from {url} ({error}). {remedy}") from error
    return path


def _md5(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def _download(url: str, part: Path) -> None:
    from rich.progress import wrap_file

    if not _downloads.get():
        raise OSError("downloads are switched off")
    begun = part.stat().st_size if part.is_file() else 0
    try:
        asked = Request(url, headers={"Range": f"bytes={begun}-"} if begun else {})
        source: Any = urlopen(asked, timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if error.code != 416:  # 416: the part is longer than the file, so it belongs to another file
            raise
        part.unlink()
        return _download(url, part)
    with source:
        begun = begun if source.status == 206 else 0  # other answers send the whole file
        length = source.headers.get("Content-Length")
        with (
            wrap_file(source, int(length or 0), description=f"Downloading {url.rpartition('/')[2]}") as reader,
            open(part, "ab" if begun else "wb") as target,
        ):
            shutil.copyfileobj(reader, target, 2**20)
    if length is not None and part.stat().st_size != begun + int(length):
        arrived = f"{part.stat().st_size} of {begun + int(length)} bytes arrived"
        raise OSError(f"{arrived}; run the same command again to continue")
    return None


def download(url: str, folder: Path, inside: str, absent: DataError, md5: str | None = None) -> Path:
    """`unpack` the archive at `url`, which is kept next to `folder`. Raises DataError as `fetch`, with the remedy `absent`."""
    archive = fetch(url, folder.with_name(url.rpartition("/")[2]), str(absent), md5)
    return unpack(archive, folder, inside)


def unpack(archive: Path, folder: Path, inside: str = ".") -> Path:
    """Unpack `inside` of an archive to `folder`, which is complete or absent afterwards. Raises DataError if it cannot."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            shutil.unpack_archive(archive, temporary, filter=None if archive.suffix == ".zip" else "data")
            (Path(temporary) / inside).rename(folder)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        if folder.is_dir():  # another process unpacked it first
            return folder
        problem = str(error).split("\n")[0].rstrip(":")
        raise DataError(f"cannot unpack {archive} to {folder}: {problem}. Delete it and download it again.") from error
    return folder


def unpack_to_cache(archive: Path) -> Path:
    """Unpack a small archive to the user's cache, and return the folder. Raises DataError if it cannot be unpacked."""
    with open(archive, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = cache_folder() / f"{archive.stem}-{digest}"
    return folder if folder.is_dir() else unpack(archive, folder)


def load_hub(
    where: Path | str, remedy: str, needed: Sequence[str], subset: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """Load the splits of a folder, or of the dataset OWNER/NAME; `subset` is a folder in the former, a configuration of the
    latter. Raises DataError with `remedy` if one `needed` is missing."""
    import datasets  # takes a second to import

    if subset is not None and isinstance(where, Path) and has_parquet(where):
        if not has_parquet(where / subset):
            raise DataError(f"{where} has no folder {subset} of parquet files. {remedy}")
        where = where / subset
    try:
        if isinstance(where, Path) and has_parquet(where):
            _check_files(where, datasets)
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
    """Context that uses only the library's cache if downloads are switched off, or if the hub's host is unknown, which saves half
    a minute."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        if not _downloads.get():
            raise OSError("downloads are switched off")
        if not getproxies():
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _check_files(folder: Path, datasets: Any) -> None:
    """Reject files without rows, which `datasets` cannot read, and with different class numbers, as it applies those of the first
    file to all."""
    import pyarrow.parquet as parquet

    names: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        metadata = parquet.read_metadata(file)
        if not metadata.num_rows:
            raise DataError(f"{file} has no rows. Remove it, or export it again.")
        for column, feature in datasets.Features.from_arrow_schema(metadata.schema.to_arrow_schema()).items():
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
    """Bytes of a file in a column of images or recordings, which contains bytes or paths. Raises OSError if there are none."""
    cell = cells[row].as_py() or {}
    data: bytes | None = cell.get("bytes")
    if data is None and cell.get("path") is None:
        raise FileNotFoundError("it has neither bytes nor a path")
    return Path(cell["path"]).read_bytes() if data is None else data
