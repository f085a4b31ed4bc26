"""Bit operations: the hardware-independent cost measure of all five papers.

M multiply-accumulates of an a-bit and a b-bit operand cost M a b bit operations. With weight, activation and
gradient bits w, a, g, training on one sample costs, for each layer,

    forward M w a     +     error M w g     +     weight gradient M a g

which is M (q^2 + 2 q g) if weights and activations both have q bits. For a product of two activations (attention), w =
a.

    GBitOps = 1e-9 * sum        effective MACs = sum / 32^2        compute percentage = 100 * sum / sum at 32 bits

The bits of a number format include the element's share of the block scale: 4.25, 6.25 and 8.25 for MX formats.
Effective MACs are what Better Schedules calls BitOps.

Source: CPT, tables 2, 3 and 5; FracTrain, section 4.1; Better Schedules, section 4.1. Sums are exact integers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import mul
from typing import Any

from bitcycle.hardware.base import Cost, HardwareOptions, LayerCost, relative
from bitcycle.hardware.operation import FLOAT_PRECISION, Histogram, Operation, SampleCounts, Workload
from bitcycle.precision import Precision


@dataclass
class BitOps(HardwareOptions):
    """Bit operations only, without energy and latency."""

    name: str = "bitops"

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        layers = self.layer_costs(workload, counts)
        total = sum((layer.total for layer in layers), Fraction(0))
        static = self._total_at(reference, workload, counts.samples)
        scheduled = tuple(replace(operation, fixed_precision=None) for operation in workload.operations)
        in_float32 = self._total_at(FLOAT_PRECISION, replace(workload, operations=scheduled), counts.samples)
        return Cost(
            samples=counts.samples,
            gbitops=float(total / 10**9),
            effective_macs=float(total / 1024),
            relative_to_static=relative(total, static),
            compute_percentage=float(100 * total / in_float32) if in_float32 else 100.0,
            layers=tuple(layers),
        )

    def layer_costs(self, workload: Workload, counts: SampleCounts) -> list[LayerCost]:
        """Bit operations by layer: integers, or fractions where the trace or the convention counts parts of samples."""
        scale = self.images_per_sample(counts.samples) / workload.samples
        weights_only = self.rule("count") in ("weights_only", "weights_and_norm")
        not_counted = ("matmul", "aggregation") if weights_only else ()
        layers = []
        for operation in workload.operations:
            if operation.kind not in not_counted:
                passes = self.sums(operation, self.widths_of, counts.of(operation), mul)
                layers.append(LayerCost(operation.name, *(_exact(part * scale) for part in passes)))
        if elements := self._elementwise(workload):
            counted = counts.histogram.items()
            forward = elements * sum(samples * p.weight * p.activation for p, samples in counted)
            backward = elements * sum(samples * p.activation * p.gradient for p, samples in counted)
            layers.append(LayerCost("(elementwise)", *(_exact(part * scale) for part in (forward, backward, backward))))
        return layers

    def _total_at(self, precision: Precision, workload: Workload, samples: int) -> Fraction:
        layers = self.layer_costs(workload, SampleCounts({precision: samples}))
        return sum((Fraction(layer.total) for layer in layers), Fraction(0))

    def sums(
        self,
        operation: Operation,
        widths: Callable[[Operation, Precision], Any],
        histogram: Histogram,
        cost_of_mac: Callable[[Any, Any], Any],
    ) -> list[Any]:
        """Cost of each pass of an operation: multiply-accumulates times the cost of one, by the `widths` of its operands."""
        errors = max(operation.input_gradients, self.rule("input_gradient") == "all")
        counted = (1, errors, operation.needs_weight_gradient)
        sums: list[Any] = [0, 0, 0]
        for scheduled, samples in histogram.items():
            w, a, _ = widths(operation, scheduled)
            error_w, update_a, g = widths(operation, operation.in_backward(scheduled))
            for index, operands in enumerate(((w, a), (error_w, g), (update_a, g))):
                sums[index] += operation.macs * samples * counted[index] * cost_of_mac(*operands)
        return sums

    def _elementwise(self, workload: Workload) -> int:
        """Elementwise operations (normalisation, pooling, activation functions) that the convention counts as MACs.

        CPT counts two per normalised element, plus the sums and divisions of average-pooling modules. FracTrain counts
        only the sums, plus one per element of a ReLU (both inferred from the tables). Better Schedules' graph code
        counts four per element of a layer norm without parameters (its get_flops.py).
        """
        count = self.rule("count")
        if count == "weights_and_norm":
            return 4 * workload.layer_norm_elements
        if count == "with_bn":
            return 2 * workload.batch_norm_elements + workload.pooled_inputs + workload.pooled_outputs
        if count == "with_bn_relu":
            return 2 * workload.batch_norm_elements + workload.pooled_inputs + workload.relu_elements
        return 0


def _exact(value: Fraction | int) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value
