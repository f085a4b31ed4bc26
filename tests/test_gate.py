"""Gates choose one option for each sample and block; gradients, cost term, cp and costs equal the formulas by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitcycle
from bitcycle.hardware import BitOps, trace
from bitcycle.layer import GatedBlock, Gates, PrecisionState, QuantizedLayer, penalty
from bitcycle.layer.gate import sign
from bitcycle.model import MODELS, CifarMobileNetV2, CifarResNet, ImageShape
from bitcycle.quantizer import Sbm
from bitcycle.schedule import FLOAT, Precision
from bitcycle.schedule.gated import OPTION_LISTS
from bitcycle.settings import SettingError
from tests.conftest import golden_json

DETERMINISTIC = Sbm(stochastic=False)
SHAPE = ImageShape(3, 16, 10)
PAPER = OPTION_LISTS["paper_resnet"]


def gated(model: nn.Module, quantizer=DETERMINISTIC, seed: int = 0, **options):
    """A gated network with known costs, and its schedule."""
    schedule = bitcycle.schedule("dfq", total_steps=100, family=getattr(model, "block_family", None), **options)
    model = bitcycle.quantize_model(model, quantizer, schedule=schedule, seed=seed)
    control = bitcycle.PrecisionController(model, schedule, workload=trace(model, torch.zeros(1, 3, 16, 16)))
    control.step(0)
    return model, control


def resnet(blocks=(1, 1, 1), seed: int = 1) -> CifarResNet:
    torch.manual_seed(seed)
    return CifarResNet(blocks, SHAPE)


def images(samples: int = 6, seed: int = 2) -> torch.Tensor:
    return torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def blocks_of(model: nn.Module) -> list[GatedBlock]:
    return [module for module in model.modules() if isinstance(module, GatedBlock)]


def force(model: nn.Module, choices: torch.Tensor) -> None:
    """Let the gates choose as told, [blocks, samples], with the gradients of a real choice."""

    def choose(index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            model.gates._begin()
        mask = F.one_hot(choices[index], len(model.gates.options.options)).float().requires_grad_()
        if model.training:
            model.gates.chosen[index] += mask.detach().sum(0).long()
            model.gates._samples, cost = len(mask), (mask * model.gates.option_costs[index]).sum()
            model.gates._cost = cost if model.gates._cost is None else model.gates._cost + cost
        masks[index] = mask
        return mask

    masks = model.gates.masks = {}
    model.gates.choose = choose


def spread(model: nn.Module, scale: float = 30.0) -> None:
    """Make the gates' choices differ from sample to sample."""
    with torch.no_grad():
        for parameter in model.gates.parameters():
            parameter.mul_(scale)


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
    own, _ = gated(resnet(), shared=False)
    assert len(own.gates.cells) == len(own.gates.projections) == 3


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


# Cost term


@pytest.mark.parametrize(
    ("cp", "options", "expected"),
    [
        (2.99, {}, -1),
        (3.0, {}, 1),
        (3.2, {}, 1),
        (2.9, {"target_range": 0.5}, -1),
        (3.0, {"target_range": 0.5}, 0),
        (3.49, {"target_range": 0.5}, 0),
        (3.5, {"target_range": 0.5}, 1),
        (2.7, {"relax": 0.2}, -1),
        (2.9, {"relax": 0.2}, -0.1),
        (3.1, {"relax": 0.2}, 0.1),
        (3.3, {"relax": 0.2}, 1),
    ],
)
def test_sign_of_the_cost_term(cp, options, expected):
    assert sign(torch.tensor(cp), torch.tensor(3.0), **options).item() == pytest.approx(expected)


CHOICES = torch.tensor([[0, 1, 2, 6], [5, 5, 5, 5], [4, 3, 0, 0]])
BITS = [0] + [a * 4 + g * 4 + a * g for a, g in PAPER[1:]]  # 0 44 54 64 112 104 144
COST = sum(BITS[k] for row in CHOICES.tolist() for k in row) / 1024


def test_bits_of_the_options_by_hand():
    assert BITS == [0, 44, 54, 64, 112, 104, 144]
    assert 100 * BITS[1] / 1024 / 3 == pytest.approx(1.432, abs=1e-3)  # 2/6 at w=4, semantics of the paper's cp
    code = [a * 4 + g * 4 + a * g for a, g in OPTION_LISTS["code_cifar"]]
    assert [round(100 * bits / 3072, 2) for bits in (code[0], code[-1])] == [
        1.76,
        4.69,
    ]  # reachable with the code's list


@pytest.mark.parametrize("target", [1.0, 10.0])
def test_cost_term_cp_and_its_gradient_by_hand(target):
    model, control = gated(resnet(), target=target)
    force(model, CHOICES)
    model(images(4))
    term = penalty(model)
    cp = 100 * COST / 4 / (3 * 3)
    expected_sign = -1 if cp < target else 1
    assert term.item() == pytest.approx(expected_sign * 1e-3 * COST, rel=1e-6)
    term.backward()
    expected = expected_sign * 1e-3 * torch.tensor(BITS) / 1024
    torch.testing.assert_close(model.gates.masks[1].grad, expected.expand(4, 7))
    assert control.record.training_values() == {"cp": pytest.approx(cp, rel=1e-9), "cp_target": target}
    shares = control.record.evaluation_values()["allocation"]
    assert shares["group1.0"] == {"0/0": 0.25, "2/6": 0.25, "3/6": 0.25, "4/6": 0, "4/12": 0, "6/8": 0, "6/12": 0.25}
    assert control.record.summary()["gates"]["mean_cp"] == pytest.approx(cp, rel=1e-9)
    assert control.record.training_values()["cp"] is None  # nothing was trained since


@pytest.mark.parametrize(("target", "low", "high"), [(0.5, 0.0, 0.9), (4.4, 4.0, 4.69)])
def test_the_cost_term_alone_leads_the_gates_to_the_target(target, low, high):
    model, control = gated(resnet(), target=target)
    optimizer = torch.optim.Adam(model.gates.parameters(), lr=0.02)
    reached = []
    for step in range(60):
        control.step(step, samples=6)
        model(images(seed=step))
        optimizer.zero_grad()
        penalty(model).backward()
        optimizer.step()
        reached.append(control.record.training_values()["cp"])
    assert low <= sum(reached[-10:]) / 10 <= high, reached


def test_cost_term_as_a_mean_and_capped_at_a_tenth_of_the_loss():
    means, _ = gated(resnet(), target=1.0, cost_reduction="mean")
    capped, _ = gated(resnet(), target=1.0, beta=1e3, adaptive_beta=True)
    for model in (means, capped):
        force(model, CHOICES)
        model(images(4))
    assert penalty(means, torch.tensor(2.0)).item() == pytest.approx(1e-3 * COST / 12, rel=1e-6)
    assert penalty(capped, torch.tensor(2.0)).item() == pytest.approx(0.2, rel=1e-6)
    assert penalty(means).item() == pytest.approx(penalty(means, torch.tensor(9.0)).item())


def test_before_a_forward_pass_the_cost_term_is_zero():
    model, _ = gated(resnet())
    assert penalty(model).item() == 0


@pytest.mark.parametrize("denominator", ["float32", "quantized"])
def test_cp_of_mobilenet_weighs_blocks_by_their_products_and_adds_depthwise(denominator):
    model, control = gated(CifarMobileNetV2(SHAPE), depthwise_reference=denominator)
    workload = trace(model, torch.zeros(1, 3, 16, 16))
    pointwise, depthwise = [], []
    for index in range(17):
        operations = [o for o in workload.operations if o.name.startswith(f"blocks.{index}.block.")]
        pointwise.append(sum(o.macs for o in operations if o.groups == 1))
        depthwise.append(sum(o.macs for o in operations if o.groups > 1))
    bits = [4 * a + 4 * g + a * g for a, g in OPTION_LISTS["paper_mobilenet_v2"]]
    bits_of_depthwise = 4 * 8 + 4 * 16 + 8 * 16
    choices = torch.tensor([[k % 5] * 2 if k not in (3, 6, 13) else [1, 4] for k in range(17)])
    force(model, choices)
    model(images(2))
    cost = sum(
        (pointwise[index] * bits[k] + depthwise[index] * bits_of_depthwise) / 1024
        for index in range(17)
        for k in choices[index].tolist()
        if k > 0
    )
    extra = 3 * sum(depthwise) if denominator == "float32" else sum(depthwise) * bits_of_depthwise / 1024
    cp = 100 * cost / 2 / (3 * sum(pointwise) + extra)
    assert control.record.training_values()["cp"] == pytest.approx(cp, rel=1e-9)
    expected_sign = -1 if cp < 3 else 1
    term = penalty(model).item()
    assert term == pytest.approx(expected_sign * 1e-3 * cost / (sum(pointwise) / 17), rel=1e-5)


def test_blocks_without_a_shortcut_are_never_skipped():
    model, _ = gated(CifarMobileNetV2(SHAPE))
    assert [index for index, block in enumerate(model.gates.choices.blocks) if not block.can_skip] == [3, 6, 13]
    nn.init.zeros_(model.gates.projections[0].weight)
    model.gates.projections[0].bias.data = torch.tensor([9.0, 3.0, 1.0, 0.0, 0.0])  # all want to skip
    model(images(2))
    skipping = model.gates.chosen[:, 0] > 0
    assert skipping.tolist() == [index not in (3, 6, 13) for index in range(17)]


def test_depthwise_convolutions_have_fixed_bits_and_the_gated_weights():
    model, control = gated(CifarMobileNetV2(SHAPE), depthwise_bits=[8, 16])
    layer = model.blocks[0].block.conv2
    assert (layer.precision.precision, layer.precision.fixed) == (Precision(4, 8, 16), True)
    assert control.precision == Precision(4, 8, 10)  # of conv2, outside the blocks
    chosen, _ = gated(CifarMobileNetV2(SHAPE), depthwise_bits=None)
    assert not chosen.blocks[0].block.conv2.precision.fixed
    own, _ = gated(CifarMobileNetV2(SHAPE), Sbm(depthwise_bits=[6, 6]))
    assert own.blocks[0].block.conv2.precision.precision == Precision(6, 6, 6)


# Costs


def test_hardware_counts_each_sample_of_a_block_at_its_own_bits():
    """Bit operations written down again: each block by its choices, a skipped stage change by its float shortcut."""
    model, control = gated(resnet())
    workload = trace(model, torch.zeros(1, 3, 16, 16))
    force(model, CHOICES)
    control.step(0, samples=4)
    model(images(4))
    expected = 0
    for operation in workload.operations:
        block = next((i for i in range(3) if operation.name.startswith(f"group{i + 1}.0.block.")), None)
        if block is None:
            passes = 3 if operation.needs_input_gradient else 2
            expected += 4 * operation.macs * 1024 * passes  # float: first, last, gates
            continue
        for option in CHOICES[block].tolist():
            if option:
                expected += operation.macs * BITS[option]
            elif "shortcut" in operation.name:
                expected += operation.macs * 3 * 1024
    assert control.cost().gbitops * 1e9 == pytest.approx(expected, rel=1e-12)
    assert {o.name for o in workload.operations if o.is_float and "gates" not in o.name} == {"conv1", "fc"}


def test_bounds_enclose_every_choice_and_are_reached():
    model, control = gated(resnet())
    workload, choices = trace(model, torch.zeros(1, 3, 16, 16)), model.gates.choices

    def cost(counts) -> float:
        per_operation = choices.histograms(counts)
        return BitOps().cost(workload, {control.precision: 4}, Precision(8, 8, 8), per_operation).gbitops

    least, most = (cost(counts) for counts in choices.extremes(workload, 4))
    every = [cost([[4 * (k == option) for k in range(7)]] * 3) for option in range(7)]
    assert least <= min(every)
    assert most == max(every)
    # The float shortcut of a skipped stage change costs more than the block at 2/6.
    assert choices.extremes(workload, 4)[0] == [[4, 0, 0, 0, 0, 0, 0]] + [[0, 4, 0, 0, 0, 0, 0]] * 2


def test_products_are_traced_once_and_the_gates_with_them():
    names = [o.name for o in trace(gated(resnet())[0], torch.zeros(1, 3, 16, 16)).operations]
    assert not any("block" in name and "#" in name for name in names)
    assert any(name.startswith("gates.cells.0") for name in names)
    assert [name for name in names if name.startswith("group2")] == [
        "group2.0.block.conv1",
        "group2.0.block.conv2",
        "group2.0.block.shortcut.0",
    ]


class _NoWaiting(TorchDispatchMode):
    """Refuses what makes a GPU's step wait for the host: values read as numbers, shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "bincount", "unique", "masked_select"), name
        return func(*args, **(kwargs or {}))


def test_no_training_step_waits_for_the_host():
    model, control = gated(resnet())
    x, labels = images(), torch.arange(6)
    with _NoWaiting():
        control.step(1, samples=6)
        loss = F.cross_entropy(model(x), labels)
        (loss + penalty(model, loss)).backward()


# Own models and loops


class Own(nn.Module):
    """Somebody's network: two blocks, one without a shortcut that changes the width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.head = nn.Linear(12, 10)
        self.block_names = ("first", "second")

    def forward(self, x):
        return self.head(self.second(self.first(F.relu(self.stem(x)))).mean((2, 3)))


def test_a_model_and_a_loop_of_ones_own():
    torch.manual_seed(0)
    schedule = bitcycle.schedule("dfq", total_steps=30, target=2.0, beta=0.05)
    model = bitcycle.quantize_model(Own(), schedule=schedule)
    control = bitcycle.PrecisionController(model, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(30):
        control.step(step)
        loss = F.cross_entropy(model(images(16)), torch.arange(16) % 10)
        optimizer.zero_grad()
        (loss + penalty(model, loss)).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert 0 < control.cost().relative_to_static < 1
    assert control.record.summary()["gates"]["mean_cp"] > 0
    assert [block.can_skip for block in model.gates.choices.blocks] == [True, False]
    copy.deepcopy(model)  # between forward and backward passes, too
    gate = model.gates.embeddings[0].conv1.weight
    assert gate.grad is not None and gate.grad.abs().sum() > 0


def test_bits_outside_the_schedule_switch_the_gates_off():
    model, control = gated(resnet())
    model(images())
    expected = copy.deepcopy(model)
    model.eval()
    with torch.no_grad():
        control.use(Precision(FLOAT, FLOAT, FLOAT))
        for module in expected.modules():
            if isinstance(module, QuantizedLayer):
                module.precision.set(Precision(FLOAT, FLOAT, FLOAT))
        expected.gates.active = False
        assert torch.equal(model(images()), expected.eval()(images()))
        assert model.gates.active is False
        control.use(control.precision)
    assert model.gates.active is True


def test_networks_without_blocks_or_with_wrong_ones_are_refused():
    schedule = bitcycle.schedule("dfq", total_steps=1)
    with pytest.raises(SettingError, match=r"names no blocks.*model=resnet20"):
        bitcycle.quantize_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)), schedule=schedule)
    model = Own()
    model.block_names = ("third",)
    with pytest.raises(SettingError, match="is no module of the network"):
        bitcycle.quantize_model(model, schedule=schedule)
    model = Own()
    with pytest.raises(SettingError, match=r"of the family mobilenet_v2.*family='mobilenet_v2'"):
        bitcycle.quantize_model(CifarMobileNetV2(SHAPE), schedule=schedule)
    with pytest.raises(SettingError, match="no quantized layer to choose bits for"):
        bitcycle.quantize_model(model, float_layers=["stem", "first.*"], schedule=schedule)


def test_gates_follow_the_seed_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, again, other = (gated(resnet(), seed=seed)[0].gates for seed in (1, 1, 2))
    torch.manual_seed(1)
    resnet()
    assert torch.equal(first.embeddings[0].conv1.weight, again.embeddings[0].conv1.weight)
    assert not torch.equal(first.embeddings[0].conv1.weight, other.embeddings[0].conv1.weight)
    assert isinstance(first, Gates)
    assert len(before)


def test_initial_weights_follow_the_released_rule():
    schedule = bitcycle.schedule("dfq", total_steps=1)
    model = bitcycle.quantize_model(CifarResNet((20, 1, 1), SHAPE), schedule=schedule)
    weights = torch.cat([e.conv1.weight.flatten() for e in model.gates.embeddings[:20]])
    assert weights.std().item() == pytest.approx((2 / 32) ** 0.5, rel=0.03)


def test_gated_imagenet_networks_have_the_gates_of_the_released_code():
    schedule = bitcycle.schedule("dfq", total_steps=1, family="imagenet")
    model = bitcycle.quantize_model(MODELS["resnet18"]().build(ImageShape(3, 64, 10)), schedule=schedule)
    assert model.gates.options.options == OPTION_LISTS["code_imagenet"]
    assert model.gates.options.weight_bits == 6
    embedding = model.gates.embeddings[0]
    assert (embedding.conv1, embedding.conv2.weight.shape[:2]) == (None, (40, 64))
    assert model.gates.cells[0].hidden_size == 20
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
