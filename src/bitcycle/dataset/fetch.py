"""Archives: download from the official source of a dataset where no registration is needed, check and unpack."""

import hashlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock

from bitcycle.cache import cache_folder
from bitcycle.dataset.base import logger
from bitcycle.errors import DataError

TIMEOUT_SECONDS = 20


def fetch(url: str, path: Path, remedy: str, md5: str | None = None) -> Path:
    """Download `url` to `path`, which is complete or absent afterwards.

    An interrupted download is kept in PATH.part, where the next call continues. If several processes call this, one downloads
    and the others wait. Raises DataError if the download fails or does not have the checksum `md5`; contains `remedy`.
    """
    from torchvision.datasets.utils import calculate_md5

    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not path.is_file():
                logger.info("%s is missing; downloading it from %s", path, url)
                _download(url, part)
                if md5 is not None and (found := calculate_md5(part)) != md5:
                    part.unlink()
                    raise OSError(f"its MD5 checksum is {found} instead of {md5}")
                part.replace(path)
    except (HTTPException, OSError) as error:
        raise DataError(f"{path} is missing and cannot be downloaded from {url} ({error}). {remedy}") from error
    return path


def _download(url: str, part: Path) -> None:
    from rich.progress import wrap_file

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
