"""Transformer language models: causal self-attention over a block of words, with pre-normalisation.

    x = sqrt(d) E[w] + positions;   x += A(norm(x)), x += F(norm(x)) in each layer;   logits = E norm(x)
    A(x) = O concat_heads( softmax( (Q x)(K x)^T / sqrt(d_head) + mask ) (V x) ),   F(x) = W2 ReLU(W1 x + b1) + b2

`transformer` is the base network: 6 layers of width 512, 8 heads, feed-forward width 2048, dropout 0.1, softmax tied to
the embedding (FracTrain, appendix D; CPT, section 4.3, which cites Baevski and Auli but reports a base network's
perplexity).

The papers do not specify the quantized layers. As in the released code of Better Schedules for BERT, we quantize all
linear layers with their biases and both products of attention; embedding, softmax layer, norms and residuals are float.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.module.layers import FloatLinear, MatrixProduct
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import TokenShape


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Positional encoding [length, width]: sines, then cosines, wavelengths 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / max(1, half - 1)))
    angles = torch.arange(length, device=device).unsqueeze(1) * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width - 2 * half))


class SelfAttention(nn.Module):
    """Causal self-attention, [N, T, d] -> [N, T, d]; each position attends to itself and to earlier ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.scores, self.context = MatrixProduct(), MatrixProduct()
        for layer, gain in ((self.query, 0.5**0.5), (self.key, 0.5**0.5), (self.value, 0.5**0.5), (self.output, 1.0)):
            nn.init.xavier_uniform_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)  # [N, T, d] -> [N, heads, T, d / heads]
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in layers)
        scores = self.scores(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = scores.masked_fill(hidden, -math.inf).softmax(3)
        return self.output(self.context(shares, v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Attention and feed-forward sublayers, each with a preceding norm and a residual connection."""

    def __init__(self, options: "TransformerOptions") -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = SelfAttention(options.width, options.heads)
        self.widen = nn.Linear(options.width, options.feedforward)
        self.narrow = nn.Linear(options.feedforward, options.width)
        self.dropout = nn.Dropout(options.dropout)
        for layer in (self.widen, self.narrow):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.narrow(self.widen(self.norm(x)).relu()))


class TransformerLanguageModel(nn.Module):
    """Tokens [T, N] -> logits [T, N, V] and an empty state."""

    float_layers = ()
    signed_inputs = ("first", "*.query", "*.key", "*.value", "*.output", "*.widen")
    quantized_bias = True

    def __init__(self, options: "TransformerOptions", vocabulary: int) -> None:
        super().__init__()
        self.width = options.width
        self.embedding = nn.Embedding(vocabulary, options.width)
        nn.init.normal_(self.embedding.weight, 0, options.width**-0.5)
        self.dropout = nn.Dropout(options.dropout)
        self.layers = nn.ModuleList(TransformerLayer(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = FloatLinear(options.width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.embedding(tokens) * math.sqrt(self.width)
        x = self.dropout(x + sinusoids(len(tokens), self.width, tokens.device).unsqueeze(1)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x).transpose(0, 1).flatten(0, 1))
        return logits.unflatten(0, tokens.shape), ()


@dataclass
class TransformerOptions(ModelOptions):
    """Options of the Transformer language models."""

    takes: ClassVar[type] = TokenShape

    layers: int = setting(6, "layers", minimum=1)
    width: int = setting(512, "width d of the hidden vectors", minimum=2)
    heads: int = setting(8, "attention heads", minimum=1)
    feedforward: int = setting(2048, "width of the feed-forward sublayer", minimum=1)
    dropout: float = setting(0.1, "dropout rate of embeddings and of each sublayer's output", minimum=0, maximum=1)

    def validate(self) -> None:
        if self.width % self.heads:
            remedy = f"use a multiple of {self.heads}"
            raise SettingError("width", self.width, f"is not divisible by {self.heads} heads", remedy)

    def build(self, shape: TokenShape) -> TransformerLanguageModel:
        return TransformerLanguageModel(self, shape.vocabulary)
