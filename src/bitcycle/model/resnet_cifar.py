"""CIFAR ResNets of depth 6n+2: a 3x3 stem, three groups of n basic blocks of 16, 32 and 64 channels, a linear classifier.

Source: CPT, section 4.1 and released code, models.py; He et al. 2016, section 4.2, with 1x1 convolutions as shortcuts. The
164-layer network of CPT is not in the released code; its published cost is that of 6n+2 with n = 27.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: relu(bn(conv(relu(bn(conv x)))) + shortcut(x)).

    The shortcut is the identity, or a 1x1 convolution with batch norm where width or size change.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, unused_bn: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            convolution = nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))
        elif unused_bn:
            self.bn3 = nn.BatchNorm2d(channels)  # unused parameters, as in the released code

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return self.relu(residual + self.shortcut(x))


class CifarResNet(nn.Module):
    """[N, channels, H, W] -> [N, classes]; 32x32 images give 8x8 maps before the global average pool.

    Args:
        blocks: blocks per group (n).
        unused_bn: give every block the third batch norm of the released code, which only two blocks use.
        width: channels of the first group; the second and third have two and four times as many.
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
