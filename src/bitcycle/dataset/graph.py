"""What every data set of one graph has: nodes with features and a class, edges, an official split of the nodes.

A sample is a node. Without `neighbours` a training step sees the whole graph and its loss is that of all training nodes; with
them, a step has `training.batch_size` training nodes and so many sampled neighbours in each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, check_whole, fixed_order, logger
from bitcycle.dataset.neighbours import SAMPLERS
from bitcycle.errors import DataError
from bitcycle.layer.sparse import Edges, make_edges
from bitcycle.settings import setting
from bitcycle.shapes import GraphShape

E = TypeVar("E", Tensor, Edges)


class Graph(NamedTuple, Generic[E]):
    """A graph: features [N, F], labels [N] (-1: none), edges, and the nodes of the splits.

    Edges are [2, E] from row 0 to row 1 as they lie on disk, `Edges` as they are used.
    """

    features: Tensor
    labels: Tensor
    edges: E
    train: Tensor
    validation: Tensor
    test: Tensor


class GraphSize(NamedTuple):
    """The official data set's numbers; `edges` as given, `symmetrised` the edges after that treatment."""

    nodes: int
    edges: int
    symmetrised: int
    features: int
    classes: int
    train: int
    validation: int
    test: int


SIZES = {
    "cora": GraphSize(2708, 10_556, 10_556, 1433, 7, 140, 500, 1000),
    "citeseer": GraphSize(3327, 9104, 9104, 3703, 6, 120, 500, 1000),
    "ogbn_arxiv": GraphSize(169_343, 1_166_243, 2_315_598, 128, 40, 90_941, 29_799, 48_603),
    "ogbn_products": GraphSize(2_449_029, 123_718_280, 123_718_280, 100, 47, 196_615, 39_323, 2_213_091),
}


@dataclass
class GraphDatasetOptions(DatasetOptions):
    """Options that every graph has."""

    has_validation = True
    takes_all_if_fewer = True

    edges: str = setting(
        "given",
        "given, symmetrised (reverse edges added, duplicates removed), or doubled (reverse edges added, duplicates kept)",
        choices=("given", "symmetrised", "doubled"),
    )
    self_loops: bool = setting(True, "an edge from each node to itself (Better Schedules: added; its code: not)")
    features: str = setting(
        "raw",
        "features of nodes: raw, standardised (each column over all nodes), or row_normalised (each node's sum is 1)",
        choices=("raw", "standardised", "row_normalised"),
    )
    neighbours: Optional[list[int]] = setting(
        None,
        "neighbours that each layer samples, that of the input first; null: each step sees the whole graph",
        minimum=1,
    )
    sampler: str = setting(
        "hashed",
        "who samples neighbours: hashed (the same on every machine), or dgl (its NeighborSampler, as the released code; the same"
        " again with as many threads)",
        choices=tuple(SAMPLERS),
    )

    @property
    def size(self) -> GraphSize:
        """The numbers of the official data set."""
        return SIZES[self.name]

    def sampled_degree(self, neighbours: int, degree: float) -> float:
        """New nodes that sampling so many neighbours brings for each node, in a graph of this mean degree."""
        return min(neighbours, degree)

    def full_info(self, data_root: Path) -> DatasetInfo:
        size = self.size
        edges = {"given": size.edges, "symmetrised": size.symmetrised, "doubled": 2 * size.edges}[self.edges]
        edges += size.nodes if self.self_loops else 0
        sampled = None if self.neighbours is None else tuple(self.neighbours)
        degrees = tuple(self.sampled_degree(count, edges / size.nodes) for count in sampled or ())
        shape = GraphShape(size.features, size.classes, size.nodes, edges, sampled, degrees)
        return DatasetInfo(shape, size.train, size.test)

    def load(self, data_root: Path, seed: int) -> Graph[Edges]:
        raw, size = self.read(data_root), self.size
        nodes, features = raw.features.shape
        found = *(nodes, raw.edges.shape[1], features), *map(len, raw[3:]), len(raw.labels)
        expected = size.nodes, size.edges, size.features, size.train, size.validation, size.test, size.nodes
        what = "nodes, edges, features, training, validation and test nodes, and labels"
        check_whole(self.name, f"what is below {data_root}", what, found, expected)
        used = raw.labels[torch.cat(raw[3:])]
        if not 0 <= int(used.min()) <= int(used.max()) < size.classes:
            problem = f"{self.name} below {data_root} has classes {int(used.min())} to {int(used.max())}"
            raise DataError(f"{problem} instead of 0 to {size.classes - 1}. Fetch it again.")
        edges = make_edges(self.treated(raw.edges, nodes), nodes)
        counted = self.full_info(data_root).shape
        assert isinstance(counted, GraphShape)
        if len(edges.sources) != counted.edges:
            logger.warning("the graph has %d edges; costs count %d", len(edges.sources), counted.edges)
        limits = (self.train_samples, self.test_samples, self.test_samples)
        splits = (part[fixed_order(len(part), limit)] for part, limit in zip(raw[3:], limits, strict=True))
        return Graph(scaled(raw.features, self.features), raw.labels, edges, *splits)

    def accuracy(self, predicted: Tensor, labels: Tensor) -> float:
        """Share of nodes whose class is predicted, both int64 [N]; by the data set's own rule where it has one."""
        return int((predicted == labels).sum()) / len(labels)

    def treated(self, edges: Tensor, nodes: int) -> Tensor:
        """The edges [2, E] after `edges` and `self_loops`."""
        if self.edges != "given":
            edges = torch.cat([edges, edges.flip(0)], dim=1)
        if self.edges == "symmetrised":
            unique = (edges[1] * nodes + edges[0]).unique()
            edges = torch.stack([unique % nodes, unique // nodes])
        if self.self_loops:
            edges = edges[:, edges[0] != edges[1]]
            edges = torch.cat([edges, torch.arange(nodes).expand(2, -1)], dim=1)
        return edges


def scaled(features: Tensor, how: str) -> Tensor:
    """Features [N, F] raw, standardised by column (mean 0, population standard deviation 1), or with rows that sum to 1."""
    if how == "standardised":
        std, mean = torch.std_mean(features, dim=0, correction=0)
        return (features - mean) / torch.where(std > 0, std, 1)
    if how == "row_normalised":
        sums = features.sum(1, keepdim=True)
        return features / torch.where(sums != 0, sums, 1)
    return features
