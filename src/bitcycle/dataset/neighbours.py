"""Neighbour sampling: the subgraph of a batch of nodes if each layer samples a given number of neighbours per node.

A layer samples min(degree, k) edges of each node without replacement, uniformly (Floyd's algorithm, vectorised over
nodes). Samples are hashes of (key, layer, node, draw) and depend only on the step, so a resumed run draws the same
samples as an uninterrupted one, with any number of threads, with or without dgl.

Source: Hamilton et al. 2017, section 3.2; Better Schedules, section 4.3 (32 neighbours). The released code uses dgl's
NeighborSampler, also without replacement, which is the alternative here. Floyd: Bentley and Floyd 1987, algorithm F2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitcycle.device import scalar
from bitcycle.module.sparse import Edges
from bitcycle.optional_imports import require
from bitcycle.randomness import derive, hash_bits, int32_key


class Neighbourhood(NamedTuple):
    """A sampled subgraph: the nodes whose features it reads, int64 [sources of the first layer]; edges of each layer."""

    nodes: Tensor
    edges: tuple[Edges, ...]


class NeighbourSampler:
    """Samples neighbourhoods of a graph. `neighbours` are numbers per node and layer, from the input on."""

    def __init__(self, edges: Edges, neighbours: Sequence[int]) -> None:
        self.edges, self.neighbours = edges, tuple(neighbours)
        device, nodes = edges.offsets.device, edges.destinations
        self.offsets = edges.offsets.long()
        self._is_new = torch.zeros(nodes, dtype=torch.bool, device=device)
        self._number = torch.zeros(nodes, dtype=torch.int32, device=device)

    def sample(self, seeds: Tensor, *key: int | str) -> Neighbourhood:
        """The neighbourhood of distinct nodes `seeds`, int64 [N], drawn by `key`."""
        nodes, layers = seeds, list[Edges]()
        for layer, count in reversed(list(enumerate(self.neighbours))):
            nodes, edges = self._layer(nodes, count, int32_key(*key, layer))
            layers.append(edges)
        return Neighbourhood(nodes, tuple(reversed(layers)))

    def _layer(self, nodes: Tensor, count: int, key: int) -> tuple[Tensor, Edges]:
        """Sources (starting with `nodes`) and edges of one layer, numbered by position among sources and nodes."""
        starts = self.offsets[nodes]
        degrees = self.offsets[nodes + 1] - starts
        chosen = choose(degrees, nodes, count, key)
        taken = torch.arange(count, device=nodes.device) < degrees.clamp_max(count).unsqueeze(1)
        sources = self.edges.sources[(starts.unsqueeze(1) + chosen)[taken]].long()
        self._is_new[sources] = True
        self._is_new[nodes] = False
        new = self._is_new.nonzero().flatten()
        self._is_new[new] = False
        everything = torch.cat([nodes, new])
        self._number[everything] = torch.arange(len(everything), dtype=torch.int32, device=nodes.device)
        offsets = torch.zeros(len(nodes) + 1, dtype=torch.int32, device=nodes.device)
        offsets[1:] = taken.sum(1).cumsum(0)
        return everything, Edges(offsets, self._number[sources])


class DglSampler:
    """Sampling by dgl's NeighborSampler, with its generator seeded by the key of each sample: `dataset.sampler=dgl`.

    A resumed run draws the same samples as an uninterrupted one if dgl has the same number of threads. The distribution is
    that of `NeighbourSampler`, the samples differ. Arguments and `sample` as there, on a CPU. Raises RunError if dgl is not
    installed; it supports Python up to 3.11.
    """

    def __init__(self, edges: Edges, neighbours: Sequence[int]) -> None:
        self.dgl = require("dgl", "graph")
        csc = (edges.offsets.long(), edges.sources.long(), torch.empty(0, dtype=torch.int64))
        self.graph = self.dgl.graph(("csc", csc), num_nodes=edges.destinations)
        # fused sampling depends on the order of threads
        self.sampler = self.dgl.dataloading.NeighborSampler(list(neighbours), fused=False)

    def sample(self, seeds: Tensor, *key: int | str) -> Neighbourhood:
        """The neighbourhood of distinct nodes `seeds`, int64 [N], drawn by `key`."""
        self.dgl.seed(derive(*key) & 0x7FFFFFFF)
        nodes, _, blocks = self.sampler.sample(self.graph, seeds)
        return Neighbourhood(nodes, tuple(edges_of(block) for block in blocks))


def edges_of(graph: Any) -> Edges:
    """Edges of a dgl graph or block, for the layers and networks of this package."""
    offsets, sources, _ = graph.adj_tensors("csc")
    return Edges(offsets.int(), sources.int())


SAMPLERS: dict[str, type[NeighbourSampler] | type[DglSampler]] = {"hashed": NeighbourSampler, "dgl": DglSampler}
"""`dataset.sampler` -> sampler class."""


def choose(degrees: Tensor, nodes: Tensor, count: int, key: int) -> Tensor:
    """Indices of the sampled edges of each node, int64 [N, count]: `count` distinct numbers below its degree, or 0, 1,
    ... if the degree is at most `count` (entries from the degree on are undefined).

    >>> choose(torch.tensor([2, 9]), torch.tensor([0, 1]), 3, key=7)[0].tolist()
    [0, 1, 2]
    """
    draws = torch.arange(count, device=nodes.device)
    counters = (nodes.unsqueeze(1) * count + draws).to(torch.int32)
    bits = hash_bits(counters, scalar(key, torch.int32, nodes.device)).long() & 0x7FFFFFFF
    chosen = draws.repeat(len(nodes), 1)
    many = degrees > count
    highest = (degrees - count).clamp_min(0).unsqueeze(1) + draws  # the j-th draw is at most this
    drawn = bits * (highest + 1) >> 31
    for draw in range(count):
        candidate = drawn[:, draw]
        repeated = (chosen[:, :draw] == candidate.unsqueeze(1)).any(1)
        candidate = torch.where(repeated, highest[:, draw], candidate)
        chosen[:, draw] = torch.where(many, candidate, chosen[:, draw])
    return chosen
