"""RetinaNet (Lin et al. 2017): a ResNet, a feature pyramid of five levels, and two heads shared by all levels.

    C3, C4, C5 -> lateral 1x1 and output 3x3 convolutions -> P3, P4, P5;   P6 = conv(C5),   P7 = conv(ReLU(P6)), both of stride 2
    head: 4 x (3x3 convolution, ReLU), then a 3x3 convolution to 9 K scores, or 9 x 4 box offsets, per position

All convolutions are quantized, including biases. A head runs five times per step, P3 first, so the range observers of
its layers are updated five times per step and mix the levels.

Source: Better Schedules, section 4.2, and its released code (cpt_voc). Differs from that code in that backbone weights
come from a file, and that without them batch normalisation statistics are trained, since those of a random network are
useless (`frozen_bn=auto`).
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle.model.base import ModelOptions, load_weights, read_weights
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import DetectionShape

ANCHORS = 9
"""Anchors per position: three scales times three aspect ratios."""
PRIOR = 0.01
"""Initial score of every anchor (Lin et al. 2017, section 3.3)."""


class Predictions(NamedTuple):
    """The predictions for each anchor: logits [N, A, K] of the classes, and offsets [N, A, 4] of the box."""

    logits: Tensor
    offsets: Tensor


class RetinaNet(nn.Module):
    """The detector, built from torchvision's ResNet, feature pyramid and heads.

    Images [N, 3, H, W], with H and W multiples of 32, give `Predictions` of all anchors: level by level from P3, row by
    row, nine per position. With `frozen_bn`, batch normalisation of the ResNet keeps its statistics; scale and shift are
    always trained.
    """

    float_layers: tuple[str, ...] = ()
    signed_inputs = ("first", "pyramid.layer_blocks.*", "heads.*.conv.0.0")
    quantized_bias = True

    def __init__(self, depth: int, classes: int, width: int = 256, frozen_bn: bool = False) -> None:
        super().__init__()
        from torchvision import models
        from torchvision.models._utils import IntermediateLayerGetter
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelP6P7

        resnet = getattr(models, f"resnet{depth}")(weights=None)
        channels = [resnet.fc.in_features // 4, resnet.fc.in_features // 2, resnet.fc.in_features]
        self.frozen_bn = frozen_bn
        self.backbone = IntermediateLayerGetter(resnet, {"layer2": "P3", "layer3": "P4", "layer4": "P5"})
        self.pyramid = FeaturePyramidNetwork(channels, width, LastLevelP6P7(channels[-1], width))
        self.heads = RetinaNetHead(width, ANCHORS, classes)
        for module in self.modules():
            if isinstance(module, nn.ReLU):  # quantizers need the convolution's unmodified output
                module.inplace = False
        self.initialise()

    def initialise(self) -> None:
        """Weights from N(0, 2 / (k k out)), PyTorch's biases; both output convolutions 0, scores at the prior."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                taps = module.kernel_size[0] * module.kernel_size[1]
                nn.init.normal_(module.weight, 0.0, math.sqrt(2 / (taps * module.out_channels)))
                if module.bias is not None:
                    bound = 1 / math.sqrt(module.in_channels * taps)
                    nn.init.uniform_(module.bias, -bound, bound)
        for output, bias in (
            (self.heads.classification_head.cls_logits, -math.log((1 - PRIOR) / PRIOR)),
            (self.heads.regression_head.bbox_reg, 0.0),
        ):
            nn.init.zeros_(output.weight)
            nn.init.constant_(output.bias, bias)

    def train(self, mode: bool = True) -> "RetinaNet":
        """Set training mode, in which frozen batch normalisation still uses its statistics."""
        super().train(mode)
        if self.frozen_bn:
            for module in self.modules():
                if isinstance(module, _BatchNorm):  # includes SyncBatchNorm
                    module.eval()
        return self

    def forward(self, images: Tensor) -> Predictions:
        """Return the predictions for all anchors."""
        features: OrderedDict[str, Tensor] = self.pyramid(self.backbone(images))
        found: dict[str, Tensor] = self.heads(list(features.values()))
        return Predictions(found["cls_logits"], found["bbox_regression"])


@dataclass
class RetinaNetOptions(ModelOptions):
    """Options of RetinaNet."""

    takes = DetectionShape

    depth: int = setting(
        18, "layers of the ResNet: 18, 34, 50 or 101 (Better Schedules: 18; its code has scripts for 101)"
    )
    width: int = setting(256, "channels of feature pyramid and heads (paper: 256)", minimum=1)
    backbone_weights: Optional[str] = setting(
        None,
        "file of ImageNet weights of the ResNet: torchvision's (resnet18-f37072fd.pth) or a run's of model=resnet18;"
        " null: random (Better Schedules 4.2: pre-trained)",
        content=True,
    )

    def validate(self) -> None:
        if self.depth not in (18, 34, 50, 101):
            raise SettingError("depth", self.depth, "is not supported", "use 18, 34, 50 or 101")

    @property
    def freezes_bn(self) -> bool:
        """Whether batch normalisation keeps its statistics."""
        return self.backbone_weights is not None or self.initial_weights is not None

    def check(self, shape: DetectionShape) -> None:
        if shape.channels != 3:
            raise SettingError("name", self.name, f"images have {shape.channels} channels", "use colour images")

    def build(self, shape: DetectionShape) -> nn.Module:
        model = RetinaNet(self.depth, shape.classes, self.width, self.freezes_bn)
        if self.backbone_weights is not None:
            found = read_weights(Path(self.backbone_weights).expanduser(), "backbone_weights")
            remedy = "give weights of the ResNet of model.depth"
            load_weights(model.backbone, found, "backbone_weights", self.backbone_weights, remedy)
        return model
