"""What a data set asks of a network; each kind of data has its own description, and a network says which kind it takes."""

from __future__ import annotations

from typing import NamedTuple, Optional, TypeAlias, Union


class ImageShape(NamedTuple):
    """Images of one size, each of one class: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


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


Shape: TypeAlias = Union[ImageShape, GraphShape]
"""Any of them."""
