"""Public networks converted with the default rule: the quantized share of their products, and their deviation from a reference.

    python scripts/support_matrix.py             # writes results/summary/support.csv, from which `make readme` writes the table

The networks are tiny and have random weights. The reference is the float network in float64 whose products are intercepted where
they call PyTorch's functions, and whose operands are rounded by the formulas of the affine quantizer, written down again here.
The converted network runs in float64, too. Only the list of quantized layers is taken from the conversion.
"""

from __future__ import annotations

import copy
import csv
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torchvision.ops import StochasticDepth
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import bitcycle
from bitcycle.layer import ConversionReport, PrecisionState
from bitcycle.precision import Precision
from support_networks import NETWORKS
from support_table import RECORD

BITS = (8, 3)


class Row(NamedTuple):
    """One network.

    products: quantized ones. share, out_of_reach: shares of the multiply-accumulates that are quantized, and that are float for
    another reason than the rule for float layers. deviation: the largest difference of the output at 8 and 3 bits from the
    reference, relative to its largest element. without_gradient, parameters: those without a gradient, and all.
    """

    library: str
    network: str
    products: int
    share: float
    out_of_reach: float
    deviation: float
    without_gradient: int
    parameters: int


def affine(x: Tensor, bits: int, dims: Any) -> Tensor:
    """x rounded to 2^bits levels between its extremes along `dims`."""
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    scale = torch.where(high > low, (high - low) / (2**bits - 1), 1)
    return ((x - low) / scale).round() * scale + low


_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_WEIGHTED = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d}


class Reference(TorchFunctionMode):
    """Rounds the operands of products with one of the `weights` (ids of parameters), those of attention by functions if
    `attention`, and those of other products of two activations if `eager`."""

    def __init__(self, bits: int, weights: set[int], attention: bool, eager: bool) -> None:
        super().__init__()
        self.bits, self.weights, self.attention, self.eager = bits, weights, attention, eager

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is Tensor.baddbmm and self.eager:
            operands = {name: affine(keywords[name], self.bits, -1) for name in ("batch1", "batch2")}
            return func(*args, **keywords | operands)
        if len(args) < 2:
            return func(*args, **keywords)
        if func in _WEIGHTED and id(args[1]) in self.weights:
            x, weight = args[:2]
            apart = 1 if func is F.conv_transpose2d else 0
            others = tuple(dim for dim in range(weight.dim()) if dim != apart)
            return func(self.whole(x), affine(weight, self.bits, others), *args[2:], **keywords)
        if func is torch.addmm and id(args[2]) in self.weights:  # Conv1D
            return func(args[0], self.whole(args[1]), affine(args[2], self.bits, 0))
        if func in _MATMUL and id(args[1]._base) in self.weights:  # x @ weight.T
            return func(self.whole(args[0]), affine(args[1], self.bits, 0))
        if func in _MATMUL and self.eager and all(x.dim() > 2 for x in args):
            return func(*(affine(x, self.bits, -1) for x in args))
        if func is torch.einsum and self.eager and args[0] == "B G H I D, B G H J D -> B G H I J":
            return func(args[0], affine(args[1], self.bits, -1), affine(args[2], self.bits, -2))
        if func is torch.einsum and self.eager and args[0] == "B G H I J, B G H J D -> B G H I D":
            return func(args[0], *(affine(x, self.bits, -1) for x in args[1:]))
        if func is F.scaled_dot_product_attention and self.attention:
            return self._attend(*args, **keywords)
        if func is F.multi_head_attention_forward and id(args[5]) in self.weights:
            return self._multi_head(*args[:7], *args[11:13]), None
        return func(*args, **keywords)

    def whole(self, x: Tensor) -> Tensor:
        """x with one range."""
        return affine(x, self.bits, tuple(range(x.dim())))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if enable_gqa else x for x in (k, v))
        scores = affine(q, self.bits, -1) @ affine(k.mT, self.bits, -1)
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return affine(scores.softmax(-1), self.bits, -1) @ affine(v, self.bits, -1)

    def _multi_head(
        self,
        query: Tensor,
        _key: Tensor,
        _value: Tensor,
        width: int,
        heads: int,
        weight: Tensor,
        bias: Tensor,
        *out: Tensor,
    ) -> Tensor:
        """Self-attention [T, N, F] without masks."""
        projected = F.linear(self.whole(query), affine(weight, self.bits, 1), bias)
        q, k, v = (x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3) for x in projected.chunk(3, 2))
        y = self._attend(q * (width // heads) ** -0.5, k, v, scale=1.0).permute(2, 0, 1, 3).flatten(2)
        return F.linear(self.whole(y), affine(out[0], self.bits, 1), out[1])


def _experts(module: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """A mixture of experts, token by token; rounded in the context of a `Reference`."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Reference)]

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        if modes:
            x, weight = modes[0].whole(x), affine(weight, modes[0].bits, 2)
        return torch.einsum("si,soi->so", x, weight[chosen.reshape(-1)])

    gate, up = multiply(x.repeat_interleave(chosen.shape[1], 0), module.gate_up_proj).chunk(2, -1)
    y = multiply(module.act_fn(gate) * up, module.down_proj) * shares.reshape(-1, 1)
    return y.unflatten(0, chosen.shape).sum(1)


ALL_EXPERTS_FUNCTIONS.register("reference", _experts)


def examine(library: str, name: str) -> Row:
    """Convert a network and compare it with the reference at 8 and at 3 bits, in training mode."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        plain, sample = NETWORKS[library][name]()
        if not isinstance(sample, tuple | Mapping):
            sample = (sample,)
        plain = plain.double()
        for module in plain.modules():
            if isinstance(module, nn.Dropout | StochasticDepth):
                module.p = 0.0
            if "experts_interface" in type(module).forward.__code__.co_freevars:
                module.config._experts_implementation = "reference"  # type: ignore[union-attr]
        sample = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, sample)
        model = bitcycle.quantize_model(copy.deepcopy(plain), sample=sample)
        report = bitcycle.conversion_report(model, sample)
        deviation = max(_deviation(plain, model, report, sample, bits) for bits in BITS)
        return Row(library, name, *_counts(report), deviation, *_gradients(model, sample))


def _counts(report: ConversionReport) -> tuple[int, float, float]:
    share = report.quantized_share
    assert share is not None, "a sample was given"
    by_rule = sum(
        row.share or 0.0 for row in report.rows if row.bits == "float" and row.reason.startswith("float_layers")
    )
    return sum(row.bits != "float" for row in report.rows), share, max(0.0, 1 - share - by_rule)


def outputs(model: nn.Module, sample: Any) -> list[Tensor]:
    """The outputs of a forward pass, with gradients first."""
    y = model(**sample) if isinstance(sample, Mapping) else model(*sample)
    leaves = tree_leaves(dict(y) if isinstance(y, Mapping) else y)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _deviation(plain: nn.Module, model: nn.Module, report: ConversionReport, sample: Any, bits: int) -> float:
    """The largest difference of any output, relative to that output's largest element."""
    quantized = [row.name for row in report.rows if row.bits != "float"]
    modules = dict(plain.named_modules())
    layers = [modules[name] for name in quantized if name in modules]
    weights = {id(layer.weight) for layer in layers if isinstance(getattr(layer, "weight", None), Tensor)}
    whole = [modules[name.removesuffix(".scores")] for name in quantized if name.endswith(".scores")]
    weights |= {id(attention.in_proj_weight) for attention in whole}
    attention = any(name.endswith("score_product") for name in quantized)
    eager = attention and getattr(getattr(plain, "config", None), "_attn_implementation", "eager") == "eager"
    for state in {module for module in model.modules() if isinstance(module, PrecisionState)}:
        state.set(Precision(bits, bits, bits))
    with torch.no_grad():
        with Reference(bits, weights, attention, eager):
            expected = outputs(copy.deepcopy(plain, {id(p): p for p in plain.parameters()}), sample)
        found = outputs(copy.deepcopy(model), sample)
    return max(
        float((y - x).abs().max() / x.abs().max().clamp_min(1e-30)) for x, y in zip(expected, found, strict=True)
    )


def _gradients(model: nn.Module, sample: Any) -> tuple[int, int]:
    """Parameters without a gradient, and all that are trained."""
    sum(x.square().mean() for x in outputs(model, sample) if x.requires_grad).backward()  # type: ignore[union-attr]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(parameter.grad is None for parameter in trained), len(trained)


def main() -> None:
    """Examine all networks, and record them."""
    rows = [examine(library, name) for library, networks in NETWORKS.items() for name in networks]
    with RECORD.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in rows:
            shares = {name: f"{getattr(row, name):.3f}" for name in ("share", "out_of_reach")}
            writer.writerow(row._replace(**shares, deviation=f"{row.deviation:.1e}"))


if __name__ == "__main__":
    main()
