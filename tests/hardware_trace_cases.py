"""What the tests of hardware trace share."""

from __future__ import annotations

from torch import nn


class Function(nn.Module):
    """A module around a function of modules and inputs."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *inputs):
        return self.function(*self.inner, *inputs)
