"""The edges of a graph in compressed sparse rows (CSR), and sums over them.

    (A h)_i = sum over the edges j -> i of h_j

In a whole graph sources and destinations are the same nodes. In a block, a sampled part of a graph, the sources are the
destinations (so that a node finds itself) followed by their neighbours.

The order of summation is fixed, as required for exact resuming: compressed rows on a CPU, where one thread sums each row, and
segments on a GPU, whose sparse products are not deterministic.
"""

import warnings
from functools import cache
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

SEGMENT_ELEMENTS = 1 << 28
"""Maximum number of gathered elements on a GPU at once: columns are processed in groups (1 GiB of float32)."""


class Edges(NamedTuple):
    """Edges ordered by destination, and by source for the backward pass.

    Attributes:
        offsets: int32 [destinations + 1]; the edges of destination i are `offsets[i]` to `offsets[i + 1]`.
        sources: int32 [edges], the source of each edge.
        back_offsets, back_destinations: the same for the reversed edges, [sources + 1] and [edges]; None: computed on demand.
    """

    offsets: Tensor
    sources: Tensor
    back_offsets: Optional[Tensor] = None
    back_destinations: Optional[Tensor] = None

    @property
    def destinations(self) -> int:
        """Number of destinations."""
        return self.offsets.shape[0] - 1

    def in_degrees(self) -> Tensor:
        """Edges into each destination, at least 1, as float32 [destinations, 1]."""
        return _degrees(self.offsets)

    def out_degrees(self, sources: int) -> Tensor:
        """Edges out of each of `sources` nodes, at least 1, as float32 [sources, 1]."""
        if self.offsets.is_meta:
            return self.offsets.new_ones(sources, 1, dtype=torch.float32)
        back_offsets, _ = self.reversed(sources)
        return _degrees(back_offsets)

    def reversed(self, sources: int) -> tuple[Tensor, Tensor]:
        """Offsets and destinations of the reversed edges, for the given number of sources."""
        if self.back_offsets is not None and self.back_destinations is not None:
            return self.back_offsets, self.back_destinations
        return compressed(self.sources, destination_of_each(self.offsets, len(self.sources)), sources)

    def to(self, device: torch.device) -> "Edges":
        """The same edges on another device."""
        parts: Any = (tensor if tensor is None else tensor.to(device) for tensor in self)
        return Edges(*parts)


def make_edges(pairs: Tensor, nodes: int) -> Edges:
    """The edges `pairs[0, k] -> pairs[1, k]` (int64 [2, edges]) of a graph with the given number of nodes."""
    sources, destinations = pairs
    return Edges(*compressed(destinations, sources, nodes), *compressed(sources, destinations, nodes))


def compressed(keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Offsets of the keys 0 .. count-1, and the values stably sorted by their keys, both int32. Offsets [count + 1]; keys and
    values [edges]."""
    order = keys.argsort(stable=True)
    numbers = torch.arange(count + 1, dtype=keys.dtype, device=keys.device)
    offsets = torch.searchsorted(keys[order], numbers)  # bincount would make the host wait
    return offsets.to(torch.int32), values[order].to(torch.int32)


def destination_of_each(offsets: Tensor, edges: int) -> Tensor:
    """The destination of each of the edges, int64 [edges]; with their number, the host does not wait for it."""
    destinations = torch.arange(len(offsets) - 1, device=offsets.device)
    return destinations.repeat_interleave(offsets.diff(), output_size=edges)


def neighbour_sum(h: Tensor, edges: Edges) -> Tensor:
    """A h: for each destination the sum of h over the sources of its edges, [sources, F] -> [destinations, F]."""
    return _NeighbourSum.apply(h, *edges)


def neighbour_mean(h: Tensor, edges: Edges) -> Tensor:
    """The mean of h over the sources of each destination's edges; 0 without edges. [sources, F] -> [destinations, F]."""
    return neighbour_sum(h, edges) / edges.in_degrees()


class _NeighbourSum(torch.autograd.Function):
    """The sum over edges, whose gradient is the sum over the reversed edges."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, *parts: Any) -> Tensor:
        edges = Edges(*parts)
        ctx.edges, ctx.nodes = edges, h.shape[0]
        return _sum_of_rows(h, edges.offsets, edges.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        offsets, destinations = ctx.edges.reversed(ctx.nodes)
        return _sum_of_rows(gradients[0], offsets, destinations), None, None, None, None


def _sum_of_rows(h: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
    if h.is_meta:  # sparse tensors have no meta kernels; this has the same number of products
        return h.new_zeros(len(offsets) - 1, h.shape[1]).index_add(0, indices, h.index_select(0, indices))
    if h.device.type != "cpu":
        return _sum_of_segments(h, offsets, indices)
    _announce_sparse_rows()
    ones = h.new_ones(len(indices))
    size = (len(offsets) - 1, h.shape[0])
    return torch.sparse_csr_tensor(offsets, indices, ones, size, device=h.device, check_invariants=False) @ h


def _sum_of_segments(h: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
    """The same by gathering rows and summing segments, one thread per sum, in groups of columns."""
    width = max(1, SEGMENT_ELEMENTS // max(1, len(indices)))
    lengths = offsets.diff().long()
    sums = [
        torch.segment_reduce(columns.index_select(0, indices), "sum", lengths=lengths, axis=0, unsafe=True, initial=0)
        for columns in h.split(width, dim=1)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def _degrees(offsets: Tensor) -> Tensor:
    return offsets.diff().clamp_min(1).to(torch.float32).unsqueeze(1)


@cache
def _announce_sparse_rows() -> None:
    """Suppress PyTorch's warning that compressed rows are a beta feature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))
