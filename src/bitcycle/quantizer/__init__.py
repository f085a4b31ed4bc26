"""Quantizers of weights, activations and gradients, and the gradients through them."""

from bitcycle.quantizer.base import ROLES, GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.by_format import with_formats
from bitcycle.quantizer.compile_utils import compiler_works
from bitcycle.quantizer.dorefa import Dorefa
from bitcycle.quantizer.fp8 import Fp8
from bitcycle.quantizer.l2_step import optimal_step
from bitcycle.quantizer.multibit import Multibit
from bitcycle.quantizer.mx import Mx, quantize_mx
from bitcycle.quantizer.nvfp4 import Nvfp4
from bitcycle.quantizer.pact_binary import PactBinary
from bitcycle.quantizer.registry import QUANTIZERS, NoQuantizer, encode_bits, quantize, quantizer_options
from bitcycle.quantizer.sbm import Sbm, SbmActivation, SbmRows, SbmWeight
from bitcycle.quantizer.sbm_gradient import SbmGradient
from bitcycle.quantizer.ternary import Ternary, Ttq
from bitcycle.quantizer.uniform import UniformL2
from bitcycle.quantizer.wageubn import Wageubn

__all__ = [
    "QUANTIZERS",
    "ROLES",
    "Dorefa",
    "Fp8",
    "GradientQuantizer",
    "Multibit",
    "Mx",
    "NoQuantizer",
    "Nvfp4",
    "PactBinary",
    "QuantizerOptions",
    "Sbm",
    "SbmActivation",
    "SbmGradient",
    "SbmRows",
    "SbmWeight",
    "TensorQuantizer",
    "Ternary",
    "Ttq",
    "UniformL2",
    "Wageubn",
    "compiler_works",
    "encode_bits",
    "optimal_step",
    "quantize",
    "quantize_mx",
    "quantizer_options",
    "with_formats",
]
