"""Transformer language models: causal self-attention over a block of words, with pre-normalisation.

    x = sqrt(d) E[w] + positions;   x += A(norm(x)), x += F(norm(x)) in each layer;   logits = E norm(x)
    A(x) = O concat_heads( softmax( (Q x)(K x)^T / sqrt(d_head) + mask ) (V x) ),   F(x) = W2 ReLU(W1 x + b1) + b2

`transformer` is the base network: 6 layers of width 512, 8 heads, feed-forward width 2048, dropout 0.1, softmax tied to
the embedding (FracTrain, appendix D; CPT, section 4.3, which cites Baevski and Auli but reports a base network's
perplexity). `transformer_adaptive` is the network of Baevski and Auli: 16 layers of width 1024, adaptive input and
softmax.

The papers do not specify the quantized layers. As in the released code of Better Schedules for BERT, we quantize all
linear layers with their biases and both products of attention; embedding, softmax layer, norms and residuals are float.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.module.layers import FloatLinear, MatrixProduct
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import TokenShape

BAND_FACTOR = 4
"""Ratio of the embedding widths of consecutive bands of the vocabulary."""


class AdaptiveVocabulary(nn.Module):
    """Adaptive input and softmax: frequency bands of the vocabulary, narrower embeddings for rare words, tied in both.

        input    x(w) = P_b E_b[w],                                          b: band of w, E_b [words, width / 4^b]
        softmax  p(w) = softmax([E_0 P_0^T h; C h])[w]                       first band; C h: logits of the other bands
                 p(w) = softmax([E_0 P_0^T h; C h])[band b] softmax(E_b P_b^T h)[w]

    Source: Baevski and Auli 2019, sections 3 and 4, in fairseq's form: every band is projected, embeddings and projections are
    tied. Words must be numbered by frequency (dataset.order=frequency).

    `cutoffs` are the first words of the bands after the first. Dropout applies before the softmax of a rare band.
    """

    def __init__(self, vocabulary: int, width: int, cutoffs: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.edges = [0, *cutoffs, vocabulary]
        self.bands = list(itertools.pairwise(self.edges))
        sizes = [(end - start, width // BAND_FACTOR**band) for band, (start, end) in enumerate(self.bands)]
        self.embeddings = nn.ParameterList(torch.empty(words, narrow) for words, narrow in sizes)
        self.projections = nn.ParameterList(torch.empty(width, narrow) for _, narrow in sizes)
        self.clusters = nn.Parameter(torch.empty(len(cutoffs), width))
        for embedding in self.embeddings:
            nn.init.normal_(embedding, 0, embedding.shape[1] ** -0.5)
        for weight in (*self.projections, self.clusters):
            nn.init.xavier_uniform_(weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., width] of tokens; every band is computed for all tokens, so no shape depends on values."""
        x = self.clusters.new_zeros(())
        for band, (start, end) in enumerate(self.bands):
            inside = ((tokens >= start) & (tokens < end)).unsqueeze(-1)
            rows = F.embedding((tokens - start).clamp(0, end - start - 1), self.embeddings[band])
            x = x + F.linear(torch.where(inside, rows, 0), self.projections[band])
        return x

    def _head(self, h: Tensor) -> Tensor:
        """Log probabilities of the first band's words and of the other bands, [M, words + bands - 1]."""
        words = F.linear(F.linear(h, self.projections[0].T), self.embeddings[0])
        return torch.cat([words, F.linear(h, self.clusters)], dim=1).log_softmax(1)

    def _tail(self, h: Tensor, band: int) -> Tensor:
        """Log probabilities of a rare band's words, given the band, [M, words]."""
        narrow = F.dropout(F.linear(h, self.projections[band].T), self.dropout, self.training)
        return F.linear(narrow, self.embeddings[band]).log_softmax(1)

    def log_probabilities(self, h: Tensor) -> Tensor:
        """Log probabilities of all words, [M, V] from h [M, width]."""
        head, first = self._head(h), self.edges[1]
        tails = [self._tail(h, band) + head[:, first + band - 1, None] for band in range(1, len(self.embeddings))]
        return torch.cat([head[:, :first], *tails], dim=1)

    def losses(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-log p(target) [M], and whether the target is the most probable word of the most probable band [M].

        Logits of a band are computed only for targets in that band, about a tenth of the work for typical frequencies.
        """
        head, first = self._head(h), self.edges[1]
        slot = targets.clone()  # target class in the head: the word itself, or its band
        for band, (start, end) in enumerate(self.bands[1:]):
            slot = torch.where((targets >= start) & (targets < end), first + band, slot)
        losses = -head.gather(1, slot.unsqueeze(1)).squeeze(1)
        right = head.argmax(1) == slot
        for band, (start, end) in enumerate(self.bands[1:], 1):
            members = ((targets >= start) & (targets < end)).nonzero().flatten()
            tail, word = self._tail(h[members], band), (targets[members] - start)
            losses = losses.index_add(0, members, -tail.gather(1, word.unsqueeze(1)).squeeze(1))
            right = right.index_put((members,), right[members] & (tail.argmax(1) == word))
        return losses, right


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Positional encoding [length, width]: sines, then cosines, wavelengths 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / max(1, half - 1)))
    angles = torch.arange(length, device=device).unsqueeze(1) * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width - 2 * half))


class SelfAttention(nn.Module):
    """Causal self-attention, [N, T, d] -> [N, T, d]; each position attends to itself and to earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.scores, self.context = MatrixProduct(), MatrixProduct()
        self.dropout = nn.Dropout(dropout)
        for layer, gain in ((self.query, 0.5**0.5), (self.key, 0.5**0.5), (self.value, 0.5**0.5), (self.output, 1.0)):
            nn.init.xavier_uniform_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)  # [N, T, d] -> [N, heads, T, d / heads]
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in layers)
        scores = self.scores(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = self.dropout(scores.masked_fill(hidden, -math.inf).softmax(3))
        return self.output(self.context(shares, v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Attention and feed-forward sublayers, each with a preceding norm and a residual connection."""

    def __init__(self, options: "TransformerOptions") -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = SelfAttention(options.width, options.heads, options.attention_dropout)
        self.widen = nn.Linear(options.width, options.feedforward)
        self.narrow = nn.Linear(options.feedforward, options.width)
        self.dropout, self.inner_dropout = nn.Dropout(options.dropout), nn.Dropout(options.activation_dropout)
        for layer in (self.widen, self.narrow):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        inner = self.inner_dropout(self.widen(self.norm(x)).relu())
        return x + self.dropout(self.narrow(inner))


class TransformerLanguageModel(nn.Module):
    """Tokens [T, N] -> logits [T, N, V] (log probabilities with adaptive softmax) and an empty state.

    The losses of adaptive softmax (`takes_targets`) do not need the probabilities of all words.
    """

    float_layers = ()
    signed_inputs = ("first", "*.query", "*.key", "*.value", "*.output", "*.widen")
    quantized_bias = True

    def __init__(self, options: "TransformerOptions", vocabulary: int) -> None:
        super().__init__()
        self.width = options.width
        self.adaptive: AdaptiveVocabulary | None = None
        self.takes_targets = options.cutoffs is not None
        if options.cutoffs is None:
            self.embedding = nn.Embedding(vocabulary, options.width)
            nn.init.normal_(self.embedding.weight, 0, options.width**-0.5)
        else:
            self.adaptive = AdaptiveVocabulary(vocabulary, options.width, options.cutoffs, options.tail_dropout)
        self.dropout = nn.Dropout(options.dropout)
        self.layers = nn.ModuleList(TransformerLayer(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width) if options.final_norm else nn.Identity()
        if options.cutoffs is None:
            self.head = FloatLinear(options.width, vocabulary, bias=False)
            self.head.weight = self.embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        """[T, N] -> [T N, d]."""
        x = (self.embedding(tokens) if self.adaptive is None else self.adaptive.embed(tokens)) * math.sqrt(self.width)
        x = self.dropout(x + sinusoids(len(tokens), self.width, tokens.device).unsqueeze(1)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).transpose(0, 1).flatten(0, 1)

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None, targets: Tensor | None = None) -> Any:
        """With adaptive softmax and targets: cross-entropy and whether the target was predicted, both [T N], and no state."""
        h = self.features(tokens)
        if targets is not None and self.adaptive is not None:
            return *self.adaptive.losses(h, targets.flatten()), ()
        logits: Tensor = self.head(h) if self.adaptive is None else self.adaptive.log_probabilities(h)
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
    attention_dropout: float = setting(0.0, "dropout rate of the attention weights", minimum=0, maximum=1)
    activation_dropout: float = setting(0.0, "dropout rate after the ReLU", minimum=0, maximum=1)
    final_norm: bool = setting(True, "apply a norm after the last layer (Baevski and Auli: none)")
    cutoffs: Optional[list[int]] = setting(
        None, "adaptive input and softmax: first word of each band after the first; null: one tied matrix", minimum=1
    )
    tail_dropout: float = setting(0.2, "adaptive: dropout rate before the softmax of a rare band", minimum=0, maximum=1)

    def validate(self) -> None:
        if self.width % self.heads:
            remedy = f"use a multiple of {self.heads}"
            raise SettingError("width", self.width, f"is not divisible by {self.heads} heads", remedy)
        if self.cutoffs is None:
            return
        if self.cutoffs != sorted(set(self.cutoffs)) or not self.cutoffs:
            raise SettingError("cutoffs", self.cutoffs, "is not in ascending order", "sort it, as in [20000,60000]")
        if self.width // BAND_FACTOR ** len(self.cutoffs) < 1:
            problem = f"makes the last band's width 0, as each is a {BAND_FACTOR}th of the one before"
            raise SettingError("cutoffs", self.cutoffs, problem, "use fewer")

    def check(self, shape: TokenShape) -> None:
        if self.cutoffs is not None and self.cutoffs[-1] >= shape.vocabulary:
            problem = f"there are only {shape.vocabulary} words"
            raise SettingError("cutoffs", self.cutoffs, problem, "use lower cutoffs, or null")

    def build(self, shape: TokenShape) -> TransformerLanguageModel:
        return TransformerLanguageModel(self, shape.vocabulary)
