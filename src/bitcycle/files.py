"""Files written atomically, and JSON files; without PyTorch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from bitcycle.errors import RunError


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


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure; Windows, which opens no folders, cannot."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, lambda stream: stream.write((json.dumps(value, indent=2) + "\n").encode()))


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
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
