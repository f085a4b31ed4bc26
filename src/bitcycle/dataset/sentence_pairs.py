"""Textual entailment: XNLI, SICK and user-defined sentence pairs, each pair as one sequence of tokens.

XNLI: 392,702 training pairs (MultiNLI, translated), 2,490 validation and 5,010 test pairs in each of 15 languages; Conneau et al.
2018. Searched in the layout of the hub's `facebook/xnli`, a folder of parquet files per language; otherwise downloaded
from there. SICK: 4,439 + 495 + 4,906 English pairs; Marelli et al. 2014. A small proxy for XNLI; results are not
comparable.
"""

import hashlib
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from bitcycle.cache import cached_file
from bitcycle.dataset.base import DatasetInfo, DatasetOptions, check_whole, first_samples, logger, missing
from bitcycle.dataset.sources import columns, has_parquet, load_hub
from bitcycle.errors import DataError
from bitcycle.optional_imports import require
from bitcycle.settings import MISSING, setting
from bitcycle.shapes import SentencePairShape

CLASSES = ("entailment", "neutral", "contradiction")
COLUMNS = {"premise": str, "hypothesis": str, "label": int}
"""Columns of a split and the types of their values."""
SPLITS = ("train", "validation", "test")
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
HUB = "facebook/xnli"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
INSIDE = "##"
LEAST = 2
"""Minimum frequency of a pair to be merged."""


def find_tokenizer(folder: Path | None, vocabulary: int, lowercase: bool, sentences: list[str]) -> Any:
    """The tokenizer: read from its folder, or, for None, trained on `sentences` and kept in the user's cache. Raises DataError
    if the folder has no tokenizer, or one with more tokens than the network has embeddings.

    Training is deterministic. Initial pieces are single characters, prefixed by ## within a word; then the most frequent pair
    of adjacent pieces is repeatedly merged into a new piece. Source: Sennrich et al. 2016 (byte pair encoding), as in common
    trainers of BERT's WordPiece. Differs from the tokenizers library in breaking ties between equally frequent pairs
    alphabetically instead of by the order of a randomly seeded hash table.
    """
    tokenizers = require("tokenizers", "entailment")
    if folder is not None:
        tokenizer = _read(tokenizers, folder, lowercase)
    else:
        known = json.dumps([tokenizers.__version__, vocabulary, lowercase, sorted(sentences)])
        tokenizer = cached_file(
            f"tokenizer-{vocabulary}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json",
            lambda: train_word_piece(tokenizers, vocabulary, lowercase, sentences),
            lambda file: tokenizers.Tokenizer.from_file(str(file)),
            lambda stream, tokenizer: stream.write(tokenizer.to_str().encode()),
        )
    if (size := tokenizer.get_vocab_size()) > vocabulary:
        raise DataError(
            f"the tokenizer in {folder} has {size} tokens, but dataset.vocabulary is {vocabulary}. Set "
            f"dataset.vocabulary={size}, or use the tokenizer of the network."
        )
    return tokenizer


def _read(tokenizers: Any, folder: Path, lowercase: bool) -> Any:
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    try:
        if whole.is_file():
            return tokenizers.Tokenizer.from_file(str(whole))
        if words.is_file():
            pieces = tokenizers.models.WordPiece.read_file(str(words))
            if "[UNK]" not in pieces:
                raise ValueError("unk_token not found in the vocabulary")
            return tokenizers.BertWordPieceTokenizer(pieces, lowercase=lowercase)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataError(f"cannot read the tokenizer in {folder}: {error}. Download its files again.") from error
    raise DataError(
        f"there is no tokenizer in {folder} (neither tokenizer.json nor vocab.txt). Put the files of the published network there,"
        " or set dataset.tokenizer to their folder, or to null to train one on the training data."
    )


def train_word_piece(tokenizers: Any, vocabulary: int, lowercase: bool, sentences: list[str]) -> Any:
    """BERT's WordPiece (Devlin et al. 2019) with at most `vocabulary` tokens, including special tokens."""
    logger.info("training a tokenizer of at most %d tokens on %d sentences", vocabulary, len(sentences))
    empty = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    words: Counter[str] = Counter()
    for sentence in sentences:
        words.update(word for word, _ in empty.pre_tokenizer.pre_tokenize_str(empty.normalize(sentence)))
    pieces = [*SPECIAL, *word_pieces(words, vocabulary - len(SPECIAL))]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    return tokenizers.BertWordPieceTokenizer(numbers, lowercase=lowercase)


def tokenized(tokenizer: Any, pairs: Sequence[tuple[str, str, int]], length: int) -> "TokenPairs":
    """Pairs as tokens; truncates longer sentences."""
    if (padding := tokenizer.token_to_id("[PAD]")) is None:
        raise DataError("the tokenizer has no token [PAD]. Use a tokenizer of a BERT model.")
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=padding, pad_token="[PAD]")
    parts = []
    for start in range(0, len(pairs), 4096):
        found = tokenizer.encode_batch([pair[:2] for pair in pairs[start : start + 4096]])
        ids = torch.tensor([pair.ids for pair in found], dtype=torch.int32)
        segments = torch.tensor([pair.type_ids for pair in found], dtype=torch.uint8)
        parts.append((ids, segments, torch.tensor([pair.attention_mask for pair in found], dtype=torch.bool)))
    ids, segments, mask = (torch.cat(several) for several in zip(*parts, strict=True))
    return TokenPairs(ids, segments, mask, torch.tensor([label for _, _, label in pairs]))


def word_pieces(words: Counter[str], size: int) -> list[str]:
    """At most `size` pieces of words with frequencies: characters, most frequent first, then merged pieces.

    >>> word_pieces(Counter({"low": 5, "lower": 2}), 7)
    ['##o', '##w', 'l', '##e', '##r', '##ow', 'low']
    """
    known = sorted(words)
    spelled = [" ".join([word[0], *(INSIDE + letter for letter in word[1:])]) for word in known]
    letters: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()  # of adjacent pairs
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # words that contain the pair

    def count(place: int, sign: int) -> None:
        for pair in pairwise(spelled[place].split(" ")):
            counts[pair] += sign * words[known[place]]
            if sign > 0:
                places[pair].add(place)

    for place, word in enumerate(known):
        count(place, 1)
        for piece in spelled[place].split(" "):
            letters[piece] += words[word]
    found = dict.fromkeys(sorted(letters, key=lambda letter: (-letters[letter], letter))[:size])
    queue = [(-number, pair) for pair, number in counts.items()]
    heapq.heapify(queue)
    while len(found) < size and queue and queue[0][0] <= -LEAST:
        number, pair = heapq.heappop(queue)
        if -number != counts[pair]:  # stale entry of the queue
            heapq.heappush(queue, (-counts[pair], pair))
            continue
        new = pair[0] + pair[1].removeprefix(INSIDE)
        together = re.compile(rf"(?<![^ ]){re.escape(' '.join(pair))}(?![^ ])")
        touched = set[tuple[str, str]]()
        for place in places.pop(pair):
            count(place, -1)
            spelled[place] = together.sub(new.replace("\\", r"\\"), spelled[place])
            count(place, 1)
            touched.update(both for both in pairwise(spelled[place].split(" ")) if new in both)
        for both in touched:
            heapq.heappush(queue, (-counts[both], both))
        del counts[pair]
        found[new] = None
    return list(found)


class TokenPairs(NamedTuple):
    """Sentence pairs as `[CLS] premise [SEP] hypothesis [SEP]`, padded to equal length.

    Token ids [N, T], 0 for padding; segment ids [N, T], 1 for the hypothesis and its [SEP]; mask [N, T], true for tokens, false
    for padding; labels [N]. Ids are stored as int32, segment ids as uint8.
    """

    ids: Tensor
    segments: Tensor
    mask: Tensor
    labels: Tensor

    def batch(self, indices: Tensor) -> "TokenPairs":
        """Some of the pairs as inputs of the network, with int64 ids."""
        ids, segments, mask, labels = (part[indices] for part in self)
        return TokenPairs(ids.long(), segments.long(), mask, labels)


@dataclass
class SentencePairOptions(DatasetOptions):
    """Options of all datasets of sentence pairs."""

    has_validation = True
    sizes: ClassVar[Optional[tuple[int, int]]] = None
    """Number of pairs of the official training and test split; None: not fixed."""

    length: int = setting(128, "tokens per pair, truncated or padded (Better Schedules' code: 128)", minimum=8)
    tokenizer: Optional[str] = setting(
        None, "folder of tokenizer.json or vocab.txt, absolute or below data_root; null: train on the sentences"
    )
    vocabulary: int = setting(8000, "token embeddings of the network: maximum size of the vocabulary", minimum=100)
    lowercase: bool = setting(False, "ignore case and accents, for a tokenizer that is trained or read from vocab.txt")

    @property
    def validates(self) -> bool:
        """Whether the validation split is used; 0 switches it off."""
        return self.validation != 0

    def table(self, data_root: Path, split: str) -> tuple[Any, object]:
        """A split with the columns premise, hypothesis and label, and its location. Raises DataError if it cannot be loaded."""
        raise NotImplementedError

    def read_split(self, data_root: Path, split: str) -> list[tuple[str, str, int]]:
        """All pairs of a split: premise, hypothesis and class number. Raises DataError if a column or a value is missing or has
        another type."""
        table, origin = self.table(data_root, split)
        pairs = [*zip(*columns(table, tuple(COLUMNS), origin))]
        if any(None in pair for pair in pairs):
            raise DataError(f"the {split} split of {origin} has pairs that lack a sentence or a label. Remove them.")
        for place, (name, kind) in enumerate(COLUMNS.items()):
            if wrong := [pair[place] for pair in pairs if type(pair[place]) is not kind]:
                problem = f"column {name} of the {split} split of {origin} has the value {wrong[0]!r:.40}"
                remedy = ", ".join(f"{number} {label}" for number, label in enumerate(CLASSES))
                raise DataError(f"{problem}. Sentences must be texts, and labels integers ({remedy}).")
        return pairs

    def full_info(self, data_root: Path) -> DatasetInfo:
        sizes = self.sizes or (self.table(data_root, split)[0].num_rows for split in ("train", "test"))
        return DatasetInfo(SentencePairShape(self.vocabulary, self.length, len(CLASSES)), *sizes)

    def load(self, data_root: Path, seed: int) -> dict[str, TokenPairs]:
        """The splits to use, as tokens: train, test, and validation unless switched off."""
        used = [split for split in SPLITS if split != "validation" or self.validation != 0]
        pairs = {split: self.read_split(data_root, split) for split in used}
        found, expected = (len(pairs["train"]), len(pairs["test"])), self.full_info(data_root)[1:]
        check_whole(self.name, f"what is below {data_root}", "training and test pairs", found, expected)
        for split, whole in pairs.items():
            if not whole or not all(0 <= label < len(CLASSES) for _, _, label in whole):
                raise DataError(
                    f"the {split} split of {self.name} has no pairs, or labels other than 0 to {len(CLASSES) - 1} "
                    f"({', '.join(CLASSES)}). Remove pairs without label, and number the labels in this order."
                )
        folder = None if self.tokenizer is None else self.located(data_root, self.tokenizer)
        premises, hypotheses, _ = zip(*pairs["train"])
        tokenizer = find_tokenizer(folder, self.vocabulary, self.lowercase, [*premises, *hypotheses])
        tokens = {}
        for split, whole in pairs.items():
            chosen = first_samples(whole, self.train_samples if split == "train" else self.test_samples)
            tokens[split] = tokenized(tokenizer, chosen, self.length)
        return tokens


@dataclass
class Xnli(SentencePairOptions):
    """Options of XNLI. The tokenizer is that of multilingual BERT (119,547 tokens), whose files are required."""

    sizes = (392_702, 5_010)

    name: str = "xnli"
    language: str = setting("de", "language of validation and test (released code: de)", choices=LANGUAGES)
    train_language: str = setting("de", "language of the training pairs (released code: de)", choices=LANGUAGES)
    tokenizer: Optional[str] = "bert-base-multilingual-cased"
    vocabulary: int = 119_547

    def place(self, data_root: Path) -> Path | None:
        places = [self._folder(data_root, language) for language in (self.train_language, self.language)]
        return places[0] if all(places) else None

    def absent(self, data_root: Path) -> DataError:
        language = self.language if self._folder(data_root, self.train_language) else self.train_language
        put = "the parquet files of this language of the hub's facebook/xnli"
        return missing(f"xnli in {language}", data_root / "xnli" / language, put, " dataset=sick is a small proxy.")

    def table(self, data_root: Path, split: str) -> tuple[Any, object]:
        language = self.train_language if split == "train" else self.language
        folder, remedy = self._folder(data_root, language), str(self.absent(data_root))
        return load_hub(folder or HUB, remedy, [split], None if folder else language)[split], folder or HUB

    @staticmethod
    def _folder(data_root: Path, language: str) -> Path | None:
        folders = (data_root / name / language for name in ("xnli", HUB, "nli/xnli"))
        return next(filter(has_parquet, folders), None)


@dataclass
class SentencePairFolder(SentencePairOptions):
    """Options of user-defined sentence pairs: a folder of train-*.parquet, validation-*.parquet and test-*.parquet."""

    more: ClassVar[str] = ""
    """How to obtain the data, for the error message if they are missing."""

    name: str = "sentence_pairs"
    path: str = setting(MISSING, "the folder with the parquet files, absolute or below data_root")

    def place(self, data_root: Path) -> Path | None:
        folder = self.located(data_root, self.path)
        return folder if has_parquet(folder) else None

    def absent(self, data_root: Path) -> DataError:
        put = "train-*.parquet, validation-*.parquet and test-*.parquet (columns premise, hypothesis, label)"
        return missing(self.name, self.located(data_root, self.path), put, f" Or set dataset.path.{self.more}")

    def table(self, data_root: Path, split: str) -> tuple[Any, object]:
        folder, absent = self.place(data_root), self.absent(data_root)
        if folder is None:
            raise absent
        return load_hub(folder, str(absent), SPLITS)[split], folder


@dataclass
class Sick(SentencePairFolder):
    """Options of SICK. With a vocabulary trained on it, the longest pair has 61 tokens."""

    sizes = (4_439, 4_906)
    more = (
        " SICK (Marelli et al. 2014) is zenodo.org/records/2787612: its own train, trial and test sets are these splits, its"
        " labels 0 entailment, 1 neutral, 2 contradiction."
    )

    name: str = "sick"
    path: str = "nli/sick"
    length: int = 64
    vocabulary: int = 4000
    lowercase: bool = True
