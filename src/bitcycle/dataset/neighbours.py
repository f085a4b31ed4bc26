"""Neighbour sampling: the part of a graph that the nodes of a batch see when each layer takes so many neighbours of each node.

Of each node's edges a layer takes min(degree, k), any such set being equally likely (Floyd's algorithm, for all nodes at once).
Which ones is a hash of (key, layer, node, draw), so a step's sample follows from its number alone, and a resumed run draws what
the undisturbed run drew, with any number of threads, with or without dgl.

Source: Hamilton et al. 2017, section 3.2; Better Schedules, section 4.3 (32 neighbours); the released code uses dgl's
NeighborSampler, which draws without replacement, too, and is here the other choice. Floyd: Bentley and Floyd 1987, algorithm F2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitcycle.layer.sparse import Edges
from bitcycle.optional_imports import require
from bitcycle.randomness import derive, hash_bits, int32_key


class Neighbourhood(NamedTuple):
    """A sampled part of a graph: the nodes whose features it reads, int64 [sources of layer one], and each layer's edges."""

    nodes: Tensor
    edges: tuple[Edges, ...]


class NeighbourSampler:
    """Samples neighbourhoods of a graph.

    Args:
        edges: of the whole graph, on the device where samples are made.
        neighbours: how many each layer takes of each node, that of the input first.
    """

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
        """Sources, which begin with `nodes`, and edges of one layer, numbered by their places among sources and nodes."""
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
    """The same by dgl's NeighborSampler, whose generator is seeded by the key of each sample: `dataset.sampler=dgl`.

    A resumed run draws what the undisturbed run drew, if dgl has as many threads. Differs from `NeighbourSampler` in which
    neighbours are drawn, not in how many or how likely each is. Arguments and `sample` as there, on a CPU.

    Raises:
        RunError: if dgl is not installed; it ends with Python 3.11.
    """

    def __init__(self, edges: Edges, neighbours: Sequence[int]) -> None:
        self.dgl = require("dgl", "graph")
        csc = (edges.offsets.long(), edges.sources.long(), torch.empty(0, dtype=torch.int64))
        self.graph = self.dgl.graph(("csc", csc), num_nodes=edges.destinations)
        self.sampler = self.dgl.dataloading.NeighborSampler(
            list(neighbours), fused=False
        )  # fused: in an order of threads

    def sample(self, seeds: Tensor, *key: int | str) -> Neighbourhood:
        """The neighbourhood of distinct nodes `seeds`, int64 [N], drawn by `key`."""
        self.dgl.seed(derive(*key) & 0x7FFFFFFF)
        nodes, _, blocks = self.sampler.sample(self.graph, seeds)
        return Neighbourhood(nodes, tuple(edges_of(block) for block in blocks))


def edges_of(graph: Any) -> Edges:
    """The edges of a graph or block of dgl, for the layers and networks of this package."""
    offsets, sources, _ = graph.adj_tensors("csc")
    return Edges(offsets.int(), sources.int())


SAMPLERS: dict[str, type[NeighbourSampler] | type[DglSampler]] = {"hashed": NeighbourSampler, "dgl": DglSampler}
"""`dataset.sampler` -> what samples."""


def choose(degrees: Tensor, nodes: Tensor, count: int, key: int) -> Tensor:
    """Which of its edges each node takes, int64 [N, count]: `count` distinct ones below its degree, or, of a node that has no
    more, all of them (0, 1, ...; places from its degree on mean nothing).

    >>> choose(torch.tensor([2, 9]), torch.tensor([0, 1]), 3, key=7)[0].tolist()
    [0, 1, 2]
    """
    draws = torch.arange(count, device=nodes.device)
    counters = (nodes.unsqueeze(1) * count + draws).to(torch.int32)
    bits = hash_bits(counters, torch.tensor(key, dtype=torch.int32, device=nodes.device)).long() & 0x7FFFFFFF
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
