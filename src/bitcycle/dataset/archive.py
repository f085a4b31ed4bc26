"""Files below a folder or inside a tar archive, read the same way."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from bitcycle.errors import DataError


class Files(Protocol):
    """Files by their names relative to a top folder, with slashes."""

    def names(self) -> list[str]:
        """All of them, in order."""

    def read(self, name: str) -> bytes:
        """The content of one.

        Raises:
            DataError: if it is missing or cannot be read.
        """

    def origin(self, name: str) -> str:
        """Where it lies, for messages."""


class FolderFiles:
    """Files below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.folder / name}: {error.strerror}. Complete the data set.") from error

    def origin(self, name: str) -> str:
        return str(self.folder / name)


class TarFiles:
    """Files below a folder of a small tar archive, which is held in memory."""

    def __init__(self, archive: Path, top: str) -> None:
        self.archive, self.top = archive, PurePosixPath(top)
        self.contents: dict[str, bytes] = {}
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    path = PurePosixPath(member.name)
                    stream = tar.extractfile(member) if member.isfile() and path.is_relative_to(self.top) else None
                    if stream is not None:
                        self.contents[path.relative_to(self.top).as_posix()] = stream.read()
        except (OSError, tarfile.TarError) as error:
            problem = str(error).split("\n")[0].rstrip(":")
            raise DataError(f"cannot read {archive}: {problem}. Fetch it again.") from error

    def names(self) -> list[str]:
        return sorted(self.contents)

    def read(self, name: str) -> bytes:
        try:
            return self.contents[name]
        except KeyError:
            raise DataError(f"{self.origin(name)} is missing. Fetch the archive again.") from None

    def origin(self, name: str) -> str:
        return f"{self.top / name} in {self.archive}"


def find_files(folders: Sequence[Path], top: str, archives: Sequence[Path] = ()) -> Files | None:
    """The files below `top` of the first folder that has it, else of the first archive that exists; None without any."""
    for folder in folders:
        if (folder / top).is_dir():
            return FolderFiles(folder / top)
    return next((TarFiles(archive, top) for archive in archives if archive.is_file()), None)
