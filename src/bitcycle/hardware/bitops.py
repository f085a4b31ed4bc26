"""Bit operations: the hardware-independent cost of all five papers.

A product of M multiply-accumulates of an a-bit and a b-bit operand costs M a b bit operations. With weight, activation and
gradient bits w, a, g, training on one sample costs, for each layer,

    forward M w a     +     error M w g     +     weight gradient M a g

which is M (q^2 + 2 q g) where weights and activations both have q bits. A product of two activations (attention) has a for w.

    GBitOps = 1e-9 * sum        effective MACs = sum / 32^2

Source: CPT, tables 2 to 5; FracTrain, section 4.1; Better Schedules, section 4.1. Sums are exact integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from bitcycle.hardware.base import PUBLISHED_IMAGES, Cost, HardwareOptions, Histogram, LayerCost
from bitcycle.hardware.operation import Operation, Workload
from bitcycle.schedule import Precision


@dataclass
class BitOps(HardwareOptions):
    """Counts bit operations; no energy and no time."""

    name: str = "bitops"

    def cost(self, workload: Workload, histogram: Histogram, reference: Precision) -> Cost:
        layers = self.layer_costs(workload, histogram)
        total = Fraction(sum(layer.total for layer in layers), workload.samples)
        samples = sum(histogram.values())
        static = Fraction(
            sum(layer.total for layer in self.layer_costs(workload, {reference: samples})), workload.samples
        )
        scale = Fraction(PUBLISHED_IMAGES, samples) if samples and self.rule("images") == "published" else Fraction(1)
        return Cost(
            samples=samples,
            gbitops=float(total * scale / 10**9),
            effective_macs=float(total * scale / 1024),
            relative_to_static=float(total / static) if static else 1.0,
            layers=tuple(layers),
        )

    def layer_costs(self, workload: Workload, histogram: Histogram) -> list[LayerCost]:
        """Bit operations by layer, times the samples in the workload."""
        layers = [self._layer_cost(operation, histogram) for operation in workload.operations]
        elements = self._elementwise(workload)
        if elements:
            forward = sum(samples * elements * p.weight * p.activation for p, samples in histogram.items())
            backward = sum(samples * elements * p.activation * p.gradient for p, samples in histogram.items())
            layers.append(LayerCost("(elementwise)", forward, backward, backward))
        return layers

    def _layer_cost(self, operation: Operation, histogram: Histogram) -> LayerCost:
        forward = error = weight_gradient = 0
        has_error = operation.needs_input_gradient or self.rule("input_gradient") == "all"
        for scheduled, samples in histogram.items():
            w, a, g = self.precision_of(operation, scheduled)
            if operation.kind == "matmul":
                w = a
            macs = operation.macs * samples
            forward += macs * w * a
            error += macs * w * g if has_error else 0
            weight_gradient += macs * a * g
        return LayerCost(operation.name, forward, error, weight_gradient)

    def precision_of(self, operation: Operation, scheduled: Precision) -> Precision:
        """Bits at which an operation is charged."""
        precision = operation.precision(scheduled)
        if operation.is_float and self.rule("float_layers") == "schedule":
            return scheduled
        return precision

    def _elementwise(self, workload: Workload) -> int:
        """Operations of normalisation, pooling and activation functions that the convention counts as MACs.

        CPT counts two for a normalised element and the sums and divisions of average-pooling modules; FracTrain counts the
        sums only, and one for each element of a ReLU (inferred from their tables).
        """
        count = self.rule("count")
        if count == "with_bn":
            return 2 * workload.batch_norm_elements + workload.pooled_inputs + workload.pooled_outputs
        if count == "with_bn_relu":
            return 2 * workload.batch_norm_elements + workload.pooled_inputs + workload.relu_elements
        return 0
