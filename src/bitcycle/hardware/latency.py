"""Base class of cost models that estimate the latency of each operation's three passes besides bit operations."""

from dataclasses import dataclass, replace
from fractions import Fraction

from bitcycle.hardware.base import Cost, LayerCost
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.histogram import Histogram, SampleCounts
from bitcycle.hardware.operation import Operation, Workload
from bitcycle.schedule import Precision


@dataclass
class LatencyModel(BitOps):
    """Latency of every operation in each pass; no energy."""

    def pass_seconds(self, operation: Operation, histogram: Histogram) -> list[Fraction]:
        """Seconds of an operation in each pass, over all samples of `histogram` times the samples of the trace."""
        raise NotImplementedError

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        cost = super().measure(workload, counts, reference)
        layers = self._seconds(workload, counts)
        total = sum((sum(passes) for passes in layers.values()), Fraction(0))
        at_reference = self._seconds(workload, SampleCounts({reference: counts.samples}))
        static = sum((sum(passes) for passes in at_reference.values()), Fraction(0))
        return replace(
            cost,
            latency_s=float(total),
            latency_relative_to_static=float(total / static) if static else 1.0,
            latency_layers=tuple(LayerCost(name, *map(float, passes)) for name, passes in layers.items()),
        )

    def _seconds(self, workload: Workload, counts: SampleCounts) -> dict[str, list[Fraction]]:
        scale = self.images_per_sample(counts.samples) / workload.samples
        return {o.name: [scale * part for part in self.pass_seconds(o, counts.of(o))] for o in workload.operations}
