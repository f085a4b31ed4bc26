"""Public networks with every quantizer: two training steps, and errors at 8 bits within bounds, or a reason.

`make test` runs one small network with each of three quantizers, `make test-all` all of them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from torch import nn

import bitcycle
from bitcycle.layer import PrecisionState, QuantizedProduct, penalty
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import QUANTIZERS, quantizer_options
from bitcycle.settings import SettingError
from tests.layer.test_library_models import tiny_transformers

models = torchvision.models
IMAGES = {
    "resnet18": lambda: models.resnet18(num_classes=4),
    "mobilenet_v2": lambda: models.mobilenet_v2(num_classes=4),
    "efficientnet_b0": lambda: models.efficientnet_b0(num_classes=4),
    "vit_b_16": lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=4),
    "convnext_tiny": lambda: models.convnext_tiny(num_classes=4),
    "swin_t": lambda: models.swin_t(num_classes=4),
}
TRANSFORMERS = ("bert", "gpt2", "llama", "t5", "vit")
NETWORKS = (*IMAGES, *TRANSFORMERS, "fcos")
QUICK = [("vit_b_16", name) for name in ("sbm", "dorefa", "pact_binary")]
REST = [(network, name) for network in NETWORKS for name in QUANTIZERS if name != "none"]


class Bound(NamedTuple):
    """Of relative errors at 8 bits, or the most bits below that a quantizer has, with random weights and no training.

    layer: of the median layer's product on the float network's activations, up to a common factor (dorefa and ttq rescale
    weights by design). worst: of the worst layer. output: of the output of a network without batch norm; None where the quantizer
    has fewer bits, or another network by design, and errors of layers add up to anything.
    """

    layer: float
    worst: float
    output: float | None = None


BOUNDS = {
    "sbm": Bound(0.02, 0.05, 0.06),
    "dorefa": Bound(0.4, 0.6),  # clips activations at 1
    "wageubn": Bound(0.15, 0.6, 0.4),  # its steps do not follow a tensor's range
    "pact_binary": Bound(0.9, 0.95),
    "uniform_l2": Bound(0.03, 0.1, 0.1),
    "ternary": Bound(0.55, 0.97),
    "multibit": Bound(0.35, 0.6),
    "ttq": Bound(0.6, 0.95),
    "mx": Bound(0.06, 0.1, 0.25),
    "nvfp4": Bound(0.16, 0.25),
    "fp8": Bound(0.05, 0.08, 0.25),
}
"""Measured on all networks: a third or so below."""
FCOS = {"sbm": Bound(0.02, 0.1), "dorefa": Bound(0.4, 0.9)}
"""Terms cancel in the products of its coarsest map, which has one pixel; dorefa clips inputs of up to 600 at 1."""
WITH_BATCH_NORM = ("resnet18", "mobilenet_v2", "efficientnet_b0", "fcos")
"""Random weights with few samples behind each statistic: what enters a layer grows from layer to layer, in float32 as well."""


def build(name: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    if name in TRANSFORMERS:
        kind, config, batch = tiny_transformers()[name]
        return kind(config), batch
    if name == "fcos":
        network = models.detection.fcos_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
        )
        target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
        return network, {"images": [torch.rand(3, 64, 64)] * 2, "targets": [target] * 2}
    network = IMAGES[name]()
    if name == "vit_b_16":
        nn.init.normal_(network.heads.head.weight, std=0.1)  # zero otherwise
    return network, {"x": torch.randn(4, 3, 32, 32) if name == "vit_b_16" else torch.randn(4, 3, 64, 64)}


def loss_of(output) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if hasattr(output, "loss"):
        return output.loss
    return sum(output.values())


def usual_statistics(model: nn.Module, call: Callable[[], Any]) -> None:
    """Batch norm with the statistics of the batch, and no biases, so that a layer's output is its product."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()
        call()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    model.eval()


def set_bits(model: nn.Module, precision: Precision) -> None:
    for module in model.modules():
        if isinstance(module, PrecisionState):
            module.set(precision)


def layer_errors(model: nn.Module, call: Callable[[], Any], precision: Precision) -> tuple[list[float], Any]:
    """Of each product, the part of its output at `precision` that is no multiple of its float output; and the float output."""
    errors: list[float] = []

    def compare(layer: QuantizedProduct, inputs: tuple, y: torch.Tensor) -> None:
        layer.precision.set(precision)
        found = type(layer).forward(layer, *inputs).double().flatten()
        layer.precision.set(Precision(FLOAT, FLOAT, FLOAT))
        y = y.double().flatten()
        cosine = (found @ y) / (found.norm() * y.norm())
        errors.append(float((1 - cosine.square()).clamp_min(0).sqrt()))

    hooks = [m.register_forward_hook(compare) for m in model.modules() if isinstance(m, QuantizedProduct)]
    set_bits(model, Precision(FLOAT, FLOAT, FLOAT))
    with torch.no_grad():
        output = call()
    for hook in hooks:
        hook.remove()
    set_bits(model, precision)
    return errors, output


def output_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def check(network: str, quantizer: str) -> tuple[float, float, float]:
    """Errors of the median layer, the worst layer and the output, all below their bounds."""
    model, batch = build(network)
    call = (lambda: model(batch["x"])) if network in IMAGES else (lambda: model(**batch))
    usual_statistics(model, call)
    options = quantizer_options(quantizer)
    bound = FCOS.get(quantizer, BOUNDS[quantizer]) if network == "fcos" else BOUNDS[quantizer]
    bits = {role: max((b for b in options.bits(role) if b <= 8), default=FLOAT) for role in ("weight", "activation")}
    try:
        model = bitcycle.quantize_model(model, options)
        errors, expected = layer_errors(model, call, Precision(**bits, gradient=FLOAT))
        with torch.no_grad():
            found = call()
    except SettingError as error:  # with a reason and a remedy
        named = re.search("'.+'.*negative inputs|negative inputs.*'.+'", str(error))
        if quantizer != "pact_binary" or not named:
            raise
        return 0, 0, 0
    middle, worst, whole = statistics.median(errors), max(errors), 0.0
    if network != "fcos":
        whole = float((output_of(found) - output_of(expected)).norm() / output_of(expected).norm())
    set_bits(model, options.initial_precision)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-4)
    for _ in range(2):
        loss = loss_of(call())
        added = penalty(model, loss)
        (loss if added is None else loss + added).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()
    assert middle < bound.layer, (middle, worst, whole)
    assert worst < bound.worst, (middle, worst, whole)
    assert bound.output is None or network in WITH_BATCH_NORM or whole < bound.output, (middle, worst, whole)
    return middle, worst, whole


@pytest.mark.parametrize(("network", "quantizer"), QUICK)
def test_a_public_network(network, quantizer):
    check(network, quantizer)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "quantizer"), REST)
def test_public_networks(network, quantizer):
    check(network, quantizer)
