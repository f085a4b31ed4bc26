"""Free Spoken Digit Dataset: the ten digits said by six people, single words at 8 kHz. A small proxy for read speech (WSJ).

Each digit is recorded 50 times by each person. Official split: recordings 0 to 4 test, 5 to 49 train. Here 5 to 44 are used for
training, 2,400 recordings; of these, 5 to 9 of each digit and person, 300 recordings, are the validation split, which leaves
2,100. Licence: CC BY-SA 4.0. Looked for below `data_root/fsdd` as a parquet file (columns audio with `bytes`, transcript,
digit, speaker, index) or as the project's own folder `recordings/DIGIT_PERSON_INDEX.wav`; else it is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bitcycle.dataset.audio import Recording, file_recording
from bitcycle.dataset.base import DatasetInfo, check_whole, missing
from bitcycle.dataset.fetch import fetch, unpack
from bitcycle.dataset.hub import columns, has_parquet, load_hub
from bitcycle.dataset.speech_dataset import SpeechDatasetOptions, SpeechSplits, characters
from bitcycle.settings import setting

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = 6
TEST, VALIDATION, TRAIN = range(5), range(5, 10), range(10, 45)
"""Indices of the recordings of each digit and person that belong to each split."""
TRAIN_SAMPLES, TEST_SAMPLES = len(TRAIN) * SPEAKERS * len(WORDS), len(TEST) * SPEAKERS * len(WORDS)
ARCHIVE = "free-spoken-digit-dataset-1.0.10"
URL = "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/tags/v1.0.10.tar.gz"
FILE_NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")


class Digit(NamedTuple):
    """A recording with what its file name says: sorted by index, digit and person, whichever source it comes from."""

    number: int
    digit: int
    speaker: str
    recording: Recording


@dataclass
class Fsdd(SpeechDatasetOptions):
    """Options of the spoken digits."""

    name: str = "fsdd"
    sampling_rate: int = setting(8000, "samples a second of all recordings", minimum=1000)
    nominal_seconds: float = setting(
        0.44,
        "length of the utterance whose products stand for all in the cost (mean of the training split)",
        minimum=0.01,
    )

    def alphabet(self, data_root: Path) -> tuple[str, ...]:
        return characters(WORDS)

    def info(self, data_root: Path) -> DatasetInfo:
        shape = self.shape(len(self.alphabet(data_root)) + 1)
        return self.limited(DatasetInfo(shape, TRAIN_SAMPLES, TEST_SAMPLES))

    def read(self, data_root: Path) -> SpeechSplits:
        folder = data_root / "fsdd"
        if has_parquet(folder):
            found = read_parquet(folder)
        else:
            found = read_folder(folder / "recordings" if (folder / "recordings").is_dir() else self._download(folder))
        found.sort(key=lambda digit: digit[:3])
        splits = SpeechSplits(
            *([digit.recording for digit in found if digit.number in indices] for indices in (TRAIN, VALIDATION, TEST))
        )
        expected = TRAIN_SAMPLES, TEST_SAMPLES, TEST_SAMPLES
        check_whole(self.name, folder, "recordings to train, choose and test with", list(map(len, splits)), expected)
        return splits

    def _download(self, folder: Path) -> Path:
        put = "the folder recordings/ of github.com/Jakobovski/free-spoken-digit-dataset, or fsdd.parquet,"
        archive = fetch(URL, folder / f"{ARCHIVE}.tar.gz", str(missing(self.name, folder, put)))
        return unpack(archive, folder / "recordings", f"{ARCHIVE}/recordings")


def read_parquet(folder: Path) -> list[Digit]:
    """The recordings of the parquet file in a folder.

    Raises:
        DataError: if it cannot be read or lacks a column.
    """
    remedy = "Fetch it again, or delete it to download the data."
    split = load_hub(folder, remedy)["train"]
    rows = zip(*columns(split, ("index", "digit", "speaker", "transcript"), folder), strict=True)
    cells = split.data.table["audio"]
    return [
        Digit(number, digit, speaker, Recording(f"row {row} of {folder}", partial(_bytes, cells, row), transcript))
        for row, (number, digit, speaker, transcript) in enumerate(rows)
    ]


def _bytes(cells: Any, row: int) -> bytes:
    data: bytes = cells[row]["bytes"].as_py()
    return data


def read_folder(folder: Path) -> list[Digit]:
    """The recordings of the project's own folder."""
    names = [(path, match) for path in sorted(folder.glob("*.wav")) if (match := FILE_NAME.fullmatch(path.name))]
    return [
        Digit(int(match[3]), int(match[1]), match[2], file_recording(path, WORDS[int(match[1])]))
        for path, match in names
    ]
