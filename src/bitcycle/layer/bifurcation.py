"""Gradient bifurcation: a coarse copy of a gradient for the product with the weight, a finer one for that with the input.

    y = product(x, W) + bias:     dL/dx from Q(dL/dy; g),     dL/dW and dL/dbias from Q(dL/dy; g_fine)

Source: the SBM paper ("scalable methods for 8-bit training of neural networks", gradients bifurcation). Paper and code of CPT
and FracTrain use a single copy.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Product = Callable[[Tensor, Tensor, Optional[Tensor]], Tensor]
Rounding = Callable[[Tensor], Tensor]


class _Bifurcated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, coarse: Rounding, fine: Rounding
    ) -> Tensor:
        # A separate graph of the product, whose backward pass can run twice, once for each copy of the gradient.
        operands: list[Any] = [
            t if t is None else t.detach().requires_grad_(t.requires_grad) for t in (x, weight, bias)
        ]
        with torch.enable_grad():
            y = product(*operands)
        ctx.operands, ctx.y, ctx.coarse, ctx.fine = operands, y, coarse, fine
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[Any] = [None] * 6
        for rounding, places in ((ctx.coarse, (0,)), (ctx.fine, (1, 2))):
            if wanted := [place for place in places if ctx.needs_input_grad[place]]:
                inputs = [ctx.operands[place] for place in wanted]
                gradients = torch.autograd.grad(ctx.y, inputs, rounding(gradient), retain_graph=True)
                for place, of_input in zip(wanted, gradients):
                    found[place] = of_input
        return tuple(found)


def bifurcated(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, coarse: Rounding, fine: Rounding
) -> Tensor:
    """product(x, weight, bias), whose output gradient is rounded by `coarse` for x and by `fine` for weight and bias."""
    return _Bifurcated.apply(x, weight, bias, product, coarse, fine)
