"""The training loop for all tasks, schedules and quantizers, with exact resume at any step.

Each step is determined by the weights, the optimizer state, the phase and the step index: precision and learning rate are
functions of them, and the batch and all random numbers follow from seed and step index. A checkpoint therefore needs no
generator states.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.device import seed_step
from bitcycle.errors import RunError
from bitcycle.layer import PrecisionController, begin_anew, penalty, share_batch_norm
from bitcycle.layer.memory_format import channels_last
from bitcycle.precision import FLOAT, Precision
from bitcycle.randomness import derive
from bitcycle.recipe.weight_averaging import WeightAverage, estimate_statistics, estimated_layers
from bitcycle.schedule import FeedbackSchedule, SearchSchedule
from bitcycle.signals import Interrupted, StopSignal
from bitcycle.task import StepOutput, Task, TaskSetup
from bitcycle.training.compilation import wants_compilation
from bitcycle.training.cuda_graphs import StepGraphs, can_record
from bitcycle.training.display import ProgressBar
from bitcycle.training.metrics_log import JsonLines, MetricsLog, open_metrics
from bitcycle.training.outcome import Best, ReduceOnPlateau, RunningMean, merit, metric_text
from bitcycle.training.phases import CandidateWeights, PhaseRunner
from bitcycle.training.plan import Plan
from bitcycle.training.processes import Agreement, replica

logger = logging.getLogger(__name__)

GO_ON, SAVE, STOP = range(3)
"""Requests that processes agree on after a step; the greatest wins."""
COUNTERS = ("step", "elapsed", "evaluating", "metrics_bytes", "timing_bytes")
"""Attributes of the trainer that are saved in checkpoints."""


class Trainer:
    """The training state of a planned run, at first that of step 0; `train` runs it from the current step to the end."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        config, options, schedule = plan.config, plan.config.training, plan.schedule
        setup = TaskSetup(config.dataset, config.data_folder, plan.info, plan.batch_size, config.seed, device)
        self.plan, self.device, self.options, self.schedule = plan, device, options, schedule
        self.epoch, self.total_steps, self.folder = plan.epoch, plan.total_steps, plan.folder
        self.task: Task = config.task.build(setup)
        compiles = wants_compilation(plan, device)
        model = plan.build_model(compiles)
        model = channels_last(model, device).train()
        self.model = share_batch_norm(model) if distributed.world_size() > 1 else model
        self.controller = PrecisionController(
            self.model, schedule, seed=config.seed, hardware=config.hardware, workload=plan.workload, rank=0
        )
        self.optimizer = options.optimizer.build(self.model)
        if isinstance(schedule, SearchSchedule):
            schedule.begin(self.task.majority_baseline)
        self.step = self.metrics_bytes = self.timing_bytes = 0
        self.elapsed = self.evaluating = 0.0
        self.metrics, self.timing = MetricsLog(JsonLines(None), []), JsonLines(None)
        self.best, self.average = Best(), WeightAverage()
        self.logged, self.observed = RunningMean(device), RunningMean(device)
        self.plateau = ReduceOnPlateau(options.learning_rate, self.task.higher_is_better)
        self.evaluation_steps = options.evaluation_steps or self.epoch.steps
        self.has_penalty = penalty(self.model) is not None
        self.replica, self.agreement = replica(self.model), Agreement()
        self.graphs = StepGraphs(self.model, can_record(plan, device))
        self.phases = PhaseRunner(
            self.model,
            self.optimizer,
            self.controller,
            options.learning_rate,
            self.folder.checkpoint,
            self.task.higher_is_better,
        )

    def open_logs(self) -> None:
        """Open metrics.jsonl with its trackers and timing.jsonl, truncated to the current step."""
        self.metrics = open_metrics(self.plan, self.step, self.metrics_bytes)
        self.timing = JsonLines(self.folder.timing if self.folder.writes else None, self.timing_bytes)

    def close(self) -> None:
        """Close the logs and disconnect from the other processes; the end of the process group may otherwise deadlock."""
        self.metrics.close()
        self.timing.close()
        self.replica = self.model
        self.graphs.forget()  # while no other run of this process has graphs

    def train(self, bar: ProgressBar, stop: StopSignal) -> None:
        """Train to the last step. Raises Interrupted after a signal, with a checkpoint saved; RunError if the loss is not finite
        or a checkpoint cannot be written."""
        saved = started = time.monotonic()
        if self.step == 0 and self.plan.config.model.initial_weights is not None:
            self.evaluate_initial_weights()
        batches = self.task.batches(self.step)
        batch = next(batches) if self.step < self.total_steps else None
        while self.step < self.total_steps:
            if self.phases.due(self.step):
                self.begin_phase()
            self.train_step(batch)
            if self.step < self.total_steps:
                batch = next(batches)  # prepared while the device still computes the step
            length, begun = self.schedule.length.total_steps, self.average.count > 0
            if self.options.weight_averaging.due(self.step, length, begun):
                self.average_weights()
            ended = self.step in (self.phases.phase.end, self.total_steps)
            if self.step % self.options.log_steps == 0 or ended:
                self.log_training(bar)
            if self.step % self.evaluation_steps == 0 or ended:
                self.evaluate(bar)
            if ended:
                self.phases.warn_if_diverged()
            bar.update(self.step)
            now = time.monotonic()
            due = self.folder.writes and now - saved >= self.options.checkpoint_seconds
            saved = now if due else saved
            agreed = self.agreement.greatest(STOP if stop.received else SAVE if due else GO_ON)
            if agreed != GO_ON or self.step == self.total_steps:
                self.elapsed, started = self.elapsed + now - started, now
                with stop.held():
                    self.save()
                saved = time.monotonic()
            if agreed == STOP and self.step < self.total_steps:
                self.agreement.close()
                distributed.barrier()  # the launcher may kill all processes when the first one exits
                raise Interrupted(f"received {stop.received or 'a signal in another process'} after step {self.step}")
        self.agreement.close()

    def evaluate_initial_weights(self) -> None:
        """Evaluate the float network that training starts from: wrong weights show, and what is lost to it can be measured."""
        values = self.evaluate_at(Precision(FLOAT, FLOAT, FLOAT), self.task.evaluate, as_trained=False)
        self.metrics.write("initial_weights", 0, **values)
        logger.info("%s of the initial weights, in float: %.2f", self.task.metric, values[self.task.metric])

    def begin_phase(self) -> None:
        """Begin the next phase with its weights and learning rate, and reset the best evaluation."""
        self.graphs.forget()
        record = self.phases.begin()
        if len(self.schedule.phases) > 1:
            self.best, self.average = Best(), WeightAverage()
            self.plateau.restart()
            self.metrics.write("phase", self.step, **record)
            logger.info(
                "phase %d of %d: %d steps at %s bits, rate %.4g, from step %d: %s",
                *(record["phase"], record["phases"], record["steps"], "/".join(map(str, record["precision"]))),
                *(record["learning_rate"], record["from_step"], record["why"]),
            )

    def train_step(self, batch: Any) -> None:
        """One optimizer step on one batch, or on this process's shard of it."""
        samples = self.epoch.samples_of(self.step)
        self.controller.step(self.step, samples=samples)
        own = (distributed.rank(),) if distributed.rank() else ()
        seed = derive(self.plan.config.seed, "step", self.step, *own)  # for modules that draw noise, such as dropout
        seed_step(self.device, seed)
        rate = self.phases.rate(self.step) * self.plateau.multiplier * self.task.rate_factor(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        passes = partial(self.passes, samples)
        loss, accuracy, objective = self.graphs.compute(self.controller.precision, batch, passes)
        outcome = StepOutput(loss, accuracy)
        if self.options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm, foreach=True)
        if self.phases.moment is not None:
            self.phases.moment.update()  # before the optimizer, which may add momentum to the gradients (Nesterov)
        self.optimizer.step()
        self.step += 1
        self.metrics.follow(self.step, rate, self.controller)
        self.logged.add(outcome)
        self.tell_schedule(outcome, objective)

    def passes(self, samples: int, batch: Any) -> tuple[Tensor, ...]:
        """Forward and backward pass of a step: loss, accuracy, and objective, which includes penalties."""
        with distributed.sharded(self.plan.config.task.parts(samples, self.plan.batch_size)):
            outcome = self.task.train(self.replica, batch)
            added = penalty(self.model, outcome.loss) if self.has_penalty else None
            objective = outcome.loss if added is None else outcome.loss + added
            distributed.weighted(objective).backward()
            return distributed.batch_means(outcome.loss, outcome.accuracy, objective)

    def tell_schedule(self, outcome: StepOutput, objective: Tensor) -> None:
        """Pass mean loss and accuracy to a feedback schedule at its observation interval."""
        schedule = self.schedule
        if not isinstance(schedule, FeedbackSchedule):
            return
        self.observed.add(outcome._replace(loss=objective) if schedule.observes_penalty else outcome)
        if self.step % schedule.observation_steps == 0:
            loss, accuracy = self.observed.take()
            precision = self.controller.precision
            self.metrics.write("observation", self.step, loss=loss, accuracy=100 * accuracy, precision=precision)
            schedule.observe(loss, accuracy)
            if isinstance(schedule, SearchSchedule) and schedule.finished:
                self.total_steps = self.step
            if isinstance(schedule, SearchSchedule) and schedule.should_reset:
                begin_anew(self.model, self.plan.build_model().state_dict())
                self.optimizer.state.clear()
                self.average = WeightAverage()
                self.plateau.restart()
                self.task.begin_anew()

    def log_training(self, bar: ProgressBar) -> None:
        """Log mean loss and accuracy since the last call."""
        self.check_finite()
        loss, accuracy = self.logged.take()
        precision = self.controller.precision
        rate = self.optimizer.param_groups[0]["lr"]
        values = {"accuracy": 100 * accuracy, "learning_rate": rate, "precision": precision}
        self.metrics.write("train", self.step, loss=loss, **values, **self.controller.record.training_values())
        bar.update(self.step, f"bits {'/'.join(map(str, precision or ()))}  loss {loss:.3f}")

    def check_finite(self) -> None:
        """Raise RunError if the loss of a step since the last record is not finite, before evaluating or saving the run."""
        total = float(self.logged.sums[0])
        if not math.isfinite(total) and not isinstance(self.schedule, SearchSchedule):
            raise RunError(
                f"the loss is {total} at step {self.step}: training diverged. Lower training.learning_rate.initial, or raise "
                "schedule.q_min or the gradient's bits."
            )

    def evaluate(self, bar: ProgressBar) -> None:
        """Evaluate at the precision of the last step (as the released code) and, if different, at q_max; update the best
        evaluation. A run in phases is evaluated at the bits of its phase alone."""
        self.check_finite()
        current = self.controller.precision
        assert current is not None, "a step has been trained"
        highest = self.schedule.highest(current)
        values = self.evaluate_at(current, self.task.evaluate)
        same = (current.weight, current.activation) == (highest.weight, highest.activation)
        same &= not self.controller.record.gates  # which choose their own precision
        values_at_q_max = values if same else self.evaluate_at(highest, self.task.evaluate, as_trained=False)
        values |= self.evaluate_average(current)
        validation = self.evaluate_at(current, self.task.validate)  # last, as it leaves the model at training precision
        value, at_q_max = values[self.task.metric], values_at_q_max[self.task.metric]
        self.best.history.append(value)
        self.best.at_q_max.append(at_q_max)
        up = self.task.higher_is_better
        if self.best.value is None or merit(value, up) > merit(self.best.value, up):
            self.best.value, self.best.step = value, self.step
            self.best.samples = self.controller.meter.state_dict()
        self.phases.record_result(value, self.best.value, self.best.step, self.task.chance)
        at_highest = {f"{self.task.metric}_at_q_max": at_q_max}
        held_out, gates = self.record_validation(validation), self.controller.record.evaluation_values()
        more = {**at_highest, **held_out, "precision": current, "cost": self.controller.cost().summary(), **gates}
        self.metrics.write("evaluation", self.step, **values, **more)
        text = f"step {self.step}/{self.total_steps}  {self.task.metric} {metric_text(value)} at {current.weight} bits"
        text += "" if same else f"  {self.task.metric} at q_max {metric_text(at_q_max)}"
        logger.info("%s  best %.2f", text, self.best.value)
        bar.update(self.step)

    def record_validation(self, validation: dict[str, float]) -> dict[str, float]:
        """Record the validation metrics, with the current weights as a candidate for the next phase; returns values to log."""
        if not validation:
            return {}
        self.best.validation.append(validation[self.task.validation_metric])
        self.plateau.observe(self.best.validation[-1])
        averaging = self.options.weight_averaging
        if not self.average.count and averaging.begins(self.best.validation, self.task.higher_is_better):
            self.average_weights()
        flatness = self.phases.flatness()
        self.phases.add_candidate(CandidateWeights(self.step, self.best.validation[-1], flatness))
        return validation if flatness is None else {**validation, "trace_sqrt_v": flatness}

    def evaluate_average(self, precision: Precision) -> dict[str, float]:
        """Metrics of the averaged weights, as `evaluate_at`; empty before averaging starts."""
        if not self.average.count:
            return {}
        with self.average.in_place_of(self.model):
            values = self.evaluate_at(precision, self.task.evaluate)
        self.best.averaged.append(values[self.task.metric])
        return {f"{name}_averaged": value for name, value in values.items()}

    def average_weights(self) -> None:
        """Include the current weights in the average, and re-estimate its batch norm statistics."""
        self.average.add(self.model)
        if not estimated_layers(self.model):
            return
        per_epoch = self.epoch.steps
        first = self.step // per_epoch * per_epoch
        with self.controller.uncounted(), self.average.in_place_of(self.model, keep=True):
            batches = islice(self.task.batches(first), per_epoch)
            estimate_statistics(self.model, batches, partial(self.task.train, self.model))

    def evaluate_at(
        self, precision: Precision, measure: Callable[[nn.Module], dict[str, float]], as_trained: bool = True
    ) -> dict[str, float]:
        """The result of `measure` for the model in evaluation mode at `precision`; with `as_trained`, gates choose theirs."""
        started = time.monotonic()
        self.controller.use(precision, choose=as_trained)
        self.model.eval()
        try:
            return measure(self.model)
        finally:
            self.model.train()
            self.evaluating += time.monotonic() - started

    def stateful_parts(self) -> dict[str, Any]:
        """The parts of a checkpoint besides the counters, by name, with `state_dict` and `load_state_dict`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            **({"schedule": self.schedule} if isinstance(self.schedule, FeedbackSchedule) else {}),
            "cost": self.controller.meter,
            "gates": self.controller.record,
            "best": self.best,
            "plateau": self.plateau,
            "task": self.task,
            "phases": self.phases,
            "logged": self.logged,
            "observed": self.observed,
            "average": self.average,
        }

    def save(self) -> None:
        """Write a checkpoint and the status."""
        self.check_finite()
        # in all processes, as some state_dict calls are collective operations
        parts = {name: part.state_dict() for name, part in self.stateful_parts().items()}
        if not self.folder.writes:
            return
        self.timing.write({"step": self.step, "seconds": self.elapsed})
        self.metrics_bytes, self.timing_bytes = self.metrics.lines.position(), self.timing.position()
        self.folder.checkpoint.save(
            {"run": self.identity(), **{counter: getattr(self, counter) for counter in COUNTERS}, **parts}
        )
        self.phases.clean_up(finished=self.step == self.total_steps)
        self.folder.write_status("running", self.step, self.total_steps)

    def identity(self) -> dict[str, Any]:
        """The identity stored in the checkpoints of this run."""
        folder, length = "/".join(self.folder.path.parts[-3:]), self.schedule.length.total_steps
        return {"folder": folder, "seed": self.plan.config.seed, "total_steps": length}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the state that `save` wrote."""
        for counter in COUNTERS:
            setattr(self, counter, state[counter])
        for name, part in self.stateful_parts().items():
            part.load_state_dict(state[name])
        if isinstance(self.schedule, SearchSchedule) and self.schedule.finished:
            self.total_steps = self.step
