"""Public networks with every quantizer: two training steps, and an output error at 8 bits within a bound, or a reason.

`make test` runs one small network with each of three quantizers, `make test-all` all of them.
"""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import bitcycle
from bitcycle.layer import PrecisionState, penalty
from bitcycle.quantizer import QUANTIZERS, quantizer_options
from bitcycle.schedule import FLOAT, Precision
from bitcycle.settings import SettingError
from tests.test_any_model import tiny_transformers

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
QUICK = [("vit_b_16", name) for name in ("sbm", "dorefa", "pact_binary")]
REST = [(network, name) for network in (*IMAGES, *TRANSFORMERS, "fcos") for name in QUANTIZERS if name != "none"]
BOUND_AT_8_BITS = 0.25
"""Relative error of the outputs of a network with random weights, with SBM, in evaluation before any training."""


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
    return network, {"x": torch.randn(2, 3, 32, 32)}


def loss_of(output) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if hasattr(output, "loss"):
        return output.loss
    return sum(output.values())


def check(network: str, quantizer: str) -> None:
    model, batch = build(network)
    batch = {("input" if network == "vit_b_16" and key == "x" else key): value for key, value in batch.items()}
    batch = batch if network not in IMAGES else {"": next(iter(batch.values()))}
    call = (lambda: model(batch[""])) if "" in batch else (lambda: model(**batch))
    options = quantizer_options(quantizer)
    try:
        model = bitcycle.quantize_model(model, options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(2):
            loss = loss_of(call())
            added = penalty(model, loss)
            (loss if added is None else loss + added).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert loss.isfinite()
    except SettingError:  # with a reason and a remedy
        assert quantizer == "pact_binary", quantizer
        return
    if quantizer != "sbm" or network == "fcos":
        return
    state = next(module for module in model.modules() if isinstance(module, PrecisionState))
    outputs = []
    for bits in (8, FLOAT):
        fresh, _ = build(network)
        model = bitcycle.quantize_model(fresh, options).eval()
        state = next(module for module in model.modules() if isinstance(module, PrecisionState))
        state.set(Precision(bits, bits, bits))
        with torch.no_grad():
            output = call()
        outputs.append(output if isinstance(output, torch.Tensor) else output.logits)
    assert (outputs[0] - outputs[1]).norm() < BOUND_AT_8_BITS * outputs[1].norm()


@pytest.mark.parametrize(("network", "quantizer"), QUICK)
def test_a_public_network(network, quantizer):
    check(network, quantizer)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "quantizer"), REST)
def test_public_networks(network, quantizer):
    check(network, quantizer)
