"""Latency on CPT's FPGA board, a Xilinx ZC706.

The throughput of a multiplier is inversely proportional to the mean width of its operands. With L lanes at clock f, a
pass of M multiply-accumulates of a-bit and b-bit numbers takes

    M (a + b)/2 / 8 / (L f)  seconds,

and the three passes run sequentially. Normalisation, activation functions and pooling take no time.

Source: CPT, table 2, and FracTrain, section 4.6, which only mention an "accelerator on ZC706". The law is empirical
(inferred from the twelve latencies of the table), its constants are the fit rounded, and an energy cannot be derived.
"""

from dataclasses import dataclass
from fractions import Fraction

from bitcycle.hardware.base import PASSES
from bitcycle.hardware.histogram import Histogram
from bitcycle.hardware.latency import LatencyModel
from bitcycle.hardware.operation import Operation
from bitcycle.settings import setting


@dataclass
class Zc706(LatencyModel):
    """Latency on the ZC706 board, in addition to bit operations; no energy."""

    name: str = "zc706"
    lanes: int = setting(128, "parallel 8-bit multipliers (fitted to CPT's table 2)", minimum=1)
    clock_hz: float = setting(2e8, "clock frequency in Hz (assumed with the lanes)", minimum=1)

    def pass_seconds(self, operation: Operation, histogram: Histogram) -> list[Fraction]:
        throughput = 16 * self.lanes * Fraction(self.clock_hz)  # of MACs times the sum of both operands' widths
        work, counted = dict.fromkeys(PASSES, 0), self.passes_of(operation)
        for scheduled, samples in histogram.items():
            w, a, g = self.precision_of(operation, scheduled)
            widths = {"forward": w + a, "error": w + g, "weight_gradient": a + g}
            for name in PASSES:
                work[name] += operation.macs * samples * widths[name] * counted[name]
        return [passed / throughput for passed in work.values()]
