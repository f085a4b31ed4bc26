"""The flatness measure s = Tr(sqrt v), a proxy for the curvature of the loss: smaller values mean flatter minima.

    v_0 = 0,   v_k = beta v_(k-1) + (1 - beta) g_k^2,   s = sum over all weights of sqrt(v_k / (1 - beta^k))

with the gradient g_k of step k, counted from the beginning of the phase. "All weights" are all trained parameters.

Source: HLHLp, section 3.2 (v estimates diag(H^2), so that s estimates the sum of the eigenvalues of H); Kingma and Ba
2014 for v and its bias correction. No code was released.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

BETA = 0.999


class SecondMoment:
    """The moving average v of squared gradients for any optimizer, without synchronisation with the host."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    def update(self) -> None:
        """Update the average with the current gradients."""
        self.steps += 1
        torch._foreach_mul_(self.moments, BETA)
        pairs = [(v, p.grad) for v, p in zip(self.moments, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            moments, gradients = zip(*pairs)
            torch._foreach_addcmul_(moments, gradients, gradients, value=1 - BETA)

    def trace_sqrt(self) -> float:
        """The current s; synchronises with the device."""
        return sum_of_roots((v, 1 - BETA**self.steps) for v in self.moments)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for mine, saved in zip(self.moments, state["moments"], strict=True):
            mine.copy_(saved)


def adam_trace_sqrt(optimizer: torch.optim.Optimizer) -> float:
    """s of Adam's second moments, whose gradients include weight decay; synchronises with the device."""
    terms = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                terms.append((state["exp_avg_sq"], 1 - group["betas"][1] ** int(state["step"])))
    return sum_of_roots(terms)


def sum_of_roots(terms: Iterable[tuple[Tensor, float]]) -> float:
    """The sum of sqrt(v / correction) over all elements of all tensors v, in double precision on the device."""
    sums = [v.sqrt().sum(dtype=torch.float64) / correction**0.5 for v, correction in terms]
    return float(torch.stack(sums).sum()) if sums else 0.0
