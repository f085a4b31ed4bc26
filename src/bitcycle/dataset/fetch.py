"""Archives: downloaded from a data set's official source where that may be had without asking, checked and unpacked."""

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
    """Download `url` to `path`, which is either complete or absent afterwards.

    What has arrived of an interrupted download stays in PATH.part, and the next call goes on there. Of several processes one
    downloads and the others wait for it.

    Raises:
        DataError: if it fails or what arrives has not the checksum `md5`; says `remedy`.
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
        if error.code != 416:  # there is nothing after what has arrived, so that it is another file's
            raise
        part.unlink()
        return _download(url, part)
    with source:
        begun = begun if source.status == 206 else 0  # a server that sends a part only when it says so
        length = source.headers.get("Content-Length")
        with (
            wrap_file(source, int(length or 0), description=f"Downloading {url.rpartition('/')[2]}") as reader,
            open(part, "ab" if begun else "wb") as target,
        ):
            shutil.copyfileobj(reader, target, 2**20)
    if length is not None and part.stat().st_size != begun + int(length):
        arrived = f"{part.stat().st_size} of {begun + int(length)} bytes arrived"
        raise OSError(f"{arrived}; run the same command again to go on")
    return None


def download(url: str, folder: Path, inside: str, absent: DataError, md5: str | None = None) -> Path:
    """`folder` with what lies below `inside` in the archive at `url`, which is kept beside it.

    Raises:
        DataError: as `fetch`, with `absent` as the remedy, and `unpack`.
    """
    archive = fetch(url, folder.with_name(url.rpartition("/")[2]), str(absent), md5)
    return unpack(archive, folder, inside)


def unpack(archive: Path, folder: Path, inside: str = ".") -> Path:
    """Unpack what lies below `inside` in a tar or zip archive to `folder`, which is complete or absent afterwards.

    Raises:
        DataError: if it cannot be unpacked.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            shutil.unpack_archive(archive, temporary, filter=None if archive.suffix == ".zip" else "data")
            (Path(temporary) / inside).rename(folder)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        if folder.is_dir():  # another process was faster
            return folder
        problem = str(error).split("\n")[0].rstrip(":")
        raise DataError(f"cannot unpack {archive} to {folder}: {problem}. Delete it and fetch it again.") from error
    return folder


def unpack_to_cache(archive: Path) -> Path:
    """The folder in the user's cache with the content of a small archive.

    Raises:
        DataError: if it cannot be unpacked.
    """
    with open(archive, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = cache_folder() / f"{archive.stem}-{digest}"
    return folder if folder.is_dir() else unpack(archive, folder)
