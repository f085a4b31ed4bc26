"""Precision chosen by the network for each sample and block: DFQ, and FracTrain, which raises DFQ's cost target in stages.

This module defines the options and the target cost as plain numbers; the gates are in `bitcycle.layer.gates.gate`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

from bitcycle.precision import FLOAT, Precision
from bitcycle.schedule.base import RunLength, Schedule, ScheduleOptions
from bitcycle.schedule.staged import LossPlateau, LossPlateauSchedule
from bitcycle.settings import SettingError, nearest, setting

Pairs = tuple[tuple[int, int], ...]
"""Options of a block as (activation bits, gradient bits); (0, 0) skips the block."""

OPTION_LISTS: dict[str, Pairs] = {
    "paper_resnet": ((0, 0), (2, 6), (3, 6), (4, 6), (4, 12), (6, 8), (6, 12)),
    "paper_mobilenet_v2": ((0, 0), (4, 8), (6, 8), (6, 10), (8, 8)),
    "code_cifar": ((3, 6), (4, 6), (4, 8), (6, 8), (6, 12)),
    "code_imagenet": ((3, 6), (4, 8), (6, 12), (8, 16)),
}
"""FracTrain, appendix F (fig. 5), and the defaults of its released code."""


class BlockFamily(NamedTuple):
    """Settings that differ between families of networks in the paper or its code.

    Attributes:
        paper, code: names of the option lists.
        weight_bits: fixed precision of the weights.
        gate_sizes: channels of the two embedding convolutions (0: only the second exists) and state size of the LSTM.
        block_weight: weight of a block in the cost, `equal` or `macs`.
        initial: initialisation of the gates: `fan_out` as in the network, or PyTorch's `default`.
    """

    paper: str
    code: str
    weight_bits: int
    gate_sizes: tuple[int, int, int]
    block_weight: str
    initial: str


FAMILIES = {
    "resnet": BlockFamily("paper_resnet", "code_cifar", 4, (32, 16, 16), "equal", "fan_out"),
    "mobilenet_v2": BlockFamily("paper_mobilenet_v2", "code_cifar", 4, (64, 32, 32), "macs", "default"),
    "imagenet": BlockFamily("code_imagenet", "code_imagenet", 6, (0, 40, 20), "macs", "default"),
}
"""Families of networks; the paper gives no list for ImageNet, hence the code's (FracTrain, appendix F; released code)."""


@dataclass
class Dfq(ScheduleOptions):
    """DFQ: a recurrent gate chooses the bits of activations and gradients for each sample and block, or skips the block.

        x' = sum_k m_k Block(x; activation bits a_k, gradient bits g_k, weight bits w),    m = onehot(argmax p), per sample
        loss = CE + s beta C / mean_l W_l,    C = sum over blocks l, samples n, options k of m W_l c_k + depthwise
        c_k = (a_k w + g_k w + a_k g_k) / 1024,    cp = 100 C / (samples * 3 sum_l W_l)        in percent of float32
        s = -1 if cp < target, else +1                                                          per step, with cp of its batch

    First and last layer are float; other layers outside the blocks have the highest bits that a block can choose, which is also
    the value of `schedule(step)` in logs. Skipping a block that changes size or width leaves its shortcut convolution in float.

    Source: FracTrain, section 3.2 and appendix F; released code, train_dfq.py and models.py. Differs from the code: 0/0 skips
    the block in MobileNetV2 as well (there: the block in float at no cost), but is not an option for its three blocks without
    a shortcut; a skip saves the depthwise convolution; cp is that of the actual batch (there: of a full batch); and block
    outputs are mixed, whereas the code's ImageNet networks mix the operands of convolutions.
    """

    name: str = "dfq"
    q_min: Any = setting(3, "not used: see `options`", affects_result=False)
    q_max: int = setting(8, "bits of the static baseline that costs are compared with", minimum=1, maximum=32)
    target: float = setting(3.0, "target of the cost cp, in percent of float32", minimum=0, maximum=100)
    options: Any = setting(
        "paper",
        "options of a block: paper, code (of the network's family), paper_resnet, paper_mobilenet_v2, code_cifar, "
        "code_imagenet, or [activation, gradient] bits, as [[0,0],[3,6]], where [0,0] skips",
    )
    weight_bits: Optional[int] = setting(
        None,
        "fixed bits of the weights in the blocks; null: 4 for CIFAR, 6 for ImageNet (released code)",
        minimum=1,
        maximum=32,
    )
    depthwise_bits: Optional[list[int]] = setting(
        [8, 16],
        "fixed [forward, gradient] bits of depthwise convolutions, whose weights have weight_bits; null: the block's choice",
        minimum=1,
        maximum=32,
    )
    family: Optional[str] = setting(
        None, "family of networks that determines the defaults; null: that of the model", choices=tuple(FAMILIES)
    )
    backward: str = setting(
        "all",
        "backward pass: all candidates for all samples, as in the code, or only the chosen candidate of each sample (Eq. 1: "
        "equals remask_gradient, in a third of the time; quantizer sbm, compute=simulate)",
        choices=("all", "chosen"),
    )
    remask_gradient: bool = setting(
        False,
        "mask gradients inside a candidate for samples that did not choose it (Eq. 1); false: batch norm and rounding noise "
        "couple the samples, as in the code",
    )
    beta: float = setting(1e-3, "weight of the cost term", minimum=0)

    def validate(self) -> None:
        self.check_q_min()
        self.pairs  # noqa: B018  (raises for a wrong list)
        if self.depthwise_bits is not None and len(self.depthwise_bits) != 2:
            problem = "needs two numbers"
            raise SettingError("depthwise_bits", self.depthwise_bits, problem, "write [forward, gradient], as [8, 16]")

    @property
    def facts(self) -> BlockFamily:
        """Defaults of the family; those of CIFAR ResNets if it is unknown."""
        return FAMILIES[self.family or "resnet"]

    @property
    def pairs(self) -> Pairs:
        """The list of options."""
        if isinstance(self.options, str):
            names = {"paper": self.facts.paper, "code": self.facts.code, **{name: name for name in OPTION_LISTS}}
            if self.options not in names:
                raise SettingError("options", self.options, "is not a list of options", nearest(self.options, names))
            return OPTION_LISTS[names[self.options]]
        _check_pairs(self.options)
        return tuple((pair[0], pair[1]) for pair in self.options)

    @property
    def precisions(self) -> tuple[Precision | None, ...]:
        """The bits of each option, in the order of the gate's outputs; None skips the block."""
        return tuple(Precision(self.bits_of_weights, a, g) if a else None for a, g in self.pairs)

    @property
    def words(self) -> tuple[str, ...]:
        """The options as FracTrain writes them, activation/gradient bits: 0/0, 2/6, ..."""
        return tuple(f"{activation}/{gradient}" for activation, gradient in self.pairs)

    @property
    def bits_of_weights(self) -> int:
        """`weight_bits`, or the family's."""
        return self.weight_bits or self.facts.weight_bits

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of a gate's two embedding convolutions and state size of its LSTM, by family."""
        return self.facts.gate_sizes

    def configure_for(self, family: str | None, blocks: int) -> ScheduleOptions:
        if blocks == 0:
            remedy = (
                "use a network of blocks, as model=resnet20 or model=mobilenet_v2 (user-defined: with an attribute "
                "block_names), or another schedule, as schedule=pfq"
            )
            raise SettingError(
                "name", self.name, "chooses bits block by block, and the network names no blocks", remedy
            )
        return self if self.family is not None or family is None else replace(self, family=family)

    def precision(self, step: int, length: RunLength) -> Precision:
        """The bits of layers outside the blocks: the highest that a block can choose."""
        activation, gradient = (max(bits) for bits in zip(*self.pairs))
        return Precision(self.bits_of_weights, activation, gradient)

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> "GatedSchedule":
        return GatedSchedule(self, RunLength(total_steps, steps_per_epoch))


@dataclass
class FracTrain(LossPlateau, Dfq):
    """FracTrain: DFQ whose cost target rises by `target_step` when the loss becomes flat, as the precision of PFQ does.

        target of stage k = target + k target_step,    k = turning points so far, at most stages - 1

    Source: FracTrain, section 3.3, algorithm 2 and appendix G; released code, train_frac.py. Differs from it in the
    length of an epoch (`epoch_steps`: 390 there).
    """

    name: str = "fractrain"
    target: float = setting(
        1.5,
        "cp of the first stage, in percent of float32 (paper: 1.5 for CIFAR, 3 for ImageNet)",
        minimum=0,
        maximum=100,
    )
    target_step: float = setting(0.5, "increase of the target from stage to stage", minimum=0)
    stages: int = setting(4, "number of stages", minimum=1)

    def validate(self) -> None:
        super().validate()
        if (last := self.target + (self.stages - 1) * self.target_step) > 100:
            raise SettingError("target_step", self.target_step, f"the last target is {last:g} %", "stay below 100 %")

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> "FracTrainSchedule":
        return FracTrainSchedule(self, RunLength(total_steps, steps_per_epoch))


@dataclass(frozen=True)
class GatedSchedule(Schedule):
    """DFQ bound to a run: the schedule provides the target cost, the network's gates choose the bits."""

    fixed = False
    follows = "depends on the input"

    options: Dfq

    @property
    def summary(self) -> str:
        words = f"{' '.join(self.options.words)} (a/g) for each sample and block"
        return f"{self.follows}: {words}, weights {self.options.bits_of_weights}"

    @property
    def compute_target(self) -> float:
        """Current target cost of the gates, in percent of float32."""
        return self.options.target

    @property
    def precisions(self) -> set[Precision]:
        chosen = {precision for precision in self.options.precisions if precision is not None}
        return chosen | {self.options.precision(0, self.length)}


@dataclass(frozen=True)
class FracTrainSchedule(GatedSchedule, LossPlateauSchedule):
    """FracTrain bound to a run; `observe` takes the mean loss of every epoch."""

    observes_penalty = True  # with the signed cost term, as in the code

    options: FracTrain

    @property
    def last_stage(self) -> int:
        return self.options.stages - 1

    @property
    def compute_target(self) -> float:
        return self.options.target + self.stage * self.options.target_step


def _check_pairs(pairs: Any) -> None:
    """Raise SettingError unless `pairs` is a list of distinct [activation, gradient] bits, not all of them skips."""
    remedy = "give [activation, gradient] bits of 1 to 32, or [0,0] to skip a block, as [[0,0],[3,6],[6,8]]"
    if not isinstance(pairs, (list, tuple)) or not pairs:
        raise SettingError("options", pairs, "is not a list of options", remedy)
    for pair in pairs:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(bits) is int for bits in pair)
        if not is_pair or (tuple(pair) != (0, 0) and not all(1 <= bits <= FLOAT for bits in pair)):
            raise SettingError("options", pairs, f"{pair} is not an option", remedy)
    if len({tuple(pair) for pair in pairs}) < len(pairs):
        raise SettingError("options", pairs, "an option occurs twice", "list each option once")
    if all(tuple(pair) == (0, 0) for pair in pairs):
        raise SettingError("options", pairs, "every option skips the block", remedy)
