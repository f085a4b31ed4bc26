"""From text to numbers: a tokenizer of a published network, or WordPiece trained on the training sentences."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitcycle.cache import cache_folder
from bitcycle.dataset.base import logger
from bitcycle.dataset.word_pieces import word_pieces
from bitcycle.errors import DataError
from bitcycle.optional_imports import require

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


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
    tokenizer = _trained(tokenizers, setup, sentences) if setup.folder is None else _read(tokenizers, setup)
    size = tokenizer.get_vocab_size()
    if size > setup.vocabulary:
        raise DataError(
            f"the tokenizer in {setup.folder} has {size} tokens, and dataset.vocabulary is {setup.vocabulary}. Set "
            f"dataset.vocabulary={size}, or give the tokenizer that belongs to the network."
        )
    return tokenizer


def _read(tokenizers: Any, setup: TokenizerSetup) -> Any:
    assert setup.folder is not None
    whole, words = setup.folder / "tokenizer.json", setup.folder / "vocab.txt"
    try:
        if whole.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(whole))
        elif words.is_file():
            tokenizer = _bert_tokenizer(tokenizers, words.read_text(encoding="utf-8").split("\n"), setup.lowercase)
        else:
            raise DataError(
                f"there is no tokenizer in {setup.folder} (neither tokenizer.json nor vocab.txt). Put the files of the published "
                "network there, or set dataset.tokenizer to their folder, or to null for one trained on the training data."
            )
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the tokenizer in {setup.folder}: {error}. Fetch its files again.") from error
    return tokenizer


def _trained(tokenizers: Any, setup: TokenizerSetup, sentences: list[str]) -> Any:
    known = json.dumps([tokenizers.__version__, setup.vocabulary, setup.lowercase, sorted(sentences)])
    name = f"tokenizer-{setup.vocabulary}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"
    try:
        kept = cache_folder() / name
        if not kept.is_file():
            part = kept.with_suffix(f".part{os.getpid()}")
            part.write_text(train_word_piece(tokenizers, setup, sentences).to_str())
            part.replace(kept)
        return tokenizers.Tokenizer.from_file(str(kept))
    except OSError as error:
        logger.info("the tokenizer is not kept: %s", error)
    return train_word_piece(tokenizers, setup, sentences)


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


def encode(tokenizer: Any, premises: list[str], hypotheses: list[str], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs as token numbers [N, length] int32, segments [N, length] uint8 and lengths [N]; the longer sentence is cut first."""
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=_padding(tokenizer), pad_token="[PAD]")
    ids = torch.empty(len(premises), length, dtype=torch.int32)
    segments = torch.empty(len(premises), length, dtype=torch.uint8)
    lengths = torch.empty(len(premises), dtype=torch.int64)
    for start in range(0, len(premises), 4096):
        rows = slice(start, start + 4096)
        found = tokenizer.encode_batch(list(zip(premises[rows], hypotheses[rows])))
        ids[rows] = torch.tensor([pair.ids for pair in found], dtype=torch.int32)
        segments[rows] = torch.tensor([pair.type_ids for pair in found], dtype=torch.uint8)
        lengths[rows] = torch.tensor([sum(pair.attention_mask) for pair in found])
    return ids, segments, lengths


def _padding(tokenizer: Any) -> int:
    number = tokenizer.token_to_id("[PAD]")
    if number is None:
        raise DataError("the tokenizer has no token [PAD], as those of BERT have. Give a tokenizer of BERT's kind.")
    return int(number)
