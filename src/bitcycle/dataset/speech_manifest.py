"""Your own recordings (WSJ, Aurora-4, ...) by lists of paths and transcripts, one list a split.

A list is a CSV file with the columns `audio` and `transcript`, or a `.jsonl` file whose objects have these keys. Paths are
absolute or relative to the list's folder; WAV, FLAC and SPHERE without shorten compression are read. WSJ: train SI-284,
validation dev93, test eval92; transcripts as you want them recognised (lower case, no punctuation).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitcycle.dataset.audio import Recording, file_recording
from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.speech_dataset import SpeechDatasetOptions, SpeechSplits, characters
from bitcycle.errors import DataError
from bitcycle.settings import setting

COLUMNS = ("audio", "transcript")
EXAMPLE = "a CSV file with the header audio,transcript, or lines of JSON with these keys"


@dataclass
class SpeechManifest(SpeechDatasetOptions):
    """Options of your own recordings."""

    name: str = "speech_manifest"
    train_manifest: str = setting(
        "speech/train.csv", "list of the training recordings, .csv or .jsonl, absolute or below data_root"
    )
    validation_manifest: str = setting("speech/validation.csv", "list of the recordings to choose by")
    test_manifest: str = setting("speech/test.csv", "list of the recordings to test on")

    def alphabet(self, data_root: Path) -> tuple[str, ...]:
        return characters([recording.transcript for recording in self._list(data_root, self.train_manifest)])

    def info(self, data_root: Path) -> DatasetInfo:
        """What the lists hold; reads them, and no recording."""
        splits = self.read(data_root)
        symbols = len(characters([recording.transcript for recording in splits.train])) + 1
        return self.limited(DatasetInfo(self.shape(symbols), len(splits.train), len(splits.test)))

    def read(self, data_root: Path) -> SpeechSplits:
        manifests = (self.train_manifest, self.validation_manifest, self.test_manifest)
        return SpeechSplits(*(self._list(data_root, manifest) for manifest in manifests))

    def _list(self, data_root: Path, manifest: str) -> list[Recording]:
        return read_manifest(data_root / Path(manifest).expanduser())


def read_manifest(file: Path) -> list[Recording]:
    """The recordings that a list names, in its order; runs of white space in transcripts become single spaces.

    Raises:
        DataError: if the list is missing, cannot be read, or a line has no path or no transcript.
    """
    import pandas

    try:
        options: dict[str, Any] = {"dtype": str, "encoding": "utf-8-sig"}
        if file.suffix == ".jsonl":
            table = pandas.read_json(file, lines=True, **options)
        else:
            table = pandas.read_csv(file, keep_default_na=False, **options)
    except FileNotFoundError as error:
        hint = "point dataset.train_manifest, validation_manifest and test_manifest at your lists"
        raise DataError(f"{file} is missing: {hint} ({EXAMPLE})") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}. It should be {EXAMPLE}.") from error
    if table.empty:
        raise DataError(f"{file} lists no recording; it should be {EXAMPLE}")
    first = 1 if file.suffix == ".jsonl" else 2
    return [_recording(file, number, row) for number, row in enumerate(table.to_dict("records"), first)]


def _recording(file: Path, number: int, row: dict[Any, Any]) -> Recording:
    audio, transcript = (row.get(column) for column in COLUMNS)
    if not isinstance(audio, str) or not audio or not isinstance(transcript, str) or not transcript.strip():
        raise DataError(f"line {number} of {file} lacks a path or a transcript; it should be {EXAMPLE}")
    return file_recording(file.parent / Path(audio).expanduser(), " ".join(transcript.split()))
