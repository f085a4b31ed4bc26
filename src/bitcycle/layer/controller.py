"""The controller sets the bits of all layers at each step and counts the cost of the steps."""

from __future__ import annotations

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
from bitcycle.layer.compilation import not_compiled
from bitcycle.layer.conversion import PRODUCT_LAYERS
from bitcycle.layer.gate_record import GateRecord
from bitcycle.layer.quantized import NOTICED_SHARE, QuantizedLayer
from bitcycle.layer.quantized_product import QuantizedProduct
from bitcycle.layer.state import PrecisionState
from bitcycle.randomness import int32_key
from bitcycle.schedule import FLOAT, FeedbackSchedule, GatedSchedule, Precision, Schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)


class PrecisionController:
    """Applies a schedule to a converted model: call `step(t)` before the forward pass of step t.

    Costs depend on the shapes of the model's products, which are traced from the first training batch. The number of samples of a
    step is passed to `step`; otherwise samples are counted in the model's training-mode forward passes with gradients, which
    suffices for a plain loop. If training calls not the model but a submodule with all quantized layers (as in Lightning), the
    forward passes of that submodule are counted.

    Args:
        model: converted by `quantize_model`; a float model is accepted and has the cost of float32. May be wrapped by
            torch.compile or DistributedDataParallel.
        schedule: a result of `bitcycle.schedule`.
        seed: of the noise for stochastic rounding, which depends on (seed, rank, step, layer, call within the step, element).
        hardware: name or options of the cost model.
        workload: the traced model, if known; otherwise it is traced at the first training batch.
        batch_dimension: sample dimension of the model's first input tensor (1 for an LSTM's [T, N, F]).
        rank: of this process in distributed training, on which its noise depends; None: that of torch.distributed.

    Raises:
        SettingError (a ValueError): if the quantizer needs the length of an epoch and the schedule does not know it, or if
            the quantizer has no format for the lowest or highest bits of the schedule.
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
        given: object = schedule
        if not isinstance(given, Schedule):
            remedy = f"give bitcycle.schedule({schedule!r}, total_steps=...)"
            raise SettingError("schedule", schedule, "is not a schedule bound to the length of a run", remedy)
        self.schedule, self.seed, self.rank, self.batch_dimension = schedule, seed, rank, batch_dimension
        self.states = precision_states(model)
        layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
        products = [module for module in model.modules() if isinstance(module, QuantizedProduct)]
        options = (product.quantizer_options for product in products)
        self._quantizers = list({id(quantizer): quantizer for quantizer in options}.values())
        for quantizer in self._quantizers:
            quantizer.check_ends(schedule.lowest, schedule.reference)
        self._stepping = [layer for layer in layers if layer.weight_quantizer.works_each_step]
        if any(quantizer.needs_epochs for quantizer in self._quantizers):
            schedule.length.epoch("update", "epoch", "bind the schedule with steps_per_epoch")
        self.precision: Precision | None = None
        self.next_step, self._has_counted = 0, False
        self._counting, self.depth = True, 0
        self._unseen = set[str]()
        self._awaits_batch, self._uncounted_steps = False, 0
        self._record = GateRecord(model)
        self._meter, self._told = CostMeter(None, hardware_options(hardware), schedule.reference), 0
        self._traced: list[tuple[nn.Parameter, bool]] = []
        self._feedback = schedule if isinstance(schedule, FeedbackSchedule) else None
        self._unobserved = self._feedback.state_dict() if self._feedback else None
        if not self.states and schedule.lowest.weight < FLOAT:
            warnings.warn("no layer of the model is quantized: call quantize_model first", stacklevel=2)
        if workload is not None:
            self._set_workload(workload)
        else:
            self._watch(model)

    def step(self, t: int, samples: int = 0) -> Precision:
        """Set the bits and the noise of step t; count `samples` training samples at these bits, if given.

        Raises:
            SettingError (a ValueError): for a step outside the schedule's run, for bits that the quantizer does not support, and
                for a negative number of samples.
            TypeError: if t or samples is not a whole number (Python's, NumPy's, or a tensor's).
        """
        t, samples = operator.index(t), operator.index(samples)
        if samples < 0:
            raise SettingError("samples", samples, "is negative", "give the number of samples of the step")
        precision = self.schedule(t)
        self._uncounted_steps += self._awaits_batch
        self._awaits_batch = samples == 0
        if precision != self.precision:
            self._check(precision)
        if self._feedback is not None:
            self._check_observations(self._feedback, t)
        epoch = self.schedule.length.steps_per_epoch
        for layer in self._stepping:
            layer.begin_step(new_epoch=epoch is not None and t % epoch == 0)
        rank = distributed.rank() if self.rank is None else self.rank
        key = int32_key("noise", self.seed, t, *(("rank", rank) if rank else ()))
        for state in self.states:
            state.is_controlled = True
            state.begin_step(key)
            if precision != state.precision and not state.fixed:
                state.set(precision)
        self.next_step, self._has_counted = t + 1, False
        self.precision = precision
        self._told = samples
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
        """Also set the bits of another converted model, such as a copy with averaged weights."""
        for state in precision_states(model):
            state.is_controlled = True
            if not state.fixed and self.precision is not None:
                state.set(self.precision)
            self.states.append(state)

    def state_dict(self) -> dict[str, Any]:
        """State of step, cost and schedule, for a checkpoint."""
        return {
            "next_step": self.next_step,
            "schedule": self._feedback.state_dict() if self._feedback else {},
            "cost": self.meter.state_dict(),
            "gates": self._record.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the model has the bits of the last step."""
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
        """Set bits outside the schedule, as for an evaluation at q_max; the next `step` sets them again.

        Args:
            precision: the bits, as a `Precision` or three numbers (weight, activation, gradient).
            choose: whether gates choose the bits; otherwise all blocks have these bits. None: only at the current precision.

        Raises:
            SettingError (a ValueError): for weight or activation bits that the model's quantizer does not support, or anything
                else than three numbers.
        """
        try:
            precision = Precision(*precision)
        except TypeError as error:
            remedy = "use three numbers of bits: weight, activation, gradient"
            raise SettingError("precision", precision, "is not a precision", remedy) from error
        self._check(precision._replace(gradient=FLOAT))
        self._record.choose(precision == self.precision if choose is None else choose)
        for state in self.states:
            state.is_controlled = True
            if not state.fixed:
                state.set(precision)

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
                "the cost is not known before the first forward pass in training mode; train one step first, and give the"
                " controller the module whose forward pass is called"
            )
        if self._uncounted_steps:
            logger.warning(
                "the cost omits %d steps without a forward pass in training mode: give step(t, samples=...); the copy of a"
                " controller does not see the forward passes of the copied model",
                self._uncounted_steps,
            )
            self._uncounted_steps = 0
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

    def _watch(self, model: nn.Module) -> None:
        """Hook the calls of the model, and of its core in case training does not call the model itself (Lightning)."""
        parts = [model, _core(model)] if hasattr(model, "training_step") else [model]
        for module in dict.fromkeys(parts):
            watch = _Watch(self, next(name for name, part in model.named_modules() if part is module))
            module.register_forward_pre_hook(watch.before, with_kwargs=True)
            module.register_forward_hook(watch.after, always_call=True)

    def see(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], prefix: str = "") -> None:
        """Count a batch, and trace the model with the first one; `prefix` is its name in the controller's model."""
        if not (model.training and self._counting and torch.is_grad_enabled()) or self.precision is None:
            return
        if self._has_counted and torch._C._current_graph_task_id() >= 0:
            return  # recomputation by activation checkpointing
        self._has_counted, self._awaits_batch = True, False
        if self._meter.workload is None:
            samples = _samples(arguments, keywords, self.batch_dimension, self._told)
            # overrides the hooks of checkpointing
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                workload = trace(model, *arguments, samples=samples, **keywords)
            _name_functions(model, workload)
            self._set_workload(workload.within(prefix))
            self._traced = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
            seen = {o.module for o in workload.operations if o.macs or o.kind == "embedding"}
            self._unseen = set(_products(model)) - seen - {""}  # a model that is a single layer has run
        elif any(parameter.requires_grad != before for parameter, before in self._traced):
            self._traced = []
            logger.warning(
                "parameters have been frozen or unfrozen since the first batch, whose products the cost counts for all steps;"
                " for other counts, use a new controller from that step on"
            )
        if not self._told:
            self._meter.add(self.precision, _samples(arguments, keywords, self.batch_dimension))

    def name_uncounted(self, model: nn.Module) -> None:
        """Warn of layers that training runs and the trace, which is in evaluation mode, does not; after the first batch."""
        if not self._unseen:
            return
        products = _products(model)
        names = [name for name in self._unseen if products[name].layer_number in products[name].precision.calls]
        self._unseen = set()
        if names:
            logger.warning(
                "the cost omits layers that run in training mode only, as it counts the products of evaluation mode: %s",
                ", ".join(sorted(names)),
            )


class _Watch:
    """Hooks of a controller on the outermost call of a model. In a copy of the model they do nothing."""

    def __init__(self, controller: PrecisionController | None = None, prefix: str = "") -> None:
        self.controller, self.prefix = controller, prefix

    @not_compiled
    def before(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.controller is not None:
            self.controller.depth += 1
            if self.controller.depth == 1:
                self.controller.see(model, arguments, keywords, self.prefix)

    @not_compiled
    def after(self, model: nn.Module, *_: Any) -> None:
        if self.controller is not None:
            self.controller.depth -= 1
            if self.controller.depth == 0:
                self.controller.name_uncounted(model)

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


def precision_states(model: nn.Module) -> list[PrecisionState]:
    """The precision states that the layers of a converted model read."""
    return [module for module in model.modules() if isinstance(module, PrecisionState)]


def _products(model: nn.Module) -> dict[str, QuantizedProduct]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedProduct)}


def _core(model: nn.Module) -> nn.Module:
    """The smallest submodule that contains all quantized products of the model."""

    def products(module: nn.Module) -> int:
        return sum(isinstance(part, QuantizedProduct) for part in module.modules())

    total = products(model)
    while inner := next((child for child in model.children() if products(child) == total), None):
        if not total or isinstance(inner, nn.ModuleList | nn.ModuleDict | QuantizedProduct):
            break
        model = inner
    return model


def _name_functions(model: nn.Module, workload: Workload) -> None:
    """Warn of products of functions (linear, einsum, scaled_dot_product_attention), which conversion cannot reach."""
    modules, found = dict(model.named_modules()), Counter[str]()
    for operation in workload.operations:
        known = isinstance(modules.get(operation.module), PRODUCT_LAYERS) or operation.kind == "unknown"
        if operation.is_float and not known:
            found[operation.module] += operation.macs
    share = sum(found.values()) / max(workload.macs, 1)
    if share > NOTICED_SHARE and any(isinstance(module, QuantizedProduct) for module in modules.values()):
        logger.warning(
            "%.0f %% of the multiply-accumulates are computed by functions and stay float, mostly in %s; use modules such as"
            " nn.Linear, nn.MultiheadAttention and bitcycle.layer.MatrixProduct to quantize them",
            *(100 * share, ", ".join(name for name, _ in found.most_common(3))),
        )


def _samples(arguments: tuple[Any, ...], keywords: dict[str, Any], dimension: int, told: int = 0) -> int:
    """Samples of a batch: the length of a list of images, or of a dimension of the first non-scalar tensor; `told` if the
    arguments, such as objects of other libraries, have no tensor."""
    tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    if not tensors and told:
        return told
    if not tensors:
        raise RuntimeError(
            "cannot tell the batch size: the model's forward pass has no tensor; give step(t, samples=...)"
        )
    images = next(iter((*arguments, *keywords.values())), None)
    if isinstance(images, (list, tuple)) and images and all(isinstance(x, Tensor) and x.dim() == 3 for x in images):
        return len(images)  # as in torchvision's detectors
    return next((int(tensor.shape[dimension]) for tensor in tensors if tensor.dim() > dimension), 1)
