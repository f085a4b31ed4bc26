"""Backward pass of a gated block only for chosen candidates (schedule.backward=chosen).

Each candidate k runs forward for the whole batch without a graph, as the gate learns from its output, and ranges and statistics
are those of the batch. Candidates that differ only in gradient bits share that pass. The results of quantized layers and batch
norms for the samples that chose k are recorded on a tape. Then the block runs once more with a graph, for all samples sorted by
candidate; layers and batch norms return the recorded results, and in the backward pass

    quantized layer   G = Q(dL/dy) for the samples of each k with its bits, range and noise, then dL/dx, dL/dW together
    batch norm        dL/dx_n = w / s_k (dL/dy_n - sum_k dL/dy / M - h_n sum_k dL/dy h / M),    h = (x - m_k) / s_k
    gate              dL/dm_nk = <dL/dy_n, candidate_k(x)_n>

with sums over the samples that chose k and M elements per channel in the whole batch. These are the gradients of
`remask_gradient=true` (FracTrain, section 3.2, equation 1), except that noise is indexed by the elements of a candidate's
samples and gradient ranges exclude the zeros of other samples. Not in the authors' code, which computes the gradients of all
candidates for all samples.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from bitcycle.cpp.operators import cpp_operators
from bitcycle.layer.batch_norm import TrainedBatchNorm2d, count_batch, exact_batch_norm
from bitcycle.layer.products.block_product import product_gradients
from bitcycle.layer.products.convolution import QuantizedConv2d
from bitcycle.layer.products.quantized import QuantizedLayer, QuantizedLinear
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import modules_of, replace_modules, twin_of
from bitcycle.quantizer.sbm import Sbm
from bitcycle.settings import SettingError


class Chosen(NamedTuple):
    """Samples that chose the same candidate: its bits, and their rows among the sorted samples."""

    state: PrecisionState
    first: int
    last: int


class Statistics(NamedTuple):
    """Mean and inverse standard deviation per channel of a candidate, its rows, and elements per channel."""

    mean: Tensor
    inverse: Tensor
    first: int
    last: int
    elements: int


@dataclass
class Entry:
    """The recorded rows of the results of one module call in the block."""

    x: Tensor | None = None
    y: Tensor | None = None
    weight: Tensor | None = None
    statistics: list[Statistics] = field(default_factory=list)


class Tape:
    """Entries in the order of calls: written by one candidate after another, then read once. `parts` are those of the samples
    that did not skip, in order."""

    def __init__(self, parts: Sequence[Chosen]) -> None:
        self.parts, self.entries, self.position, self.reads = list(parts), list[Entry](), 0, False
        self.first, self.rows = 0, torch.empty(0)
        self.begin, self.end = parts[0].first if parts else 0, parts[-1].last if parts else 0
        self.bounds = [(part.first - self.begin, part.last - self.begin) for part in parts]

    def write(self, rows: Tensor, first: int) -> None:
        """Start recording a candidate, chosen by `rows` of the batch, which are stored from row `first` on."""
        self.position, self.rows, self.first = 0, rows, first - self.begin

    def read(self) -> None:
        """Start replaying: subsequent calls return the recorded results."""
        self.position, self.reads = 0, True

    def next(self) -> Entry:
        """The entry of this call."""
        if self.position == len(self.entries):
            assert not self.reads, "the block calls other modules than without a graph"
            self.entries.append(Entry())
        self.position += 1
        return self.entries[self.position - 1]

    def keep(self, kept: Tensor | None, x: Tensor, is_private: bool = False) -> Tensor | None:
        """`kept` with the rows of x that chose the candidate; x itself if all did and it `is_private`, not seen by the block."""
        if not len(self.rows):
            return kept
        if is_private and len(self.parts) == 1 and len(self.rows) == len(x):
            return x
        source = _rows_last(x)
        if kept is None:
            layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
            size = (self.end - self.begin, *x.shape[1:])
            kept = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
        torch.index_select(source, 0, self.rows, out=_rows_last(kept)[self.first : self.first + len(self.rows)])
        return kept


class Replay:
    """The tape of a gated block, shared by its layers and batch norms; only set during `mixture`. With `compile`, operators
    compute what they can."""

    def __init__(self, compile: bool) -> None:
        self.tape: Tape | None = None
        self.compile = compile

    @contextmanager
    def with_tape(self, tape: Tape) -> Iterator[None]:
        """Context in which the modules write to the tape, or read from it."""
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None


class ReplayedProduct:
    """The computation of a quantized layer in such a block; ordinary without a tape."""

    def __init__(self, layer: QuantizedLayer, replay: Replay) -> None:
        self.layer, self.replay = layer, replay

    def accepts(self, x: Tensor) -> bool:
        """Whether the block is trained. Raises SettingError under autocast, which changes the operands of products."""
        if self.replay.tape is not None and torch.is_autocast_enabled(x.device.type):
            problem = "replays float32 products, and autocast is on"
            raise SettingError("schedule.backward", "chosen", problem, "train in float32, or use schedule.backward=all")
        return self.replay.tape is not None

    def __call__(self, x: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        tape, layer = self.replay.tape, self.layer
        assert tape is not None
        entry = tape.next()
        if tape.reads:
            states = [layer.precision if layer.precision.fixed else part.state for part in tape.parts]
            counted = [layer.call_key(state) for state in (states[1:] if layer.precision.fixed else states)]
            # a layer with fixed bits has already counted this call
            keys = [key, *counted] if layer.precision.fixed else counted
            bits = [(state.gradient_bits, state.step_key, key) for state, key in zip(states, keys)]
            return _Product.apply(x, layer.weight, bias, layer, entry, tape, bits)
        if entry.weight is None:
            entry.weight = layer.quantized_weight()
        x = layer.activation_quantizer(x, layer.precision.activation_bits)
        y = _product(layer, x, entry.weight, bias)
        entry.x, entry.y = tape.keep(entry.x, x, is_private=True), tape.keep(entry.y, y)
        return y


def _product(layer: QuantizedLayer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return layer._conv_forward(x, weight, bias) if isinstance(layer, nn.Conv2d) else F.linear(x, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, layer: QuantizedLayer, entry: Entry, tape: Tape, noise: Any
    ) -> Tensor:
        assert entry.y is not None
        ctx.save_for_backward(entry.x, entry.weight)
        ctx.layer, ctx.noise, ctx.bounds = layer, noise, tape.bounds
        return entry.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, weight), layer, needed = ctx.saved_tensors, ctx.layer, ctx.needs_input_grad[:3]
        parts = zip(ctx.bounds, ctx.noise)
        of_parts = [layer.gradient_quantizer.quantize(gradient[a:b], *noise) for (a, b), noise in parts]
        gradient = of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts)
        return *product_gradients(gradient, x, weight, needed, layer), *[None] * 4


class ReplayedBatchNorm2d(TrainedBatchNorm2d):
    """A torch.nn.BatchNorm2d in such a block; ordinary without a tape."""

    replay: Replay

    def operator(self, x: Tensor) -> Callable[..., Tensor] | None:
        return super().operator(x) if self.replay.compile else None

    def forward(self, x: Tensor) -> Tensor:
        tape = self.replay.tape
        if tape is None or not (self.training or self.running_mean is None):
            return super().forward(x)
        entry = tape.next()
        if tape.reads:
            return _Normalised.apply(x, self.weight, self.bias, self, entry, tape)
        factor = count_batch(self) if self.track_running_stats else 0.0
        state = (self.weight, self.bias, self.running_mean, self.running_var)
        functions = exact_batch_norm(x) if self.replay.compile and self._has_statistics(x) else None
        if functions is None:
            y, mean, inverse = torch.native_batch_norm(x, *state, True, factor, self.eps)
        else:
            y, mean, inverse = functions.normalise_batch(x, *state, factor, self.eps)
        entry.y = tape.keep(entry.y, y)
        last = tape.first + len(tape.rows)
        entry.statistics.append(Statistics(mean, inverse, tape.first, last, x.numel() // x.shape[1]))
        return y

    def differentiated(self, g: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Any:
        """The gradients of input, weight and bias from that of the output."""
        if self.replay.compile and weight is not None and (functions := exact_batch_norm(x, g)) is not None:
            return functions.differentiate_batch(g, x, weight, *statistics, None, False)
        wanted = [True, weight is not None, weight is not None]
        return torch.ops.aten.native_batch_norm_backward(g, x, weight, None, None, *statistics, True, self.eps, wanted)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, norm: ReplayedBatchNorm2d, entry: Entry, tape: Tape
    ) -> Tensor:
        assert entry.y is not None
        ctx.save_for_backward(x, weight)
        ctx.norm, ctx.statistics, ctx.bounds = norm, entry.statistics, tape.bounds
        return entry.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        parts, of_weight, of_bias = [], None, None
        for a, b in ctx.bounds:
            mean, inverse, _, _, elements = next(s for s in ctx.statistics if s.first <= a and b <= s.last)
            g, here = gradient[a:b], x[a:b]
            # as for a batch of these samples only, whose sums are divided by its own number of elements
            part, scale_part, shift_part = ctx.norm.differentiated(g, here, weight, mean, inverse)
            share = here.numel() / here.shape[1] / elements
            if share != 1:
                scale = (inverse if weight is None else inverse * weight).view(-1, 1, 1)
                part = (g * scale).lerp_(part, share)
            parts.append(part)
            of_weight = scale_part if of_weight is None else of_weight + scale_part
            of_bias = shift_part if of_bias is None else of_bias + shift_part
        of_x = parts[0] if len(parts) == 1 else torch.cat(parts)
        return of_x, *((None, None) if weight is None else (of_weight, of_bias)), None, None, None


class Sorted(torch.autograd.Function):
    """x[order] for a permutation of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _selected(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _scattered([(gradient, order)], gradient), None


class Mixture(torch.autograd.Function):
    """Scatters the rows of each part by `order`; the mask's gradient follows from the candidates' outputs.

    Arguments: mask [N, K], order [N], index of each option's output (-1: cannot be chosen), number of outputs, whether operators
    compute what they can, outputs, parts.
    """

    @staticmethod
    def forward(
        ctx: Any, mask: Tensor, order: Tensor, of_option: list[int], count: int, compile: bool, *tensors: Tensor
    ) -> Tensor:
        outputs, parts = tensors[:count], tensors[count:]
        rows = order.split([len(part) for part in parts])
        ctx.save_for_backward(*outputs, *rows)
        ctx.of_option, ctx.count, ctx.compile = of_option, count, compile
        return _scattered(list(zip(parts, rows)), outputs[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        outputs, rows = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        flat, *others = (_rows_last(each).flatten(1) for each in (gradient, *outputs))
        functions = cpp_operators(flat, ctx.compile)
        if functions is None:
            dots = [torch.linalg.vecdot(flat, other) for other in others]
        else:
            dots = functions.products_of_rows(flat, others).unbind()
        nothing = torch.zeros_like(dots[0])
        of_mask = torch.stack([nothing if index < 0 else dots[index] for index in ctx.of_option], 1)
        return of_mask, *[None] * (4 + ctx.count), *(_selected(gradient, part) for part in rows)


class ZeroGradients(torch.autograd.Function):
    """y; parameters that it does not depend on get zero gradients, which optimizers treat differently from None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def _rows_last(x: Tensor) -> Tensor:
    """x with channels last, the memory format of images, so that each row is contiguous."""
    return x.movedim(1, -1) if x.dim() == 4 else x


def _rows_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1) if x.dim() == 4 else x


def _selected(x: Tensor, rows: Tensor) -> Tensor:
    return _rows_first(_rows_last(x).index_select(0, rows))


def _scattered(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    count = sum(len(rows) for _, rows in parts)
    y = _rows_last(like).new_empty(count, *_rows_last(like).shape[1:])
    for part, rows in parts:
        y.index_copy_(0, rows, _rows_last(part))
    return _rows_first(y)


def prepare_replay(block: nn.Module, name: str) -> Replay:
    """Make layers and batch norms of a block use a tape; the block is changed in place. Raises SettingError if a module of
    the block cannot be replayed."""
    layers = modules_of(block, QuantizedLayer)
    replay = Replay(compile=any(layer.activation_quantizer.compile_kernel for layer in layers))
    for module in block.modules():
        if reason := _obstacle(module):
            problem = f"cannot replay block {name!r}: {reason}"
            raise SettingError("schedule.backward", "chosen", problem, "use schedule.backward=all")
    replace_modules(block, lambda m: twin_of(m, ReplayedBatchNorm2d) if isinstance(m, nn.BatchNorm2d) else m)
    for layer in layers:
        layer.computation = ReplayedProduct(layer, replay)
    for norm in modules_of(block, ReplayedBatchNorm2d):
        norm.replay = replay
    return replay


def _obstacle(module: nn.Module) -> str:
    if isinstance(module, _BatchNorm) and not isinstance(module, nn.BatchNorm2d):
        return f"its batch norm is a {type(module).__name__}, not a BatchNorm2d"
    if isinstance(module, _DropoutNd):
        return "it has dropout, whose mask would differ between the two passes"
    if not isinstance(module, QuantizedProduct):
        return ""
    is_padded = getattr(module, "padding_mode", "zeros") != "zeros" or isinstance(getattr(module, "padding", 0), str)
    if type(module) not in (QuantizedConv2d, QuantizedLinear) or is_padded:
        return (
            f"layer {module.name!r} is a {type(module).__name__}, not a convolution padded with a number of zeros or a"
            " linear layer"
        )
    if type(module.quantizer_options) is not Sbm:
        return f"layer {module.name!r} has another quantizer than sbm"
    if cast("QuantizedLayer", module).computation is not None:
        return "it computes codes"
    return ""
