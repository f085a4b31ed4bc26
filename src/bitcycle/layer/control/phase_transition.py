"""Effects of a phase transition on a network, besides loading weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bitcycle.layer.products.quantized import QuantizedLayer
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.layer.twin import modules_of
from bitcycle.quantizer import TensorQuantizer, optimal_step
from bitcycle.settings import SettingError


def restart_quantizers(model: nn.Module) -> None:
    """Let the quantizers adapt to the next phase even if its bits equal those of the previous phase."""
    for product in modules_of(model, QuantizedProduct):
        product.restart()


def begin_anew(model: nn.Module, initial: Mapping[str, torch.Tensor]) -> None:
    """Give a trained model the state `initial` of a new one, and let its quantizers forget the inputs that they have met."""
    for quantizer in modules_of(model, TensorQuantizer):
        if "signed_inputs" in quantizer._buffers and not quantizer.non_negative:
            quantizer.forget_signed()
    restart_quantizers(model)
    model.load_state_dict(initial)


def carry_quantized(model: nn.Module) -> None:
    """Replace the master weights of quantized layers by their quantized values at the current bits. Raises SettingError for
    layers that compute the weight that they quantize."""
    for layer in modules_of(model, QuantizedLayer):
        if layer.computes_weight:
            problem = f"layer {layer.name!r} computes the weight that it quantizes from its own, which stays float"
            remedy = "list the layer in float_layers, or do not carry weights"
            raise SettingError("model", type(model).__name__, problem, remedy)
        weight: torch.Tensor = layer.weight
        with torch.no_grad():
            weight.copy_(layer.rows_of(layer.weight_quantizer(layer.rows_of(weight), layer.precision.weight_bits)))


def step_ratio(model: nn.Module, bits: int, other_bits: int) -> float:
    """D_bits / D_other_bits, the geometric mean over the layers of the optimal steps of their master weights.

    Includes the quantized layers; in a float model, all convolutions and linear layers or, without any, all matrices. About 40
    for 2 and 8 bits and normal weights. Source: HLHLp, section 3.2, which does not specify the average over layers.
    """
    layers: list[Any] = [*modules_of(model, QuantizedLayer)]
    layers = layers or [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    weights = [layer.weight for layer in layers] or [p for p in model.parameters() if p.dim() > 1]
    ratios = []
    for weight in weights:
        steps = [optimal_step(weight.detach().reshape(1, -1), (1 << (b - 1)) - 1) for b in (bits, other_bits)]
        ratios.append((steps[0] / steps[1]).cpu().double().log().mean())
    return float(torch.stack(ratios).mean().exp())
