"""Cost models that estimate the latency of each product from its multiply-accumulates and bits: an FPGA, current accelerators.

The three passes of all products run sequentially. Memory, scales, quantization, normalisation, activation functions and pooling
take no time. There is no energy.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from bitcycle.hardware.base import Cost, LayerCost, relative
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.operation import SampleCounts, Workload
from bitcycle.precision import Precision
from bitcycle.settings import setting


@dataclass
class LatencyModel(BitOps):
    """Latency of every operation in each pass, in addition to bit operations."""

    def mac_seconds(self, bits: int, other_bits: int) -> Fraction:
        """Seconds of a multiply-accumulate of operands with these bits."""
        raise NotImplementedError

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        cost = super().measure(workload, counts, reference)
        total, layers = self._seconds(workload, counts)
        static, _ = self._seconds(workload, SampleCounts({reference: counts.samples}))
        return replace(
            cost, latency_s=float(total), latency_relative_to_static=relative(total, static), latency_layers=layers
        )

    def _seconds(self, workload: Workload, counts: SampleCounts) -> tuple[Fraction, tuple[LayerCost, ...]]:
        """The exact total, and the cost of each layer."""
        scale = self.images_per_sample(counts.samples) / workload.samples
        sums = [self.sums(o, self.precision_of, counts.of(o), self.mac_seconds) for o in workload.operations]
        passes = [[scale * part for part in parts] for parts in sums]
        layers = (LayerCost(o.name, *map(float, parts)) for o, parts in zip(workload.operations, passes))
        return sum((part for parts in passes for part in parts), Fraction(0)), tuple(layers)


LANES, CLOCK_HZ = 128, Fraction(200_000_000)
"""Parallel 8-bit multipliers of the board, fitted to CPT's table 2, and the clock frequency assumed with them."""


@dataclass
class Zc706(LatencyModel):
    """Latency on CPT's FPGA board, a Xilinx ZC706, in addition to bit operations; no energy.

    The throughput of a multiplier is inversely proportional to the mean width of its operands. With L lanes at clock f, a pass of
    M multiply-accumulates of a-bit and b-bit numbers takes

        M (a + b)/2 / 8 / (L f)  seconds.

    Source: CPT, table 2, and FracTrain, section 4.6, which only mention an "accelerator on ZC706". The law is empirical (inferred
    from the twelve latencies of the table), its constants are the fit rounded, and an energy cannot be derived.
    """

    name: str = "zc706"

    def mac_seconds(self, bits: int, other_bits: int) -> Fraction:
        return (bits + other_bits) / (16 * LANES * CLOCK_HZ)


RATES: dict[str, dict[int, float]] = {
    "h100": {8: 1978.9, 16: 989.4, 32: 494.7},
    "b200": {4: 9000.0, 6: 4500.0, 8: 4500.0, 16: 2250.0, 32: 1100.0},
    "mi355x": {4: 10066.0, 6: 10066.0, 8: 5033.0, 16: 2516.0, 32: 157.3},
}
"""Device -> width of a format in bits -> peak TFLOP/s, dense."""


@dataclass
class TensorCore(LatencyModel):
    """Time of the products at an accelerator's published peak rates, in addition to bit operations: a lower bound; no energy.

    A product runs at the rate of its wider operand. With R(b) the dense rate (without structured sparsity) of the device's
    narrowest format of at least b bits, a pass of M multiply-accumulates takes

        2 M / R(max of both operands' bits)  seconds.

        TFLOP/s            4 bits    6 bits    8 bits    16 bits    32 bits
        h100 (SXM)        1,978.9   1,978.9   1,978.9      989.4      494.7    FP8, BF16, TF32; nothing narrower than 8 bits
        b200 (HGX)          9,000     4,500     4,500      2,250      1,100    FP4, FP6, FP8, BF16, TF32
        mi355x             10,066    10,066     5,033      2,516      157.3    MXFP4, MXFP6, FP8, BF16, FP32

    Source: NVIDIA, "H100 Tensor Core GPU" data sheet; NVIDIA, "Blackwell architecture" technical brief and HGX B200
    specifications, whose numbers with sparsity are twice these (TF32: 2.2 PFLOP/s); AMD, "Instinct MI355X GPU" data sheet and
    "CDNA 4 architecture" white paper. float32 layers of a run count as bfloat16, as in mixed-precision
    training.
    """

    name: str = "tensorcore"
    device: str = setting("b200", "accelerator whose peak rates are used", choices=RATES)

    def rate(self, bits: int) -> Fraction:
        """Peak operations per second of a product whose wider operand has `bits` bits."""
        rates = RATES[self.device]
        width = next(width for width in sorted(rates) if width >= min(bits, 16))
        return Fraction(str(rates[width])) * 10**12

    def mac_seconds(self, bits: int, other_bits: int) -> Fraction:
        return 2 / self.rate(max(bits, other_bits))

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        cost = super().measure(workload, counts, reference)
        assert cost.latency_s is not None
        return replace(cost, latency_parts={"peak_rates": cost.latency_s})  # label in reports
