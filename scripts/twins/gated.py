"""FracTrain's gated ResNet-38: fractrain_cifar/models.py, with the cost term and the indicator of train_frac.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bitcycle
from bitcycle.layer import penalty
from bitcycle.model.resnet import CifarResNet
from bitcycle.quantizer.registry import quantizer_options
from bitcycle.shapes import ImageShape
from twin_run import Twin, pairs_of, released, to_nearest

OPTIONS = [[0, 0], [2, 6], [3, 6], [4, 6], [4, 8], [6, 8]]
WEIGHTS, BATCH, EPOCH = 4, 8, 2
BETA, TARGET, THRESHOLD, DECAY = 1e-3, 1.5, 0.9, 0.4


def build(checkout: Path, variant: str) -> Twin:
    """The variant is dfq (no cost term), cost (with it) or stages (with rising targets; an epoch has two steps)."""
    released(checkout, "fractrain_cifar")
    to_nearest(import_module("modules.quantize"))
    models = import_module("models")
    models.WEIGHT_BITS = WEIGHTS
    theirs = models.cifar10_rnn_gate_38(proj_dim=len(OPTIONS))
    common = {"options": OPTIONS, "weight_bits": WEIGHTS, "total_steps": 64, "beta": BETA if variant != "dfq" else 0.0}
    if variant == "stages":
        rising = {"epsilon": THRESHOLD, "alpha": DECAY, "epoch_steps": EPOCH}
        schedule = bitcycle.schedule("fractrain", target=TARGET, **common, **rising)
    else:
        schedule = bitcycle.schedule("dfq", target=TARGET, **common)
    ours = CifarResNet((6, 6, 6), ImageShape(3, 32, 10))
    options = replace(quantizer_options("sbm"), stochastic=False)
    ours = bitcycle.quantize_model(ours, options, schedule=schedule, float_layers=["first", "last"])
    pairs = pairs_of(theirs, ours, names_in_ours(theirs))
    control = bitcycle.PrecisionController(ours, schedule)
    cost = Cost(indicator_of(checkout)) if variant != "dfq" else None
    theirs.train(), ours.train()
    totals = [0.0, 0.0]

    def losses(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        labels = torch.randint(10, (BATCH,), generator=generator)
        control.step(step)
        output, masks = theirs(images, *([pair[side] for pair in OPTIONS] for side in (0, 1)))
        their_loss, our_loss = cross_entropy(output, labels), cross_entropy(ours(images), labels)
        if cost is None:
            return their_loss, our_loss
        return their_loss + cost.term(masks), our_loss + penalty(ours, our_loss)  # type: ignore[operator]

    def after(step: int, their_loss: float, our_loss: float) -> None:
        totals[:] = totals[0] + their_loss, totals[1] + our_loss
        if variant == "stages" and (step + 1) % EPOCH == 0:
            cost.observe(totals[0] / EPOCH)  # type: ignore[union-attr]
            schedule.observe(totals[1] / EPOCH, 0.0)
            print(f"  target {cost.target:g} in theirs, {schedule.compute_target:g} in ours")  # type: ignore[union-attr]
            totals[:] = 0.0, 0.0

    return Twin(losses, pairs, lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=1e-4), after)


def names_in_ours(theirs: nn.Module) -> Callable[[str], str | None]:
    """Map names of their parameters to ours; None for unused ones: third batch norms, the last block's gate."""
    widening = {name.split("_")[0] for name, _ in theirs.named_parameters() if "_ds" in name}

    def rename(name: str) -> str | None:
        if found := re.fullmatch(r"gate_layer1\.([13])\.(\w+)", name):
            return f"gates.embeddings.0.conv{(int(found[1]) + 1) // 2}.{found[2]}"
        if found := re.fullmatch(r"group(\d)_gate(\d)\.([13])\.(\w+)", name):
            index = 6 * (int(found[1]) - 1) + int(found[2]) + 1
            return f"gates.embeddings.{index}.conv{(int(found[3]) + 1) // 2}.{found[4]}" if index < 18 else None
        if found := re.fullmatch(r"control\.rnn_one\.(\w+)_l0", name):
            return f"gates.cells.0.{found[1]}"
        if found := re.fullmatch(r"control\.proj\.(\w+)", name):
            return f"gates.projections.0.{found[1]}"
        if found := re.fullmatch(r"(group\d)_ds(\d)\.weight", name):
            return f"{found[1]}.{found[2]}.block.shortcut.0.weight"
        if found := re.fullmatch(r"(group\d)_layer(\d)\.bn3\.(\w+)", name):
            first = found[2] == "0" and found[1] in widening
            return f"{found[1]}.0.block.shortcut.1.{found[3]}" if first else None
        if found := re.fullmatch(r"(group\d)_layer(\d)\.(.+)", name):
            return f"{found[1]}.{found[2]}.block.{found[3]}"
        return name

    return rename


def indicator_of(checkout: Path) -> Any:
    """Their loss plateau indicator, extracted from its script, which would start training if imported."""
    source = ast.parse((checkout / "fractrain_cifar" / "train_frac.py").read_text())
    found = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "loss_diff_indicator")
    scope: dict[str, Any] = {"np": np}
    # only this class, from a file given by the user
    exec(compile(ast.Module([found], []), "train_frac.py", "exec"), scope)
    return scope["loss_diff_indicator"](THRESHOLD, DECAY)


class Cost:
    """The cost term of train_frac.py, reimplemented: blocks have equal weight, the target rises by 0.5 at a turning
    point."""

    def __init__(self, indicator: Any) -> None:
        self.indicator, self.state = indicator, SimpleNamespace(turning_points=0, epochs=0, losses=0.0)
        bits = np.array(OPTIONS)
        self.costs = (bits[:, 0] * WEIGHTS + bits[:, 1] * WEIGHTS + bits[:, 0] * bits[:, 1]) / 1024

    @property
    def target(self) -> float:
        """Current target, in percent of float32."""
        return TARGET + 0.5 * self.state.turning_points

    def term(self, masks: list[list[Tensor]]) -> Tensor:
        """The term added to the loss of a batch."""
        cost = sum(
            (mask.sum() * c for block in masks for mask, c in zip(block, self.costs, strict=True)), torch.zeros(())
        )
        percentage = 100 * cost.item() / (BATCH * 3 * len(masks))
        return cost * BETA * (-1 if percentage < self.target else 1)

    def observe(self, loss: float) -> None:
        """Record the mean loss of an epoch."""
        state = self.state
        state.epochs += 1
        if state.epochs <= 10:
            state.losses += loss
            self.indicator.scale_loss = state.losses / state.epochs
        if state.turning_points < 3:
            self.indicator.get_loss(loss)
            if self.indicator.turning_point_emerge():
                state.turning_points += 1
                self.indicator.adaptive_threshold(turning_point_count=state.turning_points)
                self.indicator.reset()
