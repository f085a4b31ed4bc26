"""Recurrent language models: LSTM or GRU between an embedding and a softmax layer; AWD-LSTM.

    e_t = dropout(E[w_t]);   h_t = RNN(e_t, h_(t-1));   logits_t = V dropout(h_t) + d

`lstm` is the network of Better Schedules on Penn Treebank (one layer of 800 units, released code cpt_ptb): dropout only
after the LSTM, one bias (on W), recurrent weights from +-1/sqrt(H), embedding and softmax weights from +-0.1, softmax
bias 0. `lstm2` is our variant for CPT, which uses two layers and gives no sizes: two layers of 650 units, otherwise the
same. `lstm_hlhlp` and `gru_hlhlp` follow HLHLp (section 4.2; 300 units on Penn Treebank, 512 on WikiText-2).
"""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bitcycle.model.base import ModelOptions
from bitcycle.module.layers import FloatLinear, QuantizableEmbedding
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import TokenShape

EMBEDDING_RANGE = 0.1


class RecurrentLanguageModel(nn.Module):
    """Tokens [T, N] and the recurrent state before them -> logits [T, N, V] and the state after them."""

    float_layers = ()
    signed_inputs = ("*",)
    quantized_bias = True
    """As in the released code of Better Schedules."""

    def __init__(self, options: "RecurrentLanguageModelOptions", vocabulary: int) -> None:
        super().__init__()
        size = options.hidden if options.embedding is None else options.embedding
        kind = QuantizableEmbedding if options.quantize == "all" else nn.Embedding
        self.embedding = kind(vocabulary, size)
        layer = nn.LSTM if options.cell == "lstm" else nn.GRU
        self.rnn = layer(size, options.hidden, options.layers, dropout=options.dropout if options.layers > 1 else 0.0)
        self.decoder = (FloatLinear if options.quantize == "recurrent" else nn.Linear)(options.hidden, vocabulary)
        self.dropout_embedding, self.dropout = nn.Dropout(options.dropout_embedding), nn.Dropout(options.dropout)
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
        if self.cell == "gru" and self.bias == "input":
            raise SettingError("bias", self.bias, "a GRU needs a separate bias on U", "use bias=both")

    def build(self, shape: TokenShape) -> RecurrentLanguageModel:
        return RecurrentLanguageModel(self, shape.vocabulary)


class AwdLanguageModel(nn.Module):
    """AWD-LSTM with seven forms of regularisation: tokens [T, N] and state -> logits [T, N, V] and the next state.

        e_t = locked(E'[w_t]),    E' = E with rows of some words dropped for the batch
        h_t = LSTM_k(x_t, h_(t-1); U_k dropped),  x of the next layer = locked(h);    logits_t = E locked(h_t of the last) + d
        added to the loss:  AR mean(locked(h)^2) + TAR mean((h_t - h_(t-1))^2)       of the last layer

    Locked dropout uses one mask for all time steps of a batch. Dropout of U is drawn once per batch, before quantization.
    Layers have H units, except the last, which has the size of the embedding; embedding and softmax layer are tied.

    Source: Merity et al. 2018, sections 2 to 4, which CPT cites for its two-layer LSTM (section 4.3, table 5); recipe:
    training=awd. CPT gives no sizes, and its perplexities are far above those of this recipe; `model=lstm2 training=ptb` is the
    plain variant.
    """

    float_layers = ()
    signed_inputs = ("*",)
    quantized_bias = True

    def __init__(self, options: "AwdLanguageModelOptions", vocabulary: int) -> None:
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
            weight: Any = layer.weight_hh_l0
            changed = {"weight_hh_l0": F.dropout(weight, options.dropout_weight, self.training)}
            x, after = functional_call(layer, changed, (x, before))
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
