"""compute=codes: layers that multiply integer codes and save one byte per element for the backward pass."""

import logging

from torch import nn

from bitcycle.layer.codes.batch_norm import CodeBatchNorm2d, MaskSavingReLU, RecomputingBatchNorm2d
from bitcycle.layer.codes.product import code_product
from bitcycle.layer.codes.support import products_on_cpu
from bitcycle.layer.products.quantized import QuantizedLayer
from bitcycle.layer.twin import modules_of, replace_kinds

logger = logging.getLogger(__name__)


def compute_codes(model: nn.Module, compile: bool, recompute: bool) -> nn.Module:
    """Make the quantized layers of `model` compute on codes if layer and quantizer support it; changed in place.

    Args:
        model: converted by `quantize_model`.
        compile: fuse the operations around the products into kernels.
        recompute: let batch norm recompute the outputs of these layers instead of saving them.
    """
    layers = modules_of(model, QuantizedLayer)
    for layer in layers:
        layer.computation = code_product(layer, compile, recompute)
    able = sum(layer.computation is not None for layer in layers)
    if able < len(layers):
        kinds = ", ".join(sorted({layer.quantizer_options.name for layer in layers}))
        message = "compute=codes: %d of %d quantized layers compute as compute=simulate (quantizer %s)"
        logger.info(message, len(layers) - able, len(layers), kinds)
    if able:
        logger.info("compute=codes: %d layers compute on codes; on this CPU: %s", able, products_on_cpu())
    norm: type[nn.Module] = RecomputingBatchNorm2d if recompute else CodeBatchNorm2d
    model = replace_kinds(model, {nn.ReLU: MaskSavingReLU, nn.BatchNorm2d: norm} if able else {})
    for relu in modules_of(model, MaskSavingReLU):
        relu.compile_kernel = compile
    return model
