"""The gates of DFQ: a small recurrent network that chooses the precision of each block for each sample; their record.

For block l = 0, 1, ... with input x [N, C, H, W]:

    e = conv2(relu(conv1(mean over H, W of x)))          1x1 convolutions with bias, separate per block        [N, E]
    h, c = LSTM(e; h, c)                                  one for all blocks; h, c = 0 before the first block  [N, S]
    p = softmax(W h + b)                                  one projection for all blocks                        [N, K]
    m = onehot(argmax p),    dL/dp = dL/dm                the same in training and evaluation, without noise

Ties are resolved in favour of the first option. A block that cannot be skipped has p = 0 for the skip.

The gates also hold the cost term of the loss, entirely in tensors on the device to avoid synchronisation with the host:

    s beta C / mean W,    C = sum over blocks, samples and options of m_lnk cost_lk,    s by cp of this batch and the target

Source: FracTrain, section 3.2; released code, models.py and train_dfq.py. Differs from the code in choosing a single option if
several are equally probable (there: all), and in omitting the unused gate after the last block.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.hardware import CostMeter, Workload
from bitcycle.layer.gates.choices import BlockCosts, Choices, Tally
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import modules_of
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer.autograd import straight_through
from bitcycle.randomness import int32_key
from bitcycle.settings import SettingError

Memory = tuple[Tensor, Tensor]


class Embedding(nn.Module):
    """Pooled features of a block's input: [N, C, H, W] -> [N, E]."""

    def __init__(self, channels: int, hidden: int, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, hidden, 1) if hidden else None
        self.conv2 = nn.Conv2d(hidden or channels, size, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3), keepdim=True)
        if self.conv1 is not None:
            x = F.relu(self.conv1(x))
        return self.conv2(x).flatten(1)


class Gates(nn.Module):
    """The gates of all blocks of a network, their options, and the cost term of the loss. `channels` are those of each
    block's input."""

    chosen: Tensor
    option_costs: Tensor
    available: Tensor
    target: Tensor
    _memory: Memory | None
    _cost: Tensor | None
    _samples: int
    _last: int

    def __init__(self, choices: Choices, channels: list[int]) -> None:
        super().__init__()
        gates, blocks = choices.gates, len(choices.blocks)
        hidden, embedding, state = gates.sizes
        options = len(gates.pairs)
        self.choices, self.options = choices, gates
        self.embeddings = nn.ModuleList(Embedding(width, hidden, embedding) for width in channels)
        self.cells = nn.ModuleList([nn.LSTMCell(embedding, state)])  # lists, as in checkpoints
        self.projections = nn.ModuleList([nn.Linear(state, options)])
        if gates.facts.initial == "fan_out":
            self.apply(_initialise)
        self.states = nn.ModuleList(
            PrecisionState(precision or Precision(FLOAT, FLOAT, FLOAT), fixed=True, noise_key=int32_key("option", k))
            for k, precision in enumerate(choices.precisions)
        )
        computes = torch.tensor([precision is not None for precision in choices.precisions])
        can_skip = torch.tensor([[block.can_skip] for block in choices.blocks])
        self._keep("available", computes | can_skip)
        self._keep("chosen", torch.zeros(blocks, options, dtype=torch.int64))
        self._keep("option_costs", torch.zeros(blocks, options))
        self._keep("target", torch.full((), 100.0))
        self.reference, self.active, self.counting, self.tracing = 1.0, True, True, False
        self._last = 0
        self._begin()

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def choose(self, index: int, x: Tensor) -> Tensor:
        """The choice of block `index` for its input x: [N, K], one 1 in each row, straight-through to the gate. Raises
        SettingError if the blocks do not run in the order of their names."""
        embedded = self.embeddings[index](x)
        if index == 0:
            self._begin()
        elif self._memory is None or index <= self._last:
            problem = "runs before those named before it, or twice in one forward pass"
            remedy = "name the blocks in the order in which the network runs them, and leave out those that run twice"
            raise SettingError("block_names", self.choices.blocks[index].name, problem, remedy)
        self._last = index
        self._memory = self.cells[0](embedded, self._memory)
        logits = self.projections[0](self._memory[0]).masked_fill(~self.available[index], -torch.inf)
        mask: Tensor = straight_through(_one_hot, logits.softmax(1))
        if self.training:
            if self.counting and torch.is_grad_enabled():
                self.chosen[index] += mask.detach().sum(0).to(torch.int64)
            self._samples, cost = len(mask), (mask * self.option_costs[index]).sum()
            self._cost = cost if self._cost is None else self._cost + cost
        return mask

    def penalties(self, loss: Tensor | None = None) -> list[Tensor]:
        """The cost term of the last forward pass in training mode."""
        if self._cost is None:
            return [torch.zeros_like(self.target)]
        percentage = 100 * self._cost.detach() / (self._samples * self.reference)
        return [sign(percentage, self.target) * self.options.beta * self._cost]

    def take(self) -> list[list[int]]:
        """The choices of all training samples since the last call, by block and option; synchronises with the device."""
        counts: list[list[int]] = self.chosen.tolist()
        self.chosen.zero_()
        return counts

    def prepare_trace(self) -> None:
        """Run blocks once at the bits of the schedule from now on, for tracing their products."""
        self.tracing = True

    def _begin(self) -> None:
        """Discard the last forward pass."""
        self._memory, self._cost, self._samples = None, None, 0

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the last forward pass, whose graph cannot be copied or pickled."""
        return {**self.__dict__, "_memory": None, "_cost": None, "_samples": 0}

    def extra_repr(self) -> str:
        return f"{' '.join(self.options.words)}, weights {self.options.bits_of_weights}"


def sign(percentage: Tensor, target: Tensor) -> Tensor:
    """The sign of the cost term at a cp of `percentage`, a scalar: -1 below the target, else +1. Source: FracTrain, section 3.2.

    >>> [sign(torch.tensor(cp), torch.tensor(3.0)).item() for cp in (2.9, 3.0, 3.1)]
    [-1.0, 1.0, 1.0]
    """
    return torch.where(percentage < target, -1.0, 1.0).to(percentage)


def _one_hot(probabilities: Tensor) -> Tensor:
    options = torch.arange(probabilities.shape[1], device=probabilities.device)
    return (options == probabilities.argmax(1, keepdim=True)).to(probabilities.dtype)


def _initialise(module: nn.Module) -> None:
    """Normal weights with variance 2 / out for convolutions and 2 / (in out) for the projection, as in the released code."""
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0, (2 / module.out_channels) ** 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, (2 / (module.in_features * module.out_features)) ** 0.5)


class GateRecord:
    """Records the choices of gates; for a model without gates all values are empty."""

    def __init__(self, model: nn.Module) -> None:
        self.gates: Sequence[Gates] = modules_of(model, Gates)
        self.tallies = [Tally(gates.choices) for gates in self.gates]
        self.costs: list[BlockCosts] = []
        self.target: float | None = None

    def set_workload(self, workload: Workload) -> None:
        """Set the products of the model, which determine the cost of each option."""
        self.costs = [gates.choices.costs(workload) for gates in self.gates]
        for gates, costs in zip(self.gates, self.costs):
            gates.option_costs.copy_(torch.tensor(costs.table))
            gates.reference = costs.reference

    def forget(self) -> None:
        """Drop the choices that have not been counted yet, such as those before the first step."""
        for gates in self.gates:
            gates.chosen.zero_()

    def begin_step(self, target: float | None) -> None:
        """Activate the gates with a target cost of `target` percent of float32 (None: no target)."""
        self.target = target
        self.choose(True)
        for gates in self.gates:
            gates.target.fill_(100.0 if target is None else target)

    @property
    def chooses(self) -> bool:
        """Whether the gates choose; true without gates."""
        return all(gates.active for gates in self.gates)

    def choose(self, active: bool) -> None:
        """Let the gates choose, or use the bits of the model's other layers in all blocks."""
        for gates in self.gates:
            gates.active = active

    def count_choices(self, counting: bool) -> None:
        """Set whether choices in training mode are counted."""
        for gates in self.gates:
            gates.counting = counting

    def count(self, meter: CostMeter) -> None:
        """Fetch and count the choices since the last call; synchronises with the device. The gates of other processes are taken
        to choose as this one's."""
        for gates, tally in zip(self.gates, self.tallies):
            counts = gates.take()
            tally.add(counts)
            for operation, precision, samples in gates.choices.operations(counts):
                meter.add(precision, samples * distributed.world_size(), operation)

    def count_without_choice(self, meter: CostMeter, precision: Precision, samples: int) -> None:
        """Count samples of blocks whose gates do not choose, all of which have these bits."""
        blocks = (block for gates in self.gates if not gates.active for block in gates.choices.blocks)
        for name in (name for block in blocks for name in (block.module, block.shortcut) if name):
            meter.add(precision, samples, name)

    def training_values(self) -> dict[str, Any]:
        """Values to log with the training loss: `cp` of the steps since the last call, and its target."""
        values: dict[str, Any] = {}
        for tally, costs in zip(self.tallies, self.costs):
            values |= {"cp": costs.compute_percentage(tally.since_last("training")), "cp_target": self.target}
        return values

    def evaluation_values(self) -> dict[str, Any]:
        """Values to log with an evaluation: the shares of options chosen by training samples since the last call."""
        values: dict[str, Any] = {}
        for gates, tally in zip(self.gates, self.tallies):
            values["allocation"] = gates.choices.shares(tally.since_last("evaluation"))
        return values

    def summary(self) -> dict[str, Any]:
        """The mean cp and the shares of the options over the whole run."""
        values: dict[str, Any] = {}
        for gates, tally, costs in zip(self.gates, self.tallies, self.costs):
            percentage = costs.compute_percentage(tally.totals)
            values["gates"] = {"mean_cp": percentage, "allocation": gates.choices.shares(tally.totals)}
        return values

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"tallies": [tally.state_dict() for tally in self.tallies]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; choices that have not been counted yet are dropped."""
        self.forget()
        for tally, saved in zip(self.tallies, state["tallies"]):
            tally.load_state_dict(saved)
