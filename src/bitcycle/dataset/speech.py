"""Speech with transcripts: features, an alphabet of characters, three splits; user-defined manifests and spoken digits.

Free Spoken Digit Dataset: the ten digits spoken by six people as single words at 8 kHz. A small proxy for read speech
(WSJ). Each person recorded each digit 50 times. Official split: recordings 0 to 4 test, 5 to 49 train. Here 5 to 9 of
each digit and person (300 recordings) are the validation split and 10 to 44 (2,100 recordings) the training split.
Licence: CC BY-SA 4.0. Searched below `data_root/fsdd` as a parquet file (columns audio with `bytes`, transcript, digit,
speaker, index) or as the project's folder `recordings/DIGIT_PERSON_INDEX.wav`; otherwise downloaded.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, Splits, check_whole, first_samples, logger, missing
from bitcycle.dataset.sources import columns, download, file_bytes, has_parquet, load_hub
from bitcycle.dataset.utterances import BANDS, LogMel, Utterances
from bitcycle.errors import DataError
from bitcycle.optional_imports import require
from bitcycle.settings import setting
from bitcycle.shapes import SpeechShape

LIST_FORM = "a CSV file with the header audio,transcript, or lines of JSON with these keys"
OWN_LISTS = "set dataset.train_manifest, validation_manifest and test_manifest to your lists"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = 6
TRAIN, TEST, VALIDATION = range(10, 45), range(5), range(5, 10)
"""Recording indices of each split, for each digit and person."""
ARCHIVE = "free-spoken-digit-dataset-1.0.10"
URL = "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/tags/v1.0.10.tar.gz"


class Recording(NamedTuple):
    """An utterance: its name in messages, a function that reads its encoded bytes, and its transcript."""

    name: str
    read: Callable[[], bytes]
    transcript: str

    def waveform(self, sampling_rate: int) -> Tensor:
        """The samples [S], float32 in [-1, 1], of WAV, FLAC, SPHERE and other formats that soundfile decodes. Raises DataError
        if the recording cannot be read, is empty, is not finite, or has another rate or several channels; RunError without
        soundfile."""
        soundfile = require("soundfile", "speech")
        try:
            samples, rate = soundfile.read(io.BytesIO(self.read()), dtype="float32", always_2d=True)
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error}. Correct its path, or add the file.") from error
        except (RuntimeError, TypeError, ValueError) as error:
            # soundfile's message names an object instead of the file
            reason = str(getattr(error, "error_string", error)).rstrip(".")
            problem = f"cannot decode {self.name}: {reason}"
            raise DataError(f"{problem}. Download it again, or convert it to WAV with 16-bit PCM.") from error
        if samples.shape[1] != 1:
            raise DataError(f"{self.name} has {samples.shape[1]} channels; convert it to one")
        if rate != sampling_rate:
            raise DataError(f"{self.name} has a rate of {rate} Hz; set dataset.sampling_rate={rate}, or convert it")
        if not len(samples):
            raise DataError(f"{self.name} has no samples; remove it, or download it again")
        waveform = torch.from_numpy(samples[:, 0].copy())
        if not waveform.isfinite().all():
            raise DataError(f"{self.name} has samples that are infinite or no numbers; remove it, or convert it again")
        return waveform


def file_recording(path: Path, transcript: str) -> Recording:
    """A recording in a file."""
    return Recording(str(path), path.read_bytes, transcript)


@dataclass
class SpeechDatasetOptions(DatasetOptions):
    """Options of all speech datasets; HLHLp does not specify features, the defaults are ours."""

    has_validation = True

    sampling_rate: int = setting(16_000, "sampling rate of all recordings in Hz", minimum=1000)
    nominal_seconds: float = setting(
        7.8, "seconds of the utterance whose cost is counted for all (WSJ's SI-284: 7.8)", minimum=0.01
    )

    def alphabet(self, data_root: Path) -> tuple[str, ...]:
        """Sorted characters of all training transcripts. Raises DataError if they must be read and are missing."""
        return tuple(sorted(set("".join(recording.transcript for recording in self.read(data_root).train))))

    def load(self, data_root: Path, seed: int) -> Splits[list[Recording]]:
        """The recordings to use: `train_samples` limits the training split, `test_samples` the other two."""
        limits = (self.train_samples, self.test_samples, self.test_samples)
        splits = zip(self.read(data_root), limits, strict=True)
        return Splits(*(first_samples(split or [], limit) for split, limit in splits))

    def shape(self, transcripts: Iterable[str]) -> SpeechShape:
        """Shape of the data, with a symbol for each character of the transcripts and the blank."""
        frames = LogMel(self.sampling_rate).frames(round(self.nominal_seconds * self.sampling_rate))
        # log-mel bands with first and second differences
        return SpeechShape(3 * BANDS, 1 + len(set("".join(transcripts))), frames)

    def utterances(self, recordings: Sequence[Recording], alphabet: Sequence[str]) -> Utterances:
        """Features of recordings. Raises DataError if there are none, or one cannot be read."""
        if not recordings:
            raise DataError(f"a split of {self.name} has no recordings; add some")
        if len(recordings) > 5000:
            logger.info("computing features of %d recordings", len(recordings))
        log_mel = LogMel(self.sampling_rate)
        features = [log_mel(recording.waveform(self.sampling_rate)) for recording in recordings]
        return Utterances(features, [recording.transcript for recording in recordings], alphabet)


@dataclass
class SpeechManifest(SpeechDatasetOptions):
    """Options of user-defined recordings (WSJ, Aurora-4, ...): one list of paths and transcripts per split.

    WSJ: train SI-284, validation dev93, test eval92; transcripts normalised as required (lower case, no punctuation).
    """

    name: str = "speech_manifest"
    train_manifest: str = setting(
        "speech/train.csv", "list of the training recordings, .csv or .jsonl, absolute or below data_root"
    )
    validation_manifest: str = setting("speech/validation.csv", "list of the validation recordings")
    test_manifest: str = setting("speech/test.csv", "list of the test recordings")

    def full_info(self, data_root: Path) -> DatasetInfo:
        """Shape and sizes from the lists; reads no recordings."""
        train, test, _ = self.read(data_root)
        return DatasetInfo(self.shape(each.transcript for each in train), len(train), len(test))

    def _files(self, data_root: Path) -> list[Path]:
        manifests = (self.train_manifest, self.test_manifest, self.validation_manifest)
        return [self.located(data_root, manifest) for manifest in manifests]

    def place(self, data_root: Path) -> Path | None:
        files = self._files(data_root)
        return files[0] if all(map(Path.is_file, files)) else None

    def absent(self, data_root: Path) -> DataError:
        lacking = next(file for file in self._files(data_root) if not file.is_file())
        return missing(self.name, lacking, LIST_FORM, f" Or {OWN_LISTS}.")

    def read(self, data_root: Path) -> Splits[list[Recording]]:
        return Splits(*map(read_recordings, self._files(data_root)))


def read_recordings(file: Path) -> list[Recording]:
    """Recordings of a list, in its order; white space in transcripts is collapsed to single spaces.

    A list is a CSV file with the columns `audio` and `transcript`, or a `.jsonl` file whose objects have these keys. Paths
    are absolute or relative to the list's folder. Raises DataError if the list is missing or unreadable, or a line lacks a
    path or a transcript.
    """
    import pandas

    is_json = file.suffix == ".jsonl"
    read_json = partial(pandas.read_json, lines=True, dtype=False)  # what is no text remains so, and is refused below
    read = read_json if is_json else partial(pandas.read_csv, keep_default_na=False, dtype=str)
    try:
        table = read(file, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}. It should be {LIST_FORM}; {OWN_LISTS}.") from error
    if not is_json and not isinstance(table.index, pandas.RangeIndex):
        raise DataError(f"{file} has rows of more values than its header; put transcripts with commas in quotes")
    if table.empty:
        raise DataError(f"{file} lists no recordings; it should be {LIST_FORM}")
    recordings = []
    for number, row in enumerate(table.to_dict("records"), 1 if is_json else 2):
        audio, transcript = (row.get(column) for column in ("audio", "transcript"))
        if not isinstance(audio, str) or not audio or not isinstance(transcript, str) or not transcript.strip():
            raise DataError(f"line {number} of {file} lacks a path or a transcript; it should be {LIST_FORM}")
        recordings.append(file_recording(file.parent / Path(audio).expanduser(), " ".join(transcript.split())))
    return recordings


@dataclass
class Fsdd(SpeechDatasetOptions):
    """Options of the spoken digits; nominal_seconds is the mean of the training split."""

    name: str = "fsdd"
    sampling_rate: int = 8000
    nominal_seconds: float = 0.44

    def alphabet(self, data_root: Path) -> tuple[str, ...]:
        return tuple(sorted(set("".join(WORDS))))

    def full_info(self, data_root: Path) -> DatasetInfo:
        sizes = (len(split) * SPEAKERS * len(WORDS) for split in (TRAIN, TEST))
        return DatasetInfo(self.shape(WORDS), *sizes)

    def place(self, data_root: Path) -> Path | None:
        folder = data_root / "fsdd"
        return folder if has_parquet(folder) or (folder / "recordings").is_dir() else None

    def absent(self, data_root: Path) -> DataError:
        put = "the folder recordings/ of github.com/Jakobovski/free-spoken-digit-dataset, or fsdd.parquet,"
        return missing(self.name, data_root / "fsdd", put)

    def read(self, data_root: Path) -> Splits[list[Recording]]:
        folder = data_root / "fsdd"
        if self.place(data_root) is None:
            download(URL, folder / "recordings", f"{ARCHIVE}/recordings", self.absent(data_root))
        found = _parquet_digits(folder) if has_parquet(folder) else _file_digits(folder)
        parts = (TRAIN, TEST, VALIDATION)
        splits = [[found[key] for key in sorted(found) if key[0] in part] for part in parts]
        expected = [len(part) * SPEAKERS * len(WORDS) for part in parts]
        check_whole(self.name, folder, "training, test and validation recordings", [*map(len, splits)], expected)
        return Splits(*splits)


def _parquet_digits(folder: Path) -> dict[tuple[int, int, str], Recording]:
    """(index, digit, speaker) -> recording, from the parquet file in a folder."""
    split = load_hub(folder, "Delete it to download the data again.", ["train"])["train"]
    rows = zip(*columns(split, ("index", "digit", "speaker", "transcript"), folder), strict=True)
    cells = split.data.table["audio"]
    return {
        (number, digit, speaker): Recording(f"row {row} of {folder}", partial(file_bytes, cells, row), transcript)
        for row, (number, digit, speaker, transcript) in enumerate(rows)
    }


def _file_digits(folder: Path) -> dict[tuple[int, int, str], Recording]:
    """(index, digit, speaker) -> recording, from the project's folder."""
    paths = (folder / "recordings").iterdir()
    names = ((path, re.fullmatch(r"(\d)_([a-z]+)_(\d+)\.wav", path.name)) for path in paths)
    return {
        (int(name[3]), int(name[1]), name[2]): file_recording(path, WORDS[int(name[1])]) for path, name in names if name
    }
