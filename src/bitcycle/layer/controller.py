"""The controller sets the bits of all layers at each step and counts what the steps cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitcycle.hardware import Cost, CostMeter, HardwareOptions, Workload, hardware_options, trace
from bitcycle.layer.gate_record import GateRecord
from bitcycle.layer.quantized import QuantizedLayer
from bitcycle.layer.quantized_product import QuantizedProduct
from bitcycle.layer.state import PrecisionState
from bitcycle.randomness import int32_key
from bitcycle.schedule import FLOAT, Precision, Schedule
from bitcycle.settings import SettingError


class PrecisionController:
    """Applies a schedule to a converted model: call `step(t)` before the forward pass of step t.

    Costs need the shapes of the model's products. They are traced from the first training batch that the model sees. The
    samples of a step are those that `step` is told of; where it is told of none, they are counted in the model's
    training-mode forward passes, so a plain loop need say nothing.

    Args:
        model: converted by `quantize_model`; a float model is accepted and costs what float32 costs.
        schedule: what `bitcycle.schedule` returns.
        seed: of the noise for stochastic rounding, which depends on (seed, step, layer, element).
        hardware: name or options of the cost model.
        workload: the traced model, if known; otherwise it is traced at the first training batch.

    Raises:
        SettingError (a ValueError): if the quantizer counts epochs and the schedule does not know how long they are, or if
            the lowest or highest bits of the schedule have no format in the quantizer.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        seed: int = 0,
        hardware: str | HardwareOptions = "bitops",
        workload: Workload | None = None,
    ) -> None:
        self.schedule, self.seed = schedule, seed
        self.states = [module for module in model.modules() if isinstance(module, PrecisionState)]
        layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
        products = [module for module in model.modules() if isinstance(module, QuantizedProduct)]
        self._quantizers = list(
            {id(product.quantizer_options): product.quantizer_options for product in products}.values()
        )
        for quantizer in self._quantizers:
            quantizer.check_ends(schedule.lowest, schedule.reference)
        self._stepping = [layer for layer in layers if layer.weight_quantizer.works_each_step]
        if schedule.length.steps_per_epoch is None and any(quantizer.needs_epochs for quantizer in self._quantizers):
            remedy = "bind the schedule with steps_per_epoch"
            raise SettingError("update", "epoch", "the length of an epoch is not known", remedy)
        self.precision: Precision | None = None
        self._counting = True
        self._record = GateRecord(model)
        self._hardware = hardware_options(hardware)
        self._meter: CostMeter | None = None
        self._is_told = False
        self._told: list[tuple[Precision, int]] = []
        if not self.states and schedule.lowest.weight < FLOAT:
            warnings.warn("no layer of the model is quantized: call quantize_model first", stacklevel=2)
        if workload is not None:
            self._start_meter(workload)
        else:
            self._hook = model.register_forward_pre_hook(self._count_batch, with_kwargs=True)

    def step(self, t: int, samples: int = 0) -> Precision:
        """Set the bits and the noise of step t; count `samples` training samples at these bits, if given.

        Raises:
            SettingError (a ValueError): for a step outside the schedule's run, and for bits that the model's quantizer lacks.
        """
        precision = self.schedule(t)
        if precision != self.precision:
            self._check(precision)
        for layer in self._stepping:
            layer.begin_step(new_epoch=self._begins_epoch(t))
        key = int32_key("noise", self.seed, t)
        for state in self.states:
            state.step_key.fill_(key ^ state.noise_key)
            if precision != state.precision and not state.fixed:
                state.set(precision)
        self.precision = precision
        self._is_told = samples > 0
        if samples:
            self._told.append((precision, samples))
            self._add_told()
        self._record.begin_step(self.schedule.compute_target)
        return precision

    def _add_told(self) -> None:
        """Count what `step` was told, as soon as the model's products are known."""
        while self._told and self._meter is not None:
            self._meter.add(*self._told.pop())

    def _check(self, precision: Precision) -> None:
        for quantizer in self._quantizers:
            quantizer.check([precision])

    def _begins_epoch(self, t: int) -> bool:
        epoch = self.schedule.length.steps_per_epoch
        return epoch is not None and t % epoch == 0

    def use(self, precision: Precision, choose: bool | None = None) -> None:
        """Set bits outside the schedule, as for an evaluation at q_max; the next `step` sets them anew.

        Args:
            precision: the bits.
            choose: whether a network that chooses its bits does so; otherwise all its blocks have these bits. None: it does at
                the current precision only.

        Raises:
            SettingError (a ValueError): for weight or activation bits that the model's quantizer lacks.
        """
        self._check(precision._replace(gradient=FLOAT))
        self._record.choose(precision == self.precision if choose is None else choose)
        for state in self.states:
            if not state.fixed:
                state.set(precision)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forward passes in training mode that train nothing, as those that estimate statistics of batch norm: no cost."""
        self._counting = False
        self._record.count_choices(False)
        try:
            yield
        finally:
            self._counting = True
            self._record.count_choices(True)

    def cost(self) -> Cost:
        """What the steps so far cost, in total and relative to the same steps at static q_max.

        Raises:
            RuntimeError: before the model has seen a training batch, since its shapes are not known yet.
        """
        if self._meter is None:
            raise RuntimeError(
                "the cost is not known before the first forward pass in training mode; train one step first"
            )
        return self.meter.cost()

    @property
    def meter(self) -> CostMeter:
        """The counter behind `cost`, for saving and restoring."""
        assert self._meter is not None, "the meter exists once the operations are known"
        self._record.count(self._meter)
        return self._meter

    @property
    def record(self) -> GateRecord:
        """What the model's gates chose, for logging, saving and restoring; empty for a model without gates."""
        if self._meter is not None:
            self._record.count(self._meter)
        return self._record

    def _start_meter(self, workload: Workload) -> None:
        self._record.set_workload(workload)
        self._meter = CostMeter(workload, self._hardware, self.schedule.reference)

    def _count_batch(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not model.training or self.precision is None or not self._counting:
            return
        if self._meter is None:
            self._hook.remove()  # or tracing would call it again
            workload = trace(model, *arguments, **keywords)
            self._hook = model.register_forward_pre_hook(self._count_batch, with_kwargs=True)
            self._start_meter(workload)
        if self._is_told:
            self._add_told()
        else:
            assert self._meter is not None
            self._meter.add(self.precision, _batch_size(arguments, keywords))


def _batch_size(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise RuntimeError(
            "cannot tell the batch size: the model's forward pass has no tensor; give step(t, samples=...)"
        )
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), 1)
