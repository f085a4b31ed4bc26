"""The LSTM of Better Schedules on Penn Treebank: cpt_ptb/models.py, on random tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bitcycle
from bitcycle.model.recurrent_language_model import RecurrentLanguageModelOptions
from bitcycle.quantizer.registry import quantizer_options
from bitcycle.shapes import TokenShape
from twin_run import Twin, pairs_of, released, to_nearest

VOCABULARY, HIDDEN, BATCH, LENGTH = 200, 32, 8, 12
NAMES = {
    "encoder.weight": "embedding.weight",
    "rnn.W.weight": "rnn.weight_ih_l0",
    "rnn.W.bias": "rnn.bias_ih_l0",
    "rnn.U.weight": "rnn.weight_hh_l0",
}


def build(checkout: Path, variant: str) -> Twin:
    """Without dropout, whose random numbers differ; the state is detached between steps."""
    released(checkout, "cpt_ptb")
    to_nearest(import_module("modules.quantize"))
    theirs = import_module("models").PTB_QLSTM(VOCABULARY, HIDDEN, HIDDEN, dropout=0.0)
    ours = RecurrentLanguageModelOptions(name="lstm", hidden=HIDDEN, dropout=0.0).build(TokenShape(VOCABULARY))
    ours = bitcycle.quantize_model(ours, replace(quantizer_options("sbm"), stochastic=False))
    pairs = pairs_of(theirs, ours, lambda name: NAMES.get(name, name))
    control = bitcycle.PrecisionController(ours, bitcycle.schedule("CR", q_min=5, q_max=8, cycles=2, total_steps=64))
    states = [theirs.init_hidden(BATCH), theirs.init_hidden(BATCH)]
    text = torch.randint(VOCABULARY, (64 * LENGTH + 1, BATCH), generator=torch.Generator().manual_seed(0))
    theirs.train(), ours.train()

    def losses(step: int) -> tuple[Tensor, Tensor]:
        bits = control.step(step)
        tokens = text[step * LENGTH : (step + 1) * LENGTH]
        targets = text[step * LENGTH + 1 : (step + 1) * LENGTH + 1].flatten()
        their_output, their_state = theirs(tokens, states[0], bits.weight, bits.gradient)
        our_output, our_state = ours(tokens, states[1])
        states[:] = (tuple(part.detach() for part in state) for state in (their_state, our_state))
        return cross_entropy(their_output.flatten(0, 1), targets), cross_entropy(our_output.flatten(0, 1), targets)

    return Twin(losses, pairs, lambda weights: torch.optim.SGD(weights, 1.0))
