"""Callback for Lightning's Trainer.

>>> from bitcycle.integrations.lightning import PrecisionCallback             # doctest: +SKIP
>>> trainer = Trainer(max_steps=1000, callbacks=[PrecisionCallback("RTH", q_min=3, q_max=8)])        # doctest: +SKIP
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from lightning.pytorch import Callback
from torch import Tensor, nn

from bitcycle.integrations import at_highest, bound_schedule, check_evaluate_at
from bitcycle.integrations.feedback import LossFeed
from bitcycle.layer.control.controller import PrecisionController
from bitcycle.layer.conversion.convert import quantize_model
from bitcycle.layer.conversion.counterpart import counterpart
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.quantizer import QuantizerOptions
from bitcycle.randomness import random_state, set_random_state
from bitcycle.settings import SettingError


class PrecisionCallback(Callback):
    """Trains with a schedule of `bitcycle`; logs bits and cost, and resumes exactly from Lightning's checkpoints.

    Args:
        schedule: name of a schedule, whose length is set to the trainer's number of steps, or a result of
            `bitcycle.schedule`.
        quantizer: name or options; the module is converted before its optimizers are created, with networks that it makes in
            `configure_model`, unless already converted. One that makes them in `setup` has to convert them itself.
        hardware: name of the cost model.
        seed: seed of stochastic rounding.
        conversion: further arguments of `quantize_model`.
        evaluate_at: precision of validation, test and prediction: step (that of the last training step) or q_max.
        options: options of the schedule, such as q_min and q_max.

    Resume is exact from a checkpoint at the end of an epoch, and within an epoch if the data loader has `state_dict`
    and `load_state_dict` (such as torchdata's StatefulDataLoader); otherwise Lightning restarts the epoch. Checkpoints of
    trainings in one process include the state of the random generators, so that dropout and the order of samples go on.

    If the quantizer has a penalty (PACT), add `bitcycle.layer.penalty(self)` to the loss in `training_step`. Schedules that adapt
    to the loss (pfq) receive the mean of what `training_step` returns. Of multi-phase schedules, the bits alone are set.
    """

    def __init__(
        self,
        schedule: Any = "RTH",
        quantizer: str | QuantizerOptions = "sbm",
        hardware: str = "bitops",
        seed: int = 0,
        conversion: dict[str, Any] | None = None,
        evaluate_at: str = "step",
        **options: Any,
    ) -> None:
        self.schedule, self.quantizer, self.hardware, self.seed = schedule, quantizer, hardware, seed
        self.conversion, self.options = conversion or {}, options
        self.control: PrecisionController | None = None
        self._saved: dict[str, Any] = {}
        self._random_state: dict[str, Any] | None = None
        self._is_alone = False
        self._known: WeakSet[nn.Module] = WeakSet()  # the modules of a network that this callback has converted
        self.evaluate_at, self._evaluation = check_evaluate_at(evaluate_at), ExitStack()
        self._uncounted = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._epochs = trainer.max_epochs
        with trainer.init_module():
            pl_module.configure_model()  # which Lightning calls after this event, and which may be called repeatedly
        if _is_converted(pl_module):
            return
        if any(map(counterpart, pl_module.modules())):  # else the module's own `setup`, which follows, makes its layers
            self._convert(pl_module)
            self._known = WeakSet(pl_module.modules())

    def _convert(self, pl_module: Any) -> None:
        networks = {name: child for name, child in pl_module.named_children() if _has_layers(child)}
        if len(networks) == 1:  # whose order of execution can be traced
            ((name, network),) = networks.items()
            if any(_has_layers(child) for child in network.children()):
                setattr(pl_module, name, quantize_model(network, self.quantizer, **self.conversion))
                return
        quantize_model(pl_module, self.quantizer, **self.conversion)

    def _check_conversion(self, pl_module: Any) -> None:
        """Raises SettingError if there are layers that were made after the conversion, or none to convert."""
        if self._known or not _is_converted(pl_module):  # else the module has converted itself
            for name, module in pl_module.named_modules():
                if module not in self._known and counterpart(module):
                    problem = "was made after the conversion, as in `setup`, and would stay float"
                    remedy = "make it in __init__ or once in configure_model, or call bitcycle.quantize_model after it is made"
                    raise SettingError("model", name, problem, remedy)
        if not self._known and not _is_converted(pl_module):
            self._convert(pl_module)  # which says why there is nothing to convert

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._check_conversion(pl_module)
        total = self._steps(trainer)
        # manual optimization may take several steps in a batch, unless the trainer limits the number of steps
        self._counts_batches = not pl_module.automatic_optimization and total != trainer.max_steps
        epoch = min(trainer.num_training_batches / trainer.accumulate_grad_batches, total)  # infinite with max_steps
        bound = bound_schedule(self.schedule, self.options, total, epoch)
        saved = self._saved or (self._own_state() if trainer.global_step else {})  # else a second call of fit goes on
        self._is_alone = trainer.world_size == 1  # else only the state of the first process would be saved
        self.control, self._saved = PrecisionController(pl_module, bound, seed=self.seed, hardware=self.hardware), {}
        self._losses = LossFeed(bound, pl_module)
        if saved:
            self._random_state = saved.get("random_state") if self._is_alone else None
            self.control.load_state_dict(saved)
            self._losses.load_state_dict(saved.get("losses", {}))
        if self._random_state is not None:
            # before Lightning creates the iterator of an epoch, which draws its seed
            set_random_state(self._random_state)

    def _steps(self, trainer: Any) -> float:
        """The number of steps of the training that was asked for: a callback before this one may have added an epoch without
        steps, as StochasticWeightAveraging does."""
        loop = trainer.fit_loop
        epochs, loop.max_epochs = loop.max_epochs, self._epochs
        try:
            return trainer.estimated_stepping_batches
        finally:
            loop.max_epochs = epochs

    def _step(self, trainer: Any) -> int:
        """Index of the step of the current batch; after its optimizer's step, of the next unless steps are batches."""
        return int(trainer.fit_loop.epoch_loop.total_batch_idx if self._counts_batches else trainer.global_step)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop
        kept = getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        if self._random_state is not None and trainer.current_epoch > 0 and not kept:
            set_random_state(self._random_state)  # Lightning creates another iterator after this event

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.control is not None
        if self._random_state is not None and batch_idx:  # resumed within an epoch, whose iterator had been created
            set_random_state(self._random_state)
        self._random_state = None
        # the epoch in which StochasticWeightAveraging observes batches for batch norm has no steps
        if getattr(trainer.fit_loop, "_skip_backward", False):
            self._uncounted.enter_context(self.control.uncounted())
            return
        step = self._step(trainer)
        if step >= self.control.next_step:  # batches of gradient accumulation share the bits of the step
            self.control.step(step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.control is not None and self.control.precision is not None
        self._uncounted.close()
        if isinstance(loss := outputs.get("loss") if isinstance(outputs, Mapping) else outputs, Tensor):
            self._losses.add(loss)
        self._losses.end_step(self._step(trainer) + self._counts_batches)
        values = {f"bits_{role}": float(bits) for role, bits in self.control.precision._asdict().items()}
        if outputs or self.control.meter.workload is not None:  # else training_step skipped the batch, maybe the first
            cost = self.control.cost()
            values |= {"gbitops": cost.gbitops, "cost_relative_to_static": cost.relative_to_static}
        pl_module.log_dict(values)

    def _begin_evaluation(self, trainer: Any, pl_module: Any) -> None:
        if self.evaluate_at == "q_max":
            self._evaluation.enter_context(at_highest(self.control, pl_module, self.schedule, self.options))

    def _end_evaluation(self, trainer: Any, pl_module: Any) -> None:
        self._evaluation.close()

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation
    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._evaluation.close()
        self._uncounted.close()

    def state_dict(self) -> dict[str, Any]:
        state = self._own_state()
        return {**state, "random_state": random_state()} if state and self._is_alone else state

    def _own_state(self) -> dict[str, Any]:
        return {} if self.control is None else {**self.control.state_dict(), "losses": self._losses.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


def _is_converted(module: nn.Module) -> bool:
    return any(isinstance(part, QuantizedProduct) for part in module.modules())


def _has_layers(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())
