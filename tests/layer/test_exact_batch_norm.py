"""compute=simulate: batch norm as an operator has PyTorch's numbers, alone and with the ReLUs and quantizers around it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import bitcycle
from bitcycle.layer.batch_norm import TrainedBatchNorm2d, _is_exact
from bitcycle.layer.relu import RecordingReLU, use_operators

pytestmark = pytest.mark.skipif(not _is_exact(), reason="needs g++, AVX-512 and kernels of PyTorch that round alike")

BEFORE_RELU = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(inplace=True))
NETWORKS = {
    "alone": nn.Sequential(nn.BatchNorm2d(16)),
    "relu": BEFORE_RELU,
    "relu, not in place": nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()),
    "relu first": nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)),
    "average": nn.Sequential(
        nn.BatchNorm2d(16, momentum=None, eps=0.1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    ),
    "wide": nn.Sequential(
        nn.Conv2d(16, 80, 1), nn.BatchNorm2d(80), nn.ReLU(inplace=True), nn.Conv2d(80, 16, 3, stride=2)
    ),
    "no statistics": nn.Sequential(nn.BatchNorm2d(16, track_running_stats=False), nn.ReLU(inplace=True)),
    "not affine": nn.Sequential(nn.BatchNorm2d(16, affine=False), nn.ReLU(inplace=True)),
    "odd channels": nn.Sequential(nn.Conv2d(16, 10, 1), nn.BatchNorm2d(10), nn.ReLU(inplace=True)),
}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(*shape, generator=generator) for shape in [(3, 16, 33, 31), (2, 16, 5, 5), (1, 16, 4, 3)]]
    found = [x.contiguous(memory_format=torch.channels_last) for x in found] + [found[0]]
    for value in (torch.nan, torch.inf):
        found.append(found[1].clone(memory_format=torch.preserve_format))
        found[-1][1, 3, 2, 2] = value
    return found


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and gradients of two steps, one without gradients, and what the model remembers."""
    found = []
    for step in range(3):
        model.zero_grad()
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with torch.set_grad_enabled(step != 1):
            y = model(leaf + 0)
        found.append(y.detach().clone())
        if y.requires_grad:
            (y * torch.linspace(-1, 2, y.shape[1]).view(-1, 1, 1)).square().sum().backward(retain_graph=True)
            found += [leaf.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
            if step == 2:  # the gradient is the same for all elements
                y.sum().backward()
                found += [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    model.eval()
    return [*found, model(x.clone()).detach(), *model.buffers()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_pytorchs(name, threads):
    network = NETWORKS[name].to(memory_format=torch.channels_last)
    for x in images():
        ours = use_operators(copy.deepcopy(network))
        assert any(isinstance(module, (TrainedBatchNorm2d, RecordingReLU)) for module in ours)
        assert_same(trained(ours, x), trained(copy.deepcopy(network), x))


def test_the_operator_runs(threads):
    x = images()[0].requires_grad_()
    y = use_operators(copy.deepcopy(BEFORE_RELU))(x)
    assert y.grad_fn.name() == "TrainedBatchNorm"
    assert torch.equal(y, copy.deepcopy(BEFORE_RELU)(x))


def test_what_a_hook_keeps_or_changes_is_respected():
    """The output of batch norm before its ReLU has a graph of its own, and a gradient that is held is not changed in place."""
    found = []
    for network in (copy.deepcopy(BEFORE_RELU), use_operators(copy.deepcopy(BEFORE_RELU))):
        x, held, other = images()[0].requires_grad_(), [], []
        network[0].register_forward_hook(lambda _, __, y, other=other: other.append(y * 2) and None)
        y = network(x * 1)
        y.register_hook(held.append)
        (y.square().sum() + other[0].sum()).backward()
        found.append([x.grad, other[0].detach(), *held, y.detach()])
    assert_same(*found)


def test_second_derivatives_are_pytorchs():
    found = []
    for network in (copy.deepcopy(BEFORE_RELU), use_operators(copy.deepcopy(BEFORE_RELU))):
        x = images()[1].requires_grad_()
        (first,) = torch.autograd.grad((network(x) ** 3).sum(), x, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.square().sum(), [x, network[0].weight])])
    assert_same(*found)


def test_a_graph_is_used_once_copies_and_states_fit():
    network = use_operators(copy.deepcopy(BEFORE_RELU))
    x = images()[0].requires_grad_()
    y = network(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    again = pickle.loads(pickle.dumps(network))
    plain = copy.deepcopy(BEFORE_RELU)
    plain.load_state_dict(again.state_dict())
    assert_same([copy.deepcopy(again)(x)], [plain(x)])


@pytest.mark.parametrize("inplace", [True, False])
def test_whole_networks_train_as_with_pytorchs(threads, inplace):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.Conv2d(16, 32, 3, stride=2)]
    layers += [nn.ReLU(inplace), nn.BatchNorm2d(32), nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4)).to(memory_format=torch.channels_last)
    x, found = torch.randn(6, 3, 20, 20).contiguous(memory_format=torch.channels_last), []
    for compile in (False, True):
        quantized = bitcycle.quantize_model(copy.deepcopy(model), float_layers=[], compile=compile)
        for _ in range(2):
            quantized.zero_grad()
            quantized(x).square().sum().backward()
        found.append([*(parameter.grad for parameter in quantized.parameters()), *quantized.buffers()])
    assert_same(*found)
