"""A part of the training images is held out for choosing, so that the test images are never used for it."""

from __future__ import annotations

import torch
from torch import Tensor


def validation_size(samples: int, share: float) -> int:
    """How many of `samples` training images are held out: round(share * samples), at least one if share is above 0."""
    return max(1, round(share * samples)) if share > 0 else 0


def validation_mask(labels: Tensor, count: int, seed: int) -> Tensor:
    """A mask of `count` samples to hold out: as near to the same share of each class as whole numbers allow, else by `seed`.

    >>> mask = validation_mask(torch.tensor([0] * 8 + [1] * 4), 3, seed=0)
    >>> mask[:8].sum().item(), mask[8:].sum().item()
    (2, 1)
    """
    generator = torch.Generator().manual_seed(seed)
    classes, sizes = labels.unique(return_counts=True)
    quotas = sizes.double() * count / len(labels)
    counts = quotas.floor().long()
    # What rounding down leaves goes to the largest remainders; a random order decides among equal ones.
    order = torch.randperm(len(classes), generator=generator)
    by_remainder = order[(quotas - counts)[order].argsort(descending=True, stable=True)]
    counts[by_remainder[: count - int(counts.sum())]] += 1
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label, chosen in zip(classes, counts.tolist(), strict=True):
        members = (labels == label).nonzero().flatten()
        mask[members[torch.randperm(len(members), generator=generator)[:chosen]]] = True
    return mask
