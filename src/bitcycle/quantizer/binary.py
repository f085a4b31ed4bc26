"""Binary weights: the sign of a latent float weight, times a scale.

    w_q = s sign(w),   sign(w) = -1 if w <= 0, else +1;     dL/dw = dL/dw_q on [-1, 1], else 0

Source: partial pre-training, section 4.3. The gradient treats the scale s (mentioned once in section 7 of the paper, as "static
weight scaling") as constant and passes unscaled.
"""

import torch
from torch import Tensor

from bitcycle.quantizer.autograd import with_gradient
from bitcycle.quantizer.base import TensorQuantizer

SCALES = ("none", "mean_abs", "init_std")


def binarize(weight: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """scale * sign(weight); the sign of 0 is -1. 0 bits returns the weight.

    >>> binarize(torch.tensor([-0.2, 0.0, 0.7]), torch.tensor(1.0), torch.tensor(1)).tolist()
    [-1.0, -1.0, 1.0]
    """
    return torch.where(bits > 0, torch.where(weight > 0, scale, -scale), weight)


def clipped_gradient(gradient: Tensor, weight: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """The gradient where |weight| <= 1, else 0; at 0 bits the gradient."""
    return torch.where((weight.abs() <= 1) | (bits == 0), gradient, 0)


class BinaryWeight(TensorQuantizer):
    """Signs of the latent weights, times a scale.

    Args:
        scale: none (1), mean_abs (the mean |w| of each output channel at each step, as in XNOR-Net), or init_std (the standard
            deviation that the layer's weights had when the model was converted).
        clip: latent weights are kept within +-clip before each training step; None leaves them free.
    """

    initial_std: Tensor

    def __init__(self, scale: str = "none", clip: float | None = None) -> None:
        super().__init__()
        self.scale, self.clip = scale, clip
        self.works_each_step = clip is not None
        if scale == "init_std":
            self.register_buffer("initial_std", torch.ones(()))

    def initialise(self, x: Tensor) -> None:
        if self.scale == "init_std":
            self.initial_std = x.detach().std(correction=0)

    def begin_step(self, x: Tensor, new_epoch: bool) -> None:
        assert self.clip is not None, "only needed with a clip"
        x.clamp_(-self.clip, self.clip)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return with_gradient(binarize, clipped_gradient, x, self._scale_of(x), bits)

    def _scale_of(self, x: Tensor) -> Tensor:
        if self.scale == "mean_abs":
            return x.detach().abs().mean(dim=tuple(range(1, x.dim())), keepdim=True)
        return self.initial_std if self.scale == "init_std" else x.new_ones(())
