"""What a data set asks of a network; each kind of data has its own description, and a network says which kind it takes."""

from __future__ import annotations

from typing import NamedTuple, Optional, TypeAlias, Union


class ImageShape(NamedTuple):
    """Images of one size, each of one class: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


class SentencePairShape(NamedTuple):
    """Pairs of sentences as one sequence of token numbers below `vocabulary`, padded to `length`; number of classes."""

    vocabulary: int
    length: int
    classes: int


class InteractionShape(NamedTuple):
    """Users and items, each by a number, and whether the user has chosen the item."""

    users: int
    items: int


class TokenShape(NamedTuple):
    """Sequences of token numbers below `vocabulary`, each to be predicted from those before it."""

    vocabulary: int


class SpeechShape(NamedTuple):
    """Utterances as frames of features, to be written in symbols, the blank of CTC included; frames of a typical utterance."""

    features: int
    symbols: int
    frames: int


class GraphShape(NamedTuple):
    """A graph whose nodes are of one class each.

    Attributes:
        features: features of a node.
        classes: number of classes.
        nodes, edges: of the graph as it is used (edges in one direction each, self-loops included).
        neighbours: neighbours that each layer samples, that of the input first; None: every step sees the whole graph.
        sampled_degrees: how many of them a node has on average, as most have fewer neighbours than that or share them.
    """

    features: int
    classes: int
    nodes: int
    edges: int
    neighbours: Optional[tuple[int, ...]] = None
    sampled_degrees: tuple[float, ...] = ()


class DetectionShape(NamedTuple):
    """Images with objects in boxes: channels, height and width in pixels of a typical one (they differ), number of classes."""

    channels: int
    height: int
    width: int
    classes: int


Shape: TypeAlias = Union[
    ImageShape,
    SentencePairShape,
    InteractionShape,
    TokenShape,
    SpeechShape,
    GraphShape,
    DetectionShape,
]
"""Any of them."""
