"""ImageNet ResNets of torchvision; first, last and shortcut layers stay float.

Source: CPT, section 4.1 and table 3; FracTrain, tables 2 and 4; Better Schedules, section 4.2 (He et al. 2016).
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from bitcycle.model.base import ModelOptions
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape


@dataclass
class ResNetImagenet(ModelOptions):
    """Options of torchvision's ResNets, randomly initialised."""

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
