"""Schedules in phases, each with constant bits, a restarted learning rate and its choice of starting weights."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Optional

from bitcycle.precision import FLOAT, Precision
from bitcycle.schedule.base import PHASE_STARTS, Phase, RunLength, ScheduleOptions
from bitcycle.settings import SettingError, setting

PHASE_RATES = ("initial", "coarse", "fine")


class PlannedPhase(NamedTuple):
    """Relative length, bits of weights and activations, and the options of `Phase` in which a phase differs from others."""

    share: float
    weight: int
    activation: int
    options: dict[str, Any] = {}  # noqa: RUF012


@dataclass
class PhasedOptions(ScheduleOptions):
    """Base class of schedules in phases, which subclasses list in `plan`.

    With lengths L_i, phase k begins at step round(T (L_1 + ... + L_(k-1)) / (L_1 + ... + L_n)). At step t of a phase of S steps,
    the rate is the recipe's rate at step t of a run of S steps, times the phase's factor.
    """

    gradient: int = setting(32, "gradient bits in phases with quantized weights or activations", minimum=1, maximum=32)

    @property
    def plan(self) -> Sequence[PlannedPhase]:
        """The phases in order; those of length 0 are skipped."""
        raise NotImplementedError

    @property
    def reference(self) -> Precision:
        return Precision(*(max(bits) for bits in zip(*map(self._precision_of, self.plan))))

    def precision(self, step: int, length: RunLength) -> Precision:
        return self._precision_of(self.plan[bisect.bisect_right(self.changes(length), step) - 1])

    def phases(self, length: RunLength) -> tuple[Phase, ...]:
        borders = pairwise([*self.changes(length), length.total_steps])
        return tuple(
            Phase(start, end - start, **planned.options)
            for planned, (start, end) in zip(self.plan, borders)
            if end > start
        )

    def check_length(self, length: RunLength) -> None:
        asked = sum(planned.share > 0 for planned in self.plan)
        if len(self.phases(length)) < asked:
            problem = f"the run has only {length.total_steps} steps, less than one for some of its {asked} phases"
            raise SettingError("name", self.name, problem, "train longer, as training.steps=400, or plan fewer phases")

    def changes(self, length: RunLength) -> list[int]:
        shares = [planned.share for planned in self.plan]
        return [round(length.total_steps * before / sum(shares)) for before in [0.0, *accumulate(shares)][:-1]]

    def _precision_of(self, planned: PlannedPhase) -> Precision:
        weight, activation = planned.weight, planned.activation
        return Precision(weight, activation, self.gradient if min(weight, activation) < FLOAT else FLOAT)


@dataclass
class PartialPretrain(PhasedOptions):
    """Float training for a part of the run, then training at low precision; each part has a complete learning rate schedule.

        t < round(split T):  q_max bits, rate(t, round(split T))
        afterwards:          q_min bits, rate(t - round(split T), T - round(split T))

    Source: partial pre-training, section 3 and algorithm 1 (split 1/2), section 6 (other splits). No code was released. The
    paper does not say what happens to optimizer state and batch norm's statistics at the switch: the former is reset,
    the latter are kept.
    """

    q_min: int = setting(1, "bits of weights and activations in the second phase", minimum=1, maximum=32)
    q_max: int = setting(32, "bits of weights and activations in the first phase; 32 is float", minimum=1, maximum=32)
    split: float = setting(
        0.5, "fraction of the run in the first phase; 0: q_min throughout, 1: q_max throughout", minimum=0, maximum=1
    )

    @property
    def plan(self) -> Sequence[PlannedPhase]:
        parts = (self.split, self.q_max), (1 - self.split, self.q_min)
        return [PlannedPhase(share, bits, bits) for share, bits in parts]


@dataclass
class Hlhlp(PhasedOptions):
    """Alternating high and low precision (HLHL), with starting weights chosen by validation and flatness.

        rates of the phases   initial  eta              eta is training.learning_rate
                              coarse   alpha eta r      r = D_2 / D_8, the geometric mean over the layers of the optimal steps
                              fine     alpha eta            at 2 and 8 bits, for the weights that the phase starts from
        starting weights      best     of the previous phase by validation
                              flattest of its `candidates` best by validation those with the smallest s = Tr(sqrt v)
        s = sum over all weights of sqrt(v / (1 - beta^k)),  v = average of squared gradients with beta = 0.999, k steps

    Source: HLHLp, sections 3.2 and 4; Kingma and Ba 2014 for v. No code was released. The paper gives lengths for Penn
    Treebank (50, 30, 30 and 30 epochs, table 6), which we use for all data, and up to 20 epochs for ImageNet. It specifies
    neither the shape of the later rates, alpha beyond "typically from 0.1 to 0.01", nor what happens to the optimizer: here
    they follow the recipe, and it starts afresh. The paper trains with SGD but measures flatness by Adam's v, so v is tracked
    separately from the optimizer. The factor r is the paper's ("approximately alpha eta D_2/D_8", "initially designed by
    considering the quantization step size ratios", section 3.2) and applies "to all experiments" (section 4.1), hence the
    defaults; the third phase begins at a lower rate than the second, which r = 1 does not keep. On recurrent networks the
    defaults of alpha and r let the master weights run away from their 2-bit values in the coarse phase, after which the 8-bit
    phase ends worse than guessing; alpha = 0.1 and r = 1 keep the course of table 6 (results/notes/hlhlp-phases.md).
    """

    q_min: int = setting(2, "not used: see `bits`", affects_result=False)
    q_max: int = setting(32, "not used: see `bits`", affects_result=False)
    bits: list[int] = setting([32, 2, 8, 2], "bits of the weights in each phase; 32 is float", minimum=1, maximum=32)
    activation_bits: Optional[list[int]] = setting(
        None, "bits of the activations in each phase; null: float (HLHLp on images)", minimum=1, maximum=32
    )
    lengths: Optional[list[float]] = setting(
        None,
        "relative lengths of the phases, as [50,30,30,30] (HLHLp, table 6); null: 1 at the initial rate, `later_length` after it",
        minimum=1e-9,
    )
    later_length: float = setting(
        0.6,
        "without `lengths`, length of each later phase relative to the one at the initial rate (HLHLp, table 6: 30 of 50 epochs)",
        minimum=1e-9,
        unnamed=1.0,
    )
    rates: list[str] = setting(
        ["initial", "coarse", "fine", "fine"],
        "learning rate of each phase: that of training (initial), alpha times it (fine), or alpha r times it (coarse)",
        choices=PHASE_RATES,
    )
    start_from: list[str] = setting(
        ["previous", "best", "flattest", "best"],
        "weights that each phase starts from: the last ones (previous), the previous phase's best by validation, or the"
        " flattest of its best",
        choices=PHASE_STARTS,
    )
    alpha: float = setting(
        0.01, "factor of the rate after the first phase (HLHLp 3.2: 0.1 to 0.01; recurrent networks: 0.1)", minimum=0
    )
    ratio: Optional[float] = setting(
        None,
        "factor r of the coarse rate; null: D_2/D_8, measured on the starting weights of the phase (recurrent networks: 1)",
        minimum=0,
    )
    candidates: int = setting(5, "number of weights that `flattest` chooses from (HLHLp 3.2: three to five)", minimum=1)

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
    def plan(self) -> Sequence[PlannedPhase]:
        shares = self.lengths or [1.0 if rate == "initial" else self.later_length for rate in self.rates]
        activations = self.activation_bits or [FLOAT] * len(self.bits)
        options = [self._options(*choice) for choice in zip(self.rates, self.start_from)]
        return [PlannedPhase(*part) for part in zip(shares, self.bits, activations, options)]

    def _options(self, rate: str, start_from: str) -> dict[str, Any]:
        measured = rate == "coarse" and self.ratio is None
        ratio = self.ratio if rate == "coarse" and self.ratio is not None else 1.0
        return {
            "rate_factor": 1.0 if rate == "initial" else self.alpha * ratio,
            "rate_ratio": (2, 8) if measured else None,
            "start_from": start_from,
            "candidates": self.candidates,
        }
