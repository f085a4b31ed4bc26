"""Connectionist temporal classification: loss, greedy decoding and edit distances, computed on the device.

    loss     -ln p(z | x), p(z | x) = sum of prod_t y_t(path_t) over all paths that become z when repeats are merged
             and then blanks removed
    greedy   the path of the most probable symbols, with repeats merged and blanks removed

Source: Graves et al. 2006, sections 3.1 to 3.2 ("best path decoding").
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcycle.dataset.utterances import BLANK
from bitcycle.device import to_device


def ctc_loss(logits: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """-ln p(z | x) of each utterance [N]; 0, without gradient, if there are fewer frames than the targets need.

    Logits [N, T, S] and targets [N, L]; lengths [N] on the CPU. On a GPU, PyTorch sums the gradient in a
    nondeterministic order; with deterministic algorithms (training.deterministic) it is computed on the CPU instead.
    """
    device = logits.device
    scores = F.log_softmax(logits.float(), 2).transpose(0, 1)
    if device.type != "cpu" and torch.are_deterministic_algorithms_enabled():
        scores, targets = scores.cpu(), targets.cpu()
    losses = F.ctc_loss(scores, targets, lengths, target_lengths, blank=BLANK, reduction="none", zero_infinity=True)
    return losses.to(device)


def greedy(logits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable path as (symbols [N, T], padded with blanks; number of symbols [N]).

    >>> path = torch.tensor([[0, 2, 2, 0, 2, 1, 1]])
    >>> greedy(F.one_hot(path, 3).float(), torch.tensor([6]))
    (tensor([[2, 2, 1, 0, 0, 0, 0]]), tensor([3]))
    """
    path = logits.argmax(2)
    frames = path.shape[1]
    before = F.pad(path, (1, 0), value=BLANK)[:, :frames]
    real = torch.arange(frames, device=path.device) < to_device(lengths, path.device)[:, None]
    kept = real & (path != BLANK) & (path != before)
    places = torch.where(kept, kept.cumsum(1) - 1, frames)  # removed symbols are written to a column that is cut off
    found = torch.full((len(path), frames + 1), BLANK, device=path.device, dtype=path.dtype)
    return found.scatter(1, places, path)[:, :frames], kept.sum(1)


def edit_distances(found: Tensor, found_lengths: Tensor, wanted: Tensor, wanted_lengths: Tensor) -> Tensor:
    """Minimum number [N] of insertions, deletions and replacements between rows of [N, A] and [N, B] (Levenshtein 1966).

    Each row of the dynamic programme is computed at once: first the moves from above and from the diagonal, then those
    from the left as a running minimum of (value - column). No step synchronises with the host.

    >>> edit_distances(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([[2, 3, 3]]), torch.tensor([3]))
    tensor([2])
    """
    device = found.device
    places = torch.arange(wanted.shape[1] + 1, device=device)
    row = places.repeat(len(found), 1)
    found_lengths, wanted_lengths = to_device(found_lengths, device), to_device(wanted_lengths, device)
    for index in range(found.shape[1]):
        replaced = row[:, :-1] + (found[:, index, None] != wanted)
        new = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, replaced)], 1)
        new = (new - places).cummin(1).values + places
        row = torch.where((index < found_lengths)[:, None], new, row)
    return row.gather(1, wanted_lengths[:, None])[:, 0]
