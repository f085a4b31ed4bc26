"""Base class of cost models, the result that they return, and the meter of a run."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Optional

from bitcycle.hardware.operation import Histogram, Operation, SampleCounts, Widths, Workload, check_precision
from bitcycle.precision import Precision
from bitcycle.settings import MISSING, Settings, setting

PASSES = ("forward", "error", "weight_gradient")
"""The three products of a layer in training; `error` computes the gradient of the layer's input."""

PUBLISHED_IMAGES = 64_000 * 128
"""Images that CPT and FracTrain count for every CIFAR and ImageNet run (cost-models, inferred from their tables)."""

CONVENTIONS = {
    "actual": {"count": "conv_linear", "images": "actual", "float_layers": "float32", "input_gradient": "needed"},
    "better": {"count": "weights_only", "images": "actual", "float_layers": "schedule", "input_gradient": "all"},
    "cpt": {"count": "with_bn", "images": "published", "float_layers": "schedule", "input_gradient": "all"},
    "fractrain": {"count": "with_bn_relu", "images": "published", "float_layers": "schedule", "input_gradient": "all"},
}
"""Paper -> its counting rules: operations, number of images, bits of float layers, and layers with an error product."""


TOTALS = (
    *("gbitops", "effective_macs", "relative_to_static", "compute_percentage", "energy_j", "energy_relative_to_static"),
    *("latency_s", "latency_relative_to_static", "average_power_w", "dram_bits"),
)
"""Numbers of a cost that its summary has, in this order."""


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer over a run, by pass, in bit operations (exact), joules or seconds."""

    name: str
    forward: int | float | Fraction
    error: int | float | Fraction
    weight_gradient: int | float | Fraction

    @property
    def total(self) -> int | float | Fraction:
        """Sum of the three passes."""
        return self.forward + self.error + self.weight_gradient


@dataclass(frozen=True)
class Cost:
    """The cost of training.

    Attributes:
        samples: number of training samples.
        gbitops: 1e9 bit operations; a multiply-accumulate of an a-bit and a b-bit number is a*b bit operations.
        effective_macs: bit operations divided by 32^2, the equivalent number of float32 multiply-accumulates.
        relative_to_static: bit operations divided by those of the same samples at static q_max.
        compute_percentage: bit operations in percent of those of the same products in float32 (FracTrain's cp).
        energy_j, latency_s: joules and seconds on the accelerator; None if the cost model does not estimate them.
        energy_relative_to_static, latency_relative_to_static: energy and latency divided by those of static q_max.
        energy_parts: energy of the array, the buffers and the dram.
        latency_parts: time spent on computation and waiting for memory.
        dram_bits: bits transferred to and from external memory.
        layers: bit operations by layer and pass; normalisation and pooling, if counted, appear as `(elementwise)`.
        energy_layers, latency_layers: joules and seconds by layer and pass.
        by_hardware: cost model -> its cost, for `hardware=all`; empty otherwise.
    """

    samples: int
    gbitops: float
    effective_macs: float
    relative_to_static: float
    compute_percentage: float
    energy_j: float | None = None
    latency_s: float | None = None
    energy_relative_to_static: float | None = None
    latency_relative_to_static: float | None = None
    energy_parts: Mapping[str, float] = field(default_factory=dict)
    latency_parts: Mapping[str, float] = field(default_factory=dict)
    dram_bits: float | None = None
    layers: tuple[LayerCost, ...] = field(default=(), repr=False)
    energy_layers: tuple[LayerCost, ...] = field(default=(), repr=False)
    latency_layers: tuple[LayerCost, ...] = field(default=(), repr=False)
    by_hardware: Mapping[str, "Cost"] = field(default_factory=dict)

    @property
    def saving_percent(self) -> float:
        """Bit operations saved relative to static q_max, in percent."""
        return 100 * (1 - self.relative_to_static)

    @property
    def average_power_w(self) -> float | None:
        """Energy divided by latency, in watts; None unless the cost model estimates both."""
        return self.energy_j / self.latency_s if self.energy_j is not None and self.latency_s else None

    def summary(self) -> dict[str, Any]:
        """The totals as plain numbers, for logs and JSON."""
        return {
            **{name: getattr(self, name) for name in TOTALS},
            **{f"energy_{part}_j": value for part, value in self.energy_parts.items()},
            **{f"latency_{part}_s": value for part, value in self.latency_parts.items()},
            "samples": self.samples,
            **{name: cost.summary() for name, cost in self.by_hardware.items()},
        }


def relative(cost: float | Fraction, static: float | Fraction) -> float:
    """A cost divided by that of static q_max; 1 if that is zero."""
    return float(cost / static) if static else 1.0


@dataclass
class HardwareOptions(Settings):
    """Counting rules that all cost models share. A cost model turns a histogram of precisions into a `Cost`.

    Reports contain both the cost of the whole run and the cost up to its best evaluation (FracTrain's count).
    """

    name: str = setting(MISSING, "the cost model's name, as in hardware=NAME")
    convention: str = setting(
        "actual",
        "counting convention: actual counts what this run computes; a paper's name reproduces its published numbers",
        choices=CONVENTIONS,
    )
    count: Optional[str] = setting(
        None,
        "bit operations counted: conv_linear (all products), weights_only (Better Schedules), "
        "weights_and_norm (its graphs), with_bn (CPT: and pooling), with_bn_relu (FracTrain); null: by convention",
        choices=("conv_linear", "weights_only", "weights_and_norm", "with_bn", "with_bn_relu"),
    )
    run_samples: Optional[int] = setting(
        None, "training samples of the whole run, which the papers count as 8.192e6; null: as planned", minimum=1
    )

    def counting(self) -> dict[str, Any]:
        """How cost is counted: these settings as plain values, and the code of a user's own cost model."""
        return {**asdict(self), **self.identity()}

    def is_recorded(self, counting: Mapping[str, Any]) -> bool:
        """Whether a cost that was counted in this way has the numbers of these settings."""
        asked = {"source": None} | self.counting()
        if self.rule("images") == "actual":
            del asked["run_samples"]  # without effect
        if self.name == "bitops" and "source" not in counting:
            del asked["name"]  # the other cost models count bit operations in the same way
        return all(counting.get(name) == value for name, value in asked.items())

    def rule(self, name: str) -> str:
        """Value of a rule of CONVENTIONS: `count` if it is set, else the value of the convention."""
        return self.count if name == "count" and self.count else CONVENTIONS[self.convention][name]

    def widths_of(self, operation: Operation, scheduled: Precision) -> Widths:
        """Bits per element of the operands, with their share of a scale; both operands of a matmul are activations."""
        bits = operation.precision(scheduled)
        if operation.is_float and operation.kind != "unknown" and self.rule("float_layers") == "schedule":
            bits = scheduled
        widths = operation.stored(bits)
        return widths._replace(weight=widths.activation) if operation.kind in ("matmul", "aggregation") else widths

    def precision_of(self, operation: Operation, scheduled: Precision) -> Precision:
        """Bits of the operands as multiplied, without their share of a scale."""
        return Precision(*map(int, self.widths_of(operation, scheduled)))

    def images_per_sample(self, samples: int) -> Fraction:
        """Images counted per training sample: 1, or the factor that makes the whole run count 8.192e6 images."""
        whole_run = self.run_samples or samples
        if self.rule("images") == "published" and whole_run:
            return Fraction(PUBLISHED_IMAGES, whole_run)
        return Fraction(1)

    def cost(
        self,
        workload: Workload,
        histogram: Histogram,
        reference: Precision,
        per_operation: Mapping[str, Histogram] | None = None,
    ) -> Cost:
        """Cost of training on `histogram[precision]` samples at each precision, and its ratio to static `reference`; arguments as
        of `SampleCounts`. Raises SettingError for bits outside 1 to 32 and for inconsistent counts."""
        counts = SampleCounts(histogram, per_operation or {})
        counts.check(workload)
        check_precision(reference)
        return self.measure(workload, counts, reference)

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        """Return the cost of validated sample counts; implemented by each cost model."""
        raise NotImplementedError


class CostMeter:
    """Counts samples by precision; the cost is computed from these counts alone, so it is exact for any run length."""

    def __init__(self, workload: Workload | None, hardware: HardwareOptions, reference: Precision) -> None:
        self.workload, self.hardware, self.reference = workload, hardware, reference
        self.histogram: Counter[Precision] = Counter()
        self.per_operation: defaultdict[str, Counter[Precision]] = defaultdict(Counter)

    def add(self, precision: Precision, samples: int, operation: str | None = None) -> None:
        """Add training samples at `precision`.

        With `operation`, the name of an operation (or of a module that contains operations) whose bits are chosen per sample,
        they count for it only. Such samples are also added once without `operation`; those that skip it are not added for it.
        """
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
