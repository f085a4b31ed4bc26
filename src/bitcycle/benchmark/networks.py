"""Training steps of several networks on synthetic data, float and quantized in several variants."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from bitcycle.benchmark.measure import interleaved, peak_bytes, summarise
from bitcycle.layer import PrecisionController, penalty, quantize_model
from bitcycle.layer.codes.batch_norm import RecomputingBatchNorm2d
from bitcycle.layer.memory_format import channels_last
from bitcycle.model import MODELS
from bitcycle.module.sparse import make_edges
from bitcycle.quantizer import compiler_works
from bitcycle.recipe.options import OptimizerOptions
from bitcycle.schedule import schedule
from bitcycle.shapes import GraphShape, ImageShape, TokenShape

STEPS = 64_000
"""Assumed length of the run, for the bits of schedules."""
STRIDE = 1001
"""Distance of timed steps in the run, so that cyclic schedules visit all their bits."""

Loss = Callable[[nn.Module], Tensor]


class Variant(NamedTuple):
    """A variant of training."""

    quantizer: str = "sbm"
    schedule: str = "static"
    compute: str = "simulate"
    recompute: bool = False
    backward: str = "all"
    """Option of gated networks; see Dfq."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options of the schedule."""


VARIANTS, RECIPES = (
    {name: Variant(**values) for name, values in several.items()}
    for several in yaml.safe_load(Path(__file__).with_name("variants.yaml").read_text()).values()
)


class Network(NamedTuple):
    """A network: functions that build it and its data, and a description of its samples per step.

    `batch` maps a device to the loss of one batch as a function of the model.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], Loss]
    samples: str
    gated: bool = False
    variants: Mapping[str, Variant] = MappingProxyType(VARIANTS)


def _images(name: str, samples: int, shape: ImageShape, gated: bool = False) -> Network:
    def batch(device: torch.device) -> Loss:
        x = torch.randn(samples, shape.channels, shape.size, shape.size, device=device)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.randint(shape.classes, (samples,), device=device)
        return lambda model: F.cross_entropy(model(x), y)

    words = f"{samples} images of {shape.size}x{shape.size}"
    return Network(lambda: MODELS[name]().build(shape), batch, words, gated)


def _words(name: str, samples: int, length: int = 35, vocabulary: int = 10_000, **options: Any) -> Network:
    def batch(device: torch.device) -> Loss:
        tokens = torch.randint(vocabulary, (length + 1, samples), device=device)
        return lambda model: F.cross_entropy(model(tokens[:-1])[0].flatten(0, 1), tokens[1:].flatten())

    words = f"{samples} sequences of {length} words"
    return Network(lambda: MODELS[name](**options).build(TokenShape(vocabulary)), batch, words)


def _graph(shape: GraphShape) -> Network:
    def batch(device: torch.device) -> Loss:
        connections = make_edges(torch.randint(shape.nodes, (2, shape.edges)), shape.nodes).to(device)
        x = torch.randn(shape.nodes, shape.features, device=device)
        y = torch.randint(shape.classes, (shape.nodes,), device=device)
        return lambda model: F.cross_entropy(model(x, [connections]), y)

    words = f"a graph of {shape.nodes:,} nodes and {shape.edges:,} edges"
    return Network(lambda: MODELS["gcn"]().build(shape), batch, words)


def _sentences(samples: int, layers: int) -> Network:
    """The linear layers of a transformer, without attention."""
    length, width, inner = 64, 768, 3072

    def build() -> nn.Module:
        hidden: list[nn.Module] = []
        for _ in range(layers):
            hidden += [nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width), nn.LayerNorm(width)]
        return nn.Sequential(*hidden, nn.Linear(width, 3))

    def batch(device: torch.device) -> Loss:
        x, y = torch.randn(samples, length, width, device=device), torch.randint(3, (samples,), device=device)
        return lambda model: F.cross_entropy(model(x)[:, 0], y)

    return Network(build, batch, f"{samples} sentences of {length} words, layers of mBERT's size")


def networks(cuda: bool) -> dict[str, Network]:
    """The networks, with batches for steps of about a second on one CPU core, or the batches of the papers on a GPU."""
    small, tiny, words, sentences, layers = (128, 256, 64, 32, 12) if cuda else (32, 4, 20, 4, 2)
    cifar, imagenet, tiny_images = ImageShape(3, 32, 10), ImageShape(3, 224, 1000), ImageShape(3, 16, 10)
    return {
        "resnet8_16": _images("resnet8", 128, tiny_images),
        "resnet20_16": _images("resnet20", 128, tiny_images),
        "resnet8": _images("resnet8", 32, cifar),
        "resnet20": _images("resnet20", 128, cifar, gated=True),
        "resnet38": _images("resnet38", 128, cifar),
        "resnet74": _images("resnet74", 128, cifar, gated=cuda),
        "mobilenet_v2": _images("mobilenet_v2", small, cifar, gated=cuda),
        "resnet18": _images("resnet18", tiny, imagenet),
        "lstm": _words("lstm", words),
        "lstm2_200": _words("lstm2", words, hidden=200),
        "llama": _words("llama", 64 if cuda else 8, length=128, vocabulary=256)._replace(variants=RECIPES),
        "gcn_cora": _graph(GraphShape(features=1433, classes=7, nodes=2708, edges=10_556)),
        "gcn": _graph(GraphShape(features=128, classes=40, nodes=20_000, edges=120_000)),
        "linear": _sentences(sentences, layers),
    }


class Step:
    """Consecutive training steps of one variant of a network on one batch."""

    def __init__(self, network: Network, variant: Variant, device: torch.device) -> None:
        torch.manual_seed(0)
        model = network.build()
        gates: dict[str, Any] = {"family": getattr(model, "block_family", None), "backward": variant.backward}
        options = dict(variant.options) | (gates if variant.schedule == "dfq" else {})
        plan = schedule(variant.schedule, total_steps=STEPS, **options)
        if variant.quantizer != "none":
            how: dict[str, Any] = {"compute": variant.compute, "recompute": variant.recompute, "schedule": plan}
            model = quantize_model(model, variant.quantizer, compile=compiler_works(device.type), **how)
        computes_codes = any(getattr(module, "computation", None) is not None for module in model.modules())
        recomputes = any(isinstance(module, RecomputingBatchNorm2d) for module in model.modules())
        self.differs = (computes_codes or variant.compute != "codes") and (recomputes or not variant.recompute)
        """Whether the network has a layer to which the variant's options apply, so that it is not another variant again."""
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


def measure_networks(names: list[str], repetitions: int, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and measurements of each network: time, ratio to float, peak memory and its ratio, by variant."""
    for name in names:
        network = networks(device.type != "cpu")[name]
        chosen = {key: one for key, one in network.variants.items() if network.gated or one.schedule != "dfq"}
        every = {key: Step(network, variant, device) for key, variant in chosen.items()}
        steps = {key: step for key, step in every.items() if step.differs}
        found: dict[str, dict[str, Any]] = {**summarise(interleaved(steps, repetitions, device), "float")}
        for step in steps.values():
            step.optimizer.zero_grad(set_to_none=True)  # memory freed during the step would count as negative
        peaks = {key: peak_bytes(step, device) for key, step in steps.items()}
        for key, peak in peaks.items():
            found[key] |= {"peak_mib": round(peak / 2**20, 1), "peak_ratio": round(peak / peaks["float"], 4)}
        yield name, {"samples": network.samples, "variants": found}
