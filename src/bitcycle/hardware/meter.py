"""Adds up what a run costs while it runs, as counts of samples by precision."""

from __future__ import annotations

from collections import Counter

from bitcycle.hardware.base import Cost, HardwareOptions
from bitcycle.hardware.operation import Workload
from bitcycle.schedule import Precision


class CostMeter:
    """Counts samples by precision; the cost follows from the counts alone, so it is exact however long the run.

    Args:
        workload: the traced model.
        hardware: the cost model.
        reference: static precision that savings are relative to.
    """

    def __init__(self, workload: Workload, hardware: HardwareOptions, reference: Precision) -> None:
        self.workload, self.hardware, self.reference = workload, hardware, reference
        self.histogram: Counter[Precision] = Counter()

    def add(self, precision: Precision, samples: int) -> None:
        """Count `samples` more training samples at `precision`."""
        self.histogram[precision] += samples

    def cost(self) -> Cost:
        """The cost of all samples counted so far."""
        return self.hardware.cost(self.workload, self.histogram, self.reference)

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint: {"3,3,8": samples, ...}."""
        return {",".join(map(str, precision)): samples for precision, samples in self.histogram.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.histogram = Counter({Precision(*map(int, key.split(","))): samples for key, samples in state.items()})
