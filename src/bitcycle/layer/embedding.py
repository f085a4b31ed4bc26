"""An embedding whose table can be quantized: y_t = Q_weight(E)[w_t].

Source: HLHLp, after Xu et al. 2018, who quantize embedding and softmax weight of a language model; Better Schedules keeps
embeddings float, and so does the conversion of an ordinary torch.nn.Embedding. As a lookup is not a product, its result is not
quantized as an activation, nor its gradient.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.layer.quantized import CONVERSIONS, QuantizedLayer


class QuantizableEmbedding(nn.Embedding):
    """A torch.nn.Embedding that conversion quantizes."""


class QuantizedEmbedding(QuantizedLayer, QuantizableEmbedding):
    """The quantized counterpart of `QuantizableEmbedding`. Shapes as of torch.nn.Embedding: [...] -> [..., E]."""

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.adapted:
            with distributed.sharded(0):  # all processes have the whole table
                self.adapt(self.weight)
        return F.embedding(input, self.quantized_weight(self.call_keys().coarse))


CONVERSIONS[QuantizableEmbedding] = QuantizedEmbedding
