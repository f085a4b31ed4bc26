"""Networks in float32; the `layer` package converts them to quantized ones."""

from bitcycle.model.base import ModelOptions, build_seeded, check_kind
from bitcycle.model.mobilenet_v2_cifar import CifarMobileNetV2, MobileNetV2Cifar
from bitcycle.model.registry import MODELS
from bitcycle.model.resnet import CifarResNet, ResNetCifar
from bitcycle.model.speech_lstm import SpeechLstm, SpeechLstmOptions
from bitcycle.shapes import (
    DetectionShape,
    GraphShape,
    ImageShape,
    InteractionShape,
    SentencePairShape,
    Shape,
    SpeechShape,
    TokenShape,
)

__all__ = [
    "MODELS",
    "CifarMobileNetV2",
    "CifarResNet",
    "DetectionShape",
    "GraphShape",
    "ImageShape",
    "InteractionShape",
    "MobileNetV2Cifar",
    "ModelOptions",
    "ResNetCifar",
    "SentencePairShape",
    "Shape",
    "SpeechLstm",
    "SpeechLstmOptions",
    "SpeechShape",
    "TokenShape",
    "build_seeded",
    "check_kind",
]
