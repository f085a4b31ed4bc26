"""The affine fake quantizer of SBM, CPT, FracTrain and Better Schedules, as pure functions on tensors.

    n = 2^b - 1,   s = max(r / n, 1e-8),   Q(x) = s rint(clamp((x - z) / s + u, 0, n)) + z

with zero point z, range r and noise u in [-1/2, 1/2) for stochastic rounding (0 otherwise). Bits are int64 tensors, so that a
change of precision needs no recompilation; 0 bits means float32 and returns x.

Source: released code of CPT and FracTrain, modules/quantize.py. All functions here are element-wise or reductions in
float32: eager and compiled results are bitwise identical on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitcycle.randomness import uniform_noise

MINIMUM_SCALE = 1e-8
"""Minimum of the step s; a (nearly) constant tensor stays (nearly) unchanged."""


def fake_quantize(
    x: Tensor, zero_point: Tensor, value_range: Tensor, bits: Tensor, noise: Tensor | None = None
) -> Tensor:
    """Round x onto the 2^bits values between zero_point and zero_point + value_range; values outside are clamped.

    Args:
        x: float32 tensor of any shape.
        zero_point, value_range: float32, broadcastable to x.
        bits: int64, broadcastable to x; 0 returns x.
        noise: float32 in units of the step, added before rounding.

    >>> fake_quantize(torch.tensor([0.0, 0.4, 1.0]), torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2)).tolist()
    [0.0, 0.3333333432674408, 1.0]
    """
    code, scale = encode(x, zero_point, value_range, bits, noise)
    return torch.where(bits > 0, code * scale + zero_point, x)


def encode(
    x: Tensor, zero_point: Tensor, value_range: Tensor, bits: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The codes n of x, integers from 0 to 2^bits - 1 in float32, and the step s; arguments as of `fake_quantize`. Both have
    the shapes of x and of its range."""
    levels = ((1 << bits) - 1).to(x.dtype)
    scale = (value_range / levels).clamp_min(MINIMUM_SCALE)
    code = (x - zero_point) / scale
    if noise is not None:
        code = code + noise
    return torch.minimum(code.clamp_min(0), levels).round(), scale


def keyed_noise(x: Tensor, keys: Sequence[Any]) -> Tensor | None:
    """The noise of unbiased stochastic rounding in the shape of x, by keys (step, layer) and, if x is a shard, the index of its
    first element; without keys None: round to nearest."""
    return uniform_noise(x.shape, keys[0] ^ keys[1], *keys[2:]) if keys else None


def quantize_per_row(rows: Tensor, bits: Tensor) -> Tensor:
    """Fake-quantize each row of a matrix with its own minimum and maximum. Rows [N, F], as the result."""
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    return fake_quantize(rows, low, high - low, bits)


def quantize_in_range(
    x: Tensor,
    range_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    bits: Tensor,
    step_key: Tensor | None = None,
    layer_key: Tensor | None = None,
    first: Tensor | None = None,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:
    """Fake-quantize between the minimum and maximum that `range_of` returns; with keys, by unbiased stochastic rounding.

    Args:
        x: a tensor, or this process's shard of one.
        range_of: tensor_range, position_range or sequence_range.
        bits: int64 scalar.
        step_key, layer_key: keys of the noise; layer_key may have the shape [T, 1, 1], for T time steps of x [T, N, F].
        first: index of the shard's first element in the whole tensor (or time step); None: 0.
        low, high: minimum and maximum of the whole tensor; None: x is whole.
    """
    if low is None or high is None:
        low, high = range_of(x)
    noise = None
    if step_key is not None and layer_key is not None:
        shape = x.shape[1:] if layer_key.dim() == x.dim() else x.shape
        noise = uniform_noise(shape, step_key ^ layer_key, first)
    return fake_quantize(x, low, high - low, bits, noise)


def tensor_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of a tensor. Both are scalars."""
    low, high = torch.aminmax(x)
    return low, high


def position_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of [N, P, F] for each of the P positions, over samples and features, [1, P, 1] each."""
    return x.amin(2, keepdim=True).amin(0, keepdim=True), x.amax(2, keepdim=True).amax(0, keepdim=True)


def sequence_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each sequence at each time step of [T, N, F], [T, N, 1] each; released code, cpt_ptb."""
    low, high = torch.aminmax(x, dim=2, keepdim=True)
    return low, high


def quantize_and_observe(
    x: Tensor,
    bits: Tensor,
    running_zero_point: Tensor,
    running_range: Tensor,
    momentum: float,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fake-quantize with the range of this batch, and update the running range. A shard needs minimum and maximum of the
    batch. x and the result have any shape; bits and statistics are scalars.

        running <- momentum * running + (1 - momentum) * current          if bits > 0; unchanged at full precision

    Returns:
        the quantized tensor, the new running zero point and the new running range.
    """
    if low is None or high is None:
        low, high = tensor_range(x)
    value_range = high - low
    quantized = fake_quantize(x, low, value_range, bits)
    return quantized, *observed(running_zero_point, running_range, low, value_range, bits, momentum)


def observed(
    running_zero_point: Tensor, running_range: Tensor, low: Tensor, value_range: Tensor, bits: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """The new running zero point and range after a batch with minimum `low`; unchanged at full precision. All are scalars."""
    zero_point = torch.where(bits > 0, running_zero_point * momentum + low * (1 - momentum), running_zero_point)
    observed_range = torch.where(bits > 0, running_range * momentum + value_range * (1 - momentum), running_range)
    return zero_point, observed_range


def observed_in_turn(running: Tensor, values: Tensor, bits: Tensor, momentum: float) -> Tensor:
    """The value of `running` after T successive updates with `values`; unchanged at full precision. `running` is a scalar,
    `values` [T].

    momentum^T running + (1 - momentum) sum_t momentum^(T - 1 - t) values_t          for t = 0 ... T - 1
    """
    count = len(values)
    weights = momentum ** torch.arange(count - 1, -1, -1, dtype=values.dtype, device=values.device)
    return torch.where(bits > 0, running * momentum**count + (1 - momentum) * (weights * values).sum(), running)
