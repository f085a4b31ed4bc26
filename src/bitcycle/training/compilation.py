"""Decides whether to compile the quantizers of a run."""

from pathlib import Path

import torch

from bitcycle import distributed
from bitcycle.cpp.extension import is_compiled, operators
from bitcycle.cpp.operators import AFFINE, BLOCK, MULTIBIT
from bitcycle.quantizer import Multibit, Mx, NoQuantizer, Nvfp4, QuantizerOptions, Sbm, compiler_works
from bitcycle.training.plan import Plan

COMPILATION_PAYS_ABOVE = 1e9
"""Number of quantized activations in a run above which compilation pays off. It takes 20 to 30 seconds, or 5 with
kernels in PyTorch's disk cache; an eager quantizer takes about 20 ns more per element (activation and gradient; two CPU
cores)."""


def wants_compilation(plan: Plan, device: torch.device) -> bool:
    """Whether to compile the quantizers of this run; results are identical either way."""
    choice = plan.config.training.compile
    if choice == "false" or isinstance(plan.config.quantizer, NoQuantizer):
        return False
    elements = sum(operation.input_elements for operation in plan.workload.operations) / plan.workload.samples
    pays = choice == "true" or elements * plan.samples(0, plan.total_steps) > COMPILATION_PAYS_ABOVE
    source = _operators(plan, device)
    if source and (pays or is_compiled(source)) and operators(source) is not None:
        return True
    return pays and compiler_works(device.type)


def _operators(plan: Plan, device: torch.device) -> Path | None:
    """The source file of C++ operators if they suffice for the run; once compiled, they pay off even in short runs.

    They do not suffice for data-parallel training, which quantizes shards of a batch, and for integer products: both
    also compile functions with PyTorch.
    """
    if device.type != "cpu" or distributed.world_size() > 1 or plan.config.training.compute != "simulate":
        return None
    return operators_of(plan.config.quantizer)


def operators_of(options: QuantizerOptions) -> Path | None:
    """The source file of a quantizer's C++ operators; None if it has none."""
    sources = ((Sbm, AFFINE), ((Mx, Nvfp4), BLOCK), (Multibit, MULTIBIT))
    return next((source for kinds, source in sources if isinstance(options, kinds)), None)
