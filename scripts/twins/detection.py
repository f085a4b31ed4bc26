"""RetinaNet of Better Schedules with a ResNet-18: cpt_voc/retinanet, on random images and boxes, with random
weights."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

import bitcycle
from bitcycle.model.retinanet import RetinaNet
from bitcycle.quantizer.registry import quantizer_options
from bitcycle.task.anchors import anchors, detection_losses, match
from twin_run import Twin, pairs_of, released, to_nearest

CLASSES, SIZE = 5, 64
NAMES = {
    r"(conv1|bn1|layer\d)\.(.+)": r"backbone.\1.\2",
    r"fpn\.P(\d)_1\.(\w+)": lambda m: f"pyramid.inner_blocks.{int(m[1]) - 3}.0.{m[2]}",
    r"fpn\.P6\.(\w+)": r"pyramid.extra_blocks.p6.\1",
    r"fpn\.P7_2\.(\w+)": r"pyramid.extra_blocks.p7.\1",
    r"fpn\.P(\d)_2\.(\w+)": lambda m: f"pyramid.layer_blocks.{int(m[1]) - 3}.0.{m[2]}",
    r"regressionModel\.conv(\d)\.(\w+)": lambda m: f"heads.regression_head.conv.{int(m[1]) - 1}.0.{m[2]}",
    r"regressionModel\.output\.(\w+)": r"heads.regression_head.bbox_reg.\1",
    r"classificationModel\.conv(\d)\.(\w+)": lambda m: f"heads.classification_head.conv.{int(m[1]) - 1}.0.{m[2]}",
    r"classificationModel\.output\.(\w+)": r"heads.classification_head.cls_logits.\1",
}


def build(checkout: Path, variant: str) -> Twin:
    """One image with one box per step; batch normalisation statistics are frozen, as there; float gradients."""
    released(checkout, "cpt_voc")
    to_nearest(import_module("retinanet.quantize"))
    module = import_module("retinanet.model")
    theirs = module.QResNet(CLASSES, module.QBasicBlock, [2, 2, 2, 2])
    ours = RetinaNet(18, CLASSES, frozen_bn=True)
    ours = bitcycle.quantize_model(ours, replace(quantizer_options("sbm"), stochastic=False))
    pairs = pairs_of(theirs, ours, name_in_ours)
    float_gradients = {"gradient_min": 32, "gradient_max": 32}
    schedule = bitcycle.schedule("CR", q_min=5, q_max=8, cycles=2, total_steps=64, **float_gradients)
    control = bitcycle.PrecisionController(ours, schedule)
    theirs.train(), theirs.freeze_bn(), ours.train()
    places = anchors(SIZE, SIZE)

    def losses(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        image = torch.randn(1, 3, SIZE, SIZE, generator=generator)
        # no integer coordinates, for which overlaps can equal thresholds exactly
        corner = torch.rand(2, generator=generator) * SIZE / 2
        box = torch.cat([corner, corner + 24 + torch.rand(2, generator=generator) * 8])[None]
        label = torch.randint(CLASSES, (1,), generator=generator)
        bits = control.step(step)
        annotation = torch.cat([box, label[:, None].double()], 1)[None]
        their_losses = theirs([image, annotation], bits.weight, 0)
        found = ours(image)
        loss = detection_losses(found.logits.sigmoid(), found.offsets, places, match(places, box[None], label[None]))
        return sum(part.mean() for part in their_losses), loss.classes + loss.boxes

    return Twin(losses, pairs, lambda weights: torch.optim.SGD(weights, 1e-3))


def name_in_ours(name: str) -> str:
    """Map a name of their parameters to ours."""
    for pattern, other in NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, other, name)
    return name
