"""Every model by its name."""

from __future__ import annotations

from typing import Any

from bitcycle.model.awd_language_model import AwdLanguageModelOptions
from bitcycle.model.base import ModelOptions
from bitcycle.model.bert import Bert
from bitcycle.model.graph_network import Gcn, GraphSage
from bitcycle.model.mobilenet_v2_cifar import MobileNetV2Cifar
from bitcycle.model.ncf import Ncf
from bitcycle.model.recurrent_language_model import RecurrentLanguageModelOptions
from bitcycle.model.resnet_cifar import ResNetCifar
from bitcycle.model.resnet_extra_skip import ResNetExtraSkipCifar, ResNetExtraSkipImagenet
from bitcycle.model.resnet_imagenet import ResNetImagenet
from bitcycle.model.retinanet import RetinaNetOptions
from bitcycle.model.speech_lstm import SpeechLstmOptions
from bitcycle.model.transformer_language_model import TransformerOptions
from bitcycle.model.vgg_cifar import VggCifar

LSTM2 = {"layers": 2, "hidden": 650}
HLHLP = {
    "hidden": 300,
    "bias": "both",
    "recurrent_range": 0.1,
    "dropout_embedding": 0.5,
    "quantize": "all",
}
"""HLHLp, section 4.2: dropout on the inputs and outputs of the recurrent layer, all weights from +-0.1, all of them quantized."""

ADAPTIVE = {
    "layers": 16,
    "width": 1024,
    "feedforward": 4096,
    "final_norm": False,
    "cutoffs": [20_000, 60_000],
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
}
"""Baevski and Auli 2019, section 4."""

MODELS: dict[str, tuple[type[ModelOptions], dict[str, Any]]] = {
    **{f"resnet{depth}": (ResNetCifar, {"depth": depth}) for depth in (8, 14, 20, 32, 38, 74, 110, 152, 164)},
    "mobilenet_v2": (MobileNetV2Cifar, {}),
    **{f"resnet{depth}": (ResNetImagenet, {"depth": depth}) for depth in (18, 34, 50)},
    **{f"resnet{depth}_extra_skip": (ResNetExtraSkipCifar, {"depth": depth}) for depth in (8, 20)},
    "resnet34_extra_skip": (ResNetExtraSkipImagenet, {"depth": 34}),
    "vgg16": (VggCifar, {}),
    "mbert": (Bert, {"layers": 12, "hidden": 768, "heads": 12, "intermediate": 3072}),
    "bert_tiny": (Bert, {"layers": 2, "hidden": 128, "heads": 2, "intermediate": 512}),
    "ncf": (Ncf, {}),
    "speech_lstm": (SpeechLstmOptions, {}),
    "speech_lstm_small": (
        SpeechLstmOptions,
        {"hidden": 128, "stack": 2, "delay": 8, "dropout": 0.2, "dropout_input": 0.1},
    ),
    "lstm": (RecurrentLanguageModelOptions, {}),
    "lstm_awd": (AwdLanguageModelOptions, {}),
    "lstm2": (RecurrentLanguageModelOptions, LSTM2),
    "transformer": (TransformerOptions, {}),
    "transformer_adaptive": (TransformerOptions, ADAPTIVE),
    "gru_hlhlp": (RecurrentLanguageModelOptions, {"cell": "gru", **HLHLP}),
    "lstm_hlhlp": (RecurrentLanguageModelOptions, HLHLP),
    "gcn": (Gcn, {}),
    "gcn_small": (Gcn, {"layers": 2, "hidden": 64, "norm": "none", "dropout": 0.5}),
    "graphsage": (GraphSage, {}),
    "retinanet": (RetinaNetOptions, {}),
}
"""Model name -> its class of options and the values that make it that model; `conf/model/NAME.yaml` says the same."""
