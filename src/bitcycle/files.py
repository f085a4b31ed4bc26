"""Files written atomically: JSON, and tables as CSV (UTF-8, a header line, Unix line endings) or text; locks; without PyTorch."""

import csv
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from bitcycle.errors import RunError

RUNS = Path("results/runs")
"""Default folder of the run folders."""
LOCK_SECONDS = 0.1
"""Interval between attempts to lock a file."""
LOOK_SECONDS = 1.0
"""Time for which a lock may be held by processes that only look whether there is one."""


def write_atomically(path: Path, write: Any) -> None:
    """Create or replace a file atomically: after a crash it has either the old or the new content. `write` is called with a
    binary stream. Raises OSError if the file cannot be written (full disk); the old one is then unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, creating its folder. Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda stream: stream.write(content))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure; Windows, which opens no folders, cannot."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the names and contents of those files that exist."""
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, lambda stream: stream.write((json.dumps(value, indent=2) + "\n").encode()))


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if it is missing, damaged, or not readable for this user."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged, or contains something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; an incomplete last line, as after a crash, is ignored. Raises RunError if another line is
    not a JSON object."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # after the last newline: nothing, or an incomplete line
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RunError(f"line {number} of {path} is damaged ({error}); restore the file") from error
    return records


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as text; missing cells are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    r"""A table as Markdown.

    >>> print(markdown_table(["a|b", "c"], [[1, 2]]))
    | a\|b | c |
    |---|---|
    | 1 | 2 |
    """
    texts = ([str(cell).replace("|", "\\|") for cell in cells] for cells in (titles, *rows))
    lines = [f"| {' | '.join(cells)} |" for cells in texts]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], first: str = "") -> None:
    """Write a table, creating its folder. `first` is a line before the header. Raises OSError if it cannot be written; an
    existing file is then unchanged."""
    write_bytes(path, (first + as_csv(columns, rows)).encode())


def read_csv(path: Path, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a table; with `missing_ok`, an empty list if there is no file. Raises FileNotFoundError if there is no
    file, and RunError for a row that does not fit the first line."""
    if missing_ok and not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        rows = []
        for row in reader:
            if None in row or None in row.values():
                problem = f"{path}, line {reader.line_num}: does not have the columns of the first line"
                raise RunError(f"{problem}. Restore the file, as by git checkout; it may have a conflict of a merge.")
            rows.append(row)
        return rows


if sys.platform == "win32":
    import msvcrt

    def try_lock(stream: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process holds it. Shared locks are not supported on Windows."""
        stream.seek(0)  # locks one byte, which need not exist
        try:
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def try_lock(stream: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process holds it, unless both locks are shared. Raises RunError if its
        disk has no locks."""
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            remedy = "use a disk with file locks; Lustre has them with the mount option flock"
            raise RunError(f"cannot lock {stream.name}: {error.strerror}. Remedy: {remedy}") from error
        _locked.add(stream)
        return True

    _locked: WeakSet[IO[Any]] = WeakSet()

    def _close_in_child() -> None:
        """Close locked files in a forked process, such as a data loader's, which otherwise keeps the locks of a killed parent."""
        for stream in list(_locked):
            stream.close()

    os.register_at_fork(after_in_child=_close_in_child)


def lock_against_looks(stream: IO[Any]) -> bool:
    """Lock a file as `try_lock` does, and try again while another process may only be looking whether it is locked."""
    until = time.monotonic() + LOOK_SECONDS
    while not (is_locked := try_lock(stream)) and time.monotonic() < until:
        time.sleep(LOCK_SECONDS)
    return is_locked


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process has a file locked in this way, and lock it; creates `.NAME.lock` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "a") as stream:
        while not try_lock(stream):
            time.sleep(LOCK_SECONDS)
        yield


def resource_root() -> Path:
    """The folder with `conf`, `sweeps`, `results/published` and `results/summary` of this installation. Raises
    FileNotFoundError if there is no such folder."""
    package = Path(__file__).resolve().parent
    for root in (package / "resources", package.parents[1]):  # wheel; checkout
        if (root / "conf" / "config.yaml").is_file():
            return root
    raise FileNotFoundError(
        f"{package} has no configuration files: neither resources/conf in it nor conf two folders above it. "
        "Install the package again, or run it from a checkout."
    )
