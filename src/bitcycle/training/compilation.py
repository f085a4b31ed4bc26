"""Whether the quantizers of a run are worth compiling."""

from __future__ import annotations

import torch

from bitcycle import distributed
from bitcycle.quantizer import NoQuantizer, Sbm, compiler_works
from bitcycle.quantizer.affine_operators import are_available, are_compiled
from bitcycle.training.plan import Plan

COMPILATION_PAYS_ABOVE = 1e9
"""Quantized activations in a run above which compiling is worth its 20 to 30 seconds, or 5 once PyTorch's cache on disk has the
kernels: an eager quantizer takes about 20 ns longer for each (one activation and one gradient; two CPU cores)."""


def wants_compilation(plan: Plan, device: torch.device) -> bool:
    """Whether the quantizers of this run are to be compiled; both ways compute the same numbers."""
    choice = plan.config.training.compile
    if choice == "false" or isinstance(plan.config.quantizer, NoQuantizer):
        return False
    elements = sum(operation.input_elements for operation in plan.workload.operations) / plan.workload.samples
    pays = choice == "true" or elements * plan.samples(0, plan.total_steps) > COMPILATION_PAYS_ABOVE
    if _are_operators_enough(plan, device) and (pays or are_compiled()) and are_available():
        return True
    return pays and compiler_works(device.type)


def _are_operators_enough(plan: Plan, device: torch.device) -> bool:
    """Whether the quantizers are operators in C++ alone, which cost a short run nothing once this machine has compiled them.

    Several processes, which quantize shares of a batch, and integer products compile functions with PyTorch beside them.
    """
    is_alone = distributed.world_size() == 1 and plan.config.training.compute == "simulate"
    return device.type == "cpu" and isinstance(plan.config.quantizer, Sbm) and is_alone
