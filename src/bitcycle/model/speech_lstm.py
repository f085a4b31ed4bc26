"""Acoustic model of HLHLp: unidirectional LSTM layers and a linear output layer for CTC.

    x_0 = features, `stack` consecutive frames concatenated;   x_k = LSTM_k(dropout(x_{k-1}));
    logits_t = W dropout(x_{n, t + delay}) + c

Source: HLHLp, section 4.3: three unidirectional layers of 512 cells, CTC, keep probability 0.5 "for all the non-recurrent
connections". Parameters of layer k with I_k inputs (PyTorch's LSTM has two biases): 4 H (I_k + H) + 8 H; of the output layer
(H + 1) S. With 120 features and 16 symbols: 5,509,136. The paper does not specify symbols, features and initial weights
(here PyTorch's), and mentions no output delay (5 frames in Sak et al. 2014, LSTM architectures for large scale acoustic
modeling). Without a delay, CTC may learn to output short words before they are spoken, and does so on the spoken
digits.
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

    Logits depend on at most `delay` future stacked frames. Zero padding after an utterance does not change its logits,
    except through the ranges that quantizers compute over a batch.
    """

    float_layers: tuple[str, ...] = ()
    """HLHLp quantizes all layers of its recurrent networks."""
    signed_inputs = ("*",)
    """Features and outputs of LSTM layers have both signs."""

    def __init__(self, options: "SpeechLstmOptions", shape: SpeechShape) -> None:
        super().__init__()
        self.stack, self.delay = options.stack, options.delay
        of_input = options.dropout if options.dropout_input is None else options.dropout_input
        self.dropout_input, self.dropout = nn.Dropout(of_input), nn.Dropout(options.dropout)
        inputs = [shape.features * options.stack, *[options.hidden] * (options.layers - 1)]
        self.lstm = nn.ModuleList(nn.LSTM(size, options.hidden, batch_first=True) for size in inputs)
        self.output = nn.Linear(options.hidden, shape.symbols)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Number of valid output frames of utterances with the given numbers of input frames."""
        return (lengths + self.stack - 1) // self.stack

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(stacked(x, self.stack), (0, 0, 0, self.delay))
        x = self.dropout_input(x)
        for layer in self.lstm:
            x = self.dropout(layer(x)[0])
        return self.output(x[:, self.delay :])


def stacked(x: Tensor, count: int) -> Tensor:
    """Concatenate each `count` consecutive frames of [N, T, F], padded with zeros: [N, ceil(T / count), count F]."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % count))
    return x.reshape(x.shape[0], -1, count * x.shape[2])


@dataclass
class SpeechLstmOptions(ModelOptions):
    """Options of HLHLp's acoustic model."""

    takes = SpeechShape

    hidden: int = setting(512, "cells of an LSTM layer (HLHLp, section 4.3: 512)", minimum=1)
    layers: int = setting(3, "LSTM layers (HLHLp, section 4.3: 3)", minimum=1)
    dropout: float = setting(0.5, "dropout rate of the outputs of LSTM layers (HLHLp: 0.5)", minimum=0, maximum=1)
    dropout_input: Optional[float] = setting(
        None,
        "dropout rate of the features; null: same as dropout (HLHLp: all non-recurrent connections)",
        minimum=0,
        maximum=1,
    )
    stack: int = setting(1, "consecutive frames concatenated into one, for speed; 1: none", minimum=1)
    delay: int = setting(0, "output delay in stacked frames (not in the paper); 0: none", minimum=0)

    def build(self, shape: SpeechShape) -> SpeechLstm:
        return SpeechLstm(self, shape)
