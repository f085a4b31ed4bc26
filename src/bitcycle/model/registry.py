"""Registry of models by name."""

from bitcycle.model.base import ModelOptions
from bitcycle.model.bert import Bert
from bitcycle.model.custom import CustomModel, TimmModel
from bitcycle.model.graph_network import Gcn, GraphSage
from bitcycle.model.mobilenet_v2_cifar import MobileNetV2Cifar
from bitcycle.model.ncf import Ncf
from bitcycle.model.recurrent_language_model import AwdLanguageModelOptions, RecurrentLanguageModelOptions
from bitcycle.model.resnet import ResNetCifar, ResNetExtraSkipCifar, ResNetExtraSkipImagenet, ResNetImagenet
from bitcycle.model.retinanet import RetinaNetOptions
from bitcycle.model.speech_lstm import SpeechLstmOptions
from bitcycle.model.transformer_language_model import TransformerOptions
from bitcycle.model.vgg_cifar import VggCifar
from bitcycle.settings import Preset, registry

CIFAR_DEPTHS = [depth for depth in range(8, 165, 6) if depth != 50]
"""Depths 6n+2 up to CPT's 164 (not in any released code); 50 is a network for ImageNet."""

CIFAR = "CPT, section 4.1; He et al. 2016, section 4.2"
PTB = "Better Schedules, section 4.4 and released code, cpt_ptb"
GNN = "Better Schedules, section 4.3; released code, cpt_gnn (layer norm, dropout)"
PARTIAL = "partial pre-training, section 4.1"

HLHLP = {"hidden": 300, "bias": "both", "recurrent_range": 0.1, "dropout_embedding": 0.5, "quantize": "all"}
"""HLHLp, section 4.2: dropout on the inputs and outputs of the recurrent layer, all weights from +-0.1, all of them quantized."""

MODELS: dict[str, Preset[ModelOptions]] = registry(
    {
        **{
            f"resnet{depth}": Preset(ResNetCifar, "CIFAR ResNet of N layers, 16-32-64 channels", CIFAR, depth=depth)
            for depth in CIFAR_DEPTHS
        },
        **{
            f"resnet{depth}": Preset(
                ResNetImagenet,
                "ImageNet ResNet of N layers, torchvision's",
                "CPT, section 4.1 and table 3",
                depth=depth,
            )
            for depth in (18, 34, 50)
        },
        **{
            f"resnet{depth}_extra_skip": Preset(
                ResNetExtraSkipCifar,
                "CIFAR ResNet with a skip around every quantized convolution, for binary networks",
                f"{PARTIAL} (ResNet-20)",
                depth=depth,
            )
            for depth in CIFAR_DEPTHS
        },
        "resnet34_extra_skip": Preset(
            ResNetExtraSkipImagenet,
            "ImageNet ResNet with a skip around every quantized convolution, for binary networks",
            PARTIAL,
            depth=34,
        ),
        "mobilenet_v2": Preset(
            MobileNetV2Cifar,
            "MobileNetV2 for CIFAR, stride 1 in stem and second stage",
            "CPT, section 4.1 and released code",
        ),
        "vgg16": Preset(VggCifar, "VGG-16 for CIFAR with batch norm and one linear layer", f"{PARTIAL} and table 1"),
        "retinanet": Preset(
            RetinaNetOptions,
            "RetinaNet detector on a ResNet-18 with feature pyramid; model.depth, model.backbone_weights=FILE",
            "Better Schedules, section 4.2 and released code, cpt_voc",
        ),
        "custom": Preset(
            CustomModel, "a user-defined network: model.target=package.module:function, model.arguments={width: 2}"
        ),
        "timm": Preset(TimmModel, "an image network of timm: model.architecture=resnet10t"),
        "mbert": Preset(
            Bert,
            "multilingual BERT (base, cased), 12 layers of 768; every linear layer and both products of attention quantized",
            "Better Schedules, section 4.5 and released code, cpt_xnli; pre-trained weights by model.weights=FOLDER",
            layers=12,
            hidden=768,
            heads=12,
            intermediate=3072,
        ),
        "bert_tiny": Preset(
            Bert,
            "BERT of 2 layers of width 128, with random weights: for tests and CPUs",
            "ours; mbert, smaller",
            layers=2,
            hidden=128,
            heads=2,
            intermediate=512,
        ),
        "ncf": Preset(
            Ncf,
            "neural collaborative filtering (NeuMF) of MLPerf 0.5, with batch norm",
            f"{PARTIAL} and table 1; He et al. 2017",
        ),
        "speech_lstm": Preset(
            SpeechLstmOptions,
            "acoustic model: three unidirectional LSTM layers of 512, and CTC's output layer",
            "HLHLp, section 4.3",
        ),
        "speech_lstm_small": Preset(
            SpeechLstmOptions,
            "acoustic model of 3 LSTM layers of 128 with an output delay of 160 ms, for the spoken digits",
            "ours; speech_lstm, smaller",
            hidden=128,
            stack=2,
            delay=8,
            dropout=0.2,
            dropout_input=0.1,
        ),
        "lstm": Preset(RecurrentLanguageModelOptions, "LSTM of one layer of 800 between embedding and softmax", PTB),
        "lstm2": Preset(
            RecurrentLanguageModelOptions,
            "LSTM of two layers of 650 between embedding and softmax",
            "CPT, section 4.3, which gives no sizes: ours, after Zaremba et al. 2014",
            layers=2,
            hidden=650,
        ),
        "lstm_awd": Preset(
            AwdLanguageModelOptions,
            "AWD-LSTM of two layers, 1150 and 400 units, tied embedding and softmax; use with training=awd",
            "CPT, section 4.3, which gives no sizes but cites Merity et al. 2018 (three layers there)",
        ),
        **{
            f"{cell}_hlhlp": Preset(
                RecurrentLanguageModelOptions,
                f"{cell.upper()} of one layer of 300, quantized with its embedding and softmax (WikiText-2: model.hidden=512)",
                "HLHLp, section 4.2",
                cell=cell,
                **HLHLP,
            )
            for cell in ("gru", "lstm")
        },
        "transformer": Preset(
            TransformerOptions,
            "Transformer of 6 layers of width 512, tied embedding and softmax",
            "FracTrain, section 4.2 and appendix D; CPT, section 4.3",
        ),
        "transformer_adaptive": Preset(
            TransformerOptions,
            "Transformer of 16 layers of width 1024 with adaptive input and softmax; words numbered by frequency",
            "Baevski and Auli 2019, section 4, which CPT, section 4.3, cites",
            layers=16,
            width=1024,
            feedforward=4096,
            final_norm=False,
            cutoffs=[20_000, 60_000],
            dropout=0.3,
            attention_dropout=0.1,
            activation_dropout=0.1,
        ),
        "gcn": Preset(Gcn, "graph convolutional network of 3 layers, 512 hidden features", GNN),
        "gcn_small": Preset(
            Gcn,
            "graph convolutional network of 2 layers, 64 hidden features, for the small citation graphs",
            "ours, after Kipf and Welling 2017",
            layers=2,
            hidden=64,
            norm="none",
            dropout=0.5,
        ),
        "graphsage": Preset(GraphSage, "GraphSAGE with mean aggregator, 2 layers, 512 hidden features", GNN),
    }
)
"""Model name -> its options."""
