"""Whether the quantizers of a run are worth compiling."""

from __future__ import annotations

from pathlib import Path

import torch

from bitcycle import distributed
from bitcycle.quantizer import Mx, NoQuantizer, Nvfp4, Sbm, compiler_works
from bitcycle.quantizer.cpp_operators import AFFINE, BLOCK, are_available, are_compiled
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
    operators = _operators(plan, device)
    if operators and (pays or are_compiled(operators)) and are_available(operators):
        return True
    return pays and compiler_works(device.type)


def _operators(plan: Plan, device: torch.device) -> Path | None:
    """The file of the operators in C++ that are all the quantizers need; they cost a short run nothing once they are compiled.

    Several processes, which quantize shares of a batch, and integer products compile functions with PyTorch beside them.
    """
    if device.type != "cpu" or distributed.world_size() > 1 or plan.config.training.compute != "simulate":
        return None
    options = plan.config.quantizer
    return AFFINE if isinstance(options, Sbm) else BLOCK if isinstance(options, (Mx, Nvfp4)) else None
