"""Graph layers with quantized rows; `bitcycle.module.graph` has the float ones.

Rows are quantized before each product and sum. With row(x; b) the affine quantizer with one range per row (node, or row of a
weight; a bias is one row), and gq(y; g) the identity whose gradient is quantized to g bits with one range per tensor:

    graph convolution   h = x / sqrt(out degree)
                        in > out:  h = AGG(gq(row(h) row(W)))        in <= out:  h = gq(row(AGG(h)) row(W))
                        y = gq(row(h / sqrt(in degree)) + row(c))
    SAGE layer          S = gq(row(x_own) row(W_own)^T),    M the same with AGG, a mean, before or after
                        y = gq(row(S + M) + row(c))
    AGG                 FP-Agg: the float sum    Q-Agg: gq(sum of row(h))

Thus the aggregate is quantized before adding the bias also with FP-Agg. There are no running statistics: evaluation quantizes as
training does. The cost of a float aggregation is counted at 32 bits, that of a quantized one at the bits of the schedule.

Source: Better Schedules, section 4.3, and its released code, cpt_gnn. Differs from it in the noise (see `quantizer/sbm.py`).
The code's gradients have one range per inner dimension, which for matrices is one per tensor. `quantized_norm`: h = gq(row(x) f)
for each scaling by degrees f, which are unchanged by quantization, as a row of one value is its own range; quantizing the
gradient there is our choice.

A quantizer without ranges per row (`QuantizerOptions.row_activation`) only quantizes the operands of the product with W, with
activations as in any layer; bias and aggregate are float.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.layer.products.block_product import Axes
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer
from bitcycle.layer.products.quantized_product import Context, Noisy, Quantized
from bitcycle.layer.twin import twin_of
from bitcycle.module.graph import Aggregation, GraphConvolution, GraphLayer, RowLinear, SageConvolution
from bitcycle.module.sparse import Edges
from bitcycle.quantizer.sbm import SbmRows
from bitcycle.settings import SettingError


class LastResult:
    """The result of compute() of constant inputs, such as the features of a whole graph: recomputed only if an input is another
    tensor or was modified in place, or `conditions` differ.

    A result is cached from the second consecutive call with the same inputs, so that outputs of other layers, which never
    recur, cost no memory. Nothing is cached for inputs that require a gradient. A copy of this object starts empty.
    """

    def __init__(self) -> None:
        self.inputs: list[weakref.ref[Tensor]] = []
        self.conditions: tuple[object, ...] = ()
        self.result: Tensor | None = None

    def __call__(self, compute: Callable[[], Tensor], *inputs: Tensor, conditions: tuple[object, ...] = ()) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or any(x.requires_grad for x in inputs):
            return compute()
        is_known = len(self.inputs) == len(inputs) and all(seen() is x for seen, x in zip(self.inputs, inputs))
        conditions = (*conditions, *(x._version for x in inputs))
        if not is_known or self.conditions != conditions:
            self.inputs, self.conditions, self.result = [weakref.ref(x) for x in inputs], conditions, None
        if not is_known:
            return compute()
        if self.result is None:
            self.result = compute()
        return self.result

    def __reduce__(self) -> tuple[type["LastResult"], tuple[()]]:
        return LastResult, ()


class RowOperation(Noisy):
    """gq(function(row(x), ...)): an operation on rows in a graph layer, outside of its product with a weight. Raises SettingError
    if the quantizer has no ranges per row."""

    def __init__(self, context: Context, function: Callable[..., Tensor]) -> None:
        super().__init__()
        options = context.options
        rows = options.row_activation(context.compile)
        if rows is None:
            problem = "has no ranges per row, which quantized sums over neighbours need"
            remedy = "use quantizer=sbm, or model.aggregation=float and no quantized_norm"
            raise SettingError("name", options.name, problem, remedy)
        self.precision, self.rows, self.function = context.precision, rows, function
        self.gradient_quantizer = options.gradient(context.compile)
        self.hold_keys(context.key)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        """The operation on the rows of x at the activations' bits and another operand, with the gradient at its bits."""
        state = self.precision
        y = self.function(self.rows(x, state.activation_bits), other)
        return self.gradient_quantizer(y, state.gradient_bits, state.step_key, self.call_key())


class QuantizedRowLinear(QuantizedLayer, RowLinear):
    """A quantized RowLinear: gq(row(x) row(W)^T)."""

    def attach(self, context: Context) -> None:
        super().attach(context)
        self.activation_quantizer = context.options.row_activation(context.compile) or self.activation_quantizer

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, nn.functional.linear)


class QuantizedGraphLayer(GraphLayer):
    """Mixin that quantizes the bias, and the aggregation if requested, where the quantizer has ranges per row."""

    addition: RowOperation | None

    def attach_rows(self, context: Context) -> None:
        """Attach the quantizers of bias and aggregate."""
        has_rows = context.options.row_activation(context.compile) is not None
        self.addition = RowOperation(context.part("addition"), torch.add) if has_rows else None
        self.aggregate = Aggregation(self.takes_mean)
        if self.quantized_aggregation:
            self.aggregate = RowOperation(context.part("aggregate"), self.aggregate.function)

    def add_bias(self, h: Tensor) -> Tensor:
        if self.addition is None:
            return h + self.bias
        return self.addition(h, self.addition.rows(self.bias, self.addition.precision.weight_bits))


class QuantizedGraphConvolution(QuantizedLayer, QuantizedGraphLayer, GraphConvolution):
    """A quantized GraphConvolution, [sources, in] -> [destinations, out]."""

    axes = Axes(features=-1, inputs=0, outputs=1)

    def attach(self, context: Context) -> None:
        super().attach(context)
        self.activation_quantizer = context.options.row_activation(context.compile) or self.activation_quantizer
        self.attach_rows(context)
        self.last_scaled, self.last_quantized = LastResult(), LastResult()
        self.scaling = nn.ModuleDict()
        if self.quantized_norm:
            for side in ("sources", "destinations"):
                self.scaling[side] = RowOperation(context.part(f"scaling.{side}"), torch.mul)

    def scaled_sources(self, x: Tensor, edges: Edges) -> Tensor:
        conditions = (self.precision.precision, self.training)
        scaled = super().scaled_sources
        return self.last_scaled(lambda: scaled(x, edges), x, edges.offsets, edges.sources, conditions=conditions)

    def quantized_operands(self, x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.activation_quantizer, SbmRows):
            return super().quantized_operands(x, key)
        rows, state = self.activation_quantizer, self.precision
        conditions = (state.precision.activation,)
        quantized = self.last_quantized(lambda: rows(x, state.activation_bits), x, conditions=conditions)
        return quantized, self.quantized_weight()

    def scale(self, x: Tensor, factors: Tensor, side: str) -> Tensor:
        return self.scaling[side](x, factors) if side in self.scaling else x * factors

    def product(self, h: Tensor) -> Tensor:
        return self.quantized_product(h, lambda x, weight, _bias: x @ weight)

    def quantized_bias(self, *given: Tensor | None) -> Tensor | None:
        """None, as the bias is added after the aggregation."""
        return None


class QuantizedSageConvolution(Quantized, QuantizedGraphLayer, SageConvolution):
    """A quantized SageConvolution, whose two products are quantized layers. Shapes: [sources, in] -> [destinations, out]."""

    def attach(self, context: Context) -> None:
        for name in ("neighbour", "own"):
            setattr(self, name, twin_of(getattr(self, name), QuantizedRowLinear))
            getattr(self, name).attach(context.part(name, context.signed))
        self.attach_rows(context)


CONVERSIONS |= {GraphConvolution: QuantizedGraphConvolution, SageConvolution: QuantizedSageConvolution}
