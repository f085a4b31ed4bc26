"""Graph networks for node classification: gcn (graph convolutions) and graphsage (SAGE layers with mean aggregator).

    h_0 = x,     h_l = dropout(norm(ReLU(layer_l(h_(l-1)))))     for all layers but the last, which returns the logits

`norm` is a layer norm without parameters (eps 1e-5). In the released code it takes one mean and one variance over the whole
tensor of all nodes and features (`tensor`); `node` normalises the features of each node, `none` nothing. The paper mentions no
norm.

Source: Better Schedules, section 4.3 (3 graph convolutions or 2 SAGE layers, 512 hidden features), and released code,
cpt_gnn. All layers are quantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.module.graph import GraphConvolution, SageConvolution
from bitcycle.module.sparse import Edges
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import GraphShape


def norm(x: Tensor, kind: str) -> Tensor:
    """Layer norm without parameters of x [N, F]: over the whole tensor, over each node's features, or none."""
    return x if kind == "none" else F.layer_norm(x, x.shape if kind == "tensor" else x.shape[1:])


class GraphNetwork(nn.Module):
    """Layers over the edges of a graph, [nodes, features] -> [nodes, classes]. `norm` is tensor, node or none."""

    float_layers = ()
    """The paper quantizes all layers."""
    signed_inputs = ("*",)
    """Outputs of norms and most node features have both signs."""

    def __init__(self, layers: Sequence[nn.Module], norm: str, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.relu = nn.ReLU()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edges: Sequence[Edges]) -> Tensor:
        """Logits of the destinations of the last layer from features x of the sources of the first.

        `edges` is one graph per layer, where the destinations of a layer are the sources of the next, or one for all layers.
        """
        if len(edges) == 1:
            edges = [*edges] * len(self.layers)
        for layer, step in zip(self.layers[:-1], edges[:-1], strict=True):
            x = self.dropout(norm(self.relu(layer(x, step)), self.norm))
        return self.layers[-1](x, edges[-1])


@dataclass
class GraphModelOptions(ModelOptions):
    """Options of the graph networks."""

    takes: ClassVar = GraphShape

    layers: int = setting(3, "graph layers (Better Schedules: gcn 3, graphsage 2)", minimum=1)
    hidden: int = setting(512, "hidden features (Better Schedules: 512)", minimum=1)
    norm: str = setting(
        "tensor",
        "layer norm between layers: tensor (one mean and variance over all nodes and features: released code), node, or none"
        " (the paper mentions none)",
        choices=("tensor", "node", "none"),
    )
    dropout: float = setting(
        0.2, "dropout rate between layers (released code: 0.2, arxiv probe runs 0.5)", minimum=0, maximum=1
    )
    aggregation: str = setting(
        "float",
        "sums over neighbours: float (FP-Agg) or quantized (Q-Agg); Better Schedules, section 4.3",
        choices=("float", "quantized"),
    )

    def check(self, shape: GraphShape) -> None:
        if shape.neighbours is not None and len(shape.neighbours) != self.layers:
            problem = f"{len(shape.neighbours)} layers of neighbours are sampled (dataset.neighbours)"
            raise SettingError("layers", self.layers, problem, "give dataset.neighbours one number for each layer")

    def build(self, shape: GraphShape) -> GraphNetwork:
        widths = [shape.features, *[self.hidden] * (self.layers - 1), shape.classes]
        layers = [self.layer(*sizes) for sizes in pairwise(widths)]
        return GraphNetwork(layers, self.norm, self.dropout)

    def layer(self, in_features: int, out_features: int) -> nn.Module:
        """One float layer, freshly initialised."""
        raise NotImplementedError


@dataclass
class Gcn(GraphModelOptions):
    """Options of the graph convolutional network."""

    quantized_norm: bool = setting(False, "quantize features before scaling by node degrees (released code: off)")

    def layer(self, in_features: int, out_features: int) -> nn.Module:
        return GraphConvolution(in_features, out_features, self.aggregation == "quantized", self.quantized_norm)


@dataclass
class GraphSage(GraphModelOptions):
    """Options of GraphSAGE with mean aggregator."""

    layers: int = 2

    def layer(self, in_features: int, out_features: int) -> nn.Module:
        return SageConvolution(in_features, out_features, self.aggregation == "quantized")
