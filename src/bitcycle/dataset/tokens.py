"""Tokenizers: that of a published network, or WordPiece trained on the training sentences.

Pieces are learned by merging, deterministically. Initial pieces are single characters, prefixed by ## within a word;
then the most frequent pair of adjacent pieces is repeatedly merged into a new piece. Source: Sennrich et al. 2016 (byte
pair encoding), as in common trainers of BERT's WordPiece. Differs from the tokenizers library in breaking ties between
equally frequent pairs alphabetically instead of by the order of a randomly seeded hash table.
"""

import hashlib
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitcycle.cache import kept
from bitcycle.dataset.base import logger
from bitcycle.errors import DataError
from bitcycle.optional_imports import require

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
INSIDE = "##"
LEAST = 2
"""Minimum frequency of a pair to be merged."""


def find_tokenizer(folder: Path | None, vocabulary: int, lowercase: bool, sentences: list[str]) -> Any:
    """Return the tokenizer: read from its folder, or, for None, trained on `sentences` and cached.

    Training depends only on the arguments. The result is stored in the user's cache if it is writable.

    Raises:
        DataError: if the folder has no tokenizer, or one with more tokens than the network has embeddings.
    """
    tokenizers = require("tokenizers", "entailment")
    if folder is not None:
        tokenizer = _read(tokenizers, folder, lowercase)
    else:
        known = json.dumps([tokenizers.__version__, vocabulary, lowercase, sorted(sentences)])
        tokenizer = kept(
            f"tokenizer-{vocabulary}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json",
            lambda: train_word_piece(tokenizers, vocabulary, lowercase, sentences),
            lambda file: tokenizers.Tokenizer.from_file(str(file)),
            lambda file, tokenizer: file.write_text(tokenizer.to_str()),
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


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [N, length] int32, segment ids [N, length] uint8 and lengths [N] of pairs; truncates the longer
    sentence."""
    if (padding := tokenizer.token_to_id("[PAD]")) is None:
        raise DataError("the tokenizer has no token [PAD]. Use a tokenizer of a BERT model.")
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=padding, pad_token="[PAD]")
    parts = []
    for start in range(0, len(pairs), 4096):
        found = tokenizer.encode_batch(pairs[start : start + 4096])
        ids = torch.tensor([pair.ids for pair in found], dtype=torch.int32)
        segments = torch.tensor([pair.type_ids for pair in found], dtype=torch.uint8)
        parts.append((ids, segments, torch.tensor([sum(pair.attention_mask) for pair in found])))
    ids, segments, lengths = map(torch.cat, zip(*parts, strict=True))
    return ids, segments, lengths


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
