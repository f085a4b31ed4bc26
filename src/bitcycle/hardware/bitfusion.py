"""Energy and latency on Bit Fusion, the bit-flexible systolic accelerator that FracTrain simulates.

Each layer becomes three matrix products. Products and samples are processed sequentially:

    forward            (positions, C_out, C_in, K^2)          activation bits against weight bits
    error              (input positions, C_in, C_out, K^2)    gradient bits against weight bits
    weight gradient    (K^2, C_out, C_in, positions)          activation bits against gradient bits   (wgrad=kernel_map)
                       (K^2 C_in, C_out, 1, positions)        the same                                (wgrad=outer_product)

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
from typing import Any, Optional

from bitcycle.hardware.base import PASSES, Cost, LayerCost, relative
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.gemm import Array, Energy, Gemm, Usage, cheapest, energy_pj
from bitcycle.hardware.operation import Histogram, MatrixProduct, Operation, SampleCounts, Workload
from bitcycle.precision import Precision
from bitcycle.settings import setting

PRESETS: dict[str, dict[str, Any]] = {
    "fractrain": {"array_pj": 1000.0, "wgrad": "kernel_map"},
    "synthesised": {"array_pj": 235.104, "wgrad": "outer_product"},
}
"""Preset -> constants: those of the public simulator's FracTrain setup, and those of a 45 nm chip."""

KIB = 8 * 1024

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
        choices=PRESETS,
    )
    array_pj: Optional[float] = setting(
        None, "pJ of an active array cycle; null: 1000 (fractrain) or 235.104 (synthesised)", minimum=0
    )
    wgrad: Optional[str] = setting(
        None,
        "product of the weight gradient: kernel_map (fractrain) or outer_product (synthesised); null: by preset",
        choices=("kernel_map", "outer_product"),
    )
    array_layers: Optional[str] = setting(
        None,
        "layers that run on the array: all, or quantized only (FracTrain's table 3, no float classifier); null: by "
        "convention",
        choices=("all", "quantized"),
    )
    batch: int = setting(1, "samples that a layer processes together (FracTrain: 1)", minimum=1)
    rows: int = setting(16, "rows of the array, along which it reduces", minimum=1)
    columns: int = setting(32, "columns of the array, one for each output channel", minimum=1)
    clock_hz: float = setting(5e8, "clock frequency", minimum=1)
    dram_bits_per_cycle: int = setting(192, "width of the memory interface (12 GB/s)", minimum=1)
    weight_buffer_kib: int = setting(64, "weight buffer, half usable at a time", minimum=1)
    input_buffer_kib: int = setting(32, "input buffer, half usable at a time", minimum=1)
    output_buffer_kib: int = setting(16, "output buffer, half usable at a time", minimum=1)
    partial_sum_bits: int = setting(32, "width of a partial sum", minimum=1)
    weight_read_pj: float = setting(0.02136565625, "pJ per bit (CACTI, 45 nm)", minimum=0)
    weight_write_pj: float = setting(0.02891615625, "pJ per bit (CACTI, 45 nm)", minimum=0)
    input_read_pj: float = setting(0.059474375, "pJ per bit (CACTI, 45 nm)", minimum=0)
    input_write_pj: float = setting(0.1137040625, "pJ per bit (CACTI, 45 nm)", minimum=0)
    output_read_pj: float = setting(0.0331553125, "pJ per bit (CACTI, 45 nm)", minimum=0)
    output_write_pj: float = setting(0.0730840625, "pJ per bit (CACTI, 45 nm)", minimum=0)
    dram_pj: float = setting(15.0, "pJ per bit of external memory", minimum=0)

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
                "compute": float(total.active) / self.clock_hz,
                "memory": float(total.cycles - total.active) / self.clock_hz,
            },
            dram_bits=float(total.dram),
            energy_layers=_by_layer(layers, self._joules),
            latency_layers=_by_layer(layers, self._seconds),
        )

    def usages(self, workload: Workload, counts: SampleCounts) -> Usages:
        """Usage of every operation in each pass, over all counted samples."""
        scale = self.images_per_sample(counts.samples)
        by_convention = "quantized" if self.convention == "fractrain" else "all"
        quantized_only = (self.array_layers or by_convention) == "quantized"
        return {
            operation.name: self._usage(operation, workload.samples, counts.of(operation), scale)
            for operation in workload.operations
            if operation.macs and not (quantized_only and operation.is_float)
        }

    @property
    def array(self) -> Array:
        """The accelerator that these options describe."""
        preset_pj: float = PRESETS[self.preset]["array_pj"]
        return Array(
            rows=self.rows,
            columns=self.columns,
            bandwidth=self.dram_bits_per_cycle,
            input_buffer=self.input_buffer_kib * KIB,
            weight_buffer=self.weight_buffer_kib * KIB,
            output_buffer=self.output_buffer_kib * KIB,
            partial_sum_bits=self.partial_sum_bits,
            energy=Energy(
                preset_pj if self.array_pj is None else self.array_pj,
                *(getattr(self, f"{name}_pj") for name in Energy._fields[1:]),
            ),
        )

    def products(self, operation: Operation, share: Fraction = Fraction(1)) -> dict[str, MatrixProduct]:
        """Matrix products of the three passes, per group; `share` of the traced samples are processed together."""
        m, n, c, t = operation.product
        rows = int(m * share)
        if operation.kind == "aggregation":  # every edge adds one row of features, in the backward pass too
            return dict.fromkeys(PASSES, MatrixProduct(rows, n, c))
        if operation.kind != "conv":
            products = MatrixProduct(rows, n, c), MatrixProduct(rows, c, n), MatrixProduct(c, n, rows)
            return dict(zip(PASSES, products))
        exact = (self.wgrad or PRESETS[self.preset]["wgrad"]) == "outer_product"
        return {
            "forward": MatrixProduct(int(operation.output_positions * share), n, c, t),
            "error": MatrixProduct(int(operation.input_positions * share), c, n, t),
            "weight_gradient": MatrixProduct(t * c, n, 1, rows) if exact else MatrixProduct(t, n, c, rows),
        }

    def _usage(
        self, operation: Operation, traced: int, histogram: Histogram, scale: Fraction
    ) -> dict[str, Usage[Fraction]]:
        share, executions = self._share(operation, traced)
        products, array = self.products(operation, share), self.array
        both = self.rule("passes") == "all"
        computed = (1, both * operation.input_gradients, both * operation.needs_weight_gradient)
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
        share = Fraction(self.batch, traced)
        positions = (operation.product.m, operation.input_positions, operation.output_positions)
        # whether its size does not depend on samples
        independent = any((number * share).denominator > 1 for number in positions)
        if independent or operation.kind == "matmul":  # a matmul is one product for each sample (and head)
            return Fraction(1), Fraction(operation.groups, traced)
        return share, Fraction(operation.groups, self.batch)

    def _joules(self, usage: Usage[Fraction]) -> float:
        numbers = Usage(*(float(number) for number in usage))
        return float(sum(energy_pj(numbers, self.array.energy).values())) * 1e-12

    def _seconds(self, usage: Usage[Fraction]) -> float:
        return float(usage.cycles) / self.clock_hz


def _total(usages: Usages) -> Usage[Fraction]:
    everything = [usage for passes in usages.values() for usage in passes.values()]
    nothing = [Fraction(0)] * len(Usage._fields)
    return Usage(*(sum(numbers, Fraction(0)) for numbers in zip(nothing, *everything)))


def _by_layer(usages: Usages, measure: Callable[[Usage[Fraction]], float]) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(name, *(measure(passes[p]) for p in PASSES)) for name, passes in usages.items())
