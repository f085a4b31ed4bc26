"""Stateless sampling of items that a user has not chosen, so that training can resume at any step."""

import torch
from torch import Tensor

from bitcycle.dataset.interactions import Interactions
from bitcycle.randomness import hash_bits, int32_key


class NegativeSampler:
    """Uniform sampling of the items that a user has not chosen in `interactions`.

    The r-th item that a user has not chosen is r plus the number of chosen items before it. As c_k - k unchosen items
    precede the k-th chosen item c_k, this is the number of k with c_k - k <= r, found by one binary search for all
    samples.

    Args:
        interactions: the chosen items.
        device: device of the samples.
    """

    def __init__(self, interactions: Interactions, device: torch.device) -> None:
        users, items = interactions.shape
        self.items, self.stride = items, items + 1
        keys = (interactions.users * self.stride + interactions.items).sort().values
        owner = torch.div(keys, self.stride, rounding_mode="floor")
        counts = torch.bincount(owner, minlength=users)
        starts = counts.cumsum(0) - counts
        position = torch.arange(len(keys)) - starts[owner]
        self.keys = (keys - position).to(device)
        self.starts, self.free = starts.to(device), (items - counts).to(device)

    def item(self, users: Tensor, ranks: Tensor) -> Tensor:
        """Items with the given ranks (from 0) among those not chosen by each of `users`."""
        before = torch.searchsorted(self.keys, users * self.stride + ranks, right=True) - self.starts[users]
        return (ranks + before).clamp_max(self.items - 1)  # a user who has chosen everything gets the last item

    def draw(self, users: Tensor, numbers: Tensor, seed: int, epoch: int) -> Tensor:
        """Draw one item for each of `users`; the result depends only on the user and (seed, epoch, number)."""
        key = torch.tensor(int32_key(seed, "negatives", epoch), dtype=torch.int32, device=users.device)
        bits = hash_bits(numbers.to(torch.int32), key).long() & 0x7FFFFFFF
        return self.item(users, bits * self.free[users] >> 31)
