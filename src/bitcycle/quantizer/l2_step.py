"""The step of a uniform quantizer that leaves the smallest squared error.

    Q(w) = D z,   z = sign(w) min(floor(|w| / D + 1/2), L)
    given z:      D = sum(|w| |z|) / sum(z^2), again until the codes stop changing

Source: HLHLp, section 3.1, after Hwang and Sung 2014. The iteration has many fixed points, of which the worst leaves several
times the error of the best; the papers do not say where they start. Our search tries starts of j/200 max |w| / L for
j = 1..400 and iterates from the best five: within 0.2 % of the optimal error on tensors of 500 and more elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

STARTS = 400
STARTS_PER_RANGE = 200
ITERATED_STARTS = 5
CHUNK_ELEMENTS = 1 << 20
"""Elements that are tried at a time: as many starts as fit, so that small tensors need few passes."""


def uniform_codes(magnitudes: Tensor, step: Tensor, top: Tensor | int) -> Tensor:
    """min(floor(m / D + 1/2), L) of non-negative magnitudes m, as floats; halves go up.

    >>> uniform_codes(torch.tensor([0.2, 0.5, 9.0]), torch.tensor(1.0), 3).tolist()
    [0.0, 1.0, 3.0]
    """
    codes = (magnitudes / step + 0.5).floor()
    return torch.minimum(codes, top.to(codes.dtype)) if isinstance(top, Tensor) else codes.clamp_max(top)


def improved_step(magnitudes: Tensor, step: Tensor, top: Tensor | int) -> Tensor:
    """One iteration: the best step for the codes that `step` gives; `step` itself where all codes are zero.

    Args:
        magnitudes: [..., groups, elements], not negative.
        step: [..., groups, 1].
    """
    return _best_step(magnitudes, uniform_codes(magnitudes, step, top), step)


def fixed_point(magnitudes: Tensor, step: Tensor, top: int) -> Tensor:
    """Iterate from `step` until no code changes. Shapes as in `improved_step`."""
    codes = uniform_codes(magnitudes, step, top)
    while True:
        step = _best_step(magnitudes, codes, step)
        previous, codes = codes, uniform_codes(magnitudes, step, top)
        if torch.equal(codes, previous):
            return step


def optimal_step(groups: Tensor, top: int) -> Tensor:
    """The step D of each group (row), [groups, elements] -> [groups, 1]; 1 for a group of zeros.

    Works through the host: it looks at results to know when to stop, so it is not for every step of a training.
    """
    magnitudes = groups.detach().abs()
    largest = magnitudes.amax(dim=1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1)
    magnitudes = magnitudes / unit  # squares of small weights would underflow
    numbers = torch.arange(1, STARTS + 1, device=groups.device, dtype=groups.dtype)
    starts = (numbers / (STARTS_PER_RANGE * top)).view(-1, 1, 1).expand(-1, len(groups), 1)
    chunk = max(1, CHUNK_ELEMENTS // magnitudes.numel())
    errors = torch.cat([_squared_error(magnitudes, part, top) for part in starts.split(chunk)])
    chosen = errors.topk(ITERATED_STARTS, dim=0, largest=False).indices
    steps = fixed_point(magnitudes, starts.gather(0, chosen), top)
    best = _squared_error(magnitudes, steps, top).argmin(dim=0, keepdim=True)
    return torch.where(largest > 0, steps.gather(0, best)[0] * unit, 1)


def _best_step(magnitudes: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    squares = codes.square().sum(dim=-1, keepdim=True)
    return torch.where(squares > 0, (magnitudes * codes).sum(dim=-1, keepdim=True) / squares, step)


def _squared_error(magnitudes: Tensor, step: Tensor, top: int) -> Tensor:
    return (magnitudes - step * uniform_codes(magnitudes, step, top)).square().sum(dim=-1, keepdim=True)
