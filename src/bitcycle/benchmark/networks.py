"""Training steps of several networks on synthetic data, float and quantized in several variants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.benchmark.measure import interleaved, peak_bytes, summarise
from bitcycle.layer import PrecisionController, penalty, quantize_model
from bitcycle.layer.codes.recomputation import RecomputingBatchNorm2d
from bitcycle.layer.compilation import channels_last
from bitcycle.layer.sparse import make_edges
from bitcycle.model import MODELS
from bitcycle.quantizer import compiler_works
from bitcycle.recipe.optimizer import OptimizerOptions
from bitcycle.schedule import Schedule, schedule
from bitcycle.shapes import GraphShape, ImageShape, TokenShape

STEPS = 64_000
"""Assumed length of the run, for the bits of schedules."""
STRIDE = 1001
"""Distance of timed steps in the run, so that cyclic schedules visit all their bits."""

Loss = Callable[[nn.Module], Tensor]


@dataclass
class Network:
    """A network: functions that build it and its data, and a description of its samples per step.

    `batch` maps a device to the loss of one batch as a function of the model.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], Loss]
    samples: str
    gated: bool = False


@dataclass
class Variant:
    """A variant of training."""

    quantizer: str = "sbm"
    schedule: str = "static"
    compute: str = "simulate"
    recompute: bool = False
    backward: str = "all"
    """Option of gated networks; see Dfq."""


VARIANTS = {
    "float": Variant(quantizer="none"),
    "static 8": Variant(),
    "static 8, codes": Variant(compute="codes"),
    "static 8, codes, recompute": Variant(compute="codes", recompute=True),
    "RTH 3-8": Variant(schedule="RTH"),
    "RTH 3-8, codes": Variant(schedule="RTH", compute="codes"),
    "DFQ": Variant(schedule="dfq"),
    "DFQ, chosen": Variant(schedule="dfq", backward="chosen"),
}


def _build(name: str, shape: Any, **options: Any) -> nn.Module:
    return MODELS[name](**options).build(shape)


def _images(samples: int, size: int, classes: int) -> Callable[[torch.device], Loss]:
    def batch(device: torch.device) -> Loss:
        x = torch.randn(samples, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(classes, (samples,), device=device)
        return lambda model: F.cross_entropy(model(x), y)

    return batch


def _words(samples: int, length: int, vocabulary: int) -> Callable[[torch.device], Loss]:
    def batch(device: torch.device) -> Loss:
        tokens = torch.randint(vocabulary, (length + 1, samples), device=device)
        return lambda model: F.cross_entropy(model(tokens[:-1])[0].flatten(0, 1), tokens[1:].flatten())

    return batch


def _graph(nodes: int, edges: int, features: int, classes: int) -> Callable[[torch.device], Loss]:
    def batch(device: torch.device) -> Loss:
        connections = make_edges(torch.randint(nodes, (2, edges)), nodes).to(device)
        x, y = torch.randn(nodes, features, device=device), torch.randint(classes, (nodes,), device=device)
        return lambda model: F.cross_entropy(model(x, [connections]), y)

    return batch


def _feedforward(width: int, inner: int, layers: int) -> nn.Module:
    """The linear layers of a transformer, without attention."""
    blocks = [(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width), nn.LayerNorm(width)) for _ in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(width, 3))


def _sentences(samples: int, length: int, width: int) -> Callable[[torch.device], Loss]:
    def batch(device: torch.device) -> Loss:
        x, y = torch.randn(samples, length, width, device=device), torch.randint(3, (samples,), device=device)
        return lambda model: F.cross_entropy(model(x)[:, 0], y)

    return batch


def networks(cuda: bool) -> dict[str, Network]:
    """The networks, with batches for steps of about a second on one CPU core, or the batches of the papers on a GPU."""

    def samples(cpu: int, gpu: int) -> int:
        return gpu if cuda else cpu

    small, tiny, words = samples(32, 128), samples(4, 256), samples(20, 64)
    cifar, imagenet, tiny_images = ImageShape(3, 32, 10), ImageShape(3, 224, 1000), ImageShape(3, 16, 10)
    graph = GraphShape(features=128, classes=40, nodes=20_000, edges=120_000)
    cora = GraphShape(features=1433, classes=7, nodes=2708, edges=10_556)
    return {
        "resnet8_16": Network(lambda: _build("resnet8", tiny_images), _images(128, 16, 10), "128 images of 16x16"),
        "resnet20_16": Network(lambda: _build("resnet20", tiny_images), _images(128, 16, 10), "128 images of 16x16"),
        "resnet8": Network(lambda: _build("resnet8", cifar), _images(32, 32, 10), "32 images of 32x32"),
        "resnet20": Network(lambda: _build("resnet20", cifar), _images(128, 32, 10), "128 images of 32x32", True),
        "resnet38": Network(lambda: _build("resnet38", cifar), _images(128, 32, 10), "128 images of 32x32"),
        "resnet74": Network(lambda: _build("resnet74", cifar), _images(128, 32, 10), "128 images of 32x32", cuda),
        "mobilenet_v2": Network(
            lambda: _build("mobilenet_v2", cifar), _images(small, 32, 10), f"{small} images of 32x32", cuda
        ),
        "resnet18": Network(
            lambda: _build("resnet18", imagenet), _images(tiny, 224, 1000), f"{tiny} images of 224x224"
        ),
        "lstm": Network(
            lambda: _build("lstm", TokenShape(10_000)), _words(words, 35, 10_000), f"{words} sequences of 35 words"
        ),
        "lstm2_200": Network(
            lambda: _build("lstm2", TokenShape(10_000), hidden=200),
            _words(words, 35, 10_000),
            f"{words} sequences of 35 words",
        ),
        "gcn_cora": Network(
            lambda: _build("gcn", cora),
            _graph(cora.nodes, cora.edges, cora.features, cora.classes),
            f"a graph of {cora.nodes:,} nodes and {cora.edges:,} edges",
        ),
        "gcn": Network(
            lambda: _build("gcn", graph),
            _graph(graph.nodes, graph.edges, graph.features, graph.classes),
            f"a graph of {graph.nodes:,} nodes and {graph.edges:,} edges",
        ),
        "linear": Network(
            lambda: _feedforward(768, 3072, samples(2, 12)),
            _sentences(samples(4, 32), 64, 768),
            f"{samples(4, 32)} sentences of 64 words, layers of mBERT's size",
        ),
    }


class Step:
    """Consecutive training steps of one variant of a network on one batch."""

    def __init__(self, network: Network, variant: Variant, device: torch.device) -> None:
        torch.manual_seed(0)
        model = network.build()
        plan = _schedule(variant, getattr(model, "block_family", None))
        if variant.quantizer != "none":
            options: dict[str, Any] = {
                "compile": compiler_works(device.type),
                "compute": variant.compute,
                "recompute": variant.recompute,
                "schedule": plan,
            }
            model = quantize_model(model, variant.quantizer, **options)
        self.computes_codes = any(getattr(module, "computation", None) is not None for module in model.modules())
        self.recomputes = any(isinstance(module, RecomputingBatchNorm2d) for module in model.modules())
        self.model = channels_last(model, device).train()
        self.controller = PrecisionController(self.model, plan) if variant.quantizer != "none" else None
        self.optimizer = OptimizerOptions().build(self.model)
        self.loss, self.number = network.batch(device), 0

    def __call__(self) -> None:
        """Train one step."""
        if self.controller is not None:
            self.controller.step(self.number * STRIDE % STEPS)
        self.number += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model)
        added = penalty(self.model, loss)
        (loss if added is None else loss + added).backward()
        self.optimizer.step()


def _schedule(variant: Variant, family: str | None) -> Schedule:
    options: dict[str, dict[str, Any]] = {
        "RTH": {"q_min": 3, "q_max": 8, "cycles": 8},
        "dfq": {"family": family, "backward": variant.backward},
    }
    return schedule(variant.schedule, total_steps=STEPS, **options.get(variant.schedule, {}))


def measure_networks(names: list[str], repetitions: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and measurements of each network: time, ratio to float, peak memory and its ratio, by variant."""
    for name in names:
        network = networks(device.type == "cuda")[name]
        chosen = {key: variant for key, variant in VARIANTS.items() if network.gated or variant.schedule != "dfq"}
        steps = {key: Step(network, variant, device) for key, variant in chosen.items()}
        steps = {
            key: step
            for key, step in steps.items()
            if (step.computes_codes or chosen[key].compute != "codes")
            and (step.recomputes or not chosen[key].recompute)
        }
        found: dict[str, dict[str, Any]] = {**summarise(interleaved(steps, repetitions, device), "float")}
        for step in steps.values():
            step.optimizer.zero_grad(set_to_none=True)  # memory freed during the step would count as negative
        peaks = {key: peak_bytes(step, device) for key, step in steps.items()}
        for key, peak in peaks.items():
            found[key] |= {"peak_mib": round(peak / 2**20, 1), "peak_ratio": round(peak / peaks["float"], 4)}
        yield name, {"samples": network.samples, "variants": found}
