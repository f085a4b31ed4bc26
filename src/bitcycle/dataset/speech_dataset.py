"""What every data set of speech has: features, an alphabet of characters, and three splits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from bitcycle.dataset.audio import Recording
from bitcycle.dataset.base import DatasetOptions, fixed_order
from bitcycle.dataset.speech_features import LogMel
from bitcycle.dataset.utterances import Utterances
from bitcycle.errors import DataError
from bitcycle.settings import setting
from bitcycle.shapes import SpeechShape

logger = logging.getLogger(__name__)

KINDS_OF_FEATURE = 3
"""Log-mel bands, their first and their second differences."""


class SpeechSplits(NamedTuple):
    """Recordings to train on, to choose by, and to test on."""

    train: list[Recording]
    validation: list[Recording]
    test: list[Recording]


@dataclass
class SpeechDatasetOptions(DatasetOptions):
    """Options that every data set of speech has; HLHLp says nothing of features, these defaults are ours."""

    has_validation: ClassVar[bool] = True

    sampling_rate: int = setting(16_000, "samples a second of all recordings", minimum=1000)
    mel_bands: int = setting(
        40, "mel bands of a frame; with two differences there are three times as many features", minimum=1
    )
    window_ms: float = setting(25.0, "length of the window of a frame in milliseconds", minimum=1)
    hop_ms: float = setting(10.0, "from one frame to the next in milliseconds", minimum=1)
    nominal_seconds: float = setting(
        7.8,
        "length of the utterance whose products stand for all in the cost (mean of WSJ's SI-284: 7.8)",
        minimum=0.01,
    )

    def alphabet(self, data_root: Path) -> tuple[str, ...]:
        """The characters of all training transcripts in order; CTC has one symbol for each, and the blank.

        Raises:
            DataError: if transcripts have to be read and are missing.
        """
        raise NotImplementedError

    def read(self, data_root: Path) -> SpeechSplits:
        """All recordings of all splits; waveforms are not read yet.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        raise NotImplementedError

    def load(self, data_root: Path) -> SpeechSplits:
        """The recordings that are used: `train_samples` limits training, `test_samples` both other splits."""
        splits = self.read(data_root)
        limits = (self.train_samples, self.test_samples, self.test_samples)
        chosen = (fixed_order(len(split), limit).tolist() for split, limit in zip(splits, limits, strict=True))
        return SpeechSplits(
            *([split[index] for index in indices] for split, indices in zip(splits, chosen, strict=True))
        )

    def shape(self, symbols: int) -> SpeechShape:
        """What such data ask of a network that tells so many symbols apart, the blank included."""
        return SpeechShape(KINDS_OF_FEATURE * self.mel_bands, symbols, self.nominal_frames)

    @property
    def log_mel(self) -> LogMel:
        """The function from waveforms to log-mel features."""
        return LogMel(self.sampling_rate, self.mel_bands, self.window_ms, self.hop_ms)

    @property
    def nominal_frames(self) -> int:
        """Frames of the utterance that the cost is traced with."""
        return self.log_mel.frames(round(self.nominal_seconds * self.sampling_rate))

    def utterances(self, recordings: Sequence[Recording], alphabet: Sequence[str]) -> Utterances:
        """Features of recordings.

        Raises:
            DataError: if there are none, or one cannot be read.
        """
        if not recordings:
            raise DataError(f"a split of {self.name} holds no recording; add some")
        if len(recordings) > 5000:
            logger.info("computing features of %d recordings", len(recordings))
        log_mel = self.log_mel
        features = [log_mel(recording.waveform(self.sampling_rate)) for recording in recordings]
        return Utterances(features, [recording.transcript for recording in recordings], alphabet)


def characters(transcripts: Sequence[str]) -> tuple[str, ...]:
    """The characters that occur in transcripts, in order.

    >>> characters(["one two", "ten"])
    (' ', 'e', 'n', 'o', 't', 'w')
    """
    return tuple(sorted(set("".join(transcripts))))
