"""Networks in float32; the `layer` package converts them to quantized ones."""

from bitcycle.model.base import ModelOptions, build_seeded, check_kind
from bitcycle.model.mobilenet_v2_cifar import CifarMobileNetV2
from bitcycle.model.resnet import CifarResNet
from bitcycle.presets import Presets

__all__ = ["MODELS", "CifarMobileNetV2", "CifarResNet", "ModelOptions", "build_seeded", "check_kind"]

MODELS: Presets[ModelOptions] = Presets("model")
"""Model name -> its options."""
