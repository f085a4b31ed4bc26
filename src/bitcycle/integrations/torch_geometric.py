"""Layers of PyTorch Geometric: its Linear, in which its graph convolutions compute their products, as GCNConv and GATConv.

Sums over neighbours, and products with attention vectors, are those of the library, in float32.
"""

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import Linear

from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer


class QuantizedPyGLinear(QuantizedLayer, Linear):
    """A quantized torch_geometric.nn.Linear: [..., F] -> [..., F']."""

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, F.linear)


CONVERSIONS[Linear] = QuantizedPyGLinear
