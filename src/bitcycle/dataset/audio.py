"""Recordings of speech: a name, a transcript, and the waveform, which soundfile decodes (WAV, FLAC, SPHERE, ...)."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle.errors import DataError
from bitcycle.optional_imports import require


class Recording(NamedTuple):
    """One utterance: what it is called in messages, how its encoded bytes are read, and what is said in it."""

    name: str
    read: Callable[[], bytes]
    transcript: str

    def waveform(self, sampling_rate: int) -> Tensor:
        """The samples [S], float32 in [-1, 1].

        Raises:
            DataError: if the recording cannot be read, is empty, has another sampling rate or more than one channel.
        """
        try:
            data = self.read()
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error}. Correct its path, or put it there.") from error
        samples, rate = decode(data, self.name)
        if rate != sampling_rate:
            raise DataError(f"{self.name} has {rate} samples a second; set dataset.sampling_rate={rate}, or convert it")
        if not len(samples):
            raise DataError(f"{self.name} holds no samples; remove it, or fetch it again")
        return samples


def file_recording(path: Path, transcript: str) -> Recording:
    """A recording in a file of its own."""
    return Recording(str(path), path.read_bytes, transcript)


def decode(data: bytes, name: str) -> tuple[Tensor, int]:
    """(samples [S], sampling rate) of an encoded recording with one channel.

    Raises:
        DataError: if it cannot be decoded or has several channels.
        RunError: if soundfile is not installed.
    """
    soundfile = require("soundfile", "speech")
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = f"cannot decode {name}: {error}"
        raise DataError(f"{problem}. Fetch it again, or convert it to WAV with 16-bit PCM.") from error
    if samples.shape[1] != 1:
        raise DataError(f"{name} has {samples.shape[1]} channels; convert it to one")
    return torch.from_numpy(samples[:, 0].copy()), int(rate)
