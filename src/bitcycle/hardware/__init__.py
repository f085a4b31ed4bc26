"""Training cost: a tracer that lists a model's products, and cost models that depend only on shapes and bits."""

from bitcycle.hardware.base import CONVENTIONS, PASSES, PUBLISHED_IMAGES, Cost, CostMeter, HardwareOptions, LayerCost
from bitcycle.hardware.bitfusion import BitFusion
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.latency import TensorCore, Zc706
from bitcycle.hardware.operation import FLOAT_PRECISION, Histogram, Operation, ProductShape, SampleCounts, Workload
from bitcycle.hardware.registry import HARDWARE, AllHardware, hardware_options
from bitcycle.hardware.table import CostTable, cost_table, saving
from bitcycle.hardware.trace import trace

__all__ = [
    "CONVENTIONS",
    "FLOAT_PRECISION",
    "HARDWARE",
    "PASSES",
    "PUBLISHED_IMAGES",
    "AllHardware",
    "BitFusion",
    "BitOps",
    "Cost",
    "CostMeter",
    "CostTable",
    "HardwareOptions",
    "Histogram",
    "LayerCost",
    "Operation",
    "ProductShape",
    "SampleCounts",
    "TensorCore",
    "Workload",
    "Zc706",
    "cost_table",
    "hardware_options",
    "saving",
    "trace",
]
