"""CPT's CIFAR networks: cpt_cifar/models.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bitcycle
from bitcycle.model.mobilenet_v2_cifar import CifarMobileNetV2
from bitcycle.model.resnet import CifarResNet
from bitcycle.quantizer.registry import quantizer_options
from bitcycle.shapes import ImageShape
from twin_run import Twin, pairs_of, released, to_nearest

DEPTHWISE = (8, 16)
"""Forward and gradient bits of depthwise convolutions."""


def names_in_ours(theirs: nn.Module) -> Callable[[str], str]:
    """Map names of their parameters to ours."""
    blocks = list(
        dict.fromkeys(name.split(".")[0] for name, _ in theirs.named_parameters() if name.startswith("group"))
    )
    widening = {name.split(".")[0] for name, _ in theirs.named_parameters() if "downsample" in name}

    def rename(name: str) -> str:
        block, _, rest = name.partition(".")
        if block not in blocks:
            return name.replace("linear.", "fc.")
        rest = rest.replace("downsample.", "shortcut.0.").replace("shortcut.weight", "shortcut.0.weight")
        rest = rest.replace("bn4.", "shortcut.1.")
        if block in widening:
            rest = rest.replace("bn3.", "shortcut.1.")
        if hasattr(theirs, "linear"):
            return f"blocks.{blocks.index(block)}.{rest}"
        return re.sub(r"group(\d)_layer(\d+)", r"group\1.\2", block) + f".{rest}"

    return rename


def build(checkout: Path, variant: str) -> Twin:
    """The variant is the network, with suffix -8 for gradients of 8 bits."""
    released(checkout, "cpt_cifar")
    models = import_module("models")
    to_nearest(import_module("modules.quantize"))
    models.DWS_BITS, models.DWS_GRAD_BITS = DEPTHWISE  # used but not defined in the released file
    network, _, gradient = variant.partition("-")
    theirs = getattr(models, "cifar10_" + {"resnet38": "resnet_38"}.get(network, network))()
    shape = ImageShape(3, 32, 10)
    ours = CifarResNet((6, 6, 6), shape, unused_bn=True) if network == "resnet38" else CifarMobileNetV2(shape)
    options = replace(quantizer_options("sbm"), stochastic=False, depthwise_bits=[*DEPTHWISE])
    ours = bitcycle.quantize_model(ours, options, float_layers=["last"])
    pairs = pairs_of(theirs, ours, names_in_ours(theirs))
    low = 3 if network.startswith("resnet") else 4
    bits_of_gradients = {} if gradient else {"gradient_min": 32, "gradient_max": 32}
    schedule = bitcycle.schedule("CR", q_min=low, q_max=8, cycles=2, total_steps=64, **bits_of_gradients)
    control = bitcycle.PrecisionController(ours, schedule)
    theirs.train(), ours.train()

    def losses(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 32, 32, generator=generator)
        labels = torch.randint(10, (8,), generator=generator)
        bits = control.step(step)
        their_output = theirs(images, bits.weight, bits.gradient if bits.gradient < 32 else 0)
        return cross_entropy(their_output, labels), cross_entropy(ours(images), labels)

    return Twin(losses, pairs, lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=1e-4))
