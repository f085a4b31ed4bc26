"""BERT of Better Schedules for XNLI: cpt_xnli/models.py, two small layers with random weights, on random tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

import bitcycle
from bitcycle.model.bert import Bert
from bitcycle.quantizer.registry import quantizer_options
from bitcycle.shapes import SentencePairShape
from twin_run import Twin, pairs_of, released, to_nearest

VOCABULARY, LENGTH, BATCH, CLASSES = 120, 12, 8, 3
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "intermediate": 64}


def additive(mask: Tensor) -> Tensor:
    """Additive attention mask [N, 1, 1, T] from a mask [N, T] of ones and zeros."""
    return (1.0 - mask[:, None, None, :].double()) * torch.finfo(torch.float64).min


def build(checkout: Path, variant: str) -> Twin:
    """Without dropout, whose random numbers differ; float gradients."""
    transformers.models.bert.load_tf_weights_in_bert = None  # removed since; imported but not used by the released file
    released(checkout, "cpt_xnli")
    to_nearest(import_module("modules.quantize"))
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=SIZES["hidden"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        intermediate_size=SIZES["intermediate"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    models = import_module("models")
    # Three methods that transformers has changed or removed since.
    models.BertPreTrainedModel.init_weights = lambda network: network.apply(network._init_weights)
    models.BertPreTrainedModel.get_head_mask = lambda *_: [None] * SIZES["layers"]
    models.BertPreTrainedModel.get_extended_attention_mask = lambda _, mask, *__: additive(mask)
    theirs = models.QBertForSequenceClassification(config, of_step := SimpleNamespace(num_bits=8, num_grad_bits=0))
    ours = Bert(name="bert", dropout=0.0, **SIZES).build(SentencePairShape(VOCABULARY, LENGTH, CLASSES))
    ours = bitcycle.quantize_model(ours, replace(quantizer_options("sbm"), stochastic=False))
    pairs = pairs_of(theirs, ours)
    float_gradients = {"gradient_min": 32, "gradient_max": 32}
    schedule = bitcycle.schedule("CR", q_min=5, q_max=8, cycles=2, total_steps=64, **float_gradients)
    control = bitcycle.PrecisionController(ours, schedule)
    theirs.train(), ours.train()

    def losses(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        segments = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(BATCH, LENGTH)
        mask = torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (BATCH, 1), generator=generator)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        bits = control.step(step)
        arguments = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask.long()}
        of_step.num_bits = bits.weight
        return cross_entropy(theirs(**arguments)[0], labels), cross_entropy(ours(ids, segments, mask), labels)

    return Twin(losses, pairs, lambda weights: torch.optim.AdamW(weights, 1e-3))
