"""A run's folder: its name, its files and its status. No file name of a run is spelled anywhere else."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitcycle.errors import RunError
from bitcycle.training.checkpoint import CheckpointFolder, write_atomically
from bitcycle.training.file_lock import try_lock


class RunFolder:
    """The folder of one run.

    | file | what |
    |---|---|
    | config.yaml | every setting, resolved |
    | status.json | running, done, or failed with the reason |
    | metrics.jsonl | training, evaluation and phase records, one JSON object a line: the truth of the run |
    | timing.jsonl | wall-clock time and speed, apart, so that metrics of equal runs are equal files |
    | summary.json | final and best metric, cost in total and up to the best |
    | environment.json | versions, commit, hardware |
    | log.txt | what was shown, as plain lines |
    | checkpoint/ | last.pt and previous.pt; candidate-STEP.pt: weights that a later phase may start from, or did |
    | analyses/ | what `bitcycle.measurement` computed of the trained network |
    | NAME/ | the same of a run NAME that had to come first, such as range_test |

    Args:
        path: of the folder.
        writes: False for a process that leaves all writing to another one: what it writes here goes nowhere.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.config = path / "config.yaml"
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing.jsonl"
        self.summary = path / "summary.json"
        self.environment = path / "environment.json"
        self.log = path / "log.txt"
        self.picture = path / "picture.png"
        self.analyses = path / "analyses"
        self.checkpoint = CheckpointFolder(path / "checkpoint", writes)

    def below(self, name: str) -> RunFolder:
        """The folder of a run that belongs to this one."""
        return RunFolder(self.path / name, self.writes)

    def read_only(self) -> RunFolder:
        """The same folder for a process that leaves all writing to another one."""
        return RunFolder(self.path, writes=False)

    def state(self) -> str:
        """new, resumable or done."""
        if self.read_status().get("state") == "done" and self.read_summary():
            return "done"
        return "resumable" if self.checkpoint.exists() else "new"

    def read_status(self) -> dict[str, Any]:
        """The content of status.json; empty if there is none or it cannot be read."""
        return read_object(self.status)

    def read_summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if there is none or it cannot be read."""
        return read_object(self.summary)

    def is_in_use(self) -> bool:
        """Whether a process trains this run now."""
        try:
            with open(self.path / ".lock", "rb") as stream:
                return not try_lock(stream, shared=True)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def write_status(self, state: str, step: int, total_steps: int, reason: str | None = None) -> None:
        """Write status.json: the state, how far the run is, and its last sign of life."""
        record = {
            "state": state,
            "reason": reason,
            "step": step,
            "total_steps": total_steps,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "pid": os.getpid(),
        }
        self.write(self.status, record)

    def write(self, file: Path, value: Any) -> None:
        """Write one of the JSON files."""
        if self.writes:
            write_json(file, value)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process, if it writes.

        Raises:
            RunError: if another process is training this run, or the folder cannot be written.
        """
        if not self.writes:
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a")
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error}. Point results_root at a folder of yours.") from error
        with lock as stream:
            if not try_lock(stream):
                status = self.read_status()
                known = f"pid {status['pid']} on {status['host']}" if status.keys() >= {"pid", "host"} else "just begun"
                raise RunError(f"another process trains this run ({known}): {self.path}. Wait for it.")
            yield


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
    """The content of a JSON file that holds an object; empty if it is missing, damaged, or holds something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that was torn by a crash is left out.

    Raises:
        RunError: if another line is no JSON object.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # after the last newline: nothing, or a line that was never finished
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RunError(f"line {number} of {path} is damaged ({error}); put the file back as it was") from error
    return records
