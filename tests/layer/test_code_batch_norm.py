"""compute=codes: batch norm and ReLU as operators that know what their neighbours have computed already."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer.codes.batch_norm import CodeBatchNorm2d, MaskSavingReLU
from bitcycle.layer.codes.support import library
from bitcycle.layer.products.quantized import QuantizedLayer
from bitcycle.layer.twin import twin_of

pytestmark = [
    pytest.mark.skipif(library() is None, reason="needs g++ and a CPU with AVX-512 VNNI"),
    pytest.mark.usefixtures("codes_everywhere"),
]

SHAPES = [(2, 1, 2, 3), (3, 16, 5, 7), (1, 24, 9, 8), (4, 40, 1, 1), (2, 3, 113, 97), (6, 64, 33, 20)]


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    channels = torch.randn(shape[1], 1, 1)
    return (torch.randn(shape) * (0.1 + channels.abs()) + 3 * channels).contiguous(memory_format=torch.channels_last)


def norm_of(channels: int, **options) -> CodeBatchNorm2d:
    norm = nn.BatchNorm2d(channels, **options)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    return twin_of(norm, CodeBatchNorm2d)


def relu(inplace: bool) -> MaskSavingReLU:
    twin = MaskSavingReLU(inplace)
    twin.compile_kernel = True
    return twin


def step(model: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients and running statistics of one training step."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(gradient.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def in_double(model: nn.Module) -> nn.Module:
    kinds = {CodeBatchNorm2d: nn.BatchNorm2d, MaskSavingReLU: nn.ReLU}
    return nn.Sequential(*(twin_of(module, kinds[type(module)]) for module in copy.deepcopy(model))).double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["alone", "ReLU in place", "ReLU"])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_batch_norm_in_double_precision(shape, kind, threads):
    x, gradient = images(*shape), torch.randn(shape).contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(norm_of(shape[1]))
    if kind != "alone":
        model.append(relu(kind == "ReLU in place"))
    expected = step(in_double(model), x.double(), gradient)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, again = step(model, x, gradient), step(copy.deepcopy(model), x, gradient)[:2]
    finally:
        torch.set_num_threads(before)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=5e-5, atol=1e-6 + 2e-6 * float(theirs.abs().max())
        )
    assert all(map(torch.equal, found, again))


def test_it_adds_in_the_same_order_with_any_number_of_threads():
    x, gradient = images(5, 16, 65, 40), images(5, 16, 65, 40, seed=1)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        found.append(step(nn.Sequential(norm_of(16), relu(True)), x, gradient))
    torch.set_num_threads(1)
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_channel_only(value):
    x = images(2, 16, 5, 5)
    x[1, 3, 2, 2] = value
    y = nn.Sequential(norm_of(16), relu(True))(x)
    assert y[:, 3].isnan().all() and y[:, :3].isfinite().all() and y[:, 4:].isfinite().all()


def test_other_inputs_and_modes_are_those_of_pytorch():
    norm, x = norm_of(16), images(3, 16, 5, 5)
    plain = twin_of(copy.deepcopy(norm), nn.BatchNorm2d)
    for data in (x.contiguous(), x[:, :, ::2]):
        assert torch.equal(norm(data), plain(data))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x[:1, :, :1, :1])
    assert torch.equal(norm.eval()(x), plain.eval()(x))
    assert torch.equal(norm.double()(x.double()), plain.double()(x.double()))


def test_a_cumulative_average_is_one():
    norm, x = norm_of(16, momentum=None), [images(3, 16, 5, 5, seed=seed) for seed in range(3)]
    plain = twin_of(copy.deepcopy(norm), nn.BatchNorm2d)
    for each in x:
        norm(each), plain(each)
    assert norm.num_batches_tracked == plain.num_batches_tracked == 3
    torch.testing.assert_close(norm.running_var, plain.running_var)


@pytest.mark.parametrize("operator", ["batch norm", "ReLU", "convolution"])
def test_gradients_that_others_hold_stay_as_they_are(operator):
    """Gradients are changed in place only if nobody else sees them."""
    x, gradient = images(3, 16, 5, 5).requires_grad_(), images(3, 16, 5, 5, seed=1)
    layer = {"batch norm": norm_of(16), "ReLU": relu(False), "convolution": nn.Conv2d(16, 16, 1, bias=False)}[operator]
    if operator == "convolution":
        layer = bitcycle.quantize_model(layer, float_layers=[], compile=True, compute="codes")
    before, kept = gradient.clone(), []
    y = layer(x)
    y.backward(gradient, retain_graph=True)
    y.register_hook(kept.append)
    (y * 1).backward(gradient)
    assert torch.equal(gradient, before) and all(torch.equal(each, before) for each in kept) and kept


def test_what_is_read_between_batch_norm_and_its_relu_has_its_own_gradient():
    """Also a hook on the output of batch norm: then the ReLU does not become part of it."""
    x, gradient = images(3, 16, 5, 5), images(3, 16, 5, 5, seed=1)

    def train(norm: nn.Module, relu: nn.Module, watched: bool) -> list[torch.Tensor]:
        seen, leaf = [], x.clone().to(norm.weight.dtype).requires_grad_()
        z = norm(leaf)
        if watched:
            z.register_hook(lambda g: seen.append(g.clone()))
        other = z * 2
        (relu(z) * gradient + other * gradient.flip(0)).sum().backward()
        return [leaf.grad, norm.weight.grad, norm.bias.grad, *seen]

    for watched in (False, True):
        norm = norm_of(16)
        expected = train(twin_of(copy.deepcopy(norm), nn.BatchNorm2d).double(), nn.ReLU(), watched)
        found = train(norm, relu(True), watched)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


class Block(nn.Module):
    """Convolutions with batch norm, ReLUs in place and a residual sum; `change` is applied between its parts."""

    def __init__(self, change=lambda x: x) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2, self.relu, self.change = (
            nn.BatchNorm2d(16),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            change,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.change
        y = change(self.relu(self.bn1(change(self.conv1(x)))))
        return change(self.relu(self.bn2(change(self.conv2(y))) + x))


def scaled_in_place(x: torch.Tensor) -> torch.Tensor:
    """x with other moments and another range."""
    return x.mul_(3).add_(1)


def watched(x: torch.Tensor) -> torch.Tensor:
    """x, whose gradient a hook replaces by another."""
    if x.requires_grad:
        x.register_hook(lambda g: g * 5)
    return x


def test_a_relu_in_place_may_follow_a_convolution():
    layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.ReLU(inplace=True))
    apart = nn.Sequential(copy.deepcopy(layers[0]), nn.ReLU())
    found, expected = (
        step(bitcycle.quantize_model(model, float_layers=[], compile=True, compute="codes"), *[images(2, 16, 5, 5)] * 2)
        for model in (layers, apart)
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("change", [lambda x: x, scaled_in_place, watched, torch.clone])
def test_what_is_handed_over_changes_no_number(change):
    """Moments and ranges taken from the preceding operator equal those that an operator computes by itself."""
    torch.manual_seed(0)
    block = bitcycle.quantize_model(
        nn.Sequential(Block(change), Block(change)), float_layers=[], compile=True, compute="codes"
    )
    x = images(4, 16, 9, 8)

    def train(model: nn.Module) -> list[torch.Tensor]:
        y = model(x)
        y.backward(images(*y.shape, seed=2))
        return [y.detach(), *(p.grad for p in model.parameters()), *model.buffers()]

    alone, together = copy.deepcopy(block), copy.deepcopy(block)
    found = train(together)
    for module in alone.modules():  # a clone of a tensor has no notes
        if isinstance(module, QuantizedLayer | CodeBatchNorm2d):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
            module.register_forward_hook(lambda _, __, y: y.register_hook(torch.clone) and None)
    assert all(map(torch.equal, found, train(alone)))


def test_the_range_of_a_gradient_is_not_that_from_before_a_relu_masked_it_in_place():
    found = []
    for holds in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 3))
        model = bitcycle.quantize_model(model, float_layers=[], compile=True, compute="codes").to(
            memory_format=torch.channels_last
        )
        if holds:  # a gradient that somebody holds is masked in a copy
            held: list[torch.Tensor] = []
            model[1].register_forward_hook(lambda _, __, y, held=held: y.register_hook(held.append) and None)
        model(images(4, 16, 8, 8)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
