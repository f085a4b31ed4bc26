"""The training loop: one for all tasks, schedules and quantizers; exact to resume at any step.

Everything that a step computes follows from the weights, the optimizer's state and the step's number: precision and learning
rate are functions of it, batch and noise are hashes of it. A checkpoint therefore needs no generator states.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.errors import RunError
from bitcycle.layer import PrecisionController, penalty
from bitcycle.randomness import derive
from bitcycle.schedule import FLOAT, Precision
from bitcycle.task import Outcome, Task
from bitcycle.training.display import ProgressBar
from bitcycle.training.interruption import Interrupted, StopSignal
from bitcycle.training.metrics_log import JsonLines, MetricsLog
from bitcycle.training.options import TrainingOptions
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass
class Best:
    """The best evaluation so far, the cost up to it, and the values of all evaluations."""

    value: float | None = None
    step: int = 0
    cost: dict[str, Any] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    at_q_max: list[float] = field(default_factory=list)


class RunningMean:
    """Mean loss and accuracy over some steps, added up on the device so that no step waits for the host."""

    def __init__(self, device: torch.device) -> None:
        self.sums, self.count = torch.zeros(2, dtype=torch.float64, device=device), 0

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of a step."""
        self.sums += torch.stack([outcome.loss.detach(), outcome.accuracy])
        self.count += 1

    def take(self) -> tuple[float, float]:
        """(mean loss, mean accuracy) of the steps added since the last time; starts anew."""
        loss, accuracy = (self.sums / self.count).tolist()
        self.sums.zero_()
        self.count = 0
        return loss, accuracy

    def state_dict(self) -> dict[str, Any]:
        """Sums and count, for a checkpoint."""
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sums, self.count = state["sums"].to(self.sums.device), state["count"]


@dataclass
class Trainer:
    """Everything that one run trains with; `train` runs it from where it stands to the end."""

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    controller: PrecisionController
    options: TrainingOptions
    total_steps: int
    seed: int
    folder: RunFolder
    device: torch.device
    step: int = 0
    best: Best = field(default_factory=Best)
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        self.logged, self.observed = RunningMean(self.device), RunningMean(self.device)
        self.evaluating = 0.0
        self.metrics_bytes = 0
        self.timing_bytes = 0
        self.has_penalty = penalty(self.model) is not None

    def train(self, metrics: MetricsLog, timing: JsonLines, bar: ProgressBar, stop: StopSignal) -> None:
        """Train to the last step.

        Raises:
            Interrupted: after a signal; a checkpoint has been saved.
            RunError: if the loss is not finite or a checkpoint cannot be written.
        """
        self.metrics, self.timing = metrics, timing
        batches = self.task.batches(self.step)
        saved = started = time.monotonic()
        while self.step < self.total_steps:
            self.train_step(next(batches))
            if self.step % self.options.log_steps == 0 or self.step == self.total_steps:
                self.log_training(bar)
            if self.step % self.options.evaluation_steps == 0 or self.step == self.total_steps:
                self.evaluate(bar)
            bar.update(self.step)
            now = time.monotonic()
            if stop.received or now - saved >= self.options.checkpoint_seconds or self.step == self.total_steps:
                self.elapsed, started = self.elapsed + now - started, now
                self.save()
                saved = time.monotonic()
            if stop.received and self.step < self.total_steps:
                raise Interrupted(f"received {stop.received} after step {self.step}")

    def train_step(self, batch: Any) -> None:
        """One optimizer step on one batch."""
        self.controller.step(self.step, samples=self.task.samples(self.step))
        torch.manual_seed(derive(self.seed, "step", self.step))  # for modules that draw noise, such as dropout
        rate = self.options.learning_rate.rate(self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        outcome = self.task.train(self.model, batch)
        added = penalty(self.model, outcome.loss) if self.has_penalty else None
        objective = outcome.loss if added is None else outcome.loss + added
        objective.backward()
        self.optimizer.step()
        self.step += 1
        self.logged.add(outcome)
        self.tell_schedule(outcome, objective)

    def tell_schedule(self, outcome: Outcome, objective: Tensor) -> None:
        """Tell a schedule that reacts to the training its mean loss and accuracy, as often as it wants to know."""
        schedule = self.controller.schedule
        if schedule.observation_steps is None:
            return
        self.observed.add(outcome._replace(loss=objective) if schedule.observes_penalty else outcome)
        if self.step % schedule.observation_steps == 0:
            schedule.observe(*self.observed.take())

    def log_training(self, bar: ProgressBar) -> None:
        """Write mean loss and accuracy since the last time."""
        loss, accuracy = self.logged.take()
        precision = self.controller.precision
        rate = self.optimizer.param_groups[0]["lr"]
        values = {"accuracy": 100 * accuracy, "learning_rate": rate, "precision": precision}
        self.metrics.write("train", self.step, loss=loss, **values, **self.controller.record.training_values())
        bar.update(self.step, f"bits {'/'.join(map(str, precision or ()))}  loss {loss:.3f}")
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {self.step}: training diverged. Lower training.learning_rate.initial, or raise "
                "schedule.q_min or the gradient's bits."
            )

    def evaluate(self, bar: ProgressBar) -> None:
        """Evaluate at the chosen precision and, where that is another one, at q_max; remember the best."""
        current, highest = self.controller.precision, self.controller.schedule.reference
        assert current is not None, "a step has been trained"
        chosen = {"last": current, "max": highest, "float": Precision(FLOAT, FLOAT, FLOAT)}[
            self.options.evaluation_precision
        ]
        values = self.evaluate_at(chosen)
        same = (chosen.weight, chosen.activation) == (highest.weight, highest.activation)
        values_at_q_max = values if same else self.evaluate_at(highest)
        self.controller.use(current)
        value, at_q_max = values[self.task.metric], values_at_q_max[self.task.metric]
        self.best.history.append(value)
        self.best.at_q_max.append(at_q_max)
        cost = self.controller.cost().summary()
        better = self.best.value is None or (
            value > self.best.value if self.task.higher_is_better else value < self.best.value
        )
        if better:
            self.best.value, self.best.step, self.best.cost = value, self.step, cost
        at_highest = {f"{self.task.metric}_at_q_max": at_q_max}
        more = {**at_highest, "precision": chosen, "cost": cost, **self.controller.record.evaluation_values()}
        self.metrics.write("evaluation", self.step, **values, **more)
        text = f"step {self.step}/{self.total_steps}  {self.task.metric} {value:.2f} at {chosen.weight} bits"
        logger.info("%s  %s at q_max %.2f  best %.2f", text, self.task.metric, at_q_max, self.best.value)
        bar.update(self.step)

    def evaluate_at(self, precision: Precision) -> dict[str, float]:
        """Metrics in evaluation mode at `precision`."""
        started = time.monotonic()
        self.controller.use(precision)
        self.model.eval()
        try:
            return self.task.evaluate(self.model)
        finally:
            self.model.train()
            self.evaluating += time.monotonic() - started

    def save(self) -> None:
        """Write a checkpoint and the status."""
        self.timing.write({"step": self.step, "seconds": self.elapsed})
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.controller.schedule.state_dict(),
            "cost": self.controller.meter.state_dict(),
            "gates": self.controller.record.state_dict(),
            "best": vars(self.best),
            "logged": self.logged.state_dict(),
            "observed": self.observed.state_dict(),
            "elapsed": self.elapsed,
            "evaluating": self.evaluating,
            "metrics_bytes": self.metrics.position(),
            "timing_bytes": self.timing.position(),
        }
        self.folder.checkpoint.save(state)
        self.folder.write_status("running", self.step, self.total_steps)

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.schedule.load_state_dict(state["schedule"])
        self.controller.meter.load_state_dict(state["cost"])
        self.controller.record.load_state_dict(state.get("gates", {"tallies": []}))  # older checkpoints have none
        self.best = Best(**state["best"])
        self.logged.load_state_dict(state["logged"])
        self.observed.load_state_dict(state["observed"])
        self.elapsed, self.evaluating = state["elapsed"], state["evaluating"]
        self.metrics_bytes, self.timing_bytes = state["metrics_bytes"], state["timing_bytes"]
