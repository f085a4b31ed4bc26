"""Atomically written checkpoints: the newest two are kept, and damaged ones are skipped."""

import io
import logging
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bitcycle.errors import RunError
from bitcycle.files import sync_folder, write_atomically

logger = logging.getLogger(__name__)

CHECKSUM = 8
"""Length of the checksum, CRC-32 in hexadecimal digits, that is the comment of the archive `torch.save` writes."""


END = b"PK\5\6" + bytes(18)
"""Signature and length of the end of an archive without a comment, whose last two bytes are 0."""


class CheckpointFolder:
    """The checkpoints of one run: `last.pt`, `previous.pt`, and `candidate-STEP.pt` with weights that a later phase may choose.

    They contain only tensors, numbers, strings, lists and dictionaries, and load with `torch.load(..., weights_only=True)`.
    Without `writes`, nothing is written.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.last, self.previous, self.next = (folder / f"{name}.pt" for name in ("last", "previous", "next"))

    def exists(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.last.exists() or self.previous.exists()

    def save(self, state: dict[str, Any]) -> None:
        """Write `state` as the last checkpoint and keep the previous one. Raises RunError, changing neither, if it cannot."""
        if not self.writes:
            return
        self._write(self.next, state)
        if self.last.exists():
            os.replace(self.last, self.previous)
        os.replace(self.next, self.last)
        sync_folder(self.last.parent)

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".*.tmp"):  # by a process that was killed while it wrote
                left.unlink(missing_ok=True)
            write_atomically(path, lambda stream: _save(state, stream))
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            raise RunError(
                f"cannot write a checkpoint to {self.folder}: {error}. The previous checkpoint is untouched: free space "
                "on that disk and run the same command again to resume from there."
            ) from error

    def candidate(self, step: int) -> Path:
        """The file of the candidate weights after `step` steps."""
        return self.folder / f"candidate-{step}.pt"

    def save_candidate(self, step: int, weights: dict[str, Any]) -> None:
        """Save candidate weights for a later phase. Raises RunError if they cannot be written."""
        if self.writes:
            self._write(self.candidate(step), weights)

    def load_candidate(self, step: int) -> dict[str, Any]:
        """Load candidate weights to the CPU. Raises RunError if they are missing or damaged."""
        path = self.candidate(step)
        if problem := _damage(path):
            raise RunError(
                f"cannot read the weights from which this run continues: {path} ({problem}). Delete the folder to restart."
            )
        weights: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return weights

    def keep_candidates(self, steps: set[int]) -> None:
        """Delete all candidate weights except those after `steps`."""
        wanted = {self.candidate(step) for step in steps}
        for path in self.folder.glob("candidate-*.pt"):
            if self.writes and path not in wanted:
                path.unlink(missing_ok=True)

    def load(self, run: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The newest readable checkpoint of the identity `run` (None: any), or None if there is no checkpoint. Raises RunError
        if there are checkpoints and none of them can be used.

        Its tensors are on the CPU, from where each part copies what it keeps on its device. Adam keeps its number of steps on
        the CPU; on a device, the host would wait for it once per parameter and step.
        """
        problems = []
        # the next one is left if a process is killed before it becomes the last; the previous one may then be a damaged last one
        for path in filter(Path.exists, (self.last, self.previous, self.next)):
            if problem := _damage(path):
                problems.append(f"{path.name}: {problem}")
                logger.warning("skipping the damaged checkpoint %s (%s)", path, problem)
                continue
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            if run is None or state.get("run") == run:
                return state
            problems.append(f"{path.name}: belongs to the run {state.get('run')}, not to {run}")
            logger.warning("skipping the checkpoint %s, which belongs to another run", path)
        if problems:
            raise RunError(
                f"no usable checkpoint in {self.last.parent} ({'; '.join(problems)}). Delete that folder to start over."
            )
        return None


def _save(state: dict[str, Any], stream: BinaryIO) -> None:
    """Write `state` as `torch.save` does, with a checksum of the whole file, as the archive has none of its directory."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    content[-2:] = CHECKSUM.to_bytes(2, "little")  # the archive ends with the length of its comment
    stream.write(content)
    stream.write(_checksum(content))


def _checksum(content: memoryview) -> bytes:
    return b"%0*x" % (CHECKSUM, zlib.crc32(content))


def _damage(path: Path) -> str | None:
    """Compare a checkpoint with its checksum; returns a description of the damage, or None if it is intact."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        return str(error)
    if content[-len(END) :][:4] == END[:4] and content[-2:] == END[-2:]:
        return None  # written before checkpoints had a checksum
    return None if _checksum(content[:-CHECKSUM]) == content[-CHECKSUM:] else "does not match its checksum"
