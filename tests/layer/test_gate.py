"""Gates and gated blocks against the released code and by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitcycle
from bitcycle.layer import GatedBlock, PrecisionState
from bitcycle.model import MODELS, CifarMobileNetV2
from bitcycle.precision import Precision
from bitcycle.schedule.gated import OPTION_LISTS
from bitcycle.shapes import ImageShape
from tests.conftest import golden_json
from tests.gate_cases import DETERMINISTIC, SHAPE, force, gated, images, resnet, spread

PAPER = OPTION_LISTS["paper_resnet"]


def blocks_of(model: nn.Module) -> list[GatedBlock]:
    return [module for module in model.modules() if isinstance(module, GatedBlock)]


# The gates


@pytest.mark.parametrize("name", ["resnet38", "resnet74", "mobilenet_v2"])
def test_parameters_equal_released_code_but_for_a_gate_that_nothing_reads(name):
    network = MODELS[name]().build(ImageShape(3, 32, 10))
    schedule = bitcycle.schedule("dfq", total_steps=1, options="code", family=network.block_family)
    model = bitcycle.quantize_model(network, schedule=schedule)
    last, hidden, size = (320, 64, 32) if name == "mobilenet_v2" else (64, 32, 16)
    behind_the_last_block = last * hidden + hidden + hidden * size + size
    released = golden_json("model_stats")[f"{name}_gated_10_options5"]["parameters_without_unused"]
    assert sum(p.numel() for p in model.parameters()) + behind_the_last_block == released


def test_choices_are_one_hot_differ_between_samples_and_are_the_same_in_evaluation():
    model, _ = gated(resnet())
    spread(model)
    xs = [torch.randn(32, width, 6, 6) for width in (16, 16, 32)]
    training, evaluation = (
        [gates.choose(i, x) for i, x in enumerate(xs)] for gates in (model.gates, model.gates.eval())
    )
    for mask, same in zip(training, evaluation, strict=True):
        assert torch.equal(mask, same)
        assert set(mask.unique().tolist()) == {0, 1} and (mask.sum(1) == 1).all()
        assert len(mask.argmax(1).unique()) > 1


def test_recurrence_and_projection_are_those_of_the_formula():
    model, _ = gated(resnet())
    gates, xs = model.gates, [torch.randn(4, width, 5, 5) for width in (16, 16, 32)]
    h = c = torch.zeros(4, 16)
    for index, x in enumerate(xs):
        conv1, conv2 = gates.embeddings[index].conv1, gates.embeddings[index].conv2
        e = F.relu(x.mean((2, 3)) @ conv1.weight.flatten(1).T + conv1.bias) @ conv2.weight.flatten(1).T + conv2.bias
        cell = gates.cells[0]
        i, f, g, o = (e @ cell.weight_ih.T + h @ cell.weight_hh.T + cell.bias_ih + cell.bias_hh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        expected = (h @ gates.projections[0].weight.T + gates.projections[0].bias).argmax(1)
        assert torch.equal(gates.choose(index, x).argmax(1), expected)
    assert len(gates.cells) == len(gates.projections) == 1


def test_of_equal_probabilities_the_first_is_chosen():
    model, _ = gated(resnet())
    for parameter in model.gates.projections.parameters():
        nn.init.zeros_(parameter)
    assert model.gates.choose(0, torch.randn(5, 16, 4, 4)).argmax(1).tolist() == [0] * 5


def test_straight_through_gradient_is_the_analytic_one():
    """With u = dL/dm, softmax p and logits z: dL/dz = p (u - <u, p>), as if the choice were p itself."""
    model, _ = gated(resnet())
    gates, x, upstream = model.gates, torch.randn(3, 16, 4, 4), torch.randn(3, 7)
    logits = []
    gates.projections[0].register_forward_hook(lambda _m, _i, z: (z.retain_grad(), logits.append(z))[0])
    mask = gates.choose(0, x)
    (mask * upstream).sum().backward()
    p = logits[0].detach().softmax(1)
    torch.testing.assert_close(logits[0].grad, p * (upstream - (p * upstream).sum(1, keepdim=True)))


def test_a_gate_learns_from_what_the_candidates_would_have_given():
    """dL/dm_nk = <dL/dy_n, candidate_k(x)_n>, also of candidates that were not chosen."""
    model, _ = gated(resnet((2, 1, 1)))
    block, x, upstream = model.group1[1], torch.randn(4, 16, 8, 8), torch.randn(4, 16, 8, 8)
    choices = torch.tensor([[0] * 4, [0, 3, 6, 1], [0] * 4, [0] * 4])
    force(model, choices)
    y = block(x)
    block.zero_grad()
    y.backward(upstream)
    candidates = [copy.deepcopy(block)._candidate(k, x) for k in range(7)]
    expected = torch.stack([(upstream * candidate).flatten(1).sum(1) for candidate in candidates], 1)
    torch.testing.assert_close(model.gates.masks[1].grad, expected, rtol=1e-4, atol=1e-4)
    for sample, option in enumerate(choices[1]):
        torch.testing.assert_close(y[sample], candidates[option][sample])


# The blocks


def test_a_single_option_is_static_training_at_its_bits():
    """Forward, backward and statistics: the bits of a candidate are its own in the backward pass, too."""
    network, _ = gated(resnet(), options=[[3, 6]])
    expected = bitcycle.quantize_model(resnet(), DETERMINISTIC, float_layers=["first", "last"])
    for module in expected.modules():
        if isinstance(module, PrecisionState):
            module.set(Precision(4, 3, 6))
    x = images()
    for model in (network, expected):
        F.cross_entropy(model(x), torch.arange(6)).backward()
    gradients = {name.replace("block.", ""): p.grad for name, p in network.named_parameters() if "gates" not in name}
    for name, parameter in expected.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
    statistics = {name.replace("block.", ""): value for name, value in network.named_buffers()}
    assert torch.equal(statistics["group2.0.bn1.running_mean"], expected.group2[0].bn1.running_mean)


def test_candidates_keep_their_own_bits_in_the_backward_pass():
    """Two options that differ in the gradient's bits only: each gives the gradients of static training at its bits."""
    x, upstream = torch.randn(5, 16, 8, 8), torch.randn(5, 16, 8, 8)
    found = {}
    for pairs in ([[4, 2], [4, 8]], [[4, 2]], [[4, 8]]):
        model, _ = gated(resnet((2, 1, 1)), options=pairs)
        force(model, torch.full((4, 5), len(pairs) - 1))
        y = model.group1[1](x)
        y.backward(upstream)
        found[str(pairs)] = model.group1[1].block.conv2.weight.grad
    both, coarse, fine = found.values()
    assert not torch.equal(coarse, fine)
    # The samples that chose 8 bits give `fine`; those (none) that chose 2 bits give the rounding of zeros: nothing.
    torch.testing.assert_close(both, fine)


def test_skipping_returns_the_input_or_its_float_shortcut():
    model, _ = gated(resnet((2, 1, 1)))
    x = torch.randn(4, 16, 8, 8)
    force(model, torch.zeros(4, 4, dtype=torch.long))
    assert torch.equal(model.group1[1](x), x)
    convolution, norm = model.group2[0].block.shortcut
    expected = F.batch_norm(
        F.conv2d(x, convolution.weight, stride=2), None, None, norm.weight, norm.bias, training=True
    )
    torch.testing.assert_close(model.group2[0](x), expected)


def test_statistics_move_once_for_each_candidate():
    model, _ = gated(resnet(), options=PAPER)
    model(images())
    block = model.group2[0].block
    assert (block.bn1.num_batches_tracked, block.bn2.num_batches_tracked) == (6, 6)
    assert block.shortcut[1].num_batches_tracked == 7  # once more for the skip
    assert model.bn1.num_batches_tracked == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make", [resnet, lambda: CifarMobileNetV2(SHAPE)], ids=["resnet", "mobilenet_v2"])
def test_evaluation_computes_chosen_candidates_only_with_the_same_result(make, layout):
    model, control = gated(make())
    model = model.to(memory_format=layout)
    x = images(24).to(memory_format=layout)
    for _ in range(3):
        model(x)
    spread(model)
    model.eval()
    with torch.no_grad():
        inputs: dict[str, int] = {}
        first = [next(iter(block._layers)) for block in blocks_of(model)]
        hooks = [
            layer.register_forward_pre_hook(
                lambda _layer, args, i=i: inputs.update({i: inputs.get(i, 0) + len(args[0])})
            )
            for i, layer in enumerate(first)
        ]
        chosen = model(x)
        computed = dict(inputs)
        for block in blocks_of(model):
            block.samples_are_independent = False
        everything = model(x)
        assert all(computed.get(i, 0) <= 24 for i in range(len(first)))
        assert sum(computed.values()) < sum(inputs.values()) - sum(computed.values())
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(chosen, everything, rtol=1e-5, atol=1e-5)
    assert control.precision is not None


def test_quantizers_that_look_at_the_batch_compute_everything_in_evaluation():
    schedule = bitcycle.schedule("dfq", total_steps=1, options=[[2, 32], [3, 32]])
    model = bitcycle.quantize_model(resnet(), "uniform_l2", schedule=schedule)
    assert not any(block.samples_are_independent for block in blocks_of(model))
    assert all(block.samples_are_independent for block in blocks_of(gated(resnet())[0]))


@pytest.mark.parametrize("remask", [False, True])
def test_masked_gradients_reach_samples_that_chose_otherwise_only_if_they_may(remask):
    """Batch norm couples samples: unless masked again, also those that chose another candidate get a gradient."""
    model, _ = gated(resnet((2, 1, 1)), options=[[4, 6], [6, 8]], remask_gradient=remask)
    torch.manual_seed(3)
    x = torch.randn(4, 16, 8, 8)
    force(model, torch.tensor([[0, 0, 1, 1]] * 4))
    block, seen = model.group1[1], []
    layer = block.block.conv1
    layer.register_forward_pre_hook(lambda _layer, args: seen.append(args[0]) or args[0].retain_grad())
    block(x.requires_grad_()).square().sum().backward()
    candidate = block.block.conv1
    assert candidate is layer
    # The input's gradient through the first candidate alone: a copy with one candidate's output.
    model.zero_grad()
    y = x.detach().clone().requires_grad_()
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    (block._candidate(0, y, mask) * mask.view(-1, 1, 1, 1)).square().sum().backward()
    assert y.grad[:2].abs().sum() > 0
    assert (y.grad[2:].abs().sum() == 0) == remask
