"""compute=codes: layers that multiply integer codes and save one byte per element for the backward pass."""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from bitcycle.layer.codes.mask_saving_relu import mask_saving_relu
from bitcycle.layer.codes.product import code_product
from bitcycle.layer.codes.recomputation import recomputing_batch_norm
from bitcycle.layer.quantized import QuantizedLayer

logger = logging.getLogger(__name__)


def compute_codes(model: nn.Module, compile: bool, recompute: bool) -> nn.Module:
    """Make the quantized layers of `model` compute on codes if layer and quantizer support it; changed in place.

    Args:
        model: converted by `quantize_model`.
        compile: fuse the operations around the products into kernels.
        recompute: let batch norm recompute the outputs of these layers instead of saving them.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    for layer in layers:
        layer.computation = code_product(layer, compile, recompute)
    able = sum(layer.computation is not None for layer in layers)
    if able < len(layers):
        kinds = ", ".join(sorted({layer.quantizer_options.name for layer in layers}))
        message = "compute=codes: %d of %d quantized layers compute as compute=simulate (quantizer %s)"
        logger.info(message, len(layers) - able, len(layers), kinds)
    if able:
        _replace(model, nn.ReLU, lambda relu: mask_saving_relu(relu, compile))
    if able and recompute:
        _replace(model, nn.BatchNorm2d, recomputing_batch_norm)
    return model


def _replace(model: nn.Module, kind: type[nn.Module], twin_of: Callable[[Any], nn.Module]) -> None:
    """Replace every module of exactly this type by its twin."""
    twins: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, module in parent._modules.items():
            if type(module) is kind:
                parent._modules[name] = twins.setdefault(module, twin_of(module))
