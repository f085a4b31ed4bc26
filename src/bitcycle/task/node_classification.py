"""Node classification: accuracy on the official test and validation nodes of a graph.

Without neighbour sampling, a step uses the whole graph and all training nodes: an epoch is one step. With sampling, a
step uses `training.batch_size` training nodes and their sampled neighbours.

`loss=raw_nll` is that of the released code for ogbn-arxiv: the negated output of the correct class, averaged, without
softmax and unbounded below. The paper does not specify the loss; its code for ogbn-products uses cross-entropy.

Source: Better Schedules, section 4.3 and released code, cpt_gnn. Differs from the code in that every evaluation with
sampled neighbours uses the same sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.graph import GraphDatasetOptions
from bitcycle.dataset.neighbours import SAMPLERS
from bitcycle.device import to_device
from bitcycle.module.sparse import Edges
from bitcycle.optional_imports import require
from bitcycle.settings import setting
from bitcycle.shapes import GraphShape
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup

SEEDS = 1024
"""Seed nodes of the batch that is traced for the cost of sampled steps, as in the released code."""


@dataclass
class NodeClassificationOptions(TaskOptions):
    """Options of node classification."""

    takes = GraphDatasetOptions

    name: str = "node_classification"
    loss: str = setting(
        "cross_entropy",
        "cross_entropy, or raw_nll (released code on ogbn-arxiv: no softmax, unbounded below)",
        choices=("cross_entropy", "raw_nll"),
    )

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        return Epoch(info.train_samples, info.train_samples if info.shape.neighbours is None else batch_size)

    def sample(self, info: DatasetInfo) -> Sample:
        """The whole graph, or a batch of 1024 seed nodes with the expected number of nodes in each layer."""
        shape: GraphShape = info.shape
        if shape.neighbours is None:
            edges = _edges_on_meta(shape.nodes, shape.edges)
            return Sample((torch.zeros(shape.nodes, shape.features, device="meta"), (edges,)), info.train_samples)
        seeds = nodes = min(SEEDS, info.train_samples)
        layers = list[Edges]()
        for degree in reversed(shape.sampled_degrees):
            count = round(nodes * degree)
            layers.append(_edges_on_meta(nodes, count))
            nodes = min(nodes + count, shape.nodes)
        return Sample((torch.zeros(nodes, shape.features, device="meta"), tuple(reversed(layers))), seeds)

    def build(self, setup: TaskSetup) -> "NodeClassification":
        require("torchmetrics", "graph")  # fail before training instead of at the first evaluation
        return NodeClassification(self, setup)


def _edges_on_meta(destinations: int, edges: int) -> Edges:
    return Edges(*(torch.zeros(size, dtype=torch.int32, device="meta") for size in (destinations + 1, edges)))


class GraphBatch(NamedTuple):
    """The input of one step.

    Attributes:
        features: float32 [sources of the first layer, F].
        edges: one graph per layer, or one for all layers.
        chosen: rows of the model's outputs that have a loss, int64 [N]; None means all.
        labels: classes of these rows, int64 [N].
    """

    features: Tensor
    edges: tuple[Edges, ...]
    chosen: Optional[Tensor]
    labels: Tensor

    def logits(self, model: nn.Module) -> Tensor:
        """Outputs of the model for the chosen nodes, [N, classes]."""
        outputs: Tensor = model(self.features, self.edges)
        return outputs if self.chosen is None else outputs[self.chosen]


class NodeClassification(Task):
    """A node classification task on one graph."""

    def __init__(self, options: NodeClassificationOptions, setup: TaskSetup) -> None:
        dataset, shape, device = setup.dataset, setup.info.shape, setup.device
        graph = dataset.load(setup.data_root, setup.seed)
        self.options, self.dataset, self.seed, self.device = options, dataset, setup.seed, device
        self.train_nodes = graph.train.to(device)
        self.features, self.labels = graph.features.to(device), graph.labels.to(device)
        self.edges = graph.edges.to(device)
        self.splits = {"test": graph.test.to(device), "validation": graph.validation.to(device)}
        self.majority_baseline = float(graph.labels[graph.train].bincount().max()) / len(graph.train)
        self.sampler = None if shape.neighbours is None else SAMPLERS[dataset.sampler](self.edges, shape.neighbours)
        self.epoch, self.batch_size = options.epoch(setup.info, setup.batch_size), setup.batch_size

    def batches(self, step: int) -> Iterator[GraphBatch]:
        if self.sampler is None:
            whole = self._whole_graph(self.train_nodes)
            while True:
                yield whole
        for number, (_, places) in enumerate(self.epoch.shuffled(self.seed, step), step):
            yield self._sampled(self.train_nodes[to_device(places, self.device)], "train", number)

    def _whole_graph(self, nodes: Tensor) -> GraphBatch:
        return GraphBatch(self.features, (self.edges,), nodes, self.labels[nodes])

    def _sampled(self, nodes: Tensor, split: str, number: int) -> GraphBatch:
        assert self.sampler is not None
        seen = self.sampler.sample(nodes, self.seed, "neighbours", split, number)
        return GraphBatch(self.features[seen.nodes], seen.edges, None, self.labels[nodes])

    def train(self, model: nn.Module, batch: GraphBatch) -> StepOutput:
        logits = batch.logits(model)
        right = logits.detach().argmax(1) == batch.labels
        return StepOutput(self.loss(logits, batch.labels), right.float().mean())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over nodes, according to `options.loss`."""
        function = F.cross_entropy if self.options.loss == "cross_entropy" else F.nll_loss
        return function(logits, labels)

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Accuracy in percent and mean loss: `test_accuracy`, `test_loss`."""
        from torchmetrics import MeanMetric

        predicted, labels, mean_loss = [], [], MeanMetric().to(self.device)
        for batch in self._evaluation_batches(split):
            logits = batch.logits(model)
            predicted.append(logits.argmax(1))
            labels.append(batch.labels)
            mean_loss.update(self.loss(logits, batch.labels), weight=len(batch.labels))
        accuracy = self.dataset.accuracy(torch.cat(predicted), torch.cat(labels))
        return {f"{split}_accuracy": round(100 * accuracy, 4), f"{split}_loss": float(mean_loss.compute())}

    def _evaluation_batches(self, split: str) -> Iterator[GraphBatch]:
        nodes = self.splits[split]
        if self.sampler is None:
            yield self._whole_graph(nodes)
            return
        for number, part in enumerate(nodes.split(self.batch_size)):
            yield self._sampled(part, split, number)
