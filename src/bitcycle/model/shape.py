"""What a data set asks of a network; each kind of data has its own description, and a network says which kind it takes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, Union


class ImageShape(NamedTuple):
    """Images of one size, each of one class: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


class SpeechShape(NamedTuple):
    """Utterances as frames of features, to be written in symbols, the blank of CTC included; frames of a typical utterance."""

    features: int
    symbols: int
    frames: int


class TokenShape(NamedTuple):
    """Sequences of token numbers below `vocabulary`, each to be foretold from those before it."""

    vocabulary: int


Shape: TypeAlias = Union[
    ImageShape,
    SpeechShape,
    TokenShape,
]
"""Any of them."""
