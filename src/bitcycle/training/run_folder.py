"""The folder of a run: its name, files and status. All file names of a run are defined here."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bitcycle.errors import RunError
from bitcycle.files import lock_against_looks, read_object, try_lock, write_json
from bitcycle.training.checkpoint import CheckpointFolder

HASHED = re.compile("-([0-9a-f]{10})$")
"""The end of the name of a folder of runs that differ in the seed alone."""


class RunFolder:
    """The folder of one run.

    | file | content |
    |---|---|
    | config.yaml | every setting, resolved |
    | status.json | running, done, or failed with the reason |
    | metrics.jsonl | training, evaluation and phase records, one JSON object per line |
    | timing.jsonl | wall-clock time and speed, separate so that equal runs have identical metrics files |
    | summary.json | final and best metric, cost in total and up to the best |
    | environment.json | versions, commit, hardware |
    | log.txt | the console output, as plain lines |
    | checkpoint/ | last.pt, previous.pt; candidate-STEP.pt: weights from which a later phase may start or has started |
    | analyses/ | results of analyses of the trained network |
    | NAME/ | the folder of a preliminary run NAME, such as range_test |

    Without `writes`, writes are discarded.
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

    def below(self, name: str) -> "RunFolder":
        """The subfolder of a preliminary run."""
        return RunFolder(self.path / name, self.writes)

    def state(self) -> str:
        """new, resumable or done. A copy of the folder of another run under the name of this one is not done."""
        if read_object(self.status).get("state") == "done" and self._is_of_its_name(read_object(self.summary)):
            return "done"
        return "resumable" if self.checkpoint.exists() else "new"

    def _is_of_its_name(self, summary: dict[str, Any]) -> bool:
        """Whether a summary is there and has seed and hash of the folder's name, ...-HASH/seed=N, if it has such a name."""
        seed, name = self.path.name.removeprefix("seed="), HASHED.search(self.path.parent.name)
        if not summary or seed == self.path.name:
            return bool(summary)
        same_run = name is None or summary.get("hash", name[1]) == name[1]
        return same_run and str(summary.get("seed", seed)) == seed

    def read_settings(self) -> dict[str, Any]:
        """The content of config.yaml. Raises OSError if there is none, and RunError if it is damaged."""
        try:
            settings = OmegaConf.to_container(OmegaConf.load(self.config))
        except (YAMLError, OmegaConfBaseException, ValueError) as error:
            problem = " ".join(str(error).split())  # those of YAML have several lines
            raise RunError(f"{self.config} is damaged ({problem}); restore the file") from error
        if not isinstance(settings, dict) or "schedule" not in settings:
            raise RunError(f"{self.config} is damaged (it has no schedule); restore the file")
        return cast(dict[str, Any], settings)

    def read_status(self) -> dict[str, Any]:
        """The content of status.json; empty if there is none or it cannot be read."""
        return read_object(self.status)

    def read_summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if there is none or it cannot be read."""
        return read_object(self.summary)

    def is_in_use(self) -> bool:
        """Whether a process is training this run; False if this user may not know, which `lock` then refuses."""
        try:
            with open(self.path / ".lock", "rb") as stream:
                return not try_lock(stream, shared=True)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False

    def write_status(self, state: str, step: int | None, total_steps: int, reason: str | None = None) -> None:
        """Write status.json: state, progress (None: as recorded) and time of the last update."""
        record = {
            "state": state,
            "reason": reason,
            "step": self.read_status().get("step", 0) if step is None else step,
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
        """Lock the folder, if this process writes. Raises RunError if another is training this run, or the disk refuses."""
        if not self.writes:
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a")
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error}. Set results_root to a writable folder.") from error
        with lock as stream:
            if not lock_against_looks(stream):
                status = self.read_status()
                known = f"pid {status['pid']} on {status['host']}" if status.keys() >= {"pid", "host"} else "just begun"
                raise RunError(f"another process is training this run ({known}): {self.path}. Wait for it.")
            yield
