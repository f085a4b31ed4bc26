"""Schedules in phases, each with constant bits, a restarted learning rate and its choice of starting weights."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Optional

from bitcycle.schedule.base import STARTS, Phase, RunLength, ScheduleOptions
from bitcycle.schedule.precision import FLOAT, Precision
from bitcycle.settings import SettingError, setting

RATES = ("initial", "coarse", "fine")
RATIO_BITS = (2, 8)
"""Bits whose optimal steps the coarse rate compares, D_2 / D_8 (HLHLp, section 3.2)."""


@dataclass
class PhasedOptions(ScheduleOptions):
    """Base class of schedules in phases. Subclasses define bits, length and learning rate of each phase.

    With lengths L_i, phase k begins at step round(T (L_1 + ... + L_(k-1)) / (L_1 + ... + L_n)). At step t of a phase of S steps,
    the rate is the recipe's rate at step t of a run of S steps, times the phase's factor.
    """

    cycles: int = setting(8, "not used", affects_result=False, unused=True)
    gradient: int = setting(32, "gradient bits in phases with quantized weights or activations", minimum=1, maximum=32)
    decay: str = setting(
        "shape",
        "learning rate within a phase: training.learning_rate compressed to its length, or constant",
        choices=("shape", "constant"),
    )
    keep_optimizer: bool = setting(
        False, "keep momentum and moments at a phase transition (not specified by HLHLp and partial pre-training)"
    )
    reset_bn: bool = setting(False, "reset batch norm's running statistics at a phase transition")

    @property
    def shares(self) -> Sequence[float]:
        """Relative lengths of the phases; phases of length 0 are skipped."""
        raise NotImplementedError

    @property
    def phase_bits(self) -> Sequence[tuple[int, int]]:
        """(weight bits, activation bits) of each phase."""
        raise NotImplementedError

    def recipe(self, index: int) -> Phase:
        """Phase `index` without its position in the run."""
        raise NotImplementedError

    @property
    def reference(self) -> Precision:
        precisions = [self._precision_of(index) for index in range(len(self.shares))]
        return Precision(*(max(bits) for bits in zip(*precisions)))

    def precision(self, step: int, length: RunLength) -> Precision:
        return self._precision_of(bisect.bisect_right(self.changes(length), step) - 1)

    def phases(self, length: RunLength) -> tuple[Phase, ...]:
        boundaries = self.changes(length)
        placed = [
            replace(self._common(self.recipe(index)), start=start, steps=end - start)
            for index, (start, end) in enumerate(zip(boundaries, [*boundaries[1:], length.total_steps]))
            if end > start
        ]
        return tuple(placed)

    def check_length(self, length: RunLength) -> None:
        asked = sum(share > 0 for share in self.shares)
        if len(self.phases(length)) < asked:
            problem = f"the run has only {length.total_steps} steps, less than one for some of its {asked} phases"
            raise SettingError("name", self.name, problem, "train longer, as training.steps=400, or plan fewer phases")

    def changes(self, length: RunLength) -> list[int]:
        total = sum(self.shares)
        before = [0.0, *accumulate(self.shares)][:-1]
        return [round(length.total_steps * share / total) for share in before]

    def _common(self, phase: Phase) -> Phase:
        return replace(
            phase,
            constant_rate=self.decay == "constant",
            keep_optimizer=self.keep_optimizer,
            reset_batch_norm=self.reset_bn,
        )

    def _precision_of(self, index: int) -> Precision:
        weight, activation = self.phase_bits[index]
        return Precision(weight, activation, self.gradient if min(weight, activation) < FLOAT else FLOAT)


@dataclass
class PartialPretrain(PhasedOptions):
    """Float training for a part of the run, then training at low precision; each part has a complete learning rate schedule.

        t < round(split T):  q_max bits, rate(t, round(split T))
        afterwards:          q_min bits, rate(t - round(split T), T - round(split T))

    Source: partial pre-training, section 3 and algorithm 1 (split 1/2), section 6 (other splits). No code was released. The
    paper does not say what happens to optimizer state and batch norm's statistics at the switch: the former is reset
    (`keep_optimizer`), the latter are kept (`reset_bn`).
    """

    name: str = "partial_pretrain"
    q_min: int = setting(1, "bits of weights and activations in the second phase", minimum=1, maximum=32)
    q_max: int = setting(32, "bits of weights and activations in the first phase; 32 is float", minimum=1, maximum=32)
    split: float = setting(
        0.5, "fraction of the run in the first phase; 0: q_min throughout, 1: q_max throughout", minimum=0, maximum=1
    )

    @property
    def shares(self) -> Sequence[float]:
        return (self.split, 1 - self.split)

    @property
    def phase_bits(self) -> Sequence[tuple[int, int]]:
        return ((self.q_max, self.q_max), (self.q_min, self.q_min))

    def recipe(self, index: int) -> Phase:
        return Phase(0, 0)


@dataclass
class Hlhlp(PhasedOptions):
    """Alternating high and low precision (HLHL), with starting weights chosen by validation and flatness.

        rates of the phases   initial  eta              eta is training.learning_rate
                              coarse   alpha eta r      r = D_2 / D_8, the geometric mean over the layers of the optimal steps
                              fine     alpha eta            at 2 and 8 bits, for the weights that the phase starts from
        starting weights      best     of the previous phase by validation
                              flattest of its `candidates` best by validation those with the smallest s = Tr(sqrt v)
        s = sum over all weights of sqrt(v / (1 - beta^k)),  v = average of squared gradients with beta = 0.999, k steps

    Source: HLHLp, sections 3.2 and 4; Kingma and Ba 2014 for v. No code was released. The paper specifies neither the length of
    later phases, the shape of their rates, alpha beyond "typically from 0.1 to 0.01", nor what happens to the optimizer: all
    are settings. The paper trains with SGD but measures flatness by Adam's v, so v is tracked separately from the optimizer
    unless `second_moment=optimizer`.
    """

    name: str = "hlhlp"
    q_min: int = setting(2, "not used: see `bits`", affects_result=False)
    q_max: int = setting(32, "not used: see `bits`", affects_result=False)
    bits: list[int] = setting([32, 2, 8, 2], "bits of the weights in each phase; 32 is float", minimum=1, maximum=32)
    activation_bits: Optional[list[int]] = setting(
        None, "bits of the activations in each phase; null: float (HLHLp on images)", minimum=1, maximum=32
    )
    lengths: Optional[list[float]] = setting(
        None, "relative lengths of the phases, as [50,30,30,30] (HLHLp, table 6); null: equal", minimum=1e-9
    )
    rates: list[str] = setting(
        ["initial", "coarse", "fine", "fine"],
        "learning rate of each phase: that of training (initial), alpha times it (fine), or alpha r times it (coarse)",
        choices=RATES,
    )
    start_from: list[str] = setting(
        ["previous", "best", "flattest", "best"],
        "weights that each phase starts from: the last ones (previous), the previous phase's best by validation, or the"
        " flattest of its best",
        choices=STARTS,
    )
    alpha: float = setting(0.01, "factor of the rate after the first phase (HLHLp 3.2: 0.1 to 0.01)", minimum=0)
    ratio: Optional[float] = setting(
        None,
        "factor r of the coarse rate; null: D_2/D_8, measured on the starting weights of the phase",
        minimum=0,
    )
    candidates: int = setting(5, "number of weights that `flattest` chooses from (HLHLp 3.2: three to five)", minimum=1)
    second_moment: str = setting(
        "tracked",
        "v in Tr(sqrt v): tracked separately for any optimizer (tracked), or Adam's second moments (optimizer)",
        choices=("tracked", "optimizer"),
    )
    carry: str = setting(
        "latent",
        "values that a phase takes from its starting weights: the float master weights, or their quantized values",
        choices=("latent", "quantized"),
    )

    def validate(self) -> None:
        if not self.bits:
            raise SettingError("bits", self.bits, "is empty", "give bits, as [32,2,8,2]")
        for name in ("activation_bits", "lengths", "rates", "start_from"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.bits):
                problem = f"there are {len(self.bits)} phases in bits={self.bits}"
                raise SettingError(name, values, problem, "give one value for each phase")
        if self.start_from[0] != "previous":
            problem = "there are no weights to choose from before the first phase"
            raise SettingError("start_from", self.start_from, problem, "set the first to previous")

    @property
    def chooses(self) -> bool:
        return any(start != "previous" for start in self.start_from)

    @property
    def shares(self) -> Sequence[float]:
        return self.lengths if self.lengths is not None else [1] * len(self.bits)

    @property
    def phase_bits(self) -> Sequence[tuple[int, int]]:
        return list(zip(self.bits, self.activation_bits or [FLOAT] * len(self.bits)))

    def recipe(self, index: int) -> Phase:
        rate = self.rates[index]
        factor = 1.0 if rate == "initial" else self.alpha
        if rate == "coarse" and self.ratio is not None:
            factor *= self.ratio
        return Phase(
            0,
            0,
            rate_factor=factor,
            rate_ratio=RATIO_BITS if rate == "coarse" and self.ratio is None else None,
            start_from=self.start_from[index],
            candidates=self.candidates,
            optimizer_moments=self.second_moment == "optimizer",
            carry_quantized=index > 0 and self.carry == "quantized",
        )
