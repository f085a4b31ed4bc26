"""Float graph layers: a graph convolution and a GraphSAGE layer with mean aggregator.

    GraphConvolution   y = D_in^-1/2 A D_out^-1/2 x W + c             x [N, in], W [in, out], c [out]
    SageConvolution    y = x_own W_own^T + mean_neighbours(x) W_neighbour^T + c         W [out, in]

The product with W precedes the sum over neighbours if it shortens the rows (in > out), otherwise it follows. Degrees are at least
1. Source: Kipf and Welling 2017; Hamilton et al. 2017; Better Schedules, section 4.3 and released code, cpt_gnn, after DGL's
layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bitcycle.module.sparse import Edges, neighbour_mean, neighbour_sum


class Aggregation(nn.Module):
    """Sum, or `mean`, over the edges: [sources, F] -> [destinations, F]. A module so that its cost is listed separately."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.function: Callable[[Tensor, Edges], Tensor] = neighbour_mean if mean else neighbour_sum

    def forward(self, h: Tensor, edges: Edges) -> Tensor:
        return self.function(h, edges)


class GraphLayer(nn.Module):
    """Base class of graph layers with a bias c; [sources, in] -> [destinations, out].

    Args:
        in_features, out_features: columns of x and y.
        quantized_aggregation: whether a quantized layer aggregates neighbours by the paper's Q-Agg, else FP-Agg.
    """

    bias: nn.Parameter
    takes_mean = False
    """Whether neighbours are averaged instead of summed."""

    def __init__(self, in_features: int, out_features: int, quantized_aggregation: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.quantized_aggregation = quantized_aggregation
        self.aggregate: nn.Module = Aggregation(self.takes_mean)

    def add_bias(self, h: Tensor) -> Tensor:
        """Node features h [nodes, F] plus the bias c [F]."""
        return h + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class GraphConvolution(GraphLayer):
    """y = D_in^-1/2 A D_out^-1/2 x W + c, with Xavier-uniform weights at first, as in the released code; arguments as of
    `GraphLayer`. `quantized_norm`: whether a quantized layer also quantizes the features before scaling by degrees."""

    def __init__(
        self, in_features: int, out_features: int, quantized_aggregation: bool = False, quantized_norm: bool = False
    ) -> None:
        super().__init__(in_features, out_features, quantized_aggregation)
        self.quantized_norm = quantized_norm
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_features, out_features)))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        h = self.scaled_sources(x, edges)
        if self.in_features > self.out_features:
            h = self.aggregate(self.product(h), edges)
        else:
            h = self.product(self.aggregate(h, edges))
        return self.add_bias(self.scale(h, edges.in_degrees().rsqrt(), "destinations"))

    def scaled_sources(self, x: Tensor, edges: Edges) -> Tensor:
        """Each row of x divided by the square root of its node's out-degree."""
        return self.scale(x, edges.out_degrees(len(x)).rsqrt(), "sources")

    def scale(self, x: Tensor, factors: Tensor, side: str) -> Tensor:
        """Each row of the `side` (sources or destinations) times its factor [rows, 1]."""
        return x * factors

    def product(self, h: Tensor) -> Tensor:
        """h W."""
        return h @ self.weight


class RowLinear(nn.Linear):
    """x W^T with x [N, in], W [out, in]: half of a SAGE layer. A subclass, so that it is only converted with its layer."""


class SageConvolution(GraphLayer):
    """y = x_own W_own^T + mean(x) W_neighbour^T + c, where x_own are the first rows of x; arguments as of `GraphLayer`."""

    takes_mean = True

    def __init__(self, in_features: int, out_features: int, quantized_aggregation: bool = False) -> None:
        super().__init__(in_features, out_features, quantized_aggregation)
        self.neighbour: nn.Module = RowLinear(in_features, out_features, bias=False)
        self.own: nn.Module = RowLinear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.neighbour.weight, gain=2**0.5)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        own = self.own(x[: edges.destinations])
        if self.in_features > self.out_features:
            mean = self.aggregate(self.neighbour(x), edges)
        else:
            mean = self.neighbour(self.aggregate(x, edges))
        return self.add_bias(own + mean)
