"""Time of the products on current accelerators at their published peak rates: a lower bound, not a measurement.

A product runs at the rate of its wider operand. With R(b) the dense rate (without structured sparsity) of the device's
narrowest format of at least b bits, a pass of M multiply-accumulates takes

    2 M / R(max of both operands' bits)  seconds,

and the three passes run sequentially. Memory, scales, quantization, normalisation and activation functions take no
time.

    TFLOP/s            4 bits    6 bits    8 bits    16 bits    32 bits
    h100 (SXM)        1,978.9   1,978.9   1,978.9      989.4      494.7    FP8, BF16, TF32; nothing narrower than 8 bits
    b200 (HGX)          9,000     4,500     4,500      2,250      1,100    FP4, FP6, FP8, BF16, TF32
    mi355x             10,066    10,066     5,033      2,516      157.3    MXFP4, MXFP6, FP8, BF16, FP32

Source: NVIDIA, "H100 Tensor Core GPU" data sheet; NVIDIA, "Blackwell architecture" technical brief and HGX B200 specifications,
whose numbers with sparsity are twice these (TF32: 2.2 PFLOP/s); AMD, "Instinct MI355X GPU" data sheet and "CDNA 4 architecture"
white paper. `float_layers_in` selects whether float32 layers of a run count as float32 or as 16-bit mixed precision.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from bitcycle.hardware.base import PASSES, Cost
from bitcycle.hardware.histogram import Histogram, SampleCounts
from bitcycle.hardware.latency import LatencyModel
from bitcycle.hardware.operation import Operation, Workload
from bitcycle.schedule import Precision
from bitcycle.settings import setting

RATES: dict[str, dict[int, float]] = {
    "h100": {8: 1978.9, 16: 989.4, 32: 494.7},
    "b200": {4: 9000.0, 6: 4500.0, 8: 4500.0, 16: 2250.0, 32: 1100.0},
    "mi355x": {4: 10066.0, 6: 10066.0, 8: 5033.0, 16: 2516.0, 32: 157.3},
}
"""Device -> width of a format in bits -> peak TFLOP/s, dense."""


@dataclass
class TensorCore(LatencyModel):
    """Latency at the peak rates of an accelerator, in addition to bit operations; no energy."""

    name: str = "tensorcore"
    device: str = setting("b200", "accelerator whose peak rates are used", choices=RATES)
    float_layers_in: str = setting(
        "bfloat16",
        "rate of products with float32 operands: that of bfloat16, as in mixed-precision training, or of float32",
        choices=("bfloat16", "float32"),
    )

    def rate(self, bits: int) -> Fraction:
        """Peak operations per second of a product whose wider operand has `bits` bits."""
        rates = RATES[self.device]
        widest = 16 if self.float_layers_in == "bfloat16" else 32
        width = next(width for width in sorted(rates) if width >= min(bits, widest))
        return Fraction(str(rates[width])) * 10**12

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        cost = super().measure(workload, counts, reference)
        assert cost.latency_s is not None
        return replace(cost, latency_parts={"peak_rates": cost.latency_s})  # label in reports

    def pass_seconds(self, operation: Operation, histogram: Histogram) -> list[Fraction]:
        work, counted = dict.fromkeys(PASSES, Fraction(0)), self.passes_of(operation)
        for scheduled, samples in histogram.items():
            w, a, g = self.precision_of(operation, scheduled)
            widest = {"forward": max(w, a), "error": max(w, g), "weight_gradient": max(a, g)}
            for name in PASSES:
                work[name] += counted[name] * Fraction(2 * operation.macs * samples) / self.rate(widest[name])
        return list(work.values())
