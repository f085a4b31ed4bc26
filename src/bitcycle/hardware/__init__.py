"""What does a run cost: a model's products by tracing, and cost models over them. Knows shapes and bits only."""

from bitcycle.hardware.base import CONVENTIONS, PASSES, PUBLISHED_IMAGES, Cost, HardwareOptions, Histogram, LayerCost
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.meter import CostMeter
from bitcycle.hardware.operation import FLOAT_PRECISION, MatrixProduct, Operation, Workload
from bitcycle.hardware.registry import HARDWARE, hardware_options
from bitcycle.hardware.trace import trace

__all__ = [
    "CONVENTIONS",
    "FLOAT_PRECISION",
    "HARDWARE",
    "PASSES",
    "PUBLISHED_IMAGES",
    "BitOps",
    "Cost",
    "CostMeter",
    "HardwareOptions",
    "Histogram",
    "LayerCost",
    "MatrixProduct",
    "Operation",
    "Workload",
    "hardware_options",
    "trace",
]
