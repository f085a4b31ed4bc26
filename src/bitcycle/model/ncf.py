"""Neural collaborative filtering (NeuMF): predicts whether a user interacts with an item.

    g = e_user * e_item  (64)        h = MLP([f_user, f_item])  (2 x 128 -> 256 -> 128 -> 64)        logit = w [g, h] + c

Source: He et al. 2017 with the sizes and initial weights of MLPerf 0.5, as in partial pre-training (table 1, section
4.1), which adds batch norm after the layers of the MLP. Initial weights: embeddings N(0, 0.01^2), MLP Glorot uniform,
last layer LeCun uniform, biases PyTorch's defaults. The authors of partial pre-training released no code. They do not
specify which first layer stays float; embeddings are looked up rather than multiplied, so we take the first layer of
the MLP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.shapes import InteractionShape

FACTORS, EMBEDDING, WIDTHS = 64, 128, (256, 128, 64)
EMBEDDING_STD = 0.01


class NeuralCollaborativeFiltering(nn.Module):
    """User ids and item ids [N] -> logits [N]."""

    float_layers = signed_inputs = ("first", "last")

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, FACTORS), nn.Embedding(items, FACTORS)
        self.user_embedding, self.item_embedding = nn.Embedding(users, EMBEDDING), nn.Embedding(items, EMBEDDING)
        blocks, before = [], 2 * EMBEDDING
        for width in WIDTHS:
            blocks.append(nn.Sequential(nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()))
            before = width
        self.mlp = nn.Sequential(*blocks)
        self.final = nn.Linear(FACTORS + before, 1)
        self._initialise()

    def _initialise(self) -> None:
        for embedding in (self.user_factors, self.item_factors, self.user_embedding, self.item_embedding):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
        for layer in self.mlp.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        limit = (3 / self.final.in_features) ** 0.5
        nn.init.uniform_(self.final.weight, -limit, limit)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = self.user_factors(users) * self.item_factors(items)
        hidden = self.mlp(torch.cat((self.user_embedding(users), self.item_embedding(items)), 1))
        return self.final(torch.cat((product, hidden), 1)).squeeze(1)


@dataclass
class Ncf(ModelOptions):
    """Options of NeuMF."""

    takes = InteractionShape

    def build(self, shape: InteractionShape) -> NeuralCollaborativeFiltering:
        return NeuralCollaborativeFiltering(shape.users, shape.items)
