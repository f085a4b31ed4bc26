"""The error of evaluation soon after conversion, for the table in docs/own-models.md."""

from __future__ import annotations

import copy

import torch
from torch import nn

import bitcycle
from bitcycle.files import markdown_table
from bitcycle.quantizer import Sbm

STEPS = (0, 1, 2, 5, 10, 20)
"""Training steps between conversion and evaluation."""
RANGES = {"debiased": "`debiased`, the default of `quantize_model`", "code": "`code`, the released code"}
BITS = 8


def evaluation_errors(running_range: str, bits: int = BITS) -> list[float]:
    """Error of eval() after STEPS training steps, relative to the float network with the same weights.

    |y - y_float| / |y_float|, in Euclidean norms of the outputs for 256 samples; a perceptron 16-64-64-4 with SBM at `bits` bits
    in all layers, in training mode on batches of 64 samples without an update of its weights.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model = bitcycle.quantize_model(copy.deepcopy(plain), Sbm(running_range=running_range), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=max(STEPS)))
    control.use((bits, bits, bits))
    x = torch.randn(256, 16, generator=generator)
    expected, errors = plain(x).detach(), []
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            model.eval()
            errors.append(float((model(x).detach() - expected).norm() / expected.norm()))
            model.train()
        if step < max(STEPS):
            control.step(step)
            model(torch.randn(64, 16, generator=generator))
    return errors


def evaluation_table() -> str:
    """The errors in percent, for each start of the running range."""
    lines = [(what, *(f"{100 * error:.1f}" for error in evaluation_errors(name))) for name, what in RANGES.items()]
    return markdown_table(("`running_range`", *map(str, STEPS)), lines)
