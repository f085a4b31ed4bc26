"""Free Spoken Digit Dataset: the ten digits said by six people, single words at 8 kHz. A small stand-in for read speech (WSJ).

Each digit is recorded 50 times by each person. Official split: recordings 0 to 4 test, 5 to 49 train. Here 5 to 44 are used for
training, 2,400 recordings; of these, 5 to 9 of each digit and person, 300 recordings, are the validation split, which leaves
2,100. Licence: CC BY-SA 4.0. Looked for below `data_root/fsdd` as `fsdd.parquet` (columns audio with `bytes`, transcript,
digit, speaker, index) or as the project's own folder `recordings/DIGIT_PERSON_INDEX.wav`; else it is downloaded.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as parquet

from bitcycle.dataset.audio import Recording
from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.speech_dataset import SpeechDatasetOptions, SpeechSplits, characters
from bitcycle.errors import DataError
from bitcycle.settings import setting

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = 6
TEST, VALIDATION, TRAIN = range(5), range(5, 10), range(10, 45)
"""Indices of the recordings of each digit and person that belong to each split."""
TRAIN_SAMPLES, TEST_SAMPLES = len(TRAIN) * SPEAKERS * len(WORDS), len(TEST) * SPEAKERS * len(WORDS)
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
        samples = self.checked_samples(TRAIN_SAMPLES, TEST_SAMPLES)
        return DatasetInfo(self.shape(len(self.alphabet(data_root)) + 1), *samples)

    def read(self, data_root: Path) -> SpeechSplits:
        folder = data_root / "fsdd"
        if not (folder / "fsdd.parquet").is_file() and not (folder / "recordings").is_dir():
            download(folder)
        found = read_parquet(folder / "fsdd.parquet") if (folder / "fsdd.parquet").is_file() else read_folder(folder)
        found.sort(key=lambda digit: digit[:3])
        splits = SpeechSplits(
            *([digit.recording for digit in found if digit.number in indices] for indices in (TRAIN, VALIDATION, TEST))
        )
        sizes, expected = tuple(map(len, splits)), (TRAIN_SAMPLES, TEST_SAMPLES, TEST_SAMPLES)
        if sizes != expected:
            raise DataError(
                f"{folder} has {sizes} recordings to train, choose and test with instead of {expected}: it is not whole. "
                "Delete it to download it again, or use dataset=speech_manifest for other recordings."
            )
        return splits


def read_parquet(file: Path) -> list[Digit]:
    """The recordings of a parquet file.

    Raises:
        DataError: if it cannot be read or lacks a column.
    """
    try:
        table = parquet.read_table(file, columns=["audio", "transcript", "digit", "speaker", "index"])
        cells = table["audio"].combine_chunks().field("bytes")
        columns = [table[name].to_pylist() for name in ("index", "digit", "speaker", "transcript")]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read {file}: {error}. Fetch it again, or delete it to download the data.") from error
    return [
        Digit(number, digit, speaker, Recording(f"row {row} of {file}", _Cell(cells[row]), transcript))
        for row, (number, digit, speaker, transcript) in enumerate(zip(*columns, strict=True))
    ]


class _Cell:
    """Reads one recording's bytes from a parquet column that is held in memory."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __call__(self) -> bytes:
        data: bytes = self.cell.as_py()
        return data


def read_folder(folder: Path) -> list[Digit]:
    """The recordings of the project's own folder."""
    found = []
    for path in sorted((folder / "recordings").glob("*.wav")):
        if match := FILE_NAME.fullmatch(path.name):
            digit, speaker, number = int(match[1]), match[2], int(match[3])
            found.append(Digit(number, digit, speaker, Recording(str(path), path.read_bytes, WORDS[digit])))
    return found


def download(folder: Path) -> None:
    """Download the recordings into `folder/recordings`.

    Raises:
        DataError: if that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            with (
                urllib.request.urlopen(URL, timeout=20) as response,
                tarfile.open(fileobj=response, mode="r|gz") as archive,
            ):
                for member in archive:
                    name = Path(member.name)
                    if member.isfile() and name.parent.name == "recordings" and FILE_NAME.fullmatch(name.name):
                        stream = archive.extractfile(member)
                        assert stream is not None, "a file has content"
                        (Path(temporary) / name.name).write_bytes(stream.read())
            (folder / "recordings").mkdir()
            for path in Path(temporary).iterdir():
                path.rename(folder / "recordings" / path.name)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise DataError(
            f"fsdd is not in {folder} and cannot be downloaded ({error}). Put the folder recordings/ of "
            "github.com/Jakobovski/free-spoken-digit-dataset there, or fsdd.parquet; or point data_root= (or BITCYCLE_DATA) at "
            "the folder that holds it."
        ) from error
