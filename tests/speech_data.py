"""Made-up speech for the tests: words of tones, in the layouts of the datasets."""

from __future__ import annotations

import csv
import io
import wave
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from bitcycle.dataset.speech import WORDS

RATE = 8000
PEOPLE = ("ada", "ben", "cem", "dora", "eli", "fay")


def tones(text: str, seed: int, seconds: float = 0.03) -> np.ndarray:
    """One tone for each character, with noise: float64 [S]."""
    generator = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    parts = [np.sin(2 * np.pi * (300 + 110 * (ord(letter) - ord("a"))) * time) for letter in text]
    signal = np.concatenate(parts)
    return 0.3 * signal + 0.01 * generator.standard_normal(len(signal))


def wave_bytes(signal: np.ndarray, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """A PCM WAV file."""
    scale = {1: 127, 2: 32767, 4: 2147483647}[width]
    whole = np.rint(signal * scale).astype(np.int64) + (128 if width == 1 else 0)
    samples = whole.astype({1: np.uint8, 2: "<i2", 4: "<i4"}[width])
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return stream.getvalue()


def write_manifests(folder: Path, train: int = 48, validation: int = 8, test: int = 12) -> Path:
    """Lists and recordings of `dataset=speech_manifest`, below `folder/speech`; returns `folder`."""
    texts = ["ab", "ba", "cab", "a bad cab", "dad", "a cab", "bad dad"]
    (folder / "speech").mkdir(parents=True)
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        with open(folder / "speech" / f"{split}.csv", "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["audio", "transcript"])
            for number in range(count):
                text = texts[number % len(texts)]
                path = folder / "speech" / f"{split}{number}.wav"
                path.write_bytes(wave_bytes(tones(text, number)))
                writer.writerow([path.name, text])
    return folder


def digit_rows(last: int = 45) -> list[dict]:
    """Rows of a parquet file as that of the spoken digits, in its order; recordings `last` and later are left out."""
    return [
        {
            "audio": {
                "bytes": wave_bytes(tones(word, index + 100 * digit, 0.02)),
                "path": f"{digit}_{person}_{index}.wav",
            },
            "transcript": word,
            "digit": digit,
            "speaker": person,
            "index": index,
        }
        for index in range(last)
        for digit, word in enumerate(WORDS)
        for person in PEOPLE
    ]


def write_digits(folder: Path, rows: list[dict]) -> Path:
    """The spoken digits as a parquet file below `folder/fsdd`; returns `folder`."""
    (folder / "fsdd").mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "fsdd" / "fsdd.parquet")
    return folder
