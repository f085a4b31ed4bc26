"""Text as a sequence of token ids: words separated by spaces, and <eos> at the end of each line.

Ids are assigned from the training file only, by first occurrence or by frequency; unknown words of the other files
become <unk>. The official files contain none.

A text consists of three plain text files, one paragraph per line, or of parquet files as in the hub's
`Salesforce/wikitext`.

Penn Treebank is the version of Mikolov et al. 2011: a vocabulary of 10,000 words, lower case, without punctuation. It
is licensed by the Linguistic Data Consortium (LDC99T42) and never downloaded. WikiText: Merity et al. 2016.
With `unit=byte` a text is its UTF-8 bytes, of which there are 256; a loss is then in bits per byte, too.

wikitext2_small uses the validation file of WikiText-2 for training and the first and second half of the articles of the
test file for validation and testing; its perplexities are not comparable with published ones.
"""

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, check_whole, missing
from bitcycle.dataset.sources import columns, has_parquet, load_hub
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import TokenShape

END, UNKNOWN = "<eos>", "<unk>"
PIECE = 35
"""Tokens per unit of train_samples and test_samples: the papers' sequence length on Penn Treebank."""
PATTERNS = ("ptb.{}.txt", "wiki.{}.tokens", "{}.txt")
"""File names of a split: train, valid or test."""
HUB = "Salesforce/wikitext"
SMALL_VALIDATION_LINES = 2226
"""Lines of WikiText-2's test file used for validation in wikitext2_small; an article begins after them."""

Lines: TypeAlias = Sequence[Iterable[str]]
"""Lines of the training, validation and test file."""


class TextSize(NamedTuple):
    """Number of tokens of the three files, including <eos>, and size of the vocabulary."""

    train: int
    validation: int
    test: int
    vocabulary: int


TEXT_SIZES = {
    "ptb": TextSize(train=929_589, validation=73_760, test=82_430, vocabulary=10_000),
    "wikitext2": TextSize(train=2_088_628, validation=217_646, test=245_569, vocabulary=33_278),
    "wikitext103": TextSize(train=103_227_021, validation=217_646, test=245_569, vocabulary=267_735),
    "wikitext2_small": TextSize(train=217_646, validation=123_449, test=122_120, vocabulary=13_777),
}
SIZES_IN_BYTES = dict.fromkeys(
    ("wikitext2_small", "wikitext2_bytes"), TextSize(train=1_121_681, validation=629_737, test=626_712, vocabulary=256)
)


class Text(NamedTuple):
    """Three splits as token ids, int64 [tokens], and the vocabulary."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]

    @property
    def size(self) -> TextSize:
        """Numbers of tokens."""
        return TextSize(len(self.train), len(self.validation), len(self.test), len(self.vocabulary))


def number_tokens(lines: Lines, by_frequency: bool = False) -> Text:
    """Convert the lines of three files to token ids, by first occurrence in the training file or by decreasing frequency there.

    >>> text = number_tokens([["a b a"], ["b c"], ["a"]])
    >>> text.vocabulary, text.train.tolist(), text.validation.tolist()
    (('a', 'b', '<eos>', '<unk>'), [0, 1, 0, 2], [1, 3, 2])
    """
    numbers: dict[str, int] = {}
    train = _numbered(lines[0], lambda word: numbers.setdefault(word, len(numbers)))
    unknown = numbers.setdefault(UNKNOWN, len(numbers))
    splits = [train, *(_numbered(other, lambda word: numbers.get(word, unknown)) for other in lines[1:])]
    vocabulary = list(numbers)
    if by_frequency:
        order = train.bincount(minlength=len(numbers)).argsort(descending=True, stable=True)
        splits = [order.argsort()[part] for part in splits]
        vocabulary = [vocabulary[number] for number in order.tolist()]
    return Text(splits[0], splits[1], splits[2], tuple(vocabulary))


def number_bytes(lines: Lines) -> Text:
    """The UTF-8 bytes of three files as token ids.

    >>> text = number_bytes([["ab\\n"], ["é"], ["a"]])
    >>> text.train.tolist(), text.validation.tolist()
    ([97, 98, 10], [195, 169])
    """
    files = ("".join(part for line in each for part in line).encode() for each in lines)
    train, validation, test = (torch.from_numpy(np.frombuffer(file, np.uint8).astype(np.int64)) for file in files)
    return Text(train, validation, test, tuple(map(chr, range(256))))


def most_frequent(text: Text, size: int) -> Text:
    """`text` with the `size` most frequent tokens of the training file; all others become <unk>.

    >>> text = most_frequent(number_tokens([["a b a"], ["b c"], ["a"]], by_frequency=True), 2)
    >>> text.vocabulary, text.train.tolist()
    (('a', '<unk>'), [0, 1, 0, 1])
    """
    words = list(text.vocabulary[:size])
    unknown = words.index(UNKNOWN) if UNKNOWN in words else size - 1
    words[unknown] = UNKNOWN
    train, validation, test = (part.where(part < size, unknown) for part in text[:3])
    return Text(train, validation, test, tuple(words))


def _numbered(lines: Iterable[str], number: Callable[[str], int]) -> Tensor:
    tokens = array("i", (number(word) for line in lines for word in (*line.split(), END)))
    return torch.from_numpy(np.array(tokens, dtype=np.int64))


@dataclass
class TextDatasetOptions(DatasetOptions):
    """Options of all text datasets."""

    has_validation = True
    samples_of_one = PIECE

    order: str = setting(
        "occurrence",
        "token ids by first occurrence in the training file, or by frequency",
        choices=("occurrence", "frequency"),
    )

    vocabulary: Optional[int] = setting(
        None,
        "size of the vocabulary: only the most frequent tokens of the training file, in that order; the others become "
        "<unk>; null: all",
        minimum=2,
    )

    unit: str = setting("word", "tokens: words separated by spaces, or bytes", choices=("word", "byte"))

    def validate(self) -> None:
        super().validate()
        if self.unit == "byte" and (self.vocabulary is not None or self.order != "occurrence"):
            problem = "has 256 tokens in the order of their values"
            raise SettingError("unit", "byte", problem, "leave out dataset.vocabulary and dataset.order")

    def size(self, data_root: Path) -> TextSize:
        """Sizes of the whole dataset. Raises SettingError if they are not known in this unit."""
        if self.unit == "word":
            if self.name not in TEXT_SIZES:
                problem = f"the size of {self.name} in words is not known"
                raise SettingError("unit", "word", problem, "use dataset=wikitext2_small, the same text in words")
            return TEXT_SIZES[self.name]
        if self.name not in SIZES_IN_BYTES:
            problem = f"the size of {self.name} in bytes is not known"
            raise SettingError(
                "unit", "byte", problem, "use dataset=wikitext2_bytes, or dataset=text with your own files"
            )
        return SIZES_IN_BYTES[self.name]

    def full_info(self, data_root: Path) -> DatasetInfo:
        """Sizes in tokens. Raises SettingError if the dataset has fewer distinct tokens than `vocabulary`."""
        size = self.size(data_root)
        if self.vocabulary is not None and self.vocabulary > size.vocabulary:
            problem = f"{self.name} has only {size.vocabulary} distinct tokens"
            remedy = f"use at most {size.vocabulary}, or null for all"
            raise SettingError("vocabulary", self.vocabulary, problem, remedy)
        return DatasetInfo(TokenShape(self.vocabulary or size.vocabulary), size.train, size.test)

    def files(self, data_root: Path) -> list[Path]:
        """The plain text files of the splits; empty if there are none."""
        raise NotImplementedError

    def place(self, data_root: Path) -> Path | None:
        found = self.files(data_root)
        return found[0].parent if found else None

    def read(self, data_root: Path) -> Lines:
        return [*map(lines_of, self._required(data_root))]

    def _required(self, data_root: Path) -> list[Path]:
        found = self.files(data_root)
        if not found:
            raise self.absent(data_root)
        return found

    def load(self, data_root: Path, seed: int) -> Text:
        """The tokens to use; `vocabulary` counts the whole training file, whatever part of it `train_samples` leaves."""
        by_frequency = self.order == "frequency" or self.vocabulary is not None
        lines = self.read(data_root)
        text = number_bytes(lines) if self.unit == "byte" else number_tokens(lines, by_frequency)
        what = "training, validation, test and distinct tokens"
        check_whole(self.name, f"what is below {data_root}", what, text.size, self.size(data_root))
        text = text if self.vocabulary is None else most_frequent(text, self.vocabulary)
        train, test = (limit and limit * PIECE for limit in (self.train_samples, self.test_samples))
        return Text(text.train[:train], text.validation[:test], text.test[:test], text.vocabulary)


def lines_of(path: Path, remedy: str = "Download the file again") -> Iterator[str]:
    """The lines of a file. Raises DataError with the remedy if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as stream:  # a byte order mark would belong to the first word
            yield from stream
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}. {remedy}.") from error


def find_text(folders: Sequence[Path], splits: Sequence[str] = ("train", "valid", "test")) -> list[Path]:
    """Plain text files of all `splits` in the first folder that has them; empty if there is none."""
    for folder in folders:
        files = ([folder / pattern.format(split) for pattern in PATTERNS] for split in splits)
        found = [file for named in files for file in [*filter(Path.is_file, named)][:1]]
        if len(found) == len(splits):
            return found
    return []


@dataclass
class PennTreebank(TextDatasetOptions):
    """Options of Penn Treebank."""

    name: str = "ptb"

    def files(self, data_root: Path) -> list[Path]:
        return find_text([data_root / name for name in ("ptb", "penn", "penn-treebank", "ptb/data")])

    def absent(self, data_root: Path) -> DataError:
        put = "ptb.train.txt, ptb.valid.txt and ptb.test.txt (Mikolov's preparation; licensed, so not downloaded)"
        return missing(self.name, data_root / "ptb", put, " dataset=wikitext2_small is a small free text.")


@dataclass
class WikiText(TextDatasetOptions):
    """Options of WikiText-2 and WikiText-103."""

    name: str = "wikitext2"

    @property
    def subset(self) -> str:
        """Its name on the hub."""
        return f"wikitext-{self.name.removeprefix('wikitext')}-v1"

    def files(self, data_root: Path) -> list[Path]:
        return find_text(self._folders(data_root))

    def place(self, data_root: Path) -> Path | None:
        parquet = (*self._folders(data_root), data_root / HUB / self.subset)
        return super().place(data_root) or next(filter(has_parquet, parquet), None)

    def absent(self, data_root: Path) -> DataError:
        put = f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or the parquet files of the hub's {HUB} {self.subset},"
        return missing(self.name, self._folders(data_root)[0], put)

    def read(self, data_root: Path) -> Lines:
        if self.files(data_root):
            return super().read(data_root)
        folder, names = self.place(data_root), ("train", "validation", "test")
        splits = load_hub(folder or HUB, str(self.absent(data_root)), names, None if folder else self.subset)
        return [columns(splits[name], ["text"], folder or HUB)[0] for name in names]

    def _folders(self, data_root: Path) -> list[Path]:
        return [data_root / name for name in (self.name, self.subset.removesuffix("-v1"), self.subset)]


@dataclass
class WikiTextSmall(TextDatasetOptions):
    """Options of the small proxy of WikiText-2, in words or bytes."""

    name: str = "wikitext2_small"

    def files(self, data_root: Path) -> list[Path]:
        """Three files, or two of WikiText-2: its validation and test files."""
        official = [data_root / name for name in ("wikitext2", "wikitext-2", "wikitext-2-v1")]
        own = find_text([data_root / name for name in (self.name, "wikitext2-small")])
        return own or find_text(official, ("valid", "test"))

    def absent(self, data_root: Path) -> DataError:
        official = "WikiText-2's wiki.valid.tokens and wiki.test.tokens"
        put = f"train.txt, valid.txt and test.txt, or {official} into {data_root / 'wikitext2'},"
        return missing(self.name, data_root / self.name, put)

    def read(self, data_root: Path) -> Lines:
        if len(found := self.files(data_root)) != 2:
            return super().read(data_root)
        rest = list(lines_of(found[1]))
        return [lines_of(found[0]), rest[:SMALL_VALIDATION_LINES], rest[SMALL_VALIDATION_LINES:]]


OWN_TEXT = "Save it as text in UTF-8"
"""Remedy for a user's file that cannot be read."""


@dataclass
class OwnText(TextDatasetOptions):
    """Options of user-defined text; sizes are read from the files."""

    name: str = "text"
    path: str = setting(
        MISSING,
        "folder, absolute or below data_root: train.txt, valid.txt and test.txt, one paragraph per line, words separated by "
        "spaces",
    )

    def size(self, data_root: Path) -> TextSize:
        files = self._required(data_root)
        size = _size(tuple((path, path.stat().st_mtime_ns) for path in files), self.unit)
        if empty := next((path for path, tokens in zip(files, size) if not tokens), None):
            raise DataError(f"{empty} is empty. Give it text, one paragraph per line.")
        return size

    def read(self, data_root: Path) -> Lines:
        return [lines_of(path, OWN_TEXT) for path in self._required(data_root)]

    def files(self, data_root: Path) -> list[Path]:
        return find_text([self.located(data_root, self.path)])

    def absent(self, data_root: Path) -> DataError:
        folder = self.located(data_root, self.path)
        problem = "has no train.txt, valid.txt and test.txt" if folder.is_dir() else "is not a folder"
        remedy = "Give an absolute path or one below data_root, with one paragraph per line and spaces between words."
        return DataError(f"dataset.path={self.path}: {folder} {problem}. {remedy}")


@functools.lru_cache(maxsize=1)
def _size(files: tuple[tuple[Path, int], ...], unit: str) -> TextSize:
    """Sizes of files given with their modification times; cached until they change."""
    lines = [lines_of(path, OWN_TEXT) for path, _ in files]
    return (number_bytes(lines) if unit == "byte" else number_tokens(lines)).size
