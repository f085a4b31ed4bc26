"""The products that a network computes, described by shapes and counts for cost models, and training samples by precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from bitcycle.precision import FLOAT, Precision
from bitcycle.settings import SettingError, nearest

FLOAT_PRECISION = Precision(FLOAT, FLOAT, FLOAT)


class ProductShape(NamedTuple):
    """Dimensions of the forward product of one sample (and one group): m output positions, n output channels, c reduction
    channels, t kernel taps. Multiply-accumulates = m n c t."""

    m: int
    n: int
    c: int
    t: int = 1


class Widths(NamedTuple):
    """Bits per element of weights, activations and gradients; fractional if they include a share of a scale."""

    weight: int | Fraction
    activation: int | Fraction
    gradient: int | Fraction


@dataclass(frozen=True)
class Operation:
    """A product of the forward pass.

    Attributes:
        name: the module that computes it, as in `model.named_modules()`; with a suffix `#k` where it computes several.
        kind: conv, linear (an activation times a weight), matmul (two activations), aggregation (a sum over the edges of a
            graph: a sparse product, index_add or the like), embedding (a lookup: no multiply-accumulate) or unknown
            (other arithmetic, always float32).
        macs: multiply-accumulates of the forward product over `Workload.samples` samples.
        product: dimensions of one group's matrix product over `Workload.samples` samples.
        groups: number of such products.
        input_positions: positions of the input map (height times width for a convolution), the m of the error product.
        input_elements, output_elements: sizes of the operands over `Workload.samples` samples.
        input_gradients: number of error products: 0 for a layer that reads the network's input, at most 2 for a bilinear layer,
            else 1.
        fixed_precision: its bits if no schedule changes them (float32 for a layer that is not quantized), else None.
        needs_weight_gradient: False for a frozen weight, and for a matmul whose second operand needs no gradient.
        storage: for each of weights, activations and gradients, scheduled bits -> stored bits per element, including the share
            of a scale; empty where both are equal.
        backward_at_gradient_bits: whether products of the backward pass read weights and activations at the bits of gradients.
    """

    name: str
    kind: str
    macs: int
    product: ProductShape
    groups: int
    input_positions: int
    input_elements: int
    output_elements: int
    input_gradients: int
    fixed_precision: Precision | None
    needs_weight_gradient: bool = True
    storage: tuple[Mapping[int, Fraction], ...] = ()
    backward_at_gradient_bits: bool = False

    @property
    def is_float(self) -> bool:
        """Whether this operation is never quantized."""
        return self.fixed_precision == FLOAT_PRECISION

    @property
    def module(self) -> str:
        """Name of the module that computes it."""
        return self.name.partition("#")[0]

    @property
    def output_positions(self) -> int:
        """Positions of the output map: product.m, or more for a transposed convolution that enlarges the map."""
        return self.output_elements // (self.product.n * self.groups)

    def precision(self, scheduled: Precision) -> Precision:
        """Bits of this operation at a scheduled precision."""
        return scheduled if self.fixed_precision is None else self.fixed_precision

    def in_backward(self, scheduled: Precision) -> Precision:
        """The scheduled precision of the operands of the backward pass."""
        return Precision(*3 * [scheduled.gradient]) if self.backward_at_gradient_bits else scheduled

    def stored(self, precision: Precision) -> Widths:
        """Stored bits per element at `precision`, including the share of a scale."""
        if not self.storage:
            return Widths(*precision)
        return Widths(*(table.get(bits, bits) for table, bits in zip(self.storage, precision)))


@dataclass(frozen=True)
class Workload:
    """The operations of one forward pass over `samples` samples.

    Attributes:
        operations: the products, in order of execution.
        samples: samples in the traced input; all counts are totals over these.
        batch_norm_elements: output elements of batch normalisations.
        layer_norm_elements: output elements of layer normalisations.
        relu_elements: output elements of ReLUs.
        pooled_inputs, pooled_outputs: input and output elements of average-pooling modules.
    """

    operations: tuple[Operation, ...]
    samples: int = 1
    batch_norm_elements: int = 0
    relu_elements: int = 0
    pooled_inputs: int = 0
    pooled_outputs: int = 0
    layer_norm_elements: int = 0

    def within(self, module: str, kind: str) -> "Workload":
        """This workload as submodule `module` of a larger model; its class `kind` names operations of its own."""
        if not module:
            return self
        inner = (o.name.removeprefix(kind) if o.module == kind else f".{o.name}" for o in self.operations)
        return replace(
            self, operations=tuple(replace(o, name=module + name) for o, name in zip(self.operations, inner))
        )

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward pass over `samples` samples."""
        return sum(operation.macs for operation in self.operations)

    @property
    def macs_of_sample(self) -> int | float:
        """Multiply-accumulates per sample."""
        return _ratio(self.macs, self.samples)

    @property
    def macs_per_sample(self) -> dict[str, int | float]:
        """Multiply-accumulates per sample, by operation."""
        return {operation.name: _ratio(operation.macs, self.samples) for operation in self.operations}


def _ratio(numerator: int, denominator: int) -> int | float:
    return numerator // denominator if numerator % denominator == 0 else numerator / denominator


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
