"""AWD-LSTM: a recurrent language model with seven forms of regularisation.

    e_t = locked(E'[w_t]),    E' = E with rows of some words dropped for the batch
    h_t = LSTM_k(x_t, h_(t-1); U_k dropped),  x of the next layer = locked(h);    logits_t = E locked(h_t of the last) + d
    added to the loss:  AR mean(locked(h)^2) + TAR mean((h_t - h_(t-1))^2)       of the last layer

Locked dropout uses one mask for all time steps of a batch. Dropout of U is drawn once per batch, before quantization.
Layers have H units, except the last, which has the size of the embedding; embedding and softmax layer are tied.

Source: Merity et al. 2018, sections 2 to 4, which CPT cites for its two-layer LSTM (section 4.3, table 5); recipe: training=awd.
CPT gives no sizes, and its perplexities are far above those of this recipe; `model=lstm2 training=ptb` is the plain
variant.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bitcycle.model.base import ModelOptions
from bitcycle.model.recurrent_language_model import EMBEDDING_RANGE
from bitcycle.settings import setting
from bitcycle.shapes import TokenShape


class AwdLanguageModel(nn.Module):
    """Tokens [T, N] and the recurrent state before them -> logits [T, N, V] and the state after them."""

    float_layers = ()
    signed_inputs = ("*",)
    quantized_bias = True

    def __init__(self, options: AwdLanguageModelOptions, vocabulary: int) -> None:
        super().__init__()
        self.options = options
        sizes = [options.embedding, *[options.hidden] * (options.layers - 1), options.embedding]
        self.embedding = nn.Embedding(vocabulary, options.embedding)
        self.layers = nn.ModuleList(nn.LSTM(*pair) for pair in itertools.pairwise(sizes))
        self.decoder = nn.Linear(options.embedding, vocabulary)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        nn.init.zeros_(self.decoder.bias)
        self._outputs: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The state contains h and c of each layer in order, each [1, N, units]."""
        options, last = self.options, []
        x = locked_dropout(self._embedded(tokens), options.dropout_input, self.training)
        for index, layer in enumerate(self.layers):
            if index:
                x = locked_dropout(x, options.dropout_hidden, self.training)
            before = None if state is None else (state[2 * index], state[2 * index + 1])
            x, after = functional_call(layer, self._dropped(layer), (x, before))
            last += list(after)
        dropped = locked_dropout(x, options.dropout, self.training)
        self._outputs = (x, dropped) if self.training else None
        logits = self.decoder(dropped.flatten(0, 1))  # flattened, so that the gradient has a single range
        return logits.unflatten(0, tokens.shape), tuple(last)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings of the tokens; in training, randomly dropped words are zero throughout the batch."""
        rows: Tensor = self.embedding(tokens)
        if not self.training or not self.options.dropout_embedding:
            return rows
        kept = F.dropout(rows.new_ones(self.embedding.num_embeddings, 1), self.options.dropout_embedding)
        return rows * F.embedding(tokens, kept)

    def _dropped(self, layer: Any) -> dict[str, Tensor]:
        """Recurrent weight of a layer with dropout for this batch."""
        weight: Tensor = layer.weight_hh_l0
        return {"weight_hh_l0": F.dropout(weight, self.options.dropout_weight, self.training)}

    def penalties(self, loss: Tensor | None = None) -> list[Tensor]:
        """AR and TAR of the last forward pass in training mode."""
        if self._outputs is None:
            return []
        output, dropped = self._outputs
        terms = [self.options.activation_penalty * dropped.square().mean()]
        if len(output) > 1:
            terms.append(self.options.change_penalty * output.diff(dim=0).square().mean())
        return terms

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the last forward pass, whose graph cannot be copied or pickled."""
        return {**self.__dict__, "_outputs": None}


def locked_dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """Dropout of x [T, N, F] with one mask [1, N, F] for all T time steps (Gal and Ghahramani 2016)."""
    return x * F.dropout(torch.ones_like(x[:1]), share) if training and share else x


@dataclass
class AwdLanguageModelOptions(ModelOptions):
    """Options of AWD-LSTM; defaults of Merity et al. 2018 on Penn Treebank, except the number of layers."""

    takes: ClassVar[type] = TokenShape

    name: str = "lstm_awd"
    layers: int = setting(2, "stacked LSTM layers (CPT: 2; Merity et al.: 3)", minimum=1)
    hidden: int = setting(1150, "units of all layers except the last", minimum=1)
    embedding: int = setting(400, "size of the embedding and units of the last layer", minimum=1)
    dropout: float = setting(
        0.4, "dropout rate of the last layer's output, one mask for all time steps", minimum=0, maximum=1
    )
    dropout_hidden: float = setting(
        0.25, "dropout rate between layers, one mask for all time steps", minimum=0, maximum=1
    )
    dropout_input: float = setting(
        0.4, "dropout rate of the embedded tokens, one mask for all time steps", minimum=0, maximum=1
    )
    dropout_embedding: float = setting(0.1, "dropout rate of words of the vocabulary, per batch", minimum=0, maximum=1)
    dropout_weight: float = setting(0.5, "dropout rate of the recurrent weights, per batch", minimum=0, maximum=1)
    activation_penalty: float = setting(2.0, "factor of the mean square of the last layer's output (AR)", minimum=0)
    change_penalty: float = setting(1.0, "factor of the mean square of its change from step to step (TAR)", minimum=0)

    def build(self, shape: TokenShape) -> AwdLanguageModel:
        return AwdLanguageModel(self, shape.vocabulary)
