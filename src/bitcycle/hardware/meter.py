"""Accumulates the cost of a run as counts of samples by precision."""

from collections import Counter, defaultdict

from bitcycle.hardware.base import Cost, HardwareOptions
from bitcycle.hardware.operation import Workload
from bitcycle.schedule import Precision


class CostMeter:
    """Counts samples by precision; the cost is computed from these counts alone, so it is exact for any run length."""

    def __init__(self, workload: Workload | None, hardware: HardwareOptions, reference: Precision) -> None:
        self.workload, self.hardware, self.reference = workload, hardware, reference
        self.histogram: Counter[Precision] = Counter()
        self.per_operation: defaultdict[str, Counter[Precision]] = defaultdict(Counter)

    def add(self, precision: Precision, samples: int, operation: str | None = None) -> None:
        """Add training samples at `precision`; with `operation`, an operation (or a module that contains operations) whose bits
        are chosen per sample, for it alone: the samples must be added once more without it, and those that skip it left out."""
        counts = self.histogram if operation is None else self.per_operation[operation]
        counts[precision] += samples

    def cost(self) -> Cost:
        """The cost of all samples added so far; the workload must be known."""
        assert self.workload is not None, "the operations are not known yet"
        return self.hardware.cost(self.workload, self.histogram, self.reference, self.per_operation)

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint: {"3,3,8": samples, "block1:4,2,6": samples, ...}."""
        whole = {_words(precision): samples for precision, samples in self.histogram.items()}
        parts = {
            f"{name}:{_words(precision)}": samples
            for name, counts in self.per_operation.items()
            for precision, samples in counts.items()
        }
        return whole | parts

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.histogram.clear()
        self.per_operation.clear()
        for key, samples in state.items():
            operation, _, words = key.rpartition(":")
            self.add(Precision(*map(int, words.split(","))), samples, operation or None)


def _words(precision: Precision) -> str:
    return ",".join(map(str, precision))
