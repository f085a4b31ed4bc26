"""Common corruptions of images at five severities; s is the value of a severity below, pixels p lie in [0, 1].

| corruption | p becomes, before it is clipped | s of severities 1 to 5 |
|---|---|---|
| gaussian_noise | p + s n, n normal | 0.04, 0.08, 0.12, 0.18, 0.26 |
| shot_noise | Poisson(s p) / s | 60, 25, 12, 5, 3 |
| impulse_noise | 0 or 1 each with probability s / 2 | 0.03, 0.06, 0.09, 0.17, 0.27 |
| gaussian_blur | a Gaussian mean of width s (image side / 32) pixels | 0.4, 0.6, 0.8, 1.1, 1.5 |
| brightness | p + s | 0.1, 0.2, 0.3, 0.4, 0.5 |
| contrast | mean + s (p - mean), the mean of each image and channel | 0.6, 0.45, 0.3, 0.2, 0.1 |
| pixelate | means over tiles of about 1 / s pixels | 0.75, 0.5, 0.38, 0.25, 0.19 |

Kinds and five severities are those of Hendrycks and Dietterich 2019; code and values are ours, for small images. Results with
them are none of ImageNet-C, whose published files `measurement/corruption.py` reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Corrupt = Callable[[Tensor, float, torch.Generator], Tensor]
"""(pixels [N, C, H, W] in [0, 1], s, generator) -> pixels."""


def gaussian_noise(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """Normal noise."""
    return pixels + s * torch.randn(pixels.shape, generator=generator)


def shot_noise(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """The noise of counting s photons where a pixel is 1."""
    return torch.poisson(pixels * s, generator=generator) / s


def impulse_noise(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """Black and white pixels, in each channel apart."""
    drawn = torch.rand(pixels.shape, generator=generator)
    return torch.where(drawn < s / 2, 0.0, torch.where(drawn < s, 1.0, pixels))


def gaussian_blur(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """A Gaussian mean, the border continued."""
    width = s * pixels.shape[-1] / 32
    reach = max(1, round(3 * width))
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    kernel = torch.exp(-places.square() / (2 * width**2))
    kernel = kernel / kernel.sum()
    channels = pixels.shape[1]
    padded = F.pad(pixels, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, kernel.view(1, 1, 1, -1).repeat(channels, 1, 1, 1), groups=channels)
    return F.conv2d(rows, kernel.view(1, 1, -1, 1).repeat(channels, 1, 1, 1), groups=channels)


def brightness(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """Brighter by s."""
    return pixels + s


def contrast(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """Nearer to the mean."""
    mean = pixels.mean((2, 3), keepdim=True)
    return mean + s * (pixels - mean)


def pixelate(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """Fewer, larger pixels."""
    height, width = pixels.shape[2:]
    small = F.interpolate(pixels, (max(1, round(s * height)), max(1, round(s * width))), mode="area")
    return F.interpolate(small, (height, width), mode="nearest")


CORRUPTIONS: dict[str, tuple[Corrupt, tuple[float, ...]]] = {
    "gaussian_noise": (gaussian_noise, (0.04, 0.08, 0.12, 0.18, 0.26)),
    "shot_noise": (shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "gaussian_blur": (gaussian_blur, (0.4, 0.6, 0.8, 1.1, 1.5)),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.6, 0.45, 0.3, 0.2, 0.1)),
    "pixelate": (pixelate, (0.75, 0.5, 0.38, 0.25, 0.19)),
}


def corrupt(images: Tensor, name: str, severity: int, generator: torch.Generator) -> Tensor:
    """Bytes [N, H, W, C] with a corruption of `CORRUPTIONS` at a severity from 1 to 5.

    >>> grey = torch.full((1, 2, 2, 1), 51, dtype=torch.uint8)
    >>> corrupt(grey, "brightness", 2, torch.Generator()).unique().tolist()  # 0.2 + 0.2 of 255
    [102]
    """
    function, values = CORRUPTIONS[name]
    pixels = images.permute(0, 3, 1, 2).float() / 255
    changed = function(pixels, values[severity - 1], generator)
    return (changed.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
