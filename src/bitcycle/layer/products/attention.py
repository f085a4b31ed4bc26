"""Quantized multi-head attention: four linear layers and two products of activations.

    q, k, v = x_q W_q^T, x_k W_k^T, x_v W_v^T;   P = softmax(q k^T / sqrt(d) + mask);   y = (P v) W_o^T

Each of the six products has its own quantizers; softmax, scaling and masks are float32. Parameters are those of
torch.nn.MultiheadAttention, under the same names.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.layer.products.matrix_product import QuantizedMatrixProduct
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer, QuantizedLinear
from bitcycle.layer.products.quantized_product import Context, Quantized
from bitcycle.layer.twin import twin_of
from bitcycle.module.layers import MatrixProduct


class InProjection(QuantizedLayer):
    """The projection of queries, keys or values, [..., features] -> [..., E]; its parameters remain in the attention."""

    def __init__(self, owner: nn.MultiheadAttention, place: int) -> None:
        nn.Module.__init__(self)
        self._owner, self.place = (owner,), place  # in a tuple so that it is not registered as a submodule
        self.weight_name = "in_proj_weight" if owner._qkv_same_embed_dim else f"{'qkv'[place]}_proj_weight"

    def _part(self, packed: Tensor) -> Tensor:
        size = self._owner[0].embed_dim
        return packed[self.place * size : (self.place + 1) * size]

    @property
    def weight(self) -> Tensor:
        """[E, features]."""
        weight: Tensor = getattr(self._owner[0], self.weight_name)
        return self._part(weight) if self.weight_name == "in_proj_weight" else weight

    @property
    def bias(self) -> Tensor | None:
        """[E], if the attention has biases."""
        bias = self._owner[0].in_proj_bias
        return None if bias is None else self._part(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, F.linear)


class QuantizedMultiheadAttention(Quantized, nn.MultiheadAttention):
    """A quantized torch.nn.MultiheadAttention: same arguments, parameters, inputs and outputs."""

    query: InProjection
    key: InProjection
    value: InProjection

    def attach(self, context: Context) -> None:
        """Attach quantizers to the six products; inputs are treated as signed."""
        self.precision = context.precision
        for place, name in enumerate(("query", "key", "value")):
            setattr(self, name, InProjection(self, place))
        self.out_proj = twin_of(self.out_proj, QuantizedLinear)
        self.scores, self.mixture = (twin_of(MatrixProduct(), QuantizedMatrixProduct) for _ in range(2))
        for name in ("query", "key", "value", "scores", "mixture", "out_proj"):
            getattr(self, name).attach(context.part(name))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:  # as in PyTorch
            raise RuntimeError(
                "is_causal only describes attn_mask, which is missing; see generate_square_subsequent_mask"
            )
        batched = query.dim() == 3
        operands = [x if batched else x.unsqueeze(0) for x in (query, key, value)]
        if batched and not self.batch_first:  # quantizers expect samples in dimension 0
            operands = [x.transpose(0, 1) for x in operands]
        samples, length = operands[0].shape[:2]
        q, k, v = self.query(operands[0]), self.key(operands[1]), self.value(operands[2])
        k, v = self._with_bias(k, self.bias_k), self._with_bias(v, self.bias_v)
        q, k, v = (x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = self._mask(attn_mask, key_padding_mask, samples, q.dtype)
        scores = self.scores(q * self.head_dim**-0.5, k.transpose(-2, -1))
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), self.dropout, self.training)
        y = self.mixture(weights, v)
        y = self.out_proj(y.transpose(1, 2).reshape(samples, length, self.embed_dim))
        if not batched:
            y, weights = y.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if not need_weights:
            return y, None
        return y, weights.mean(-3) if average_attn_weights else weights

    def _with_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return x if bias is None else torch.cat([x, bias.expand(len(x), 1, -1)], dim=1)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, samples: int, dtype: torch.dtype) -> Tensor | None:
        """The additive mask of the scores [N, heads, L, S], from boolean (True: masked) or additive masks."""
        total = None
        if mask is not None:
            whole = _added(mask, dtype)
            total = whole.view(samples, self.num_heads, *whole.shape[1:]) if whole.dim() == 3 else whole
        if padding is not None:
            hidden = _added(padding, dtype).view(samples, 1, 1, -1)
            total = hidden if total is None else total + hidden
        more_keys = (self.bias_k is not None) + self.add_zero_attn
        return total if total is None else F.pad(total, (0, more_keys))


def _added(mask: Tensor, dtype: torch.dtype) -> Any:
    return F._canonical_mask(mask, "mask", None, "", dtype, check_other=False)


CONVERSIONS[nn.MultiheadAttention] = QuantizedMultiheadAttention
