"""What the tests of gate share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import bitcycle
from bitcycle.hardware import trace
from bitcycle.model import CifarResNet
from bitcycle.quantizer import Sbm
from bitcycle.shapes import ImageShape

DETERMINISTIC = Sbm(stochastic=False)


SHAPE = ImageShape(3, 16, 10)


def gated(model: nn.Module, quantizer=DETERMINISTIC, seed: int = 0, **options):
    """A gated network with known costs, and its schedule."""
    schedule = bitcycle.schedule("dfq", total_steps=100, family=getattr(model, "block_family", None), **options)
    model = bitcycle.quantize_model(model, quantizer, schedule=schedule, seed=seed)
    control = bitcycle.PrecisionController(model, schedule, workload=trace(model, torch.zeros(1, 3, 16, 16)))
    control.step(0)
    return model, control


def resnet(blocks=(1, 1, 1), seed: int = 1) -> CifarResNet:
    torch.manual_seed(seed)
    return CifarResNet(blocks, SHAPE)


def images(samples: int = 6, seed: int = 2) -> torch.Tensor:
    return torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def force(model: nn.Module, choices: torch.Tensor) -> None:
    """Let the gates choose as told, [blocks, samples], with the gradients of a real choice."""

    def choose(index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            model.gates._begin()
        mask = F.one_hot(choices[index], len(model.gates.options.pairs)).float().requires_grad_()
        if model.training:
            model.gates.chosen[index] += mask.detach().sum(0).long()
            model.gates._samples, cost = len(mask), (mask * model.gates.option_costs[index]).sum()
            model.gates._cost = cost if model.gates._cost is None else model.gates._cost + cost
        masks[index] = mask
        return mask

    masks = model.gates.masks = {}
    model.gates.choose = choose


def spread(model: nn.Module, scale: float = 30.0) -> None:
    """Make the gates' choices differ from sample to sample."""
    with torch.no_grad():
        for parameter in model.gates.parameters():
            parameter.mul_(scale)
