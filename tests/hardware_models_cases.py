"""What the tests of hardware models share."""

from __future__ import annotations

from torch import nn


def three_layers() -> nn.Module:
    """3 x 8 x 8 -> conv 3x3 to 16 -> grouped conv 3x3, stride 2, 4 groups, to 32 -> linear to 10; classifier float."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=4, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
