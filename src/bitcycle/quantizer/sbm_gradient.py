"""The gradients of SBM: one range per tensor, per position or per time step, rounded stochastically; see `sbm.py`."""

from collections.abc import Callable

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.cpp.operators import GradientRange, batch_operators
from bitcycle.quantizer import affine, codes
from bitcycle.quantizer.base import GradientQuantizer
from bitcycle.quantizer.codes import GradientCodes
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import computable, flat, rows, shaped, unflat


class SbmGradient(GradientQuantizer):
    """Affine quantizer of the gradient with one range per tensor, by default with stochastic rounding.

    With `by_position` one range per position between the first and the last dimension, over these two: [N, F] has one range,
    [N, T, F] T of them, [N, heads, T, F] heads times T; in a recurrent layer, whose time step is [1, N, F] in the released code,
    each sequence has its own.
    """

    has_codes = True

    def __init__(self, stochastic: bool = True, compile: bool = False, by_position: bool = False) -> None:
        super().__init__(stochastic, compile)
        self.by_position = by_position

    def forward(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        if (native := batch_operators(x, self.compile_kernel)) is None:
            return super().forward(x, bits, step_key, layer_key)
        options = (self.stochastic, self._range(x))
        return native.with_quantized_gradient(x, bits, step_key, layer_key, *options)

    def quantize_sequence(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        if (native := batch_operators(x, self.compile_kernel)) is None:
            return super().quantize_sequence(x, bits, step_key, layer_keys)
        options = (self.stochastic, GradientRange.SEQUENCE)
        return native.with_quantized_gradient(x, bits, step_key, layer_keys, *options)

    def loses(self, gradient: Tensor, bits: int) -> bool:
        low, high = torch.aminmax(gradient)
        return bool((high > low) & ((high - low) / ((1 << bits) - 1) < affine.MINIMUM_SCALE))

    def _range(self, x: Tensor) -> GradientRange:
        return GradientRange.POSITION if self.by_position and x.dim() > 2 else GradientRange.TENSOR

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        kind = self._range(gradient)
        if (native := batch_operators(gradient, self.compile_kernel)) is not None:
            return native.quantize_gradient(gradient, bits, step_key, layer_key, self.stochastic, kind)
        if kind == GradientRange.POSITION:
            x = computable(gradient.reshape(len(gradient), -1, gradient.shape[-1]))
            quantized = self._round(x, affine.position_range, bits, step_key, layer_key, distributed.first_element(x))
            return quantized.to(gradient.dtype).view(gradient.shape)
        x = rows(gradient)
        quantized = self._round(x, affine.tensor_range, bits, step_key, layer_key, distributed.first_element(x))
        return unflat(quantized.reshape(-1), like=gradient)

    def _round(
        self, x: Tensor, range_of: Callable[..., tuple[Tensor, Tensor]], bits: Tensor, *noise: Tensor | None
    ) -> Tensor:
        """x with the range of the whole batch, and with the noise (step key, layer key, first element) if stochastic."""
        noise = noise if self.stochastic else (None, None, None)
        limits: tuple[Tensor, ...] = ()
        if distributed.current_shard() is not None:
            limits = range_of(x)
            if range_of is not affine.sequence_range:  # sequences are not divided
                limits = distributed.all_min_max(*limits)
        return kernel(affine.quantize_in_range, self.compile_kernel)(x, range_of, bits, *noise, *limits)

    def encode(
        self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor
    ) -> tuple[Tensor, GradientCodes]:
        keys = (step_key, layer_key) if self.stochastic else ()
        function = kernel(codes.encode_gradient, self.compile_kernel)
        quantized, integers, scale, low = function(flat(gradient), bits, *keys)
        step = float(scale)  # in float64, as an error of z' is multiplied by the number of elements
        zero_point = float(low) + (1 << (int(bits) - 1)) * step
        return unflat(quantized, like=gradient), GradientCodes(shaped(integers, like=gradient), step, zero_point)

    def quantize_steps(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        x = flat(gradient).view(gradient.shape)
        noise = (step_key, layer_keys.view(-1, 1, 1), distributed.first_element(x[0]))
        quantized = self._round(x, affine.sequence_range, bits, *noise)
        return unflat(quantized.reshape(-1), like=gradient)


class RelativeGradient(GradientQuantizer):
    """SbmGradient applied in power-of-two units, so that the minimum step is 1e-8 of the largest element.

    Q(G) = u Q(G / u),   u = 2^(floor(log2 max |G|) + 1)
    """

    def __init__(self, quantizer: SbmGradient) -> None:
        super().__init__(quantizer.stochastic)
        self.inner = quantizer

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return self._in_units(self.inner.quantize, gradient, bits, step_key, layer_key)

    def quantize_steps(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        return self._in_units(self.inner.quantize_steps, gradient, bits, step_key, layer_keys)

    def _in_units(self, quantize: Callable[..., Tensor], gradient: Tensor, *arguments: Tensor) -> Tensor:
        x = computable(gradient)  # the unit of float16 can be 2^16, which float16 lacks
        exponent = torch.frexp(distributed.all_max(x.abs().amax())).exponent
        unit = torch.ldexp(torch.ones((), dtype=x.dtype, device=x.device), exponent)
        return (quantize(x / unit, *arguments) * unit).to(gradient.dtype)
