"""Acoustic model of HLHLp: LSTM layers that see the past only, and a linear layer that scores the symbols of CTC.

    x_0 = features, `stack` frames after each other joined to one;   x_k = LSTM_k(dropout(x_{k-1}));
    logits_t = W dropout(x_{n, t + delay}) + c

Source: HLHLp, section 4.3: three unidirectional layers of 512 cells, CTC, keep probability 0.5 "for all the non-recurrent
connections". Parameters of layer k with I_k inputs (PyTorch's LSTM has two biases): 4 H (I_k + H) + 8 H; of the output layer
(H + 1) S. With 120 features and 16 symbols: 5,509,136. Symbols, features and initial weights (PyTorch's) are not in the paper,
nor is a delay of the answers (Sak et al. 2014, LSTM architectures for large scale acoustic modeling, have one of 5 frames):
without one, CTC may learn to spell short words before they are heard, and does on the spoken digits.
"""

from dataclasses import dataclass
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.settings import setting
from bitcycle.shapes import SpeechShape


class SpeechLstm(nn.Module):
    """Features [N, T, F] -> logits [N, ceil(T / stack), symbols]; symbol 0 is the blank.

    Logits depend on no frame later than `delay` (and beyond the stack). Behind an utterance lie zeros, of whatever length it is
    padded to, so that they change none of its logits; they only take part in the ranges that quantizers find in a batch.

    Args:
        shape: number of features and symbols.
        hidden: cells of a layer.
        layers: number of layers.
        dropout: share of outputs of LSTM layers that is dropped.
        dropout_input: share of features that is dropped.
        stack: consecutive frames that are joined to one.
        delay: joined frames that are heard before the first answer; as many of zeros follow the last.
    """

    float_layers: tuple[str, ...] = ()
    """HLHLp quantizes all layers of its recurrent networks."""
    signed_inputs = ("*",)
    """Features and outputs of LSTM layers have both signs."""

    def __init__(
        self, shape: SpeechShape, hidden: int, layers: int, dropout: float, dropout_input: float, stack: int, delay: int
    ) -> None:
        super().__init__()
        self.stack, self.delay = stack, delay
        self.dropout_input, self.dropout = nn.Dropout(dropout_input), nn.Dropout(dropout)
        inputs = [shape.features * stack, *[hidden] * (layers - 1)]
        self.lstm = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in inputs)
        self.output = nn.Linear(hidden, shape.symbols)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Number of valid logits of utterances with the given numbers of frames."""
        return (lengths + self.stack - 1) // self.stack

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(stacked(x, self.stack), (0, 0, 0, self.delay))
        x = self.dropout_input(x)
        for layer in self.lstm:
            x = self.dropout(layer(x)[0])
        return self.output(x[:, self.delay :])


def stacked(x: Tensor, count: int) -> Tensor:
    """Frames [N, T, F] joined by `count`, zeros behind the last: [N, ceil(T / count), count F]."""
    missing = -x.shape[1] % count
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.reshape(x.shape[0], -1, count * x.shape[2])


@dataclass
class SpeechLstmOptions(ModelOptions):
    """Options of HLHLp's acoustic model."""

    takes = SpeechShape

    name: str = "speech_lstm"
    hidden: int = setting(512, "cells of an LSTM layer (HLHLp, section 4.3: 512)", minimum=1)
    layers: int = setting(3, "LSTM layers (HLHLp, section 4.3: 3)", minimum=1)
    dropout: float = setting(0.5, "share of outputs of LSTM layers that is dropped (HLHLp: 0.5)", minimum=0, maximum=1)
    dropout_input: Optional[float] = setting(
        None,
        "share of features that is dropped; null: as dropout (HLHLp: all non-recurrent connections)",
        minimum=0,
        maximum=1,
    )
    stack: int = setting(1, "consecutive frames joined to one, which makes the network faster; 1: none", minimum=1)
    delay: int = setting(
        0, "joined frames that are heard before the first answer (not in the paper); 0: none", minimum=0
    )

    def build(self, shape: SpeechShape) -> SpeechLstm:
        dropout_input = self.dropout if self.dropout_input is None else self.dropout_input
        return SpeechLstm(shape, self.hidden, self.layers, self.dropout, dropout_input, self.stack, self.delay)
