"""Every model by its name."""

from __future__ import annotations

from typing import Any

from bitcycle.model.base import ModelOptions
from bitcycle.model.mobilenet_v2_cifar import MobileNetV2Cifar
from bitcycle.model.resnet_cifar import ResNetCifar
from bitcycle.model.resnet_extra_skip import ResNetExtraSkipCifar, ResNetExtraSkipImagenet
from bitcycle.model.resnet_imagenet import ResNetImagenet
from bitcycle.model.retinanet import RetinaNetOptions
from bitcycle.model.vgg_cifar import VggCifar

MODELS: dict[str, tuple[type[ModelOptions], dict[str, Any]]] = {
    **{f"resnet{depth}": (ResNetCifar, {"depth": depth}) for depth in (8, 14, 20, 32, 38, 74, 110, 152, 164)},
    "mobilenet_v2": (MobileNetV2Cifar, {}),
    **{f"resnet{depth}": (ResNetImagenet, {"depth": depth}) for depth in (18, 34, 50)},
    **{f"resnet{depth}_extra_skip": (ResNetExtraSkipCifar, {"depth": depth}) for depth in (8, 20)},
    "resnet34_extra_skip": (ResNetExtraSkipImagenet, {"depth": 34}),
    "vgg16": (VggCifar, {}),
    "retinanet": (RetinaNetOptions, {}),
}
"""Model name -> its class of options and the values that make it that model; `conf/model/NAME.yaml` says the same."""
