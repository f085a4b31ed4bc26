"""Shapes of datasets, from which networks are built; a network declares which kind of data it takes."""

from typing import NamedTuple, Optional, TypeAlias


class ImageShape(NamedTuple):
    """Images of one size, each of one class: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


class SentencePairShape(NamedTuple):
    """Sentence pairs as one sequence of token indices below `vocabulary`, padded to `length`; number of classes."""

    vocabulary: int
    length: int
    classes: int


class InteractionShape(NamedTuple):
    """User and item indices, and whether the user has interacted with the item."""

    users: int
    items: int


class TokenShape(NamedTuple):
    """Sequences of token indices below `vocabulary`, each to be predicted from the preceding ones."""

    vocabulary: int


class SpeechShape(NamedTuple):
    """Utterances as frames of features, transcribed into symbols including the CTC blank; frames of a typical utterance."""

    features: int
    symbols: int
    frames: int


class GraphShape(NamedTuple):
    """A graph whose nodes have one class each; nodes and (directed) edges as used, including self-loops.

    `neighbours` are those that each layer samples, input layer first (None: full-graph training); `sampled_degrees` their average
    number per node, which is lower as nodes have fewer neighbours or share them.
    """

    features: int
    classes: int
    nodes: int
    edges: int
    neighbours: Optional[tuple[int, ...]] = None
    sampled_degrees: tuple[float, ...] = ()


class DetectionShape(NamedTuple):
    """Images with bounding boxes: channels, height and width in pixels of a typical image (they vary), number of classes."""

    channels: int
    height: int
    width: int
    classes: int


Shape: TypeAlias = (
    ImageShape | SentencePairShape | InteractionShape | TokenShape | SpeechShape | GraphShape | DetectionShape
)
"""Any kind of data."""
