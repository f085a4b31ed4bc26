"""ResNets: those for CIFAR, torchvision's for ImageNet, and networks with extra skips for both."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions, shortcut
from bitcycle.module.layers import add_relu
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv x)))) + shortcut(x)) with 3x3 convolutions."""

    def __init__(self, in_channels: int, channels: int, stride: int, unused_bn: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(in_channels, channels, stride)
        if unused_bn and isinstance(self.shortcut, nn.Identity):
            self.bn3 = nn.BatchNorm2d(channels)  # unused parameters, as in the released code

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return add_relu(self.relu, residual, self.shortcut(x))


class CifarResNet(nn.Module):
    """[N, channels, H, W] -> [N, classes]; 32x32 images give 8x8 maps before the global average pool.

    A 3x3 stem, three groups of n basic blocks of 16, 32 and 64 channels, a linear classifier: depth 6n+2. `blocks` are those of
    each group, `width` the channels of the first.

    Source: CPT, section 4.1 and released code, models.py; He et al. 2016, section 4.2, with 1x1 convolutions as shortcuts. The
    164-layer network of CPT is not in the released code; its published cost is that of 6n+2 with n = 27.
    """

    float_layers = ("last",)
    """Float layers of the papers on CIFAR: the classifier only (released code of CPT and FracTrain)."""
    block_family = "resnet"

    def __init__(
        self, blocks: tuple[int, int, int], shape: ImageShape, unused_bn: bool = False, width: int = 16
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape.channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.group1 = _group(width, width, blocks[0], 1, unused_bn)
        self.group2 = _group(width, 2 * width, blocks[1], 2, unused_bn)
        self.group3 = _group(2 * width, 4 * width, blocks[2], 2, unused_bn)
        self.block_names = tuple(f"group{group}.{block}" for group in (1, 2, 3) for block in range(blocks[group - 1]))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, shape.classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """The pooled features before the classifier, [N, 4 width]."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.group3(self.group2(self.group1(x)))
        return self.pool(x).flatten(1)


def _group(in_channels: int, channels: int, blocks: int, stride: int, unused_bn: bool) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride, unused_bn)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1, unused_bn) for _ in range(blocks - 1)))


def _initialise(module: nn.Module) -> None:
    """Normal weights with variance 2 / (k k out), for the classifier 2 / (in out), as in the released code."""
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
        nn.init.normal_(module.weight, 0, (2 / fan_out) ** 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, (2 / (module.in_features * module.out_features)) ** 0.5)


@dataclass
class CifarDepth(ModelOptions):
    """Options of networks for small images whose number of layers is 6n+2."""

    smallest_image = 4
    depth: int = setting(MISSING, "layers, 6n+2: 8, 14, 20, 32, 38, 74, 110, 152, 164, ...")

    def validate(self) -> None:
        if self.depth < 8 or self.depth % 6 != 2:
            lower = max(8, (self.depth - 2) // 6 * 6 + 2)
            raise SettingError("depth", self.depth, "is not of the form 6n+2", f"use {lower} or {lower + 6}")


@dataclass
class ResNetCifar(CifarDepth):
    """Options of the CIFAR ResNets."""

    unused_bn: bool = setting(False, "give every block the released code's third batch norm, mostly unused")
    width: int = setting(
        16, "channels of the first group (papers: 16); later groups have 2 and 4 times as many", minimum=1
    )

    def build(self, shape: ImageShape) -> CifarResNet:
        n = (self.depth - 2) // 6
        return CifarResNet((n, n, n), shape, self.unused_bn, self.width)


@dataclass
class ResNetImagenet(ModelOptions):
    """Options of torchvision's ResNets, randomly initialised; first, last and shortcut layers stay float.

    Source: CPT, section 4.1 and table 3; FracTrain, tables 2 and 4; Better Schedules, section 4.2 (He et al. 2016).
    """

    smallest_image = 32
    depth: int = setting(MISSING, "layers: 18, 34, 50, 101 or 152")

    def validate(self) -> None:
        if self.depth not in (18, 34, 50, 101, 152):
            raise SettingError("depth", self.depth, "torchvision has no such ResNet", "use 18, 34, 50, 101 or 152")

    def build(self, shape: ImageShape) -> nn.Module:
        from torchvision import models

        model: Any = getattr(models, f"resnet{self.depth}")(weights=None, num_classes=shape.classes)
        if shape.channels != 3:
            model.conv1 = nn.Conv2d(shape.channels, 64, 7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        stages = [(stage, len(getattr(model, f"layer{stage}"))) for stage in (1, 2, 3, 4)]
        model.block_names = tuple(f"layer{stage}.{block}" for stage, count in stages for block in range(count))
        model.block_family = "imagenet"
        network: nn.Module = model
        return network


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
        self.shortcut = shortcut(in_channels, channels)  # of the pooled input

    def forward(self, x: Tensor) -> Tensor:
        # A function instead of a module, as published costs exclude this pooling. Odd sizes are rounded up, as by the
        # convolution.
        passed = F.avg_pool2d(x, self.stride, ceil_mode=True, count_include_pad=False) if self.stride > 1 else x
        return self.shortcut(passed) + self.bn(self.conv(self.relu(x)))


class ExtraSkipResNet(nn.Module):
    """[N, channels, H, W] -> [N, classes]: stem, units, ReLU, global average pool, linear classifier; a skip connection goes
    around every quantized convolution, as needed to train binary networks from scratch.

        y = skip(x) + BN(conv3x3(ReLU(x)))          one unit per 3x3 convolution; no ReLU after the sum
        skip = x; BN(conv1x1(x)) where the width changes, after 2x2 average pooling where the stride is 2

    Source: partial pre-training, section 4.1, after Bethge et al. 2019; the authors released no code. The paper specifies which
    convolutions a skip bypasses, not the positions of ReLU and pooling: here ReLU (PACT with `quantizer=pact_binary`) reads the
    sum, and the skip connection stays real-valued, as in the networks of Bethge et al. Initial weights are He et al.'s, normal
    with variance 2 / (k k out). Widths and units are those of each stage; the first unit of later stages has stride 2.
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
