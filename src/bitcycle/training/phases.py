"""Executes the phases of a schedule: starting weights, learning rate, optimizer state.

During a phase, the weights with the best validation results are saved next to the checkpoints, as many as the next
phase chooses from. They are deleted when neither of the two checkpoints needs them, so that an interrupted run always
finds them. They may be chosen by their flatness (`SecondMoment`).
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from bitcycle import distributed
from bitcycle.device import widest_float
from bitcycle.layer import PrecisionController, restart_quantizers, step_ratio
from bitcycle.precision import FLOAT, Precision
from bitcycle.recipe.learning_rate import LearningRateOptions
from bitcycle.schedule import Phase
from bitcycle.training.checkpoint import CheckpointFolder
from bitcycle.training.outcome import merit, worse

logger = logging.getLogger(__name__)

BETA = 0.999
"""Decay of the second moments of gradients."""


class SecondMoment:
    """The moving average v of squared gradients for any optimizer, without synchronisation with the host. It gives the flatness
    measure s = Tr(sqrt v), a proxy for the curvature of the loss: smaller values mean flatter minima.

        v_0 = 0,   v_k = beta v_(k-1) + (1 - beta) g_k^2,   s = sum over all trained parameters of sqrt(v_k / (1 - beta^k))

    with the gradient g_k of step k, counted from the beginning of the phase.

    Source: HLHLp, section 3.2 (v estimates diag(H^2), so that s estimates the sum of the eigenvalues of H); Kingma and Ba
    2014 for v and its bias correction. No code was released.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    def update(self) -> None:
        """Update the average with the current gradients."""
        self.steps += 1
        torch._foreach_mul_(self.moments, BETA)
        pairs = [(v, p.grad) for v, p in zip(self.moments, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            moments, gradients = zip(*pairs)
            torch._foreach_addcmul_(moments, gradients, gradients, value=1 - BETA)

    def trace_sqrt(self) -> float:
        """The current s; synchronises with the device."""
        sums = [v.sqrt().sum(dtype=widest_float(v.device)) for v in self.moments]
        return float(torch.stack(sums).sum()) / (1 - BETA**self.steps) ** 0.5 if sums and self.steps else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for mine, saved in zip(self.moments, state["moments"], strict=True):
            mine.copy_(saved)


class CandidateWeights(NamedTuple):
    """Weights that the next phase may start from: their step, validation metric and Tr(sqrt v)."""

    step: int
    validation: float
    trace_sqrt_v: float | None = None


def best_candidates(found: list[CandidateWeights], count: int, higher_is_better: bool) -> list[CandidateWeights]:
    """The `count` best of `found` by validation, best first; ties favour earlier steps. Undefined values are worst."""
    return sorted(found, key=lambda c: (-merit(c.validation, higher_is_better), c.step))[:count]


def choose(found: list[CandidateWeights], start_from: str) -> tuple[CandidateWeights, str]:
    """Select the candidate from which a phase starts, from a list with the best first; also returns the reason as text.

    >>> choose([CandidateWeights(20, 91.5, 7.0), CandidateWeights(10, 90.0, 5.0)], "flattest")[0].step
    10
    """
    if start_from == "best":
        return found[0], f"best validation of its phase, {found[0].validation:g}"
    undefined = [c for c in found if c.trace_sqrt_v is None or math.isnan(c.trace_sqrt_v)]
    flattest = min((c for c in found if c not in undefined), key=lambda c: c.trace_sqrt_v or 0.0, default=found[0])
    listed = ", ".join(f"{c.trace_sqrt_v or 0:.6g} after step {c.step}" for c in found)
    return flattest, f"smallest Tr(sqrt v) of the {len(found)} best by validation ({listed})"


def phase_rate(recipe: LearningRateOptions, phase: Phase, step: int, epoch_steps: int | None = None) -> float:
    """The learning rate at `step`: the recipe's rate for a run of the phase's length, times the phase's factor."""
    return recipe.rate(step - phase.start, phase.steps, epoch_steps) * phase.rate_factor


def phase_name(precision: Precision) -> str:
    """The bits of a phase in words: those of the weights, and after a slash those of the activations if they differ.

    >>> phase_name(Precision(32, 32, 32)), phase_name(Precision(2, 2, 32)), phase_name(Precision(8, 32, 32))
    ('float', '2 bits', '8/32 bits')
    """
    weight, activation = precision.weight, precision.activation
    bits = f"{weight}" if weight == activation else f"{weight}/{activation}"
    return "float" if min(weight, activation) >= FLOAT else f"{bits} bits"


@dataclass
class PhaseRunner:
    """Tracks the current phase of a run, and applies the changes at the beginning of each."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    controller: PrecisionController
    learning_rate: LearningRateOptions
    folder: CheckpointFolder
    higher_is_better: bool
    index: int = -1  # no phase has begun
    ratio: float = 1.0
    candidates: list[CandidateWeights] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    moment: SecondMoment | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of the run."""
        return self.controller.schedule.phases

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.phases[self.index]

    @property
    def following(self) -> Phase | None:
        """The next phase, if there is one."""
        return self.phases[self.index + 1] if self.index + 1 < len(self.phases) else None

    def due(self, step: int) -> bool:
        """Whether the next phase begins with `step`."""
        return self.following is not None and self.following.start == step

    def rate(self, step: int) -> float:
        """The learning rate of `step`."""
        epoch_steps = self.controller.schedule.length.steps_per_epoch
        return phase_rate(self.learning_rate, self.phase, step, epoch_steps) * self.ratio

    def begin(self) -> dict[str, Any]:
        """Begin the next phase; returns values to log."""
        phase = self.following
        assert phase is not None, "a phase is due"
        from_step, why = phase.start, "weights at the end of the previous phase" if phase.start else "initial weights"
        if phase.kept:
            distributed.barrier()  # wait until process 0 has written the weights
            chosen, why = choose(self.candidates, phase.start_from)
            self.model.load_state_dict(self.folder.load_candidate(chosen.step))
            from_step = chosen.step
        if phase.start:
            restart_quantizers(self.model)
            self.optimizer.state.clear()
        self.ratio = step_ratio(self.model, *phase.rate_ratio) if phase.rate_ratio else 1.0
        self.index, self.candidates = self.index + 1, []
        then = self.following
        tracked = then is not None and then.start_from == "flattest"
        self.moment = SecondMoment(self.model.parameters()) if tracked else None
        record = {
            "phase": self.index + 1,
            "name": phase_name(self.controller.schedule(phase.start)),
            "phases": len(self.phases),
            "first_step": phase.start,
            "steps": phase.steps,
            "precision": list(self.controller.schedule(phase.start)),
            "learning_rate": self.rate(phase.start),
            "rate_factor": phase.rate_factor * self.ratio,
            "start_from": phase.start_from,
            "from_step": from_step,
            "why": why,
        }
        self.records.append(record)
        return record

    def flatness(self) -> float | None:
        """The current Tr(sqrt v), if the next phase selects its starting weights by it."""
        return None if self.moment is None else self.moment.trace_sqrt()

    def add_candidate(self, candidate: CandidateWeights) -> None:
        """Save the current weights if they are among the candidates for the next phase."""
        kept = self.following.kept if self.following is not None else 0
        best = best_candidates([*self.candidates, candidate], kept, self.higher_is_better)
        if candidate in best:
            self.folder.save_candidate(candidate.step, self.model.state_dict())
        self.candidates = best

    def record_result(self, metric: float, best: float | None, best_step: int, chance: float | None) -> None:
        """Record the results of the current phase for the summary: the main metric at its last evaluation so far (`metric`, and
        `final` as in the summary of a run), the best one, and the level of guessing (`chance`, see `Task.chance`)."""
        if self.records:
            self.records[-1].update(final=metric, metric=metric, best=best, best_step=best_step, chance=chance)

    def warn_if_diverged(self) -> None:
        """Warn if the current phase, which has ended, is worse than guessing."""
        record = self.records[-1] if self.records else {}
        if record.get("chance") is not None and worse(record["metric"], record["chance"], self.higher_is_better):
            what = f"phase {record['phase']} ({record['name']})" if len(self.phases) > 1 else "the run"
            then = ": the phases after it start from useless weights" if self.following is not None else ""
            values = what, record["metric"], record["chance"], then
            logger.warning("%s ends at %.4g, worse than guessing (%.4g)%s", *values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "ratio": self.ratio,
            "candidates": [candidate._asdict() for candidate in self.candidates],
            "moment": self.moment.state_dict() if self.moment is not None else None,
            "records": self.records,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index, self.ratio, self.records = state["index"], state["ratio"], state["records"]
        self.candidates = [CandidateWeights(**candidate) for candidate in state["candidates"]]
        self.saved = {candidate.step for candidate in self.candidates}
        self.moment = None
        if state["moment"] is not None:
            self.moment = SecondMoment(self.model.parameters())
            self.moment.load_state_dict(state["moment"])

    def clean_up(self, finished: bool) -> None:
        """After a checkpoint, delete candidate weights that neither it, nor the previous one, nor analyses of phases need."""
        now = {candidate.step for candidate in self.candidates}
        begun_from = {record["from_step"] for record in self.records if record["start_from"] != "previous"}
        self.folder.keep_candidates(begun_from if finished else begun_from | now | self.saved)
        self.saved = now
