"""backward=chosen: the gradients of remask_gradient=true from backward passes through chosen samples alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitcycle
from bitcycle.layer import penalty
from bitcycle.model import CifarMobileNetV2
from bitcycle.quantizer import Sbm
from bitcycle.settings import SettingError
from tests.conftest import plan
from tests.gate_cases import SHAPE, force, gated, images, resnet, spread

LOW_BITS = [[0, 0], [3, 4], [3, 8], [6, 6]]


def both(make=resnet, quantizer=None, **options):
    """The same network with all backward passes, masked, and with those of chosen candidates."""
    quantizer = quantizer or Sbm(stochastic=False)
    masked, _ = gated(make(), quantizer, remask_gradient=True, **options)
    chosen, _ = gated(make(), quantizer, backward="chosen", **options)
    chosen.load_state_dict(masked.state_dict())
    return masked.to(memory_format=torch.channels_last), chosen.to(memory_format=torch.channels_last)


def trained(model: nn.Module, samples: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    x = images(samples).contiguous(memory_format=torch.channels_last)
    loss = F.cross_entropy(model(x), torch.arange(samples) % 10)
    (loss + penalty(model, loss)).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bits", [16, 32])
def test_gradients_are_those_of_all_backward_passes_masked(bits):
    masked, chosen = both(lambda: resnet((2, 1, 1)), options=[[0, 0], [3, bits], [6, bits]])
    for model in (masked, chosen):
        spread(model)
    (loss, expected), (same_loss, found) = trained(masked, 24), trained(chosen, 24)
    assert torch.equal(masked.gates.chosen, chosen.gates.chosen)
    assert ((masked.gates.chosen > 0).sum(1) > 1).any(), "samples choose differently"
    assert same_loss == pytest.approx(loss, rel=1e-5)
    assert set(found) == set(expected)
    largest = max(gradient.abs().max() for gradient in expected.values())
    rounding = 1e-2 if bits == 16 else 1e-4  # where a last digit turns a level, later layers see it
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-2, atol=float(largest) * rounding, msg=name)


@pytest.mark.parametrize(
    ("make", "name"),
    [(resnet, "group2.0"), (lambda: resnet((2, 1, 1)), "group1.1"), (lambda: CifarMobileNetV2(SHAPE), "blocks.2")],
    ids=["shortcut", "identity", "mobilenet_v2"],
)
def test_parts_of_a_batch_have_their_own_bits(make, name):
    """One block with given choices: gradients of input, parameters and choices, and the output."""
    masked, chosen = both(make, options=LOW_BITS, depthwise_bits=None)
    found = []
    for model in (masked, chosen):
        block = model.get_submodule(name)
        force(model, torch.tensor([[0, 1, 2, 3, 1, 2, 3, 3]]).expand(block.index + 1, -1))
        channels = next(module.in_channels for module in block.modules() if isinstance(module, nn.Conv2d))
        torch.manual_seed(4)
        x = torch.randn(8, channels, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = block(x)
        y.backward(torch.randn(y.shape))
        parameters = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
        found.append([y, x.grad, model.gates.masks[block.index].grad, *parameters])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("make", [resnet, lambda: CifarMobileNetV2(SHAPE)], ids=["resnet", "mobilenet_v2"])
def test_with_one_candidate_nothing_differs_with_its_noise(make):
    plain, chosen = both(make, Sbm(), options=[[3, 6]])
    (loss, expected), (same_loss, found) = trained(plain, 6), trained(chosen, 6)
    assert loss == same_loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    for name, value in plain.state_dict().items():
        assert torch.equal(value, chosen.state_dict()[name]), name


def test_candidates_that_differ_in_gradients_alone_share_a_forward_pass():
    model, _ = gated(resnet((2, 1, 1)), options=LOW_BITS, backward="chosen")
    calls = []
    model.group1[1].block.conv1.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model(images(8))
    block = model.group2[0].block
    assert calls in ([False, False], [False, False, True])  # the last one where not all samples skip
    assert (block.bn1.num_batches_tracked, block.shortcut[1].num_batches_tracked) == (2, 3)
    copy.deepcopy(model)  # between forward and backward passes, too


def test_parameters_of_a_block_that_all_samples_skip_have_gradients_of_zero():
    model, _ = gated(resnet((2, 1, 1)), options=LOW_BITS, backward="chosen")
    force(model, torch.zeros(4, 6, dtype=torch.long))
    model(images(6)).sum().backward()
    block = model.group1[1].block
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in block.parameters())


def test_precision_that_changes_before_the_backward_pass_is_noticed():
    model, control = gated(resnet(), options=LOW_BITS, backward="chosen")
    spread(model)
    loss = model(images(8)).sum()
    control.step(1)
    with pytest.raises(RuntimeError, match="precision changed between"):
        loss.backward()


class WithDropout(nn.Module):
    """A block that cannot be replayed."""

    block_names = ("block",)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.5))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.block(self.stem(x)).mean((2, 3)))


class WithPaddingInWords(WithDropout):
    """Another one; its backward pass once failed without saying why."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding="same"))


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (WithDropout, {}, "block 'block': it has dropout"),
        (WithPaddingInWords, {}, "not a convolution padded with a number of zeros"),
        (resnet, {"quantizer": "dorefa"}, "another quantizer than sbm"),
        (resnet, {"compute": "codes"}, "it computes codes"),
    ],
)
def test_what_cannot_be_replayed_is_refused(model, options, reason):
    schedule = bitcycle.schedule("dfq", total_steps=10, backward="chosen")
    with pytest.raises(SettingError, match=rf"{reason}.*use schedule.backward=all"):
        bitcycle.quantize_model(model(), schedule=schedule, **options)


def test_a_run_that_cannot_be_replayed_names_the_setting_of_its_group():
    with pytest.raises(SettingError) as raised:
        plan("schedule=dfq", "schedule.backward=chosen", "quantizer=dorefa", "model=resnet8", "dataset=digits")
    assert raised.value.field == "schedule.backward"


def test_autocast_is_refused():
    model, _ = gated(resnet(), backward="chosen")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SettingError, match="autocast is on"):
        model(images())
