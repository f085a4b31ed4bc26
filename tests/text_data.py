"""A made-up text in the layout of dataset=text."""

from __future__ import annotations

import random
from pathlib import Path


def write_text(folder: Path, words: int = 30) -> Path:
    """A text in which one of two words follows each word: about 4,000, 1,000 and 1,000 tokens."""
    generator = random.Random(0)
    folder.mkdir(parents=True)
    for name, lines in (("train", 400), ("valid", 100), ("test", 100)):
        word, text = 0, ""
        for _ in range(lines):
            line = []
            for _ in range(9):
                word = (2 * word + generator.randrange(1, 3)) % words
                line.append(f"w{word}")
            text += " ".join(line) + "\n"
        (folder / f"{name}.txt").write_text(text)
    return folder
