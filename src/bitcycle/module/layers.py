"""A product, an embedding, a linear layer and a sum with a ReLU in float, which conversion treats in their own way."""

import torch
from torch import Tensor, nn


class MatrixProduct(nn.Module):
    """a @ b as a module, so that it can be quantized: [..., m, k] and [..., k, n] -> [..., m, n]."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The product over the last two dimensions, batched over the others."""
        return torch.matmul(a, b)


class QuantizableEmbedding(nn.Embedding):
    """A torch.nn.Embedding that conversion quantizes.

    Source: HLHLp, after Xu et al. 2018, who quantize embedding and softmax weight of a language model; Better Schedules keeps
    embeddings float, and so does the conversion of an ordinary torch.nn.Embedding. As a lookup is not a product, its result is
    not quantized as an activation, nor its gradient: y_t = Q_weight(E)[w_t].
    """


class FloatLinear(nn.Linear):
    """A linear layer that is never quantized, whatever the quantizer's rule for float layers."""

    stays_float = True
    """Suppresses the warning about layers without a quantized counterpart."""


def add_relu(relu: nn.Module, x: Tensor, added: Tensor) -> Tensor:
    """relu(x + added), as one operator if conversion has replaced `relu` by one that takes both. Any shape, kept."""
    return relu(x, added) if getattr(relu, "takes_added", False) else relu(x + added)
