"""How a tensor is mapped onto 2^b levels, and how gradients pass through that."""

from bitcycle.quantizer.base import ROLES, GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.compile_utils import compiler_works
from bitcycle.quantizer.dorefa import Dorefa
from bitcycle.quantizer.l2_step import optimal_step
from bitcycle.quantizer.multibit import Multibit
from bitcycle.quantizer.pact_binary import PactBinary
from bitcycle.quantizer.registry import QUANTIZERS, NoQuantizer, encode_bits, quantize, quantizer_options
from bitcycle.quantizer.sbm import Sbm, SbmActivation, SbmGradient, SbmRows, SbmWeight
from bitcycle.quantizer.ternary import Ternary
from bitcycle.quantizer.ttq import Ttq
from bitcycle.quantizer.uniform import UniformL2
from bitcycle.quantizer.wageubn import Wageubn

__all__ = [
    "QUANTIZERS",
    "ROLES",
    "Dorefa",
    "GradientQuantizer",
    "Multibit",
    "NoQuantizer",
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
    "quantizer_options",
]
