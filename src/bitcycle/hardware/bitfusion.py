"""Energy and latency on Bit Fusion, the bit-flexible systolic accelerator that FracTrain simulates.

Each layer becomes three matrix products. Products and samples are processed sequentially:

    forward            (positions, C_out, C_in, K^2)          activation bits against weight bits
    error              (input positions, C_in, C_out, K^2)    gradient bits against weight bits
    weight gradient    (K^2, C_out, C_in, positions)          activation bits against gradient bits   (preset=fractrain)
                       (K^2 C_in, C_out, 1, positions)        the same                                (preset=synthesised)

Their cycles and memory traffic are those of the best tiling (`bitcycle.hardware.gemm`). Energy is the sum over active
array cycles, buffer accesses and external memory; latency is cycles divided by clock frequency. Numbers wider than 8
bits, including float32, are treated as integers of several 8-bit digits. Error and weight-gradient products that
training does not need cost nothing under any convention. Lookups, normalisation, activation functions and pooling are
not modelled.

Source: FracTrain, section 4.1 and table 3; the constants are those of the public simulator, none is fitted. The paper
gives no configuration. `fractrain` follows a public notebook of one of its authors: a placeholder of 1000 pJ for an
active cycle of the array (synthesis gave 235 pJ) and a weight gradient that treats the output's gradient as a kernel
(`kernel_map`: right number of products, wrong operand sizes); it matches table 3. Layers wider than 8 bits and grouped
layers are our extension; the paper does not cover them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from bitcycle.hardware.base import PASSES, Cost, LayerCost, relative
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.gemm import Array, Energy, Gemm, Usage, cheapest, energy_pj
from bitcycle.hardware.operation import Histogram, Operation, ProductShape, SampleCounts, Workload
from bitcycle.precision import Precision
from bitcycle.settings import setting

ARRAY_PJ = {"fractrain": 1000.0, "synthesised": 235.104}
"""Preset -> picojoules of an active array cycle: in the public simulator's FracTrain setup, and on a 45 nm chip."""
KIB = 8 * 1024
CLOCK_HZ = 5e8
ARRAY = Array(
    rows=16,
    columns=32,
    bandwidth=192,  # 12 GB/s
    input_buffer=32 * KIB,
    weight_buffer=64 * KIB,
    output_buffer=16 * KIB,
    partial_sum_bits=32,
    energy=Energy(
        array_cycle=ARRAY_PJ["fractrain"],
        input_read=0.059474375,
        input_write=0.1137040625,
        weight_read=0.02136565625,
        weight_write=0.02891615625,
        output_read=0.0331553125,
        output_write=0.0730840625,
        dram=15.0,
    ),
)
"""The accelerator of the public simulator; energies of buffers from CACTI at 45 nm."""

Usages = dict[str, dict[str, Usage[Fraction]]]
"""Operation -> pass -> its usage."""


@dataclass
class BitFusion(BitOps):
    """Energy and latency on Bit Fusion, in addition to bit operations."""

    name: str = "bitfusion"
    preset: str = setting(
        "fractrain",
        "fractrain: as FracTrain's table 3 was most likely simulated; synthesised: array energy of the 45 nm synthesis and the "
        "exact weight gradient",
        choices=ARRAY_PJ,
    )

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        cost = super().measure(workload, counts, reference)
        layers = self.usages(workload, counts)
        total = _total(layers)
        static = _total(self.usages(workload, SampleCounts({reference: counts.samples})))
        return replace(
            cost,
            energy_j=self._joules(total),
            latency_s=self._seconds(total),
            energy_relative_to_static=relative(self._joules(total), self._joules(static)),
            latency_relative_to_static=relative(self._seconds(total), self._seconds(static)),
            energy_parts={part: pj * 1e-12 for part, pj in energy_pj(total, self.array.energy).items()},
            latency_parts={
                "compute": float(total.active) / CLOCK_HZ,
                "memory": float(total.cycles - total.active) / CLOCK_HZ,
            },
            dram_bits=float(total.dram),
            energy_layers=_by_layer(layers, self._joules),
            latency_layers=_by_layer(layers, self._seconds),
        )

    def usages(self, workload: Workload, counts: SampleCounts) -> Usages:
        """Usage of every operation in each pass, over all counted samples."""
        scale = self.images_per_sample(counts.samples)
        quantized_only = self.convention == "fractrain"  # its table 3 has no float classifier
        return {
            operation.name: self._usage(operation, workload.samples, counts.of(operation), scale)
            for operation in workload.operations
            if operation.macs and not (quantized_only and operation.is_float)
        }

    @property
    def array(self) -> Array:
        """The accelerator that these options describe."""
        return ARRAY._replace(energy=ARRAY.energy._replace(array_cycle=ARRAY_PJ[self.preset]))

    def products(self, operation: Operation, share: Fraction = Fraction(1)) -> dict[str, ProductShape]:
        """Matrix products of the three passes, per group; `share` of the traced samples are processed together."""
        m, n, c, t = operation.product
        rows = int(m * share)
        if operation.kind == "aggregation":  # every edge adds one row of features, in the backward pass too
            return dict.fromkeys(PASSES, ProductShape(rows, n, c))
        if operation.kind != "conv":
            products = ProductShape(rows, n, c), ProductShape(rows, c, n), ProductShape(c, n, rows)
            return dict(zip(PASSES, products))
        exact = self.preset == "synthesised"
        return {
            "forward": ProductShape(int(operation.output_positions * share), n, c, t),
            "error": ProductShape(int(operation.input_positions * share), c, n, t),
            "weight_gradient": ProductShape(t * c, n, 1, rows) if exact else ProductShape(t, n, c, rows),
        }

    def _usage(
        self, operation: Operation, traced: int, histogram: Histogram, scale: Fraction
    ) -> dict[str, Usage[Fraction]]:
        share, executions = self._share(operation, traced)
        products, array = self.products(operation, share), self.array
        computed = (1, operation.input_gradients, operation.needs_weight_gradient)
        sums = {name: [0] * len(Usage._fields) for name in PASSES}
        for scheduled, samples in histogram.items():
            w, a, _ = self.precision_of(operation, scheduled)
            error_w, update_a, g = self.precision_of(operation, operation.in_backward(scheduled))
            for name, bits, times in zip(PASSES, ((a, w), (g, error_w), (update_a, g)), computed):
                if times:
                    usage = cheapest(Gemm(*products[name], *bits), array)
                    sums[name] = [sum_ + times * samples * number for sum_, number in zip(sums[name], usage)]
        return {name: Usage(*(number * executions * scale for number in sums[name])) for name in PASSES}

    def _share(self, operation: Operation, traced: int) -> tuple[Fraction, Fraction]:
        """Part of the traced samples that an operation processes together, and how often it runs per sample."""
        share = Fraction(1, traced)
        positions = (operation.product.m, operation.input_positions, operation.output_positions)
        # whether its size does not depend on samples
        independent = any((number * share).denominator > 1 for number in positions)
        if independent or operation.kind == "matmul":  # a matmul is one product for each sample (and head)
            return Fraction(1), Fraction(operation.groups, traced)
        return share, Fraction(operation.groups)

    def _joules(self, usage: Usage[Fraction]) -> float:
        numbers = Usage(*(float(number) for number in usage))
        return float(sum(energy_pj(numbers, self.array.energy).values())) * 1e-12

    def _seconds(self, usage: Usage[Fraction]) -> float:
        return float(usage.cycles) / CLOCK_HZ


def _total(usages: Usages) -> Usage[Fraction]:
    everything = [usage for passes in usages.values() for usage in passes.values()]
    nothing = [Fraction(0)] * len(Usage._fields)
    return Usage(*(sum(numbers, Fraction(0)) for numbers in zip(nothing, *everything)))


def _by_layer(usages: Usages, measure: Callable[[Usage[Fraction]], float]) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(name, *(measure(passes[p]) for p in PASSES)) for name, passes in usages.items())
