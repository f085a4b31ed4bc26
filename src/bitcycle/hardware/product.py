"""The ATen operations that compute products, with their dimensions.

Every layer and function reaches the dispatcher as one of these few operations, so no knowledge of the model is needed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitcycle.hardware.operation import ProductShape

aten = torch.ops.aten

Depends = Callable[[Tensor], bool]
"""Whether a tensor was computed from the model's input (an activation) or not (a weight or a constant)."""


class Product(NamedTuple):
    """`groups` matrix products of dimensions `shape`; `moving` is the activation, `held` the other operand, and `second` the
    second activation of a bilinear layer."""

    kind: str
    shape: ProductShape
    groups: int
    input_positions: int
    moving: Tensor
    held: Tensor
    output: Tensor
    second: Tensor | None = None

    @property
    def macs(self) -> int:
        """Multiply-accumulates; a sparse operand counts its stored elements only, a complex number as two real ones."""
        return math.prod(self.shape) * self.groups


def _convolution(args: Any, output: Tensor, depends: Depends) -> Product:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    small = x if transposed else output  # a transposed convolution is the error product of a convolution
    positions = small.shape[0] * math.prod(small.shape[2:])
    out_channels = (weight.shape[1] * groups if transposed else weight.shape[0]) // groups
    shape = ProductShape(positions, out_channels, x.shape[1] // groups, math.prod(weight.shape[2:]))
    return Product("conv", shape, groups, x.shape[0] * math.prod(x.shape[2:]), x, weight, output)


def _matrix_product(x: Tensor, y: Tensor, output: Tensor, depends: Depends) -> Product:
    """x [..., m, k] times y [..., k, n], or vectors instead of m = 1 and n = 1; one group per matrix of a batch, four if they are
    complex."""
    if y.dim() > 1 and (torch.strided not in (x.layout, y.layout) or x.layout != y.layout):
        return _sparse_product(x, y, output)
    groups = (x.shape[0] if x.dim() == 3 else 1) * (4 if output.is_complex() else 1)
    m, k, n = x.shape[-2] if x.dim() > 1 else 1, x.shape[-1], y.shape[-1] if y.dim() > 1 else 1
    if depends(y) and not depends(x):  # a weight on the left: the transposed product
        return Product("linear", ProductShape(n, m, k), groups, n, y, x, output)
    kind = "matmul" if depends(x) and depends(y) else "linear"
    return Product(kind, ProductShape(m, n, k), groups, m, x, y, output)


def _linear(args: Any, output: Tensor, depends: Depends) -> Product:
    """x [..., k] times W [n, k] as one operation, as on devices that have an own operator for linear layers (Metal)."""
    x, weight = args[:2]
    rows, outputs = math.prod(x.shape[:-1]), math.prod(weight.shape[:-1])
    kind = "matmul" if depends(x) and depends(weight) else "linear"
    return Product(kind, ProductShape(rows, outputs, x.shape[-1]), 1, rows, x, weight, output)


def _sparse_product(x: Tensor, y: Tensor, output: Tensor) -> Product:
    """A sum over the edges of a graph: each stored element of the adjacency matrix multiplies one row of features."""
    adjacency, features = (y, x) if x.layout == torch.strided else (x, y)
    edges, width = adjacency._nnz(), features.shape[1 if adjacency is x else 0]
    return Product("aggregation", ProductShape(edges, width, 1), 1, edges, features, adjacency, output)


def _scattered_sum(args: Any, output: Tensor, depends: Depends) -> Product | None:
    """index_add and similar, (self, dim, index, source[, reduction]): aggregation without sparse matrices."""
    source, index = args[3], args[2]
    if len(args) > 4 and args[4] not in ("sum", "mean"):
        return None  # a maximum or product over neighbours is not a sum of products
    width = source.shape[-1] if source.dim() > 1 else 1
    edges = source.numel() // width if width else 0
    return Product("aggregation", ProductShape(edges, width, 1), 1, edges, source, index, output)


def _bilinear(args: Any, output: Tensor, depends: Depends) -> Product:
    """y_o = x W_o z, the product of nn.Bilinear: a linear layer whose inputs are all products x_i z_j. The gradients of x,
    z and W take a product of the same size each."""
    x, weight, z, expanded = args[:4]
    outputs, reduced = weight.shape[0], weight.shape[1] * weight.shape[2]
    rows = output.numel() // outputs
    assert len(expanded) == 2, "nn.Bilinear flattens its inputs to two dimensions"
    return Product("linear", ProductShape(rows, outputs, reduced), 1, rows, x, weight, output, z)


def _lookup(args: Any, output: Any, depends: Depends) -> Product:
    """An embedding: rows of a table are read, not multiplied."""
    table, indices = args[0], args[1]
    rows = output[0] if isinstance(output, tuple) else output
    return Product(
        "embedding", ProductShape(indices.numel(), table.shape[1], 0), 1, indices.numel(), indices, table, rows
    )


def _of_operands(first: int) -> Callable[[Any, Any, Depends], Product | None]:
    """The product of two arguments, of which the first has this index."""
    return lambda args, output, depends: _matrix_product(args[first], args[first + 1], output, depends)


_ADDED = (aten.addmm, aten._sparse_addmm, aten.baddbmm, aten.addbmm, aten.addmv)
_ADDED_BY_INDEX = (aten.index_add, aten.scatter_add, aten.scatter_reduce)
PRODUCTS: dict[Any, Callable[[Any, Any, Depends], Product | None]] = {
    aten.convolution: _convolution,
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot), _of_operands(0)),
    **dict.fromkeys(_ADDED, _of_operands(1)),
    aten.linear: _linear,
    aten._trilinear: _bilinear,
    **dict.fromkeys((*_ADDED_BY_INDEX, aten.index_add_, aten.scatter_add_, aten.scatter_reduce_), _scattered_sum),
    **dict.fromkeys((aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only), _lookup),
}
"""ATen operation -> function from its arguments and result to the product, or to None if there is none."""
