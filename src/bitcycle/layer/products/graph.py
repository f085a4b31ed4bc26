"""Graph layers: a graph convolution and a GraphSAGE layer with mean aggregator, in float and with quantized rows.

    GraphConvolution   y = D_in^-1/2 A D_out^-1/2 x W + c             x [N, in], W [in, out], c [out]
    SageConvolution    y = x_own W_own^T + mean_neighbours(x) W_neighbour^T + c         W [out, in]

The product with W precedes the sum over neighbours if it shortens the rows (in > out), otherwise it follows. Degrees are at least
1. Source: Kipf and Welling 2017; Hamilton et al. 2017; Better Schedules, section 4.3 and released code, cpt_gnn, after DGL's
layers. The quantized layers quantize rows before each product and sum.

With row(x; b) the affine quantizer with one range per row (node, or row of a weight; a bias is one row), and gq(y; g) the
identity whose gradient is quantized to g bits with one range per tensor:

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

import torch
from torch import Tensor, nn

from bitcycle.layer.products.block_product import Axes
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer
from bitcycle.layer.products.quantized_product import Context, Noisy, Quantized
from bitcycle.layer.twin import twin_of
from bitcycle.module.sparse import Edges, neighbour_mean, neighbour_sum
from bitcycle.quantizer.sbm import SbmRows
from bitcycle.settings import SettingError


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


class RowQuantization(Noisy):
    """Quantization of rows and their gradient in a graph layer, outside of its product with a weight. Raises SettingError if
    the quantizer has no ranges per row."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        options = context.options
        rows = options.row_activation(context.compile)
        if rows is None:
            problem = "has no ranges per row, which quantized sums over neighbours need"
            remedy = "use quantizer=sbm, or model.aggregation=float and no quantized_norm"
            raise SettingError("name", options.name, problem, remedy)
        self.precision, self.rows = context.precision, rows
        self.gradient_quantizer = options.gradient(context.compile)
        self.hold_keys(context.key)

    def quantize(self, x: Tensor) -> Tensor:
        """row(x) at the activations' bits."""
        return self.rows(x, self.precision.activation_bits)

    def quantize_gradient_of(self, y: Tensor) -> Tensor:
        """gq(y) at the gradients' bits."""
        state = self.precision
        return self.gradient_quantizer(y, state.gradient_bits, state.step_key, self.call_key())


class QuantizedAggregation(RowQuantization):
    """Q-Agg: gq(aggregate(row(h))), [sources, F] -> [destinations, F]."""

    def __init__(self, context: Context, aggregate: Aggregation) -> None:
        super().__init__(context)
        self.aggregate = aggregate

    def forward(self, h: Tensor, edges: Edges) -> Tensor:
        return self.quantize_gradient_of(self.aggregate.function(self.quantize(h), edges))


class QuantizedAddition(RowQuantization):
    """gq(row(h) + row(c)), h [N, F], c [F]; the bias at the weights' bits."""

    def forward(self, h: Tensor, bias: Tensor) -> Tensor:
        return self.quantize_gradient_of(self.quantize(h) + self.rows(bias, self.precision.weight_bits))


class QuantizedScaling(RowQuantization):
    """gq(row(x) f) with a factor for each row."""

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        return self.quantize_gradient_of(self.quantize(x) * factors)


class QuantizedRowLinear(QuantizedLayer, RowLinear):
    """A quantized RowLinear: gq(row(x) row(W)^T)."""

    def attach(self, context: Context) -> None:
        super().attach(context)
        self.activation_quantizer = context.options.row_activation(context.compile) or self.activation_quantizer

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, nn.functional.linear)


class QuantizedGraphLayer(GraphLayer):
    """Mixin that quantizes the bias, and the aggregation if requested, where the quantizer has ranges per row."""

    addition: nn.Module | None

    def attach_rows(self, context: Context) -> None:
        """Attach the quantizers of bias and aggregate."""
        has_rows = context.options.row_activation(context.compile) is not None
        self.addition = QuantizedAddition(context.part("addition")) if has_rows else None
        self.aggregate = plain = Aggregation(self.takes_mean)
        if self.quantized_aggregation:
            self.aggregate = QuantizedAggregation(context.part("aggregate"), plain)

    def add_bias(self, h: Tensor) -> Tensor:
        return h + self.bias if self.addition is None else self.addition(h, self.bias)


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
                self.scaling[side] = QuantizedScaling(context.part(f"scaling.{side}"))

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
