"""How a tensor is mapped onto 2^b levels, and how gradients pass through that."""

from bitcycle.quantizer.base import ROLES, GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.kernel import compiler_works
from bitcycle.quantizer.registry import QUANTIZERS, NoQuantizer, encode_bits, quantize, quantizer_options
from bitcycle.quantizer.sbm import Sbm, SbmActivation, SbmGradient, SbmWeight

__all__ = [
    "QUANTIZERS",
    "ROLES",
    "GradientQuantizer",
    "NoQuantizer",
    "QuantizerOptions",
    "Sbm",
    "SbmActivation",
    "SbmGradient",
    "SbmWeight",
    "TensorQuantizer",
    "compiler_works",
    "encode_bits",
    "quantize",
    "quantizer_options",
]
