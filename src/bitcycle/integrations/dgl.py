"""Layers of DGL: GraphConv. SAGEConv needs no special support, as its products are torch.nn.Linear layers."""

from collections.abc import Callable
from typing import Any

from dgl import function
from dgl.nn.pytorch import GraphConv
from torch import Tensor

from bitcycle.layer.products.block_product import Axes
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer


class QuantizedGraphConv(QuantizedLayer, GraphConv):
    """A dgl.nn.GraphConv with a quantized product with the weight [in, out]; sums over neighbours are float32."""

    axes = Axes(-1, 0, 1)

    def rows_of(self, weight: Tensor) -> Tensor:
        return weight.T

    _norm: str
    _in_feats: int
    _out_feats: int
    _activation: Callable[[Tensor], Tensor] | None
    bias: Tensor | None

    def forward(self, graph: Any, feat: Any, weight: Tensor | None = None, edge_weight: Tensor | None = None) -> Tensor:
        if weight is not None:
            raise ValueError("weight: a quantized GraphConv uses its own weight. Remedy: leave the layer float")
        if not self._allow_zero_in_degree and (graph.in_degrees() == 0).any():
            raise ValueError(
                "graph: has nodes without incoming edges. Remedy: use dgl.add_self_loop or allow_zero_in_degree=True"
            )
        with graph.local_scope():
            h = feat[0] if isinstance(feat, tuple) else feat
            h = _scaled(h, graph.out_degrees(), {"left": -1.0, "both": -0.5}.get(self._norm))
            if self._in_feats > self._out_feats:
                h = _summed(graph, self.quantized_product(h, _product), edge_weight)
            else:
                h = self.quantized_product(_summed(graph, h, edge_weight), _product)
            h = _scaled(h, graph.in_degrees(), {"right": -1.0, "both": -0.5}.get(self._norm))
        h = h if self.bias is None else h + self.bias
        return h if self._activation is None else self._activation(h)


def _product(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x @ weight


def _scaled(h: Tensor, degrees: Tensor, power: float | None) -> Tensor:
    if power is None:
        return h
    return h * degrees.to(h).clamp(min=1).pow(power).view(-1, *[1] * (h.dim() - 1))


def _summed(graph: Any, h: Tensor, edge_weight: Tensor | None) -> Tensor:
    graph.srcdata["h"] = h
    message = function.copy_u("h", "m")
    if edge_weight is not None:
        graph.edata["w"] = edge_weight
        message = function.u_mul_e("h", "w", "m")
    graph.update_all(message, function.sum("m", "h"))
    return graph.dstdata["h"]


CONVERSIONS[GraphConv] = QuantizedGraphConv
