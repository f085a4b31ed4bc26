"""bitcycle: neural networks trained with few bits whose number changes along the way.

>>> import bitcycle
>>> schedule = bitcycle.schedule("RTH", q_min=3, q_max=8, cycles=8, total_steps=64_000)
>>> schedule(0)
Precision(weight=8, activation=8, gradient=8)
"""

from bitcycle.layer import PrecisionController, quantize_model
from bitcycle.quantizer import quantize
from bitcycle.schedule import Precision, schedule

__version__ = "0.1.0"

__all__ = ["Precision", "PrecisionController", "quantize", "quantize_model", "schedule"]
