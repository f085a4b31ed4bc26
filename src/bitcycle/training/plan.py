"""The plan of a run: length, precision, products, cost, folder. Planning reads no data and trains nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from bitcycle.configuration import GROUPS, RunConfig
from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.epoch import Epoch
from bitcycle.hardware import FLOAT_PRECISION, Cost, Workload
from bitcycle.layer import Choices, LayerRule, quantize_model
from bitcycle.model import build_seeded, check_kind
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import NoQuantizer, with_formats
from bitcycle.randomness import derive
from bitcycle.schedule import Phase, Schedule, SearchSchedule, Static, UndecidedSchedule
from bitcycle.settings import SettingError
from bitcycle.training.initial_weights import fitting_weights, load_initial_weights
from bitcycle.training.naming import run_hash, run_path
from bitcycle.training.network import ConvertedNetwork, blocks, network
from bitcycle.training.phases import phase_rate
from bitcycle.training.run_folder import RunFolder


@dataclass(frozen=True)
class Plan:
    """A validated run before training."""

    config: RunConfig
    info: DatasetInfo
    epoch: Epoch
    total_steps: int
    schedule: Schedule
    workload: Workload
    layers: tuple[LayerRule, ...]
    parameters: int
    folder: RunFolder
    choices: Choices | None
    hash: str
    found: dict[str, Any] = field(default_factory=dict)
    preceded_by: dict[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Training samples in a full batch."""
        return self.config.training.batch_size

    def samples(self, first: int, steps: int) -> int:
        """Training samples of `steps` steps from step `first` on, including the smaller last batch of each epoch."""
        return self.epoch.samples_before(first + steps) - self.epoch.samples_before(first)

    def histogram(self, course: Sequence[tuple[Precision, int]]) -> Counter[Precision]:
        """Training samples at each precision of a run with this course."""
        histogram: Counter[Precision] = Counter()
        step = 0
        for precision, steps in course:
            histogram[precision] += self.samples(step, steps)
            step += steps
        return histogram

    def cost(self) -> Cost | None:
        """The cost of the whole run; None for a schedule that depends on the training."""
        return self._cost_of(self.histogram(self.schedule.run_lengths)) if self.schedule.fixed else None

    def counting(self) -> dict[str, Any]:
        """How cost is counted: the settings of the hardware group as plain values, and the code of a user's own cost model."""
        return self.config.hardware.counting()

    def cost_bounds(self) -> tuple[Cost, Cost]:
        """The minimum and maximum cost of the whole run."""
        if self.choices is None:
            courses = self.schedule.min_cost, self.schedule.max_cost
            least, most = (self._cost_of(self.histogram(course)) for course in courses)
            return least, most
        samples = self.samples(0, self.total_steps)
        extremes = self.choices.extremes(self.workload, samples)
        least, most = (
            self._cost_of({self.schedule(0): samples}, self.choices.histograms(counts)) for counts in extremes
        )
        return least, most

    def _cost_of(
        self, histogram: Mapping[Precision, int], chosen: Mapping[str, Mapping[Precision, int]] | None = None
    ) -> Cost:
        cost: Cost = self.config.hardware.cost(self.workload, histogram, self.schedule.reference, chosen)
        return cost

    @cached_property
    def preliminary(self) -> "Plan | None":
        """The preliminary run that determines this run's schedule, in a subfolder; None if the schedule is known."""
        if not isinstance(self.schedule, UndecidedSchedule):
            return None
        options = self.schedule.preliminary
        schedule = options.bind(self.schedule.length.total_steps, self.schedule.length.steps_per_epoch)
        config, folder = replace(self.config, schedule=options), self.folder.below(options.name)
        return replace(
            self, config=config, schedule=schedule, total_steps=schedule.steps, folder=folder, hash=run_hash(config)
        )

    def resolve(self, found: dict[str, Any], preceded_by: dict[str, Any]) -> "Plan":
        """The same run under the same name, with the schedule determined by the result of the preliminary run."""
        assert isinstance(self.schedule, UndecidedSchedule)
        return replace(self, schedule=self.schedule.resolve(found), found=found, preceded_by=preceded_by)

    def build_model(self, compile: bool = False) -> nn.Module:
        """The converted model with its initial weights."""
        weights, gates = (derive(self.config.seed, part) for part in ("weights", "gates"))
        model = build_seeded(self.config.model, self.info.shape, weights)
        load_initial_weights(self.config.model, model)
        return quantize_model(
            model,
            self.config.quantizer.as_released(),
            compile=compile,
            compute=self.config.training.compute,
            recompute=self.config.training.recompute,
            schedule=self.schedule,
            seed=gates,
        )

    def describe(self) -> dict[str, Any]:
        """The plan as plain values: the content of `dry_run=json`."""
        cost, bounds, first = self.cost(), self._described_bounds(), self.preliminary
        lengths = self.schedule.run_lengths if self.schedule.fixed else None
        return {
            "run_dir": str(self.folder.path),
            "state": self.state(),
            "scale": self.config.scale,
            "total_steps": self.total_steps,
            "batch_size": self.batch_size,
            "steps_per_epoch": self.epoch.steps,
            "parameters": self.parameters,
            "precision": [[*precision, steps] for precision, steps in lengths] if lengths is not None else None,
            "formats": dict(zip(("forward", "gradient"), map(list, self.schedule.options.format_lists or ()))) or None,
            "phases": [self.describe_phase(phase) for phase in self.schedule.phases],
            "macs_per_sample": {"total": self.workload.macs_of_sample, "by_layer": self.workload.macs_per_sample},
            "cost": cost.summary() if cost is not None else dict.fromkeys(bounds["least"]),
            "cost_bounds": bounds,
            "layers": [rule._asdict() for rule in self.layers],
            "preliminary": first
            and {
                "schedule": first.schedule.name,
                "run_dir": str(first.folder.path),
                "state": first.folder.state(),
                "total_steps": first.total_steps,
                "cost_bounds": first._described_bounds(),
            },
        }

    def _described_bounds(self) -> dict[str, dict[str, Any]]:
        least, most = self.cost_bounds()
        return {"least": least.summary(), "most": most.summary()}

    def state(self) -> str:
        """new, resumable or done; a run is also resumable if its preliminary run has begun."""
        first, state = self.preliminary, self.folder.state()
        return "resumable" if state == "new" and first is not None and first.folder.state() != "new" else state

    def describe_phase(self, phase: Phase) -> dict[str, Any]:
        """A phase as plain values; its learning rate is null if it depends on the starting weights."""
        interval = self.config.training.evaluation_steps or self.epoch.steps
        first = phase_rate(self.config.training.learning_rate, phase, phase.start)
        end = min(phase.end, self.total_steps)
        return {
            "first_step": phase.start,
            "steps": end - phase.start,
            "precision": list(self.schedule(phase.start)) if not isinstance(self.schedule, UndecidedSchedule) else None,
            "learning_rate": first if phase.rate_ratio is None else None,
            "start_from": phase.start_from,
            "evaluations": -(-end // interval) - phase.start // interval,
        }


def make_plan(config: RunConfig) -> Plan:
    """Plan a run. Raises SettingError for incompatible settings; DataError if the folder of a custom dataset is missing."""
    name, path = run_hash(config), run_path(config)
    folder = RunFolder(path)
    info = _within("dataset", config.dataset.info, config.data_folder)
    _within("model", check_kind, config.model, config.dataset.name, info.shape)
    _within("task", config.task.check, config.dataset)
    epoch: Epoch = _within("task", config.task.epoch, info, config.training.batch_size)
    total_steps = config.training.total_steps(epoch.steps)
    schedule = _bind_schedule(config, info, total_steps, epoch.steps)
    for phase in schedule.phases:
        _within("training.learning_rate", config.training.learning_rate.check_length, phase.steps)
    total_steps = schedule.steps
    if config.model.initial_weights is not None:
        _within("model", fitting_weights, config.model, config.model.build(info.shape))
    evaluated = schedule.reference._replace(gradient=FLOAT)  # at q_max, without gradients
    quantizer = with_formats(config.quantizer, schedule)
    _within("quantizer", quantizer.check, [*schedule.precisions, evaluated])
    _within("quantizer", quantizer.check_ends, schedule.lowest, schedule.reference)
    converted: ConvertedNetwork = _within("quantizer", network, config.model, info, config.task, quantizer, schedule)
    if config.hardware.run_samples is None:  # to which published image counts refer
        samples = epoch.samples_before(total_steps)
        config = replace(config, hardware=replace(config.hardware, run_samples=samples))
    return Plan(
        config=config,
        info=info,
        epoch=epoch,
        total_steps=total_steps,
        schedule=schedule,
        workload=converted.workload,
        layers=converted.layers,
        parameters=converted.parameters,
        folder=folder,
        hash=name,
        choices=converted.choices,
    )


def _bind_schedule(config: RunConfig, info: DatasetInfo, total_steps: int, per_epoch: int) -> Schedule:
    options = _within("schedule", config.schedule.configure_for, *_within("model", blocks, config.model, info.shape))
    schedule: Schedule = _within("schedule", options.bind, total_steps, per_epoch)
    if isinstance(config.quantizer, NoQuantizer):
        if isinstance(schedule, SearchSchedule):
            problem = "searches for a precision, which requires a quantizer"
            raise SettingError("schedule", schedule.name, problem, "choose a quantizer")
        return _FloatSchedule(Static(q_max=FLOAT), schedule.length, schedule.reference, schedule.phases)
    return schedule


@dataclass(frozen=True)
class _FloatSchedule(Schedule):
    """Float32 at every step, for runs without quantizer; the cost's reference and the phases are still the schedule's."""

    reference: Precision = FLOAT_PRECISION
    phases: tuple[Phase, ...] = ()


def _within(group: str, function: Any, *arguments: Any) -> Any:
    """function(*arguments), with setting errors that name the configuration group."""
    try:
        return function(*arguments)
    except SettingError as error:
        if error.field.partition(".")[0] in GROUPS:
            raise  # already names another group
        raise error.within(group) from None
