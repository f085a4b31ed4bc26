"""Quantized layers, the conversion of float models, and the controller that sets the bits."""

from bitcycle.layer.batch_norm import share_batch_norm
from bitcycle.layer.control.controller import PrecisionController
from bitcycle.layer.control.phase_transition import begin_anew, carry_quantized, restart_quantizers, step_ratio
from bitcycle.layer.control.report import ConversionReport, conversion_report
from bitcycle.layer.conversion.convert import float_state_dict, quantize_model
from bitcycle.layer.conversion.plan import DEFAULT_FLOAT_LAYERS, LayerRule, conversion_plan, convertible_layers
from bitcycle.layer.gates.choices import Choices
from bitcycle.layer.gates.gate import Gates
from bitcycle.layer.gates.gated_block import GatedBlock
from bitcycle.layer.products.attention import QuantizedMultiheadAttention
from bitcycle.layer.products.convolution import (
    QuantizedConv1d,
    QuantizedConv2d,
    QuantizedConv3d,
    QuantizedConvTranspose1d,
    QuantizedConvTranspose2d,
    QuantizedConvTranspose3d,
    QuantizedEmbedding,
)
from bitcycle.layer.products.graph import QuantizedGraphConvolution, QuantizedSageConvolution
from bitcycle.layer.products.matrix_product import QuantizedMatrixProduct
from bitcycle.layer.products.quantized import QuantizedLayer, QuantizedLinear
from bitcycle.layer.products.quantized_product import QuantizedProduct, penalty
from bitcycle.layer.products.recurrent import QuantizedGRU, QuantizedLSTM
from bitcycle.layer.state import PrecisionState
from bitcycle.module.layers import MatrixProduct, QuantizableEmbedding

__all__ = [
    "DEFAULT_FLOAT_LAYERS",
    "Choices",
    "ConversionReport",
    "GatedBlock",
    "Gates",
    "LayerRule",
    "MatrixProduct",
    "PrecisionController",
    "PrecisionState",
    "QuantizableEmbedding",
    "QuantizedConv1d",
    "QuantizedConv2d",
    "QuantizedConv3d",
    "QuantizedConvTranspose1d",
    "QuantizedConvTranspose2d",
    "QuantizedConvTranspose3d",
    "QuantizedEmbedding",
    "QuantizedGRU",
    "QuantizedGraphConvolution",
    "QuantizedLSTM",
    "QuantizedLayer",
    "QuantizedLinear",
    "QuantizedMatrixProduct",
    "QuantizedMultiheadAttention",
    "QuantizedProduct",
    "QuantizedSageConvolution",
    "begin_anew",
    "carry_quantized",
    "conversion_plan",
    "conversion_report",
    "convertible_layers",
    "float_state_dict",
    "penalty",
    "quantize_model",
    "restart_quantizers",
    "share_batch_norm",
    "step_ratio",
]
