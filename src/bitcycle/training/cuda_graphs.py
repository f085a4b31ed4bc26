"""Training steps as CUDA graphs: the forward and backward passes are recorded once for each precision, and then replayed.

A step of a small quantized network is hundreds to thousands of kernels of a few microseconds, which the host takes several
times as long to launch as a GPU takes to compute them. A graph is launched at once. It holds the same kernels in the same
order, so that results are identical. What changes between steps lies in tensors that the graph reads: bits, noise keys, weights,
the batch. The optimizer, which has the learning rate as a number, stays outside.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bitcycle import distributed
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.layer.twin import modules_of
from bitcycle.model.custom import CustomModel, TimmModel
from bitcycle.quantizer import TensorQuantizer
from bitcycle.schedule import GatedSchedule

if TYPE_CHECKING:
    from bitcycle.training.plan import Plan

logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]


class Recorded(NamedTuple):
    """A graph with the tensors that it reads and writes."""

    graph: Any  # a torch.cuda.CUDAGraph
    batch: Any
    outputs: Outputs
    gradients: list[Tensor | None]


def can_record(plan: "Plan", device: torch.device) -> bool:
    """Whether the steps of a run on a device are recorded. What a network from elsewhere does in Python is not known: its steps
    are recorded on request only. Logs what stands in the way of a request."""
    options = plan.config.training
    if options.cuda_graphs == "false":
        return False
    obstacles = {
        f"the device is {device.type}; use training.device=cuda": device.type == "cuda",
        "training.compute=codes is not recorded; use simulate": options.compute == "simulate",
        f"steps of task={plan.config.task.name} differ or keep something between them": plan.config.task.steps_are_alike,
        "several processes train together; use one": distributed.world_size() == 1,
        f"gates of schedule={plan.schedule.name} choose what is computed": not isinstance(plan.schedule, GatedSchedule),
    }
    reason = next((text for text, is_fine in obstacles.items() if not is_fine), None)
    if options.cuda_graphs == "true" and reason:
        logger.warning("training.cuda_graphs=true records nothing: %s", reason)
    from_elsewhere = isinstance(plan.config.model, CustomModel | TimmModel)
    return reason is None and (options.cuda_graphs == "true" or not from_elsewhere)


class StepGraphs:
    """The graphs of a model's training steps by precision and shapes. The first steps of each are computed as usual, since
    quantizers may adapt and kernels be compiled; then one is recorded.

    Args:
        model: whose gradients a step computes.
        is_used: whether to record at all; otherwise every step is computed as usual.
        record: makes a graph of what a function without arguments launches: (graph, the function's result).
    """

    wait = 16
    """Number of steps of a kind that are computed before one is recorded. Recording costs about as much as these steps, so it
    would not pay for quantizers that adapt to bits which change every few steps."""
    replays = 0
    """Number of replays in this process."""

    def __init__(
        self,
        model: nn.Module,
        is_used: bool,
        record: Callable[[Callable[[], Outputs], Any], tuple[Any, Outputs]] | None = None,
    ) -> None:
        self.is_used, self._record = is_used, record or _recorded
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.products = modules_of(model, QuantizedProduct)
        self.prepares = any(
            type(quantizer).prepare is not TensorQuantizer.prepare
            for product in self.products
            for quantizer, _ in product.operands()
        )
        self.forget()

    def forget(self) -> None:
        """Forget all graphs, as after a change of what their tensors are."""
        self.met = Counter[Hashable]()
        self.recorded: dict[Hashable, Recorded] = {}
        self.pool: Any = None  # PyTorch records into no pool whose graphs are gone

    def compute(self, precision: Hashable, batch: Any, passes: Callable[[Any], Outputs]) -> Outputs:
        """The result of passes(batch), which computes gradients that were None before."""
        if not self.is_used:
            return passes(batch)
        if not all(product.adapted for product in self.products):
            if self.prepares:  # quantizers may get other tensors, and numbers that a graph holds as constants
                self.forget()
            return passes(batch)
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        others = tuple(leaf for leaf in tree_leaves(batch) if not isinstance(leaf, Tensor))
        key = (precision, others, tuple((x.shape, x.stride(), x.dtype) for x in leaves))
        if self.met[key] < self.wait:
            self.met[key] += 1
            return passes(batch)
        found = self.recorded.get(key)
        if found is None:
            try:
                found = self.recorded[key] = self._made(batch, passes)
            except RuntimeError as error:  # something in the network makes the host wait, or is unknown to graphs
                self._give_up(error)
                return passes(batch)
        for mine, given in zip(tree_leaves(found.batch), tree_leaves(batch), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        for parameter, gradient in zip(self.parameters, found.gradients, strict=True):
            parameter.grad = gradient
        found.graph.replay()
        StepGraphs.replays += 1
        return found.outputs

    def _give_up(self, error: RuntimeError) -> None:
        """Compute all steps as usual from now on, this one from its beginning."""
        first: BaseException = error
        while first.__context__ is not None:  # ending the recording fails, too, and says less
            first = first.__context__
        reason = str(first).split("\n")[0]
        logger.warning("a training step cannot be recorded as a CUDA graph, and takes longer without one: %s", reason)
        self.is_used = False
        self.forget()
        for parameter in self.parameters:
            parameter.grad = None
        for product in self.products:
            product.precision.calls.clear()  # no call has happened in this step

    def _made(self, batch: Any, passes: Callable[[Any], Outputs]) -> Recorded:
        mine = tree_map_only(Tensor, torch.clone, batch)
        graph, outputs = self._record(lambda: passes(mine), self)
        gradients = [parameter.grad for parameter in self.parameters]
        logger.debug("recorded CUDA graph %d of the training steps", len(self.recorded) + 1)
        return Recorded(graph, mine, tuple(output.detach() for output in outputs), gradients)


def _recorded(passes: Callable[[], Outputs], graphs: StepGraphs) -> tuple[Any, Outputs]:
    """A CUDA graph in the memory of the other graphs of the run, of which only one is replayed at a time."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        # other threads may allocate pinned memory for the next batches meanwhile
        with torch.cuda.graph(graph, pool=graphs.pool, capture_error_mode="thread_local"):
            outputs = passes()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # PyTorch leaves that of a failed recording in place
        raise
    graphs.pool = graphs.pool or graph.pool()
    return graph, outputs
