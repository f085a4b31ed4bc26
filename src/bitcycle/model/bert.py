"""BERT for pairs of sentences: the network of `transformers`, with attention rewritten so that both products can be
quantized.

    S = Q K^T / sqrt(d) + mask,     P = dropout(softmax(S)),     C = P V          (both products: MatrixProduct)

Source: Devlin et al. 2019 and released code of Better Schedules, cpt_xnli. Quantized: every linear layer with its bias,
including pooler and classifier, and both products of attention. Float: embeddings, layer norms, softmax, GELU, tanh,
dropout and residuals. Differs from the code only in the noise of stochastic rounding. Works with transformers 4.46 and
later.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions, load_weights, read_weights
from bitcycle.module.layers import MatrixProduct
from bitcycle.optional_imports import require
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import SentencePairShape

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class SelfAttention(nn.Module):
    """Self-attention with the layers of a `transformers` module: [N, T, H] -> ([N, T, H], None)."""

    def __init__(self, attention: Any, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = attention.query, attention.key, attention.value
        self.dropout = attention.dropout
        self.scores, self.context = MatrixProduct(), MatrixProduct()

    def forward(self, x: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Add the mask [N, 1, 1, T] to the scores; all other arguments concern decoders and are ignored."""
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        scores = self.scores(query, key.transpose(2, 3)) / query.shape[-1] ** 0.5 + attention_mask
        context = self.context(self.dropout(scores.softmax(-1)), value)
        return context.transpose(1, 2).flatten(2), None


class BertClassifier(nn.Module):
    """Token ids, segment ids and mask [N, T] -> logits [N, classes]; parameter names of BertForSequenceClassification."""

    float_layers = ()
    """Every linear layer is quantized (Better Schedules' code)."""
    signed_inputs = ("*",)
    """No layer reads the output of a ReLU."""
    quantized_bias = True
    """Biases too."""

    def __init__(self, bert: Any, classes: int) -> None:
        super().__init__()
        config = bert.config
        self.bert = bert
        for layer in bert.encoder.layer:
            layer.attention.self = SelfAttention(layer.attention.self, config.num_attention_heads)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        nn.init.normal_(self.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        """`mask` is true for tokens and false for padding."""
        x = self.bert.embeddings(input_ids=ids, token_type_ids=segments)
        # Added to the scores before the softmax; built here, as the mask functions of transformers differ between
        # versions.
        hidden = torch.where(mask, 0.0, torch.finfo(x.dtype).min)[:, None, None, :]
        for layer in self.bert.encoder.layer:
            output = layer(x, hidden)
            x = output[0] if isinstance(output, tuple) else output
        return self.classifier(self.dropout(self.bert.pooler(x)))


@dataclass
class Bert(ModelOptions):
    """Options of BERT."""

    takes = SentencePairShape

    layers: int = setting(MISSING, "encoder layers", minimum=1)
    hidden: int = setting(MISSING, "width", minimum=1)
    heads: int = setting(MISSING, "attention heads", minimum=1)
    intermediate: int = setting(MISSING, "width of the feed-forward sublayer", minimum=1)
    positions: int = setting(512, "maximum number of tokens per sequence", minimum=1)
    dropout: float = setting(0.1, "dropout of hidden states and attention", minimum=0, maximum=0.999)
    weights: Optional[str] = setting(
        None,
        "folder of published weights (model.safetensors or pytorch_model.bin), as bert-base-multilingual-cased; null: random",
    )

    def validate(self) -> None:
        if self.hidden % self.heads:
            problem = f"does not divide the width of {self.hidden}"
            raise SettingError("heads", self.heads, problem, "choose another number")

    def check(self, shape: SentencePairShape) -> None:
        if shape.length > self.positions:
            problem = f"is less than the {shape.length} tokens of a pair"
            raise SettingError("positions", self.positions, problem, f"set dataset.length={self.positions} or less")

    def build(self, shape: SentencePairShape) -> BertClassifier:
        transformers = require("transformers", "entailment")
        config = transformers.BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=self.positions,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )
        file = _weights_file(self.weights) if self.weights is not None else None  # before seconds of random weights
        bert = transformers.BertModel(config)
        if file is not None:
            _load(bert, file)
        elif self.initial_weights is None:
            _warn_of_random_weights(self.name)
        return BertClassifier(bert, shape.classes)


@cache
def _warn_of_random_weights(name: str) -> None:
    logger.warning(
        "%s starts from RANDOM weights, without pre-training. Fine-tuning as in the papers needs published weights: "
        "model.weights=FOLDER",
        name,
    )


def _weights_file(path: str) -> Path:
    """The file of published weights in a folder. Raises SettingError if there is none."""
    folder = Path(path).expanduser()
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        remedy = "put model.safetensors or pytorch_model.bin of the published network there"
        raise SettingError("weights", path, "contains no weights", remedy)
    return file


def _load(bert: nn.Module, file: Path) -> None:
    """Load published weights of the network with or without a head. Raises SettingError if they do not fit."""
    found = {_present_name(name): value for name, value in read_weights(file, "weights").items()}
    remedy = "give weights of the same network, and its dataset.vocabulary and dataset.tokenizer"
    load_weights(bert, found, "weights", str(file.parent), remedy)
    logger.info("loaded BERT weights from %s", file.parent)


def _present_name(name: str) -> str:
    """Current name of a parameter of an early checkpoint."""
    name = name.removeprefix("bert.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
