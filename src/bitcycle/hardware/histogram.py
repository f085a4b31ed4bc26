"""Number of training samples at each precision, for the whole network and for operations with their own precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitcycle.hardware.operation import Operation, Workload
from bitcycle.schedule import FLOAT, Precision
from bitcycle.settings import SettingError, nearest

Histogram = Mapping[Precision, int]
"""Precision -> number of training samples."""


@dataclass(frozen=True)
class SampleCounts:
    """Samples of one run by precision.

    Attributes:
        histogram: samples by precision, for every operation without an entry in `per_operation`.
        per_operation: name of an operation, or of a module that contains operations -> their counts, for networks that choose
            bits per sample (DFQ). The longest matching name applies. Samples that skip the operation are not counted. Operations
            with fixed bits use these sample counts but keep their bits.
    """

    histogram: Histogram
    per_operation: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return sum(self.histogram.values())

    def of(self, operation: Operation) -> Histogram:
        """The counts of one operation."""
        if not self.per_operation:
            return self.histogram
        names = [operation.name, *_enclosing(operation.module)]
        return next((self.per_operation[name] for name in names if name in self.per_operation), self.histogram)

    def check(self, workload: Workload) -> None:
        """Reject invalid counts. Raises SettingError for bits outside 1 to 32, negative counts, a name that is not in the
        workload, and more samples of an operation than of the run."""
        for histogram in (self.histogram, *self.per_operation.values()):
            for precision, samples in histogram.items():
                check_precision(precision)
                if not isinstance(samples, int) or samples < 0:
                    raise SettingError("samples", samples, "is not a number of samples", "use whole numbers from 0")
        known = {name for o in workload.operations for name in (o.name, *_enclosing(o.module))}
        for name, histogram in self.per_operation.items():
            if name not in known:
                raise SettingError("per_operation", name, "is not an operation of the model", nearest(name, known))
            if sum(histogram.values()) > self.samples:
                problem = f"counts {sum(histogram.values())} samples of {self.samples} in the run"
                raise SettingError("per_operation", name, problem, "count each sample of an operation once")


def check_precision(precision: Precision) -> None:
    """Reject bits that are not integers from 1 to 32. Raises SettingError naming the invalid bits."""
    for role, bits in precision._asdict().items():
        if not isinstance(bits, int) or not 1 <= bits <= FLOAT:
            problem = "is not a whole number of bits from 1 to 32"
            raise SettingError(
                f"{role} precision", bits, problem, "use 32 for float32; leave skipped samples uncounted"
            )


def _enclosing(module: str) -> list[str]:
    """Names of a module and of its ancestors, longest first: a.b -> [a.b, a]."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
