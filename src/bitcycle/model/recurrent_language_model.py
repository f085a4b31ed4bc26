"""Recurrent language models: LSTM or GRU between an embedding and a softmax layer.

    e_t = dropout(E[w_t]);   h_t = RNN(e_t, h_(t-1));   logits_t = V dropout(h_t) + d

`lstm` is the network of Better Schedules on Penn Treebank (one layer of 800 units, released code cpt_ptb): dropout only
after the LSTM, one bias (on W), recurrent weights from +-1/sqrt(H), embedding and softmax weights from +-0.1, softmax
bias 0. `lstm2` is our variant for CPT, which uses two layers and gives no sizes: two layers of 650 units, otherwise the
same. `lstm_hlhlp` and `gru_hlhlp` follow HLHLp (section 4.2; 300 units on Penn Treebank, 512 on WikiText-2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Optional

import torch
from torch import Tensor, nn

from bitcycle.layer.embedding import QuantizableEmbedding
from bitcycle.model.base import ModelOptions
from bitcycle.model.float_layer import FloatLinear
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import TokenShape

EMBEDDING_RANGE = 0.1


class RecurrentLanguageModel(nn.Module):
    """Tokens [T, N] and the recurrent state before them -> logits [T, N, V] and the state after them."""

    float_layers = ()
    signed_inputs = ("*",)
    quantized_bias = True
    """As in the released code of Better Schedules."""

    def __init__(self, options: RecurrentLanguageModelOptions, vocabulary: int) -> None:
        super().__init__()
        size = options.hidden if options.embedding is None else options.embedding
        kind = QuantizableEmbedding if options.quantize == "all" else nn.Embedding
        self.embedding = kind(vocabulary, size)
        layer = nn.LSTM if options.cell == "lstm" else nn.GRU
        self.rnn = layer(size, options.hidden, options.layers, dropout=options.dropout if options.layers > 1 else 0.0)
        self.decoder = (FloatLinear if options.quantize == "recurrent" else nn.Linear)(options.hidden, vocabulary)
        self.dropout_embedding, self.dropout = nn.Dropout(options.dropout_embedding), nn.Dropout(options.dropout)
        if options.tied:
            self.decoder.weight = self.embedding.weight
        self._initialise(options.recurrent_range, options.bias == "input")

    @torch.no_grad()
    def _initialise(self, recurrent_range: float | None, one_bias: bool) -> None:
        if recurrent_range is not None:  # PyTorch's default is 1 / sqrt(H)
            for parameter in self.rnn.parameters():
                parameter.uniform_(-recurrent_range, recurrent_range)
        for weight in {self.embedding.weight, self.decoder.weight}:
            weight.uniform_(-EMBEDDING_RANGE, EMBEDDING_RANGE)
        self.decoder.bias.zero_()
        if one_bias:
            for layer in range(self.rnn.num_layers):
                hold_at_zero(self.rnn, f"bias_hh_l{layer}")

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.dropout_embedding(self.embedding(tokens))
        is_lstm = isinstance(self.rnn, nn.LSTM)
        x, last = self.rnn(x, state if state is None or is_lstm else state[0])
        logits = self.decoder(self.dropout(x).flatten(0, 1))  # flattened, so that the gradient has a single range
        return logits.unflatten(0, tokens.shape), tuple(last) if is_lstm else (last,)


def hold_at_zero(rnn: nn.RNNBase, name: str) -> None:
    """Replace a parameter of a recurrent layer by a constant zero that is neither trained nor saved."""
    zero = torch.zeros_like(getattr(rnn, name))
    delattr(rnn, name)
    rnn.register_buffer(name, zero, persistent=False)
    rnn._init_flat_weights()  # update the references of PyTorch's layer to its weights


@dataclass
class RecurrentLanguageModelOptions(ModelOptions):
    """Options of the recurrent language models."""

    takes: ClassVar[type] = TokenShape

    cell: str = setting("lstm", "lstm or gru", choices=("lstm", "gru"))
    layers: int = setting(1, "stacked recurrent layers", minimum=1)
    hidden: int = setting(800, "units of a recurrent layer", minimum=1)
    embedding: Optional[int] = setting(None, "size of the embedding; null: same as hidden", minimum=1)
    dropout: float = setting(0.5, "dropout rate of each recurrent layer's output", minimum=0, maximum=1)
    dropout_embedding: float = setting(
        0.0, "dropout rate of the embedding (Better Schedules' paper: 0, its code: 0.5)", minimum=0, maximum=1
    )
    tied: bool = setting(False, "share one matrix between softmax layer and embedding")
    bias: str = setting(
        "input",
        "biases of a recurrent layer: on W only (input: Better Schedules' code), or on W and U as in PyTorch (both)",
        choices=("input", "both"),
    )
    recurrent_range: Optional[float] = setting(
        None, "bound of the uniform initial recurrent weights; null: 1/sqrt(hidden)", minimum=0
    )
    quantize: str = setting(
        "products",
        "quantized layers: recurrent and softmax layers (products: Better Schedules' code), also the embedding"
        " (all: HLHLp), or recurrent layers only",
        choices=("products", "all", "recurrent"),
    )

    def validate(self) -> None:
        if self.tied and self.embedding not in (None, self.hidden):
            problem = f"cannot be tied to a softmax weight for {self.hidden} units"
            raise SettingError("embedding", self.embedding, problem, "omit it, or set tied=false")
        if self.cell == "gru" and self.bias == "input":
            raise SettingError("bias", self.bias, "a GRU needs a separate bias on U", "use bias=both")

    def build(self, shape: TokenShape) -> RecurrentLanguageModel:
        return RecurrentLanguageModel(self, shape.vocabulary)
