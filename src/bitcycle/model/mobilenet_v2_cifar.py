"""MobileNetV2 for CIFAR: stride 1 in the stem and in the second stage, ReLU, 1x1 shortcuts where the width changes.

Source: released code of CPT and FracTrain, models.py, after E2-Train. Differs from torchvision's network in the
strides, in ReLU instead of ReLU6, in an expansion convolution in the first stage too, and in the shortcut convolutions.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions, shortcut
from bitcycle.shapes import ImageShape

STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""(expansion, width, blocks, stride of the first block) of each stage."""


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1; blocks of stride 1 add a shortcut."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = expansion * in_channels
        self.stride = stride
        self.conv1 = nn.Conv2d(in_channels, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = nn.Conv2d(hidden, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(in_channels, channels) if stride == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return y + self.shortcut(x) if self.stride == 1 else y


class CifarMobileNetV2(nn.Module):
    """[N, channels, H, W] -> [N, classes]; 32x32 images give 4x4 maps before the global average pool."""

    float_layers = ("last",)
    """Float layers of the papers on CIFAR: the classifier only (released code of CPT and FracTrain)."""
    signed_inputs = ("conv1", "blocks.[1-9]*.conv1", "blocks.[1-9]*.shortcut.0", "conv2")
    """Layers that read the image or the output of a block, which ends without ReLU (block 0 reads a ReLU's output)."""
    block_family = "mobilenet_v2"

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape.channels, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU(inplace=True)
        blocks, width = [], 32
        for expansion, channels, count, stride in STAGES:
            for index in range(count):
                blocks.append(InvertedResidual(width, channels, expansion, stride if index == 0 else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.block_names = tuple(f"blocks.{index}" for index in range(len(blocks)))
        self.conv2 = nn.Conv2d(width, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280)
        self.fc = nn.Linear(1280, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        x = self.relu(self.bn2(self.conv2(x)))
        # A function instead of a module: CPT's published costs count pooling modules only.
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


@dataclass
class MobileNetV2Cifar(ModelOptions):
    """Options of MobileNetV2 for CIFAR."""

    smallest_image = 8

    def build(self, shape: ImageShape) -> CifarMobileNetV2:
        return CifarMobileNetV2(shape)
