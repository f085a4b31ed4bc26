"""ResNets with a skip connection around every quantized convolution, as needed to train binary networks from scratch.

    y = skip(x) + BN(conv3x3(ReLU(x)))          one unit per 3x3 convolution; no ReLU after the sum
    skip = x; BN(conv1x1(x)) where the width changes, after 2x2 average pooling where the stride is 2

Source: partial pre-training, section 4.1, after Bethge et al. 2019; the authors released no code. The paper specifies
which convolutions a skip bypasses, not the positions of ReLU and pooling: here ReLU (PACT with `quantizer=pact_binary`)
reads the sum, and the skip connection stays real-valued, as in the networks of Bethge et al.
Initial weights are He et al.'s, normal with variance 2 / (k k out).
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.model.resnet_cifar import CifarDepth
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape

IMAGENET_DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
"""Blocks of two convolutions in each stage of the networks for large images (He et al. 2016)."""


class SkipUnit(nn.Module):
    """One 3x3 convolution with a skip connection: skip(x) + BN(conv(ReLU(x)))."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.relu = nn.ReLU()  # not in place: the skip reads the input too
        self.conv = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, 1, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        # A function instead of a module, as published costs exclude this pooling. Odd sizes are rounded up, as by the
        # convolution.
        passed = F.avg_pool2d(x, self.stride, ceil_mode=True, count_include_pad=False) if self.stride > 1 else x
        return self.shortcut(passed) + self.bn(self.conv(self.relu(x)))


class ExtraSkipResNet(nn.Module):
    """[N, channels, H, W] -> [N, classes]: stem, units, ReLU, global average pool, linear classifier.

    Args:
        stem: layers before the units, starting with the first convolution; its output has `widths[0]` channels.
        widths: channels of each stage.
        units: units in each stage; the first unit of later stages has stride 2.
        classes: number of classes.
    """

    float_layers = ("first", "last", "shortcut")
    """First, last and projection layers stay float (partial pre-training, section 4.3)."""
    signed_inputs = ("first", "shortcut")
    """The first layer reads the data; projections read the sums between units, which have no ReLU."""

    def __init__(self, stem: nn.Sequential, widths: tuple[int, ...], units: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = stem
        stages, before = [], widths[0]
        for stage, (width, count) in enumerate(zip(widths, units, strict=True)):
            for index in range(count):
                stages.append(SkipUnit(before, width, 2 if stage > 0 and index == 0 else 1))
                before = width
        self.units = nn.Sequential(*stages)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.relu(self.units(self.stem(x)))).flatten(1))


@dataclass
class ResNetExtraSkipCifar(CifarDepth):
    """Options of the network for small images: a 3x3 stem of 16 channels, three stages of 2n units of 16, 32 and 64 channels."""

    def build(self, shape: ImageShape) -> ExtraSkipResNet:
        stem = nn.Sequential(nn.Conv2d(shape.channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        count = (self.depth - 2) // 3
        return ExtraSkipResNet(stem, (16, 32, 64), (count, count, count), shape.classes)


@dataclass
class ResNetExtraSkipImagenet(ModelOptions):
    """Options of the network for large images: a 7x7 stem with max pooling, four stages of 64 to 512 channels."""

    smallest_image = 32
    depth: int = setting(MISSING, "layers: 18 or 34")

    def validate(self) -> None:
        if self.depth not in IMAGENET_DEPTHS:
            raise SettingError("depth", self.depth, "has no layout with extra skips", "use 18 or 34")

    def build(self, shape: ImageShape) -> ExtraSkipResNet:
        stem = nn.Sequential(
            nn.Conv2d(shape.channels, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.BatchNorm2d(64),
        )
        units = tuple(2 * blocks for blocks in IMAGENET_DEPTHS[self.depth])
        return ExtraSkipResNet(stem, (64, 128, 256, 512), units, shape.classes)
