"""SBM: the affine min-max quantizer ("scalable methods for 8-bit training") of Better Schedules, CPT and FracTrain.

    weight      one range per output channel, rounded to nearest
    activation  one range per tensor, of the batch in training and a running range in evaluation, rounded to nearest
    gradient    one range per tensor at the layer's output, rounded stochastically; one copy serves both products. If a linear
                layer's output has dimensions between samples and features (tokens, heads), one range per position, over samples
                and features
    operand     of a product of two activations (attention): one range per row (last dimension); no running range
    bias        float32, or one range, rounded to nearest

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[-1.0, 0.1, 2.0]]), 2, quantizer="sbm", role="activation").tolist()
[[-1.0, 0.0, 2.0]]

Source: semantics of the released code of CPT and FracTrain, modules/quantize.py. Differs from the authors' code in the
noise, which is a hash of (seed, step, layer, element) and not drawn from the global generator. Ranges per position, operands
and biases are those of the released code of Better Schedules (cpt_xnli, cpt_ptb, cpt_voc, cpt_gnn). Differs from the original
SBM paper, as their code does, in the single copy of the gradient and in plain BatchNorm.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.cpp.operators import batch_operators, cpp_operators
from bitcycle.quantizer import affine, codes
from bitcycle.quantizer.autograd import is_recomputation, straight_through
from bitcycle.quantizer.base import GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.codes import Codes, WeightCodes
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import computable, flat, rows, shaped, unflat
from bitcycle.quantizer.sbm_gradient import RelativeGradient, SbmGradient
from bitcycle.settings import setting

logger = logging.getLogger(__name__)


class SbmWeight(TensorQuantizer):
    """Affine quantizer with one range per output channel (dimension 0)."""

    has_codes = True

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        if (native := cpp_operators(x, self.compile_kernel)) is not None:
            return native.quantize_rows(x, bits, True)
        return super().forward(x, bits)

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        return unflat(kernel(affine.quantize_per_row, self.compile_kernel)(rows(x), bits), like=x)

    def encode_weight(self, x: Tensor, bits: Tensor) -> WeightCodes:
        integers, *of_rows = kernel(codes.encode_rows, self.compile_kernel)(rows(x), bits)
        return WeightCodes(shaped(integers, like=x), *of_rows)

    def decode_weight(self, weight: WeightCodes, bits: Tensor) -> Tensor:
        function = kernel(codes.decode_rows, self.compile_kernel)
        decoded = function(rows(weight.integers), weight.scale, weight.minimum, bits)
        return shaped(decoded.view(-1), like=weight.integers)


class SbmRows(TensorQuantizer):
    """Affine quantizer with one range per row (last dimension); a vector, such as a bias, has one range. Stateless.

    Source: released code of Better Schedules, quantize.py of cpt_gnn (activations, aggregates, biases of graph layers) and of
    cpt_xnli (operands of attention).
    """

    samples_are_independent = True

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        if (native := cpp_operators(x, self.compile_kernel)) is not None:
            return native.quantize_rows(x, bits, False)
        return super().forward(x, bits)

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        matrix = computable(x.reshape(-1, x.shape[-1]))
        return kernel(affine.quantize_per_row, self.compile_kernel)(matrix, bits).to(x.dtype).view(x.shape)


class SbmActivation(TensorQuantizer):
    """Affine quantizer with the range of the current batch, and an observer that tracks a running range.

    Evaluation clamps to the running range, an average that is shared by all precisions and updated only in training steps with
    quantized activations; with activation checkpointing, once per step. It starts at zero, as in the released code, so that
    evaluation soon after conversion clips most values. `debias` divides it by the sum of its weights, as Adam does:

        range_T / (1 - momentum^T)          after T batches

    Evaluation before any training step uses the range of its first batch (the released code returns a constant); this does not
    affect training.
    """

    samples_are_independent = True
    has_codes = True

    running_zero_point: Tensor
    running_range: Tensor
    running_weight: Tensor | None
    """Sum of the weights of the observed batches, 1 - momentum^T; None: no correction."""

    def __init__(self, momentum: float = 0.9, compile: bool = False, debias: bool = False) -> None:
        super().__init__(compile)
        self.momentum = momentum
        self.register_buffer("running_zero_point", torch.zeros(()))
        self.register_buffer("running_range", torch.zeros(()))
        self.register_buffer("running_weight", torch.zeros(()) if debias else None)
        self.calibrated: tuple[Tensor, Tensor] | None = None
        self.is_observed = False

    @property
    def lacks_values(self) -> bool:
        return not (self.training or self.is_observed or self.calibrated is not None)

    @property
    def adapts(self) -> bool:
        return not self.training

    def prepare(self, x: Tensor, bits: int) -> None:
        """Use the range of x for evaluation until a training step has been observed."""
        if self.training or not bits:
            return
        if bool(self._has_moved()):
            self.calibrated = None
        elif self.calibrated is None:
            low, high = distributed.all_min_max(*torch.aminmax(flat(x)))
            self.calibrated = low, high - low
            logger.info("an activation is quantized in evaluation before any training: using the range of this batch")

    def restart(self) -> None:
        self.calibrated = None

    def _has_moved(self) -> Tensor:
        """Whether the running range is no longer that of a new observer."""
        return (self.running_range != 0) | (self.running_zero_point != 0)

    def evaluation_range(self) -> tuple[Tensor, Tensor]:
        """Zero point and range in evaluation."""
        zero_point, value_range = self.running_zero_point, self.running_range
        if self.running_weight is not None:
            weight = torch.where(self.running_weight > 0, self.running_weight, 1)
            zero_point, value_range = zero_point / weight, value_range / weight
        if self.calibrated is None:
            return zero_point, value_range
        # an average of weights stays in evaluation mode while its buffers are copied from the trained model
        moved, (low, first_range) = self._has_moved(), self.calibrated
        return torch.where(moved, zero_point, low), torch.where(moved, value_range, first_range)

    def record(self, bits: Tensor, batches: int = 1) -> None:
        """Add the weights of observed batches (or time steps); for every training pass that moves the running range."""
        self.is_observed = True
        if self.running_weight is None or is_recomputation():
            return
        share = (1 - self.momentum**batches) * (bits > 0)
        self.running_weight.add_((1 - self.running_weight) * share)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        name = f"{prefix}running_weight"
        if self.running_weight is not None and f"{prefix}running_range" in state_dict and name not in state_dict:
            state_dict[name] = torch.ones_like(self.running_weight)  # saved without correction
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.is_observed |= bool(state_dict.get(f"{prefix}running_range", torch.zeros(())) != 0)

    def range_of_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Zero point and range of the codes of x in evaluation; the range is NaN if x has a NaN, for which there is no code."""
        zero_point, value_range = self.evaluation_range()
        return zero_point, torch.where(x.isnan().any(), torch.nan, value_range)

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Zero point and range that an operator reads and updates in training; copies if they must not change."""
        if not self.training:
            return self.evaluation_range()
        running = (self.running_zero_point, self.running_range)
        return (running[0].clone(), running[1].clone()) if is_recomputation() else running

    def _move(self, zero_point: Tensor, value_range: Tensor) -> None:
        """Set the running range, unless this forward pass is a recomputation for the backward pass."""
        if not is_recomputation():
            self.running_zero_point.copy_(zero_point)
            self.running_range.copy_(value_range)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        native = batch_operators(x, self.compile_kernel)
        if not self.training:
            if native is not None:
                return native.quantize_clamped(x, bits, *self.ranges())
            return super().forward(x, bits)
        self.record(bits)
        if native is not None:
            return native.quantize_and_observe(x, bits, *self.ranges(), self.momentum)
        y, zero_point, value_range = straight_through(self._quantize, x, bits)
        self._move(zero_point, value_range)
        return y

    def encode(self, x: Tensor, bits: Tensor) -> Codes:
        if not self.training:
            zero_point, value_range = self.range_of_codes(x)
            zero_point = zero_point.clone()  # the copy saved for the backward pass must not change with the observer
            integers, scale = kernel(codes.encode_in_range, self.compile_kernel)(flat(x), zero_point, value_range, bits)
            return Codes(shaped(integers, like=x), scale, zero_point)
        self.record(bits)
        function, running = kernel(codes.encode_and_observe, self.compile_kernel), self.running_zero_point
        integers, scale, low, zero_point, value_range = function(
            flat(x), bits, running, self.running_range, self.momentum
        )
        self._move(zero_point, value_range)
        return Codes(shaped(integers, like=x), scale, low)

    def quantize_sequence(self, x: Tensor, bits: Tensor) -> Tensor:
        if not self.training:
            return self(x, bits)
        self.record(bits, len(x))
        if (native := batch_operators(x, self.compile_kernel)) is not None:
            return native.quantize_sequence(x, bits, *self.ranges(), self.momentum)
        y, low, value_range = straight_through(self._quantize_steps, x, bits)
        self._move(
            affine.observed_in_turn(self.running_zero_point, low, bits, self.momentum),
            affine.observed_in_turn(self.running_range, value_range, bits, self.momentum),
        )
        return y

    def _quantize_steps(self, x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrix = rows(x)
        low, high = distributed.all_min_max(*torch.aminmax(matrix, dim=1))
        limits = (low[:, None], (high - low)[:, None])
        y = kernel(affine.fake_quantize, self.compile_kernel)(matrix, *limits, bits)
        return unflat(y.reshape(-1), like=x), low, high - low

    def _quantize(self, x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vector = flat(x)
        limits: tuple[Tensor, ...] = ()
        if distributed.current_shard() is not None:  # collectives cannot be part of a kernel
            limits = distributed.all_min_max(*torch.aminmax(vector))
        observer = (self.running_zero_point, self.running_range, self.momentum)
        function = kernel(affine.quantize_and_observe, self.compile_kernel)
        y, zero_point, value_range = function(vector, bits, *observer, *limits)
        return unflat(y, like=x), zero_point, value_range

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(affine.fake_quantize, x, *self.evaluation_range(), bits)


@dataclass
class Sbm(QuantizerOptions):
    """Options of the SBM quantizer."""

    name: str = "sbm"
    momentum: float = setting(
        0.9, "momentum of the running activation range; FracTrain's CIFAR code has 0.1", minimum=0, maximum=1
    )
    running_range: Optional[str] = setting(
        None,
        "running activation range: starts at zero (code, the released code), or is corrected for that (debiased); null: code"
        " on the command line, debiased in quantize_model",
        choices=("code", "debiased"),
    )
    stochastic: bool = setting(True, "round gradients stochastically (unbiased)")
    least_step: str = setting(
        "code",
        "minimum quantization step of gradients: 1e-8 (code, as the released code), which is coarse if the loss is a mean"
        " over very many tokens, or 1e-8 of the largest element (relative)",
        choices=("code", "relative"),
    )
    quantized_bias: Optional[bool] = setting(
        None,
        "quantize biases to the bits of the weights, with one range per bias (Better Schedules' code); null: set by the"
        " network (true for entailment and retinanet), else float32",
    )

    def configure_for(self, model: nn.Module) -> "Sbm":
        if self.quantized_bias is not None:
            return self
        return replace(self, quantized_bias=bool(getattr(model, "quantized_bias", False)))

    def as_released(self) -> "Sbm":
        return replace(self, running_range=self.running_range or "code")

    def weight(self, compile: bool) -> SbmWeight:
        return SbmWeight(compile)

    def activation(self, compile: bool, signed: bool = False) -> SbmActivation:
        return SbmActivation(self.momentum, compile, debias=self.running_range != "code")

    def row_activation(self, compile: bool) -> SbmRows:
        return SbmRows(compile)

    def gradient(self, compile: bool) -> GradientQuantizer:
        return self._with_least_step(SbmGradient(self.stochastic, compile))

    def position_gradient(self, compile: bool) -> GradientQuantizer:
        return self._with_least_step(SbmGradient(self.stochastic, compile, by_position=True))

    def _with_least_step(self, quantizer: SbmGradient) -> GradientQuantizer:
        return quantizer if self.least_step == "code" else RelativeGradient(quantizer)

    def matmul_operand(self, compile: bool) -> SbmRows:
        return SbmRows(compile)

    def bias(self, compile: bool) -> SbmRows | None:
        return SbmRows(compile) if self.quantized_bias else None
