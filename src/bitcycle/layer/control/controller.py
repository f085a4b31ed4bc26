"""The controller sets the bits of all layers at each step and counts the cost of the steps."""

import logging
import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitcycle import distributed
from bitcycle.hardware import Cost, CostMeter, HardwareOptions, Workload, hardware_options, trace
from bitcycle.layer.control.report import added_layers
from bitcycle.layer.control.resumption import check_resumed, schedule_record
from bitcycle.layer.control.watch import (
    Call,
    FirstStep,
    Watch,
    called_parts,
    layers_outside,
    name_functions,
    name_zero_weights,
    products_of,
    samples_of,
    sizes_of,
)
from bitcycle.layer.gates.gate import GateRecord
from bitcycle.layer.products.quantized_product import QuantizedProduct, separate_noise
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import modules_of
from bitcycle.precision import FLOAT, Precision, effective, read_precision
from bitcycle.quantizer import QuantizerOptions, with_formats
from bitcycle.quantizer.autograd import is_computed_again, is_recomputation
from bitcycle.randomness import int32_key
from bitcycle.schedule import FeedbackSchedule, GatedSchedule, Schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)


class PrecisionController:
    """Applies a schedule to a converted model: call `step(t)` before the forward pass of step t.

    Costs depend on the shapes of the model's products, which are traced from the first training batch. The number of samples of a
    step is passed to `step`, and all forward passes of the first step are theirs; otherwise samples are counted in the model's
    training-mode forward passes with gradients, which suffices for a plain loop. With several processes, which are taken to have
    batches of the same size (and gates that choose alike), the samples of all count.
    If training calls not the model but its parts (in Lightning, or of a ModuleDict), the samples are those of the part that is
    called first, and the products those of all calls of the first step.

    The trace runs a copy of the model once, with its forward hooks, which may be part of what it computes: a hook that collects
    outputs sees those of the first batch twice. To avoid that, trace before registering it: `workload=trace(model, sample)`.

    Args:
        model: converted by `quantize_model`; a float model is accepted and has the cost of float32. May be wrapped by
            torch.compile or DistributedDataParallel.
        schedule: a result of `bitcycle.schedule`.
        seed: of the noise for stochastic rounding, which depends on (seed, rank, step, layer, call within the step, element).
        hardware: name or options of the cost model.
        workload: the traced model, if known, whose samples `step` receives; otherwise it is traced at the first training batch.
        batch_dimension: sample dimension of the model's first input tensor (1 for an LSTM's [T, N, F]).
        rank: of this process in distributed training, on which its noise depends; None: that of torch.distributed.

    Raises:
        SettingError (a ValueError): if the quantizer does not support bits of the schedule, or the model was converted without
            its formats or gates.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        seed: int = 0,
        hardware: str | HardwareOptions = "bitops",
        workload: Workload | None = None,
        batch_dimension: int = 0,
        rank: int | None = None,
    ) -> None:
        network: object = model
        if not isinstance(network, nn.Module):
            remedy = "give the converted network, and several of them as an nn.ModuleDict or nn.ModuleList"
            raise SettingError("model", type(model).__name__, "is not a torch.nn.Module", remedy)
        given: object = schedule
        if not isinstance(given, Schedule):
            remedy = f"give bitcycle.schedule({schedule!r}, total_steps=...)"
            raise SettingError("schedule", schedule, "is not a schedule bound to the length of a run", remedy)
        if batch_dimension < 0:  # from the end it would name features in one tensor, and samples in another
            remedy = "count from the first dimension: 0, or 1 for [T, N, F]"
            raise SettingError("batch_dimension", batch_dimension, "is negative", remedy)
        self.schedule, self.seed, self.rank, self.batch_dimension = schedule, seed, rank, batch_dimension
        self.states = modules_of(model, PrecisionState)
        separate_noise(model)
        self._quantizers = _quantizers_of(model, schedule)
        self.precision: Precision | None = None
        self._used: Precision | None = None  # outside the schedule
        self._is_at_q_max = False
        self.next_step = 0
        self._postponed: Counter[str] = Counter()  # passes without gradients that checkpointing computes again, by part
        self._counting, self._depth = True, 0
        self._untraced: dict[QuantizedProduct, str] = {}  # in the first step; by name, which is empty once traced
        self._awaits_batch, self._uncounted_steps = False, 0
        self._record = GateRecord(model)
        if isinstance(schedule, GatedSchedule) and self.states and not self._record.gates:
            remedy = "use quantize_model(model, ..., schedule=schedule)"
            raise SettingError(
                "schedule", schedule.name, "the model was converted without gates to choose bits", remedy
            )
        self._meter, self._samples_given = CostMeter(None, hardware_options(hardware), schedule.reference), 0
        self._first, self._is_tracing, self._noticed = FirstStep(), True, set[str]()
        self._feedback = schedule if isinstance(schedule, FeedbackSchedule) else None
        self._unobserved = self._feedback.state_dict() if self._feedback else None
        if others := layers_outside(model, self.states):
            logger.warning(
                "layers outside of the model were converted with it, share its bits, and follow this controller, too: %s; convert"
                " parts with schedules of their own one by one",
                ", ".join([*others[:3], *(["..."] if len(others) > 3 else [])]),
            )
        if not self.states and schedule.lowest.weight < FLOAT:
            warnings.warn("no layer of the model is quantized: call quantize_model first", stacklevel=2)
        name_zero_weights(model, schedule.lowest)
        if added := added_layers(model):
            names = ", ".join([*added[:3], *(["..."] if len(added) > 3 else [])])
            logger.warning("layers added after the conversion stay float: %s; add them before quantize_model", names)
        if workload is not None:
            self._set_workload(workload)  # as the command line does, which names a shortfall itself
        else:
            self._notice("shortfall", schedule.shortfall)
            for name, part in called_parts(model).items():
                watch = Watch(self._begin_call, self._end_call, name)
                part.register_forward_pre_hook(watch.before, with_kwargs=True)
                part.register_forward_hook(watch.after, always_call=True)

    def step(self, t: int, samples: int = 0) -> Precision:
        """Set the bits and the noise of step t; count `samples` training samples (of all processes) at these bits, if
        given.

        Raises:
            SettingError (a ValueError): for a step outside the schedule's run, for bits that the quantizer does not support,
                for a negative number of samples, and within `at_q_max`.
            TypeError: if t or samples is not a whole number (Python's, NumPy's, or a tensor's).
        """
        t, samples = operator.index(t), operator.index(samples)
        if samples < 0:
            raise SettingError("samples", samples, "is negative", "give the number of samples of the step")
        if self._is_at_q_max:
            raise SettingError(
                "step", t, "begins within at_q_max", "begin it after the `with` block, which sets the bits back"
            )
        precision = self.schedule(t)
        self._uncounted_steps += self._awaits_batch
        self._awaits_batch = samples == 0
        if self.precision is None:
            self._record.forget()
        if precision != self.precision:
            self._check(precision)
        if self._feedback is not None:
            self._check_observations(self._feedback, t)
        self._name_omitted()
        self._untraced = {}  # later batches may have other layers, as mixtures of experts do
        self._depth = 0  # a forward pass that was interrupted by Ctrl-C has not ended, for the hooks
        rank = distributed.rank() if self.rank is None else self.rank
        key = int32_key("noise", self.seed, t, *(("rank", rank) if rank else ()))
        for state in self.states:
            state.begin_step(key)
            state.control(precision)
        self.next_step, self._is_tracing = t + 1, not self._first.calls
        self._postponed.clear()
        self.precision, self._used = precision, None
        self._samples_given = samples
        if samples:
            self._meter.add(precision, samples)
        target = self.schedule.compute_target if isinstance(self.schedule, GatedSchedule) else None
        self._record.begin_step(target)
        return precision

    def _check_observations(self, schedule: FeedbackSchedule, t: int) -> None:
        """Warn once if a feedback schedule has received no observations."""
        if self._unobserved is None:
            return
        if schedule.state_dict() != self._unobserved:
            self._unobserved = None
        elif t > 2 * schedule.observation_steps:
            self._unobserved = None
            message = "schedule %s has received no loss in %d steps and does not advance: call schedule.observe every %d steps"
            logger.warning(message, schedule.name, t, schedule.observation_steps)

    def follow(self, model: nn.Module) -> None:
        """Also set the bits of another converted model, such as a copy with averaged weights. Raises SettingError (a
        ValueError) for a model without quantized layers."""
        states = modules_of(model, PrecisionState)
        if self.states and not states:
            remedy = "give a copy of the converted model, or a model that quantize_model converted"
            raise SettingError("model", type(model).__name__, "has no quantized layers to set bits of", remedy)
        for state in states:
            state.control(self._used or self.precision or state.precision)
        self.states += states

    def state_dict(self) -> dict[str, Any]:
        """State of step, cost and schedule, for a checkpoint, with the settings and the length of the schedule."""
        return {
            "next_step": self.next_step,
            "bound_schedule": schedule_record(self.schedule),
            "schedule": self._feedback.state_dict() if self._feedback else {},
            "cost": self.meter.state_dict(),
            "gates": self._record.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the model has the bits of the last step.

        Raises:
            SettingError (a ValueError), changing nothing: for the state of another schedule or of anything but a controller, and
                for one whose last step is outside of this controller's run. A warning names another length.
        """
        if missing := {"next_step", "cost", "gates"} - set(state):
            problem, remedy = f"has no {', '.join(sorted(missing))}", "give what state_dict of a controller returned"
            raise SettingError("state", ", ".join(map(str, list(state)[:3])), problem, remedy)
        if "bound_schedule" in state:  # states of earlier versions lack it
            check_resumed(state["bound_schedule"], self.schedule)
        if state["next_step"] > self.schedule.length.total_steps:
            self.schedule(state["next_step"] - 1)
        self.next_step = state["next_step"]
        self._meter.load_state_dict(state["cost"])
        if self._feedback is not None:
            self._feedback.load_state_dict(state["schedule"])
        self._record.load_state_dict(state["gates"])
        if self.next_step:
            self.use(self.schedule(self.next_step - 1))

    def _check(self, precision: Precision) -> None:
        for quantizer in self._quantizers:
            quantizer.check([precision])

    def use(self, precision: Precision | tuple[int, int, int], choose: bool | None = None) -> None:
        """Set bits outside the schedule, as for an evaluation at q_max; the next `step` sets them again. Training passes until
        then cost these bits, unless `step` was given their samples.

        Args:
            precision: the bits, as a `Precision` or three numbers (weight, activation, gradient).
            choose: whether gates choose the bits; otherwise all blocks have these bits. None: only at the current precision.

        Raises:
            SettingError (a ValueError): for weight or activation bits that the model's quantizer does not support, or anything
                else than three numbers.
        """
        precision = read_precision(precision)
        self._check(precision._replace(gradient=FLOAT))
        self._record.choose(precision == self.precision if choose is None else choose)
        for state in self.states:
            state.control(precision)
        self._used = effective(precision)

    @contextmanager
    def at_q_max(self) -> Iterator[None]:
        """Context of an evaluation at the schedule's highest bits; then the model has its previous bits again.

        `with control.at_q_max(): evaluate(model)`
        """
        before = [(state, state.precision, state.is_controlled) for state in self.states]
        chose, used, was_at_q_max = self._record.chooses, self._used, self._is_at_q_max
        self.use(self.schedule.reference)
        self._is_at_q_max = True
        try:
            yield
        finally:
            self._record.choose(chose)
            self._used, self._is_at_q_max = used, was_at_q_max
            for state, precision, was_controlled in before:
                state.control(precision, was_controlled)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context of training-mode forward passes that are not counted, such as for estimating batch norm statistics."""
        self._counting = False
        self._record.count_choices(False)
        try:
            yield
        finally:
            self._counting = True
            self._record.count_choices(True)

    def cost(self) -> Cost:
        """The cost of the steps so far, in total and relative to the same steps at static q_max. Raises RuntimeError before
        the first training batch, when shapes are not known yet. Warns of steps without a counted batch."""
        if self._meter.workload is None:
            raise RuntimeError(
                "the cost is not known before the first forward pass in training mode; train one step first, call model(x) and"
                " not model.forward(x), and give the controller the module that is called, or a ModuleDict of those that are"
            )
        if self._uncounted_steps:
            logger.warning(
                "the cost omits %d steps without a forward pass in training mode: give step(t, samples=...); the copy of a"
                " controller does not see the forward passes of the copied model",
                self._uncounted_steps,
            )
            self._uncounted_steps = 0
        self._name_omitted()
        return self.meter.cost()

    @property
    def meter(self) -> CostMeter:
        """The counter behind `cost`, for saving and restoring."""
        self._record.count(self._meter)
        return self._meter

    @property
    def record(self) -> GateRecord:
        """The choices of the model's gates, for logging, saving and restoring; empty for a model without gates."""
        self._record.count(self._meter)
        return self._record

    def _set_workload(self, workload: Workload) -> None:
        self._record.set_workload(workload)
        self._meter.workload = workload

    def _begin_call(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], part: str) -> None:
        """Count an outermost forward pass, and trace those of the first step; `part` is the module's name in the controller's
        model."""
        self._depth += 1
        if self._depth > 1:
            return
        if not (model.training and self._counting) or self.precision is None:
            return
        if not torch.is_grad_enabled():
            self._postponed[part] += is_computed_again()
            return
        if is_recomputation():
            if not self._postponed[part]:
                return
            self._postponed[part] -= 1
        self._awaits_batch = False
        is_trained = tuple(parameter.requires_grad for parameter in model.parameters())
        if self._is_tracing:
            self._trace(model, arguments, keywords, part, is_trained)
        else:
            self._notice("calls", self._first.change(part, is_trained))
        self._notice("sizes", self._first.resizing(part, sizes_of(arguments, keywords, self.batch_dimension)))
        if not self._samples_given and self._first.counts(part):
            samples = samples_of(arguments, keywords, self.batch_dimension) * distributed.world_size()
            self._meter.add(self._used or self.precision, samples)
            self._record.count_without_choice(self._meter, self._used or self.precision, samples)

    def _notice(self, kind: str, words: str) -> None:
        """Warn of what the schedule or the cost misses, once of each kind."""
        if words and kind not in self._noticed:
            self._noticed.add(kind)
            logger.warning(words)

    def _trace(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        part: str,
        is_trained: tuple[bool, ...],
    ) -> None:
        """Add the products of a forward pass of the first step. Raises SettingError for a batch without samples."""
        samples = samples_of(arguments, keywords, self.batch_dimension, self._samples_given)
        if not samples:
            shapes = [list(leaf.shape) for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
            problem = "has no samples, and the cost counts the products of the first training batch"
            which = f"if dimension {self.batch_dimension} is not that of the samples, give batch_dimension"
            raise SettingError("batch", shapes, problem, f"leave out empty batches, or {which}")
        passes_gradient = any(
            leaf.requires_grad for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)
        )

        def traced() -> Workload:
            # overrides the hooks of checkpointing
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                workload = trace(model, *arguments, samples=samples, **keywords)
            name_functions(model, workload)
            seen = {o.module for o in workload.operations if o.macs or o.kind == "embedding"}
            for name, product in products_of(model).items():
                if name in seen or not name:  # a model that is a single layer has run
                    self._untraced[product] = ""
                else:
                    self._untraced.setdefault(product, f"{part}.{name}".lstrip("."))
            return workload.within(part, type(model).__name__)

        self._first.add(Call(part, samples, passes_gradient, is_trained), traced)
        self._set_workload(self._first.workload(self._samples_given / distributed.world_size()))

    def _end_call(self, _model: nn.Module) -> None:
        self._depth -= 1

    def _name_omitted(self) -> None:
        """Warn of layers that the first step calls and the trace, of its first forward pass in evaluation mode, does not."""
        names = {
            product: name
            for product, name in self._untraced.items()
            if name and product.layer_number in product.precision.calls
        }
        self._untraced |= dict.fromkeys(names, "")
        if names:
            logger.warning(
                "the cost omits layers that training calls and the traced forward pass, the first one in evaluation mode,"
                " does not: %s",
                ", ".join(sorted(names.values())),
            )


def _quantizers_of(model: nn.Module, schedule: Schedule) -> list[QuantizerOptions]:
    """The options of the quantizers of a model. Raises SettingError if one does not support all bits of the schedule, or the
    model was converted without its formats."""
    options = (product.quantizer_options for product in modules_of(model, QuantizedProduct))
    quantizers = list({id(quantizer): quantizer for quantizer in options}.values())
    for quantizer in quantizers:
        if with_formats(quantizer, schedule) != quantizer:
            remedy = "use quantize_model(model, ..., schedule=schedule)"
            lists = schedule.options.format_lists
            raise SettingError("schedule.formats", lists, "the model was converted without them", remedy)
        quantizer.check_ends(schedule.lowest, schedule.reference)
        quantizer.check(sorted(schedule.precisions))  # before the step that needs them
    return quantizers
