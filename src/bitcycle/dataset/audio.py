"""Recordings of speech: a name, a transcript, and how to get at the waveform."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitcycle.errors import DataError
from bitcycle.optional_imports import require

PCM_SCALES = {1: 128.0, 2: 32768.0, 4: 2147483648.0}
"""Bytes of a PCM sample -> what full scale is divided by."""


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

    PCM WAV of 8, 16 or 32 bits is read by the standard library, everything else (FLAC, NIST SPHERE, ...) by soundfile.

    Raises:
        DataError: if it cannot be decoded or has several channels.
        RunError: if soundfile is needed and not installed.
    """
    try:
        return _decode_wave(data, name)
    except (wave.Error, EOFError, KeyError):
        return _decode_other(data, name)


def _decode_wave(data: bytes, name: str) -> tuple[Tensor, int]:
    with wave.open(io.BytesIO(data)) as stream:
        width, scale = stream.getsampwidth(), PCM_SCALES[stream.getsampwidth()]
        _check_channels(stream.getnchannels(), name)
        raw, rate = stream.readframes(stream.getnframes()), stream.getframerate()
    raw = raw[: len(raw) // width * width]
    if width == 1:  # the only width without sign
        samples = np.frombuffer(raw, dtype=np.uint8).astype(np.float64) - scale
    else:
        samples = np.frombuffer(raw, dtype=f"<i{width}").astype(np.float64)
    return torch.from_numpy((samples / scale).astype(np.float32)), rate


def _decode_other(data: bytes, name: str) -> tuple[Tensor, int]:
    soundfile = require("soundfile", "speech")
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = f"cannot decode {name}: {error}"
        raise DataError(f"{problem}. Fetch it again, or convert it to WAV with 16-bit PCM.") from error
    _check_channels(samples.shape[1], name)
    return torch.from_numpy(samples[:, 0].copy()), int(rate)


def _check_channels(channels: int, name: str) -> None:
    if channels != 1:
        raise DataError(f"{name} has {channels} channels; convert it to one")
