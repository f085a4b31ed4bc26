"""What every cost model provides, and the result that all of them return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional

from bitcycle.hardware.operation import Workload
from bitcycle.schedule import Precision
from bitcycle.settings import MISSING, Settings, setting

PASSES = ("forward", "error", "weight_gradient")
"""The three products of a layer in training; error is the gradient of its input."""

PUBLISHED_IMAGES = 64_000 * 128
"""Images that CPT and FracTrain count for every CIFAR and ImageNet run (cost-models, inferred from their tables)."""

CONVENTIONS: dict[str, dict[str, str]] = {
    "actual": {"count": "conv_linear", "images": "actual", "float_layers": "float32", "input_gradient": "needed"},
    "better": {"count": "conv_linear", "images": "actual", "float_layers": "schedule", "input_gradient": "all"},
    "cpt": {"count": "with_bn", "images": "published", "float_layers": "schedule", "input_gradient": "all"},
    "fractrain": {"count": "with_bn_relu", "images": "published", "float_layers": "schedule", "input_gradient": "all"},
}
"""What a paper counts, by name: which operations, how many images, float layers at which bits, whose error products."""

Histogram = Mapping[Precision, int]
"""How many samples were trained at which precision."""


@dataclass(frozen=True)
class LayerCost:
    """Bit operations of one layer over a run, by pass."""

    name: str
    forward: int
    error: int
    weight_gradient: int

    @property
    def total(self) -> int:
        """Bit operations of all three passes."""
        return self.forward + self.error + self.weight_gradient


@dataclass(frozen=True)
class Cost:
    """What some training cost.

    Attributes:
        samples: training samples that were counted.
        gbitops: 1e9 bit operations; a multiply-accumulate of an a-bit and a b-bit number is a*b bit operations.
        effective_macs: bit operations divided by 32^2: multiply-accumulates of float32 that they are worth.
        relative_to_static: this cost divided by that of the same samples at static q_max.
        energy_j, latency_s: joules and seconds on the accelerator; None where the cost model has none.
        layers: bit operations by layer and pass; those of normalisation and pooling, if counted, as `(elementwise)`.
    """

    samples: int
    gbitops: float
    effective_macs: float
    relative_to_static: float
    energy_j: float | None = None
    latency_s: float | None = None
    layers: tuple[LayerCost, ...] = field(default=(), repr=False)

    @property
    def saving_percent(self) -> float:
        """Percent saved against static q_max."""
        return 100 * (1 - self.relative_to_static)

    def summary(self) -> dict[str, float | int | None]:
        """The totals as plain numbers, for logs and JSON."""
        return {
            "gbitops": self.gbitops,
            "effective_macs": self.effective_macs,
            "relative_to_static": self.relative_to_static,
            "energy_j": self.energy_j,
            "latency_s": self.latency_s,
            "samples": self.samples,
        }


@dataclass
class HardwareOptions(Settings):
    """Options that every cost model has: what is counted. Each cost model turns a histogram of precisions into a `Cost`."""

    name: str = setting(MISSING, "the cost model's name, as in hardware=NAME", affects_result=False)
    convention: str = setting(
        "actual",
        "whose rules of counting: actual is what this run computes, a paper's name gives the numbers of its tables",
        choices=CONVENTIONS,
        affects_result=False,
    )
    count: Optional[str] = setting(
        None,
        "operations counted: conv_linear, with_bn (CPT: and pooling), with_bn_relu (FracTrain); null: by convention",
        choices=("conv_linear", "with_bn", "with_bn_relu"),
        affects_result=False,
    )
    images: Optional[str] = setting(
        None,
        "training samples counted: actual, or published (8.192e6 whatever the run); null: by convention",
        choices=("actual", "published"),
        affects_result=False,
    )
    float_layers: Optional[str] = setting(
        None,
        "layers that are not quantized count at float32 bits or at those of the schedule (as all papers do); null: by convention",
        choices=("float32", "schedule"),
        affects_result=False,
    )
    input_gradient: Optional[str] = setting(
        None,
        "error products counted: needed ones, or of all layers, also the first (as all papers do); null: by convention",
        choices=("needed", "all"),
        affects_result=False,
    )

    def rule(self, name: str) -> str:
        """The value of count, images, float_layers or input_gradient: the option's own, else that of the convention."""
        chosen: str | None = getattr(self, name)
        return CONVENTIONS[self.convention][name] if chosen is None else chosen

    def cost(self, workload: Workload, histogram: Histogram, reference: Precision) -> Cost:
        """Cost of training on `histogram[precision]` samples at each precision.

        Args:
            workload: the traced model.
            histogram: samples by precision.
            reference: static precision that `relative_to_static` compares with.
        """
        raise NotImplementedError
