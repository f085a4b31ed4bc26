"""VGG-16 for CIFAR: thirteen 3x3 convolutions with batch norm and ReLU, five max poolings, one linear classifier.

    64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M, linear 512 -> classes

Source: partial pre-training, section 4.1 and table 1 (Simonyan and Zisserman 2014); the authors released no code. The
paper does not say how the network for 224 pixels was adapted to 32: here each convolution is followed by batch norm and
has no bias, one linear layer replaces the three large ones, and there is no dropout.
Initial weights are He et al.'s, normal with variance 2 / (k k out).
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.shapes import ImageShape

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""(width, number of convolutions) of each stage, followed by a max pooling."""


class CifarVgg(nn.Module):
    """[N, channels, H, W] -> [N, classes]; 32x32 images give 1x1 maps after the last pooling."""

    float_layers = ("first", "last")
    """First and last layer stay float (partial pre-training, section 4.3)."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = shape.channels
        for width, count in STAGES:
            for _ in range(count):
                convolution = nn.Conv2d(before, width, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(before, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        # Larger images than 32 pixels leave more than one position; they are averaged.
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


@dataclass
class VggCifar(ModelOptions):
    """Options of VGG-16 for CIFAR."""

    smallest_image = 32

    def build(self, shape: ImageShape) -> CifarVgg:
        return CifarVgg(shape)
