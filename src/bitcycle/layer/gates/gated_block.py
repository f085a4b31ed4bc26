"""Blocks whose precision is chosen for each sample, and the conversion that wraps the blocks of a network.

    y_n = candidate_k(x)_n  with k the choice of sample n = sum_k m_nk candidate_k(x)_n
    candidate_k(x) = Block(x; activation bits a_k, gradient bits g_k, weight bits w),    of a skip: x, or shortcut(x) in float

    dL/dcandidate_k = m_k dL/dy,    dL/dm_nk = <dL/dy_n, candidate_k(x)_n>

Source: FracTrain, section 3.2, equation 1; released code, models.py.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.layer.compilation import not_compiled
from bitcycle.layer.gates.choices import Block, Choices
from bitcycle.layer.gates.chosen_backward import Chosen, Mixture, Replay, Sorted, Tape, ZeroGradients, prepare_replay
from bitcycle.layer.gates.gate import Gates
from bitcycle.layer.products.quantized import QuantizedLayer
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import modules_of
from bitcycle.quantizer.autograd import is_recomputation
from bitcycle.schedule import Dfq
from bitcycle.settings import SettingError

SHORTCUTS = ("shortcut", "downsample")
"""Attributes that hold the shortcut of a block; a module without layers, or None, is the identity."""


class GatedBlock(nn.Module):
    """A block that runs at the bits chosen by the gates for each sample.

    Computation by mode:

    * training: every candidate for the whole batch, as in the released code. Batch norm sees full batches and, like the
      observers of activations, updates its running statistics once per candidate (batch norm of a shortcut once more for the
      skip). Costs include only the chosen candidates, which is what hardware would compute.
    * training with backward=chosen: the same forward pass, but gradients only of chosen candidates; see chosen_backward.py.
    * evaluation: each candidate only for the samples that chose it; the result is the same, as all statistics are fixed. If a
      quantizer depends on the whole batch in evaluation, or gradients are needed, everything is computed as in training.
    * bits other than those of the current step (such as evaluation in float32 or at q_max): the block once, without gate.
    """

    def __init__(self, block: nn.Module, gates: Gates, index: int) -> None:
        super().__init__()
        self.block, self.index = block, index
        self.replay = (
            prepare_replay(block, gates.choices.blocks[index].name) if gates.options.backward == "chosen" else None
        )
        # In tuples so that parameters are not registered twice: the gates belong to the network, the layers to the block.
        self._gates = (gates,)
        self._shortcut = (getattr(block, shortcut_name(block), None),)
        self._layers = tuple(product for product in modules_of(block, QuantizedProduct) if not product.precision.fixed)
        self.samples_are_independent = _samples_are_independent(block)
        for layer in self._layers:
            layer.register_forward_pre_hook(self._refuse_recomputation)

    def _refuse_recomputation(self, *_: Any) -> None:
        """Raise SettingError in activation checkpointing, whose second forward pass has lost the gate's choice and its bits."""
        gates = self._gates[0]
        if gates.active and is_recomputation():
            problem = f"chooses bits of {gates.choices.blocks[self.index].name!r}, which activation checkpointing computes again"
            raise SettingError("schedule", gates.options.name, problem, "train the gated blocks without checkpointing")

    def forward(self, x: Tensor) -> Tensor:
        gates = self._gates[0]
        if gates.tracing:
            gates.choose(self.index, x)
        if gates.tracing or not gates.active:
            return self.block(x)
        self._refuse_recomputation()
        mask = gates.choose(self.index, x)
        if self.replay is not None and self.training and torch.is_grad_enabled():
            return self._replayed(x, mask, self.replay)
        if self.training or torch.is_grad_enabled() or not self.samples_are_independent:
            return self._mixture(x, mask)
        return self._chosen(x, mask.argmax(1))

    def _mixture(self, x: Tensor, mask: Tensor) -> Tensor:
        """All candidates for all samples, combined by the choice of each sample."""
        terms = [
            self._candidate(option, x, mask[:, option]) * mask[:, option].view(-1, 1, 1, 1)
            for option in range(mask.shape[1])
            if self._can_choose(option)
        ]
        if len(terms) == 1:
            return terms[0]
        return functools.reduce(torch.add, terms).contiguous()  # the layout determines the order of subsequent sums

    @not_compiled
    def _replayed(self, x: Tensor, mask: Tensor, replay: Replay) -> Tensor:
        """The same with a graph of only the chosen candidates; see chosen_backward.py."""
        passes = self._forward_passes()
        options = [option for same in passes for option in same]
        chosen = torch.stack([mask.detach()[:, option] for option in options], dim=1)
        rank = chosen.argmax(1)
        order = rank.argsort(stable=True)
        # what is computed depends on these numbers: the only wait for the device
        counts = (rank[:, None] == torch.arange(len(options), device=rank.device)).sum(0).tolist()
        ends = dict(zip(options, itertools.accumulate(counts)))
        firsts = {option: ends[option] - count for option, count in zip(options, counts)}
        x_sorted, outputs, parts, of_option = Sorted.apply(x, order), [], [], [-1] * mask.shape[1]
        for skips, group in itertools.groupby(passes, lambda same: self._skips(same[0])):
            module, same_forward = self._shortcut[0] if skips else self.block, list(group)
            tape = Tape(
                [
                    Chosen(self._state(k), firsts[k], ends[k])
                    for same in same_forward
                    for k in same
                    if firsts[k] < ends[k]
                ]
            )
            for same in same_forward:
                tape.write(order[firsts[same[0]] : ends[same[-1]]], firsts[same[0]])
                with torch.no_grad(), replay.with_tape(tape):
                    outputs.append(self._candidate(same[0], x).detach())
                for option in same:
                    of_option[option] = len(outputs) - 1
            if tape.parts:
                rows = x_sorted[tape.begin : tape.end] if tape.end - tape.begin < len(x) else x_sorted
                tape.read()
                with replay.with_tape(tape):
                    parts.append(rows if module is None else module(rows))
        y = Mixture.apply(mask, order, of_option, len(outputs), replay.compile, *outputs, *parts)
        all_skip = not tape.parts  # of the block's last forward pass
        return ZeroGradients.apply(y, *self.block.parameters()) if all_skip else y

    def _forward_passes(self) -> list[list[int]]:
        """Options grouped by forward pass, which those that differ only in gradient bits share; skips come first."""
        precisions = self._gates[0].choices.precisions
        passes: dict[tuple[int, int] | None, list[int]] = {}
        for option, precision in enumerate(precisions):
            if self._can_choose(option):
                passes.setdefault(None if precision is None else precision[:2], []).append(option)
        return sorted(passes.values(), key=lambda same: not self._skips(same[0]))

    def _skips(self, option: int) -> bool:
        return self._gates[0].choices.precisions[option] is None

    def _state(self, option: int) -> PrecisionState:
        return self._gates[0].states[option]  # type: ignore[return-value]

    def _chosen(self, x: Tensor, choice: Tensor) -> Tensor:
        """Only the chosen candidate for every sample."""
        layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        order = choice.argsort(stable=True)
        counts = choice.bincount(minlength=len(self._gates[0].states)).tolist()
        parts = [
            self._candidate(option, x.index_select(0, samples).contiguous(memory_format=layout))
            for option, samples in enumerate(order.split(counts))
            if len(samples)
        ]
        return torch.cat(parts).index_select(0, order.argsort()).contiguous(memory_format=layout)

    def _can_choose(self, option: int) -> bool:
        choices = self._gates[0].choices
        return choices.precisions[option] is not None or choices.blocks[self.index].can_skip

    def _candidate(self, option: int, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The block's output for all of x as if every sample had chosen `option`; `mask` marks those that did."""
        skips = self._skips(option)
        if skips and self._shortcut[0] is None:
            return x
        wanted = mask.detach() if mask is not None and self._gates[0].options.remask_gradient else None
        with self._at(self._state(option), wanted):
            y: Tensor = self._shortcut[0](x) if skips else self.block(x)  # type: ignore[misc]
        self._check_skip(x, y)
        return y

    def _check_skip(self, x: Tensor, y: Tensor) -> None:
        """Raise SettingError if the input is to replace an output of another shape, as of a block that pools."""
        block, choices = self._gates[0].choices.blocks[self.index], self._gates[0].choices
        if x.shape != y.shape and block.can_skip and not block.shortcut and None in choices.precisions:
            problem = (
                f"changes its input from {list(x.shape)} to {list(y.shape)} without a shortcut, and cannot be skipped"
            )
            remedy = "choose schedule.options without [0,0], or give the block a submodule `shortcut`"
            raise SettingError("block_names", block.name, problem, remedy)

    @contextmanager
    def _at(self, state: PrecisionState, mask: Tensor | None) -> Iterator[None]:
        """Context in which the layers of the block read their bits from `state`.

        States are exchanged instead of modified, as the backward pass needs the bits of every candidate.
        """
        before = [layer.precision for layer in self._layers]
        state.sample_mask = mask
        for layer in self._layers:
            layer.read_from(state)
        try:
            yield
        finally:
            state.sample_mask = None
            for layer, own in zip(self._layers, before):
                layer.read_from(own)


def shortcut_name(block: nn.Module) -> str:
    """The attribute that holds the shortcut of a block, if that has layers; otherwise empty."""
    found = {name: getattr(block, name, None) for name in SHORTCUTS}
    return next((name for name, m in found.items() if isinstance(m, nn.Module) and list(m.parameters())), "")


def _samples_are_independent(block: nn.Module) -> bool:
    """Whether, in evaluation mode, the block's output for a sample depends on that sample alone."""
    for module in block.modules():
        if isinstance(module, QuantizedLayer) and not module.activation_quantizer.samples_are_independent:
            return False
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return False
    return True


def gate_blocks(model: nn.Module, options: Dfq, seed: int = 0) -> nn.Module:
    """Wrap the blocks that `model.block_names` lists, in the order of execution, and add their gates as `model.gates`. Raises
    SettingError if a name is not a module or is listed twice, or a block has no quantized layer.

    Args:
        model: converted by `quantize_model`; changed in place.
        options: options of the blocks.
        seed: of the gates' initial weights.
    """
    names: tuple[str, ...] = tuple(model.block_names)  # type: ignore[arg-type]
    for name in (name for name in names if names.count(name) > 1):
        raise SettingError("block_names", name, "is listed twice", "list each block once")
    modules = [_block(model, name) for name in names]
    blocks = tuple(_description(name, module) for name, module in zip(names, modules))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gates = Gates(Choices(blocks, options), [modules_of(module, nn.Conv2d)[0].in_channels for module in modules])
    gates.to(next(model.parameters()).device).train(model.training)
    for index, (name, module) in enumerate(zip(names, modules)):
        parent, _, attribute = name.rpartition(".")
        wrapped = GatedBlock(module, gates, index).train(module.training)
        setattr(model.get_submodule(parent), attribute, wrapped)
    model.gates = gates
    return model


def _block(model: nn.Module, name: str) -> nn.Module:
    known: dict[str, nn.Module] = dict(model.named_modules())
    if name not in known:
        raise SettingError("block_names", name, "is not a module of the network", "list the names of its blocks")
    if not modules_of(known[name], nn.Conv2d):
        problem, remedy = "has no nn.Conv2d, and the gates read images", "list blocks with one, or use schedule=pfq"
        raise SettingError("block_names", name, problem, remedy)
    if all(layer.precision.fixed for layer in modules_of(known[name], QuantizedLayer)):
        remedy = "leave fewer layers float, or fix the bits of fewer (layer_bits, depthwise_bits)"
        raise SettingError("block_names", name, "has no quantized layer to choose bits for", remedy)
    return known[name]


def _description(name: str, block: nn.Module) -> Block:
    """Describe a block; without a shortcut module it can be skipped only if it changes neither size nor width."""
    shortcut, inner = shortcut_name(block), modules_of(block, nn.Conv2d)
    keeps_shape = inner[-1].out_channels == inner[0].in_channels and all(set(layer.stride) == {1} for layer in inner)
    module = f"{name}.block"
    return Block(name, module, f"{module}.{shortcut}" if shortcut else "", bool(shortcut) or keeps_shape)
