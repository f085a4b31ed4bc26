"""From text to numbers: a tokenizer of a published network, or WordPiece trained on the training sentences.

The pieces that words are written in are learned by merging, the same for the same words, wherever and whenever. They are single
characters at first, ## in front of those within a word. Again and again the pair of neighbours that is most frequent becomes a
new piece. Source: Sennrich et al. 2016 (byte pair encoding), as the usual trainers of BERT's WordPiece do it. Differs from that
of the tokenizers library in what decides among equally frequent pairs: the alphabet, where theirs has the order of a hash table
with a random seed.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitcycle.cache import kept
from bitcycle.dataset.base import logger
from bitcycle.errors import DataError
from bitcycle.optional_imports import require

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
INSIDE = "##"
LEAST = 2
"""Pairs that are rarer than this are not merged."""


class TokenizerSetup(NamedTuple):
    """Where a tokenizer comes from: a folder, or training with so many tokens, with or without regard to case."""

    folder: Path | None
    vocabulary: int
    lowercase: bool


def find_tokenizer(setup: TokenizerSetup, sentences: list[str]) -> Any:
    """The tokenizer: read from its folder, or trained on `sentences` and kept for the next time.

    Training depends on sentences and setup alone. The result is kept in the user's cache, if that can be written to.

    Raises:
        DataError: if the folder holds none, or one with more tokens than the network has embeddings for.
    """
    tokenizers = require("tokenizers", "entailment")
    tokenizer = (
        _trained(tokenizers, setup, sentences)
        if setup.folder is None
        else _read(tokenizers, setup.folder, setup.lowercase)
    )
    size = tokenizer.get_vocab_size()
    if size > setup.vocabulary:
        raise DataError(
            f"the tokenizer in {setup.folder} has {size} tokens, and dataset.vocabulary is {setup.vocabulary}. Set "
            f"dataset.vocabulary={size}, or give the tokenizer that belongs to the network."
        )
    return tokenizer


def _read(tokenizers: Any, folder: Path, lowercase: bool) -> Any:
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    try:
        if whole.is_file():
            return tokenizers.Tokenizer.from_file(str(whole))
        if words.is_file():
            return _bert_tokenizer(tokenizers, words.read_text(encoding="utf-8").split("\n"), lowercase)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the tokenizer in {folder}: {error}. Fetch its files again.") from error
    raise DataError(
        f"there is no tokenizer in {folder} (neither tokenizer.json nor vocab.txt). Put the files of the published network there,"
        " or set dataset.tokenizer to their folder, or to null for one trained on the training data."
    )


def _trained(tokenizers: Any, setup: TokenizerSetup, sentences: list[str]) -> Any:
    known = json.dumps([tokenizers.__version__, setup.vocabulary, setup.lowercase, sorted(sentences)])
    return kept(
        f"tokenizer-{setup.vocabulary}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json",
        lambda: train_word_piece(tokenizers, setup, sentences),
        lambda file: tokenizers.Tokenizer.from_file(str(file)),
        lambda file, tokenizer: file.write_text(tokenizer.to_str()),
    )


def train_word_piece(tokenizers: Any, setup: TokenizerSetup, sentences: list[str]) -> Any:
    """BERT's WordPiece (Devlin et al. 2019) with at most `vocabulary` tokens, special ones included."""
    logger.info("training a tokenizer of at most %d tokens on %d sentences", setup.vocabulary, len(sentences))
    normalizer, splitter = _normalizer(tokenizers, setup.lowercase), tokenizers.pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for sentence in sentences:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    pieces = [*SPECIAL, *word_pieces(words, setup.vocabulary - len(SPECIAL))]
    return _bert_tokenizer(tokenizers, pieces, setup.lowercase)


def _normalizer(tokenizers: Any, lowercase: bool) -> Any:
    return tokenizers.normalizers.BertNormalizer(lowercase=lowercase)


def _bert_tokenizer(tokenizers: Any, pieces: list[str], lowercase: bool) -> Any:
    """BERT's tokenizer with these pieces, numbered in their order.

    Raises:
        ValueError: if [CLS], [SEP] or [UNK] is not one of them.
    """
    numbers = {piece.strip(): number for number, piece in enumerate(pieces) if piece.strip()}
    if missing := {"[CLS]", "[SEP]", "[UNK]"} - set(numbers):
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = _normalizer(tokenizers, lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    markers = [(word, numbers[word]) for word in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*markers)
    return tokenizer


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs as token numbers [N, length] int32, segments [N, length] uint8 and lengths [N]; the longer sentence is cut first."""
    if (padding := tokenizer.token_to_id("[PAD]")) is None:
        raise DataError("the tokenizer has no token [PAD], as those of BERT have. Give a tokenizer of BERT's kind.")
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=padding, pad_token="[PAD]")
    ids = torch.empty(len(pairs), length, dtype=torch.int32)
    segments = torch.empty(len(pairs), length, dtype=torch.uint8)
    lengths = torch.empty(len(pairs), dtype=torch.int64)
    for start in range(0, len(pairs), 4096):
        rows = slice(start, start + 4096)
        found = tokenizer.encode_batch(pairs[rows])
        ids[rows] = torch.tensor([pair.ids for pair in found], dtype=torch.int32)
        segments[rows] = torch.tensor([pair.type_ids for pair in found], dtype=torch.uint8)
        lengths[rows] = torch.tensor([sum(pair.attention_mask) for pair in found])
    return ids, segments, lengths


def word_pieces(words: Counter[str], size: int) -> list[str]:
    """At most `size` pieces for words with their frequencies: characters, the most frequent first, then merged pieces.

    >>> word_pieces(Counter({"low": 5, "lower": 2}), 7)
    ['##o', '##w', 'l', '##e', '##r', '##ow', 'low']
    """
    spelled = [[word[0], *(INSIDE + letter for letter in word[1:])] for word in sorted(words)]
    weights = [words[word] for word in sorted(words)]
    letters: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()  # of each pair of neighbours
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # the words that it is in

    def count(word: int, sign: int) -> None:
        for pair in pairwise(spelled[word]):
            counts[pair] += sign * weights[word]
            if sign > 0:
                places[pair].add(word)

    for word, weight in enumerate(weights):
        count(word, 1)
        for piece in spelled[word]:
            letters[piece] += weight
    found = dict.fromkeys(sorted(letters, key=lambda letter: (-letters[letter], letter))[:size])
    queue = [(-number, pair) for pair, number in counts.items()]
    heapq.heapify(queue)
    while queue and len(found) < size:
        number, pair = heapq.heappop(queue)
        if -number != counts[pair]:  # it has changed since it was queued
            if counts[pair] > 0:
                heapq.heappush(queue, (-counts[pair], pair))
            continue
        if -number < LEAST:
            break
        new, touched = pair[0] + pair[1].removeprefix(INSIDE), set[tuple[str, str]]()
        for word in places.pop(pair):
            count(word, -1)
            spelled[word] = _merged(spelled[word], pair, new)
            count(word, 1)
            touched.update(both for both in pairwise(spelled[word]) if new in both)
        for both in touched:
            heapq.heappush(queue, (-counts[both], both))
        del counts[pair]
        found[new] = None
    return list(found)


def _merged(pieces: list[str], pair: tuple[str, str], new: str) -> list[str]:
    result: list[str] = []
    for piece in pieces:
        if result and (result[-1], piece) == pair:
            result[-1] = new
        else:
            result.append(piece)
    return result
