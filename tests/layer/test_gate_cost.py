"""The cost term of gates, their costs on hardware, and gates in own models."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitcycle
from bitcycle.hardware import BitOps, trace
from bitcycle.layer import Gates, QuantizedLayer, float_state_dict, penalty
from bitcycle.layer.gates.choices import Tally
from bitcycle.layer.gates.gate import sign
from bitcycle.model import MODELS, CifarMobileNetV2, CifarResNet
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import Sbm
from bitcycle.schedule.gated import OPTION_LISTS
from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from tests.gate_cases import DETERMINISTIC, SHAPE, force, gated, images, resnet

PAPER = OPTION_LISTS["paper_resnet"]


# Cost term


@pytest.mark.parametrize(("cp", "expected"), [(2.99, -1), (3.0, 1), (3.2, 1)])
def test_sign_of_the_cost_term(cp, expected):
    assert sign(torch.tensor(cp), torch.tensor(3.0)).item() == expected


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
    for step in range(40):
        control.step(step, samples=6)
        model(images(seed=step))
        optimizer.zero_grad()
        penalty(model).backward()
        optimizer.step()
        reached.append(control.record.training_values()["cp"])
    assert low <= sum(reached[-10:]) / 10 <= high, reached


def test_before_a_forward_pass_the_cost_term_is_zero():
    model, _ = gated(resnet())
    assert penalty(model).item() == 0


def test_cp_of_mobilenet_weighs_blocks_by_their_products_and_adds_depthwise():
    model, control = gated(CifarMobileNetV2(SHAPE))
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
    cp = 100 * cost / 2 / (3 * sum(pointwise) + 3 * sum(depthwise))
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
            passes = 2 + operation.input_gradients
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


def test_no_training_step_but_the_first_waits_for_the_host():
    model, control = gated(resnet())
    x, labels = images(), torch.arange(6)

    def step(number: int) -> None:
        control.step(number, samples=6)
        loss = F.cross_entropy(model(x), labels)
        (loss + penalty(model, loss)).backward()

    step(0)  # the first gradients of each number of bits are looked at, once
    with _NoWaiting():
        step(1)


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


def test_training_at_bits_outside_the_schedule_costs_them_in_the_blocks_too():
    """Blocks whose gates did not choose once cost nothing."""
    schedule = bitcycle.schedule("dfq", total_steps=2)
    model = bitcycle.quantize_model(resnet(), DETERMINISTIC, schedule=schedule)
    control = bitcycle.PrecisionController(model, schedule)
    control.step(0)
    control.use((8, 8, 8))
    model(images())
    workload = trace(model, images())
    expected = BitOps().cost(workload, {Precision(8, 8, 8): 6}, schedule.reference)
    assert control.cost() == expected
    assert expected.relative_to_static == 1
    control.step(1)
    model(images())
    assert control.cost().relative_to_static < 1
    assert control.cost().samples == 12


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_gated_blocks_are_not_checkpointed(inside, reentrant):
    """The second forward pass once had other choices, or other bits inside a block: wrong gradients and counts."""
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(12, 12, 3, padding=1)

        def forward(self, x):
            return F.relu(checkpoint(self.conv, x, use_reentrant=reentrant) if inside else self.conv(x))

    class Checkpointed(Own):
        def __init__(self):
            super().__init__()
            self.stem, self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), Block(), Block()

        def forward(self, x):
            x = F.relu(self.stem(x))
            for block in (self.first, self.second):
                x = block(x) if inside else checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x.mean((2, 3)))

    schedule = bitcycle.schedule("dfq", total_steps=1)
    model = bitcycle.quantize_model(Checkpointed(), schedule=schedule)
    control = bitcycle.PrecisionController(model, schedule)
    control.step(0)
    with pytest.raises(SettingError, match=r"schedule=dfq: chooses bits of 'second'.* without checkpointing"):
        model(images()).sum().backward()
    control.use((8, 8, 8))
    model(images()).sum().backward()


@pytest.mark.parametrize("backward", ["all", "chosen"])
def test_a_block_that_pools_is_not_skipped(backward):
    """Its skip once stopped with PyTorch's error about the sizes of two tensors."""

    def train(options) -> torch.Tensor:
        model = Own()
        model.first.append(nn.MaxPool2d(2))
        schedule = bitcycle.schedule("dfq", total_steps=1, options=options, backward=backward)
        model = bitcycle.quantize_model(model, schedule=schedule)
        bitcycle.PrecisionController(model, schedule).step(0)
        return model(images())

    changes = r"changes its input from \[6, 8, 16, 16\] to \[6, 8, 8, 8\]"
    with pytest.raises(SettingError, match=rf"block_names=first: {changes}.*without \[0,0\]"):
        train([[0, 0], [4, 8]])
    assert train([[3, 6], [4, 8]]).shape == (6, 10)


def test_networks_without_blocks_or_with_wrong_ones_are_refused():
    schedule = bitcycle.schedule("dfq", total_steps=1)
    with pytest.raises(SettingError, match=r"names no blocks.*model=resnet20"):
        bitcycle.quantize_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)), schedule=schedule)
    model = Own()
    model.block_names = ("third",)
    with pytest.raises(SettingError, match="is not a module of the network"):
        bitcycle.quantize_model(model, schedule=schedule)
    model = Own()
    with pytest.raises(SettingError, match=r"of the family mobilenet_v2.*family='mobilenet_v2'"):
        bitcycle.quantize_model(CifarMobileNetV2(SHAPE), schedule=schedule)
    with pytest.raises(SettingError, match="no quantized layer to choose bits for"):
        bitcycle.quantize_model(model, float_layers=["stem", "first.*"], schedule=schedule)
    with pytest.raises(SettingError, match=r"no quantized layer to choose bits for.*layer_bits"):
        bitcycle.quantize_model(Own(), layer_bits={"first*": 4}, schedule=schedule)
    model = Own()
    model.block_names = ("first", "first")
    with pytest.raises(SettingError, match="block_names=first: is listed twice"):
        bitcycle.quantize_model(model, schedule=schedule)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.block_names = ("0", "1")
    with pytest.raises(SettingError, match=r"has no nn.Conv2d, and the gates read images.*schedule=pfq"):
        bitcycle.quantize_model(model, float_layers=[], schedule=schedule)


class Twice(Own):
    def forward(self, x):
        h = self.second(self.first(F.relu(self.stem(x))))
        return self.head(self.second(h[:, :8]).mean((2, 3)))


@pytest.mark.parametrize(("kind", "names"), [(Own, ("second", "first")), (Twice, ("first", "second"))])
def test_blocks_that_do_not_run_in_the_order_of_their_names_are_refused(kind, names):
    """The second step failed in a freed graph, with a message of PyTorch's."""
    model = kind()
    model.block_names = names
    schedule = bitcycle.schedule("dfq", total_steps=2)
    model = bitcycle.quantize_model(model, schedule=schedule)
    bitcycle.PrecisionController(model, schedule).step(0)
    with pytest.raises(SettingError, match=r"block_names=\w+: runs before those named before it, or twice"):
        model(images(4))


def test_a_shortcut_with_bits_of_its_own_is_cheaper_to_skip_to():
    """It was counted in float, so that the lower bound was above the upper one."""
    schedule = bitcycle.schedule("dfq", total_steps=100, family="resnet")
    model = bitcycle.quantize_model(resnet(), DETERMINISTIC, schedule=schedule, layer_bits={"*shortcut*": 4})
    workload = trace(model, torch.zeros(1, 3, 16, 16))
    assert model.gates.choices.extremes(workload, 4)[0] == [[4, 0, 0, 0, 0, 0, 0]] * 3


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
    assert model.gates.options.pairs == OPTION_LISTS["code_imagenet"]
    assert model.gates.options.bits_of_weights == 6
    embedding = model.gates.embeddings[0]
    assert (embedding.conv1, embedding.conv2.weight.shape[:2]) == (None, (40, 64))
    assert model.gates.cells[0].hidden_size == 20
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_saved_counts_stay_as_they_were_saved():
    """A reader's later query once changed the state in memory, so that restoring it lost counts."""
    tally = Tally(gated(resnet())[0].gates.choices)
    counts = [[1] * len(row) for row in tally.totals]
    tally.add(counts)
    saved = tally.state_dict()
    tally.since_last("training")
    tally.load_state_dict(saved)
    assert tally.since_last("training") == counts
    tally.load_state_dict(saved)
    assert tally.since_last("training") == counts


def test_choices_after_a_saved_state_are_dropped_with_it():
    """Going back to a state kept in memory once counted the choices of the dropped steps, too."""
    model, control = gated(resnet())

    def train(step: int) -> None:
        control.step(step, samples=6)
        model(images())

    train(0)
    saved, cost = control.state_dict(), control.cost()
    train(1)
    control.load_state_dict(saved)
    assert control.cost() == cost
    assert sum(control.record.tallies[0].totals[0]) == 6


def test_choices_are_counted_where_samples_are():
    """Passes before the first step and without gradients once counted in the blocks only, and cost() stopped."""
    schedule = bitcycle.schedule("dfq", total_steps=1)
    model = bitcycle.quantize_model(resnet(), DETERMINISTIC, schedule=schedule)
    control = bitcycle.PrecisionController(model, schedule)
    model(images())
    control.step(0)
    model(images())
    with torch.no_grad():
        model(images())
    assert control.cost().samples == 6
    assert [sum(row) for row in control.record.tallies[0].totals] == [6, 6, 6]


def test_only_gated_blocks_lose_their_part_of_a_name():
    """A module called `block` below a module whose name ends like that of a gated block once lost it, too."""

    class Nested(nn.Sequential):
        block_names = ("1",)
        float_layers = ()

    first = nn.Sequential(nn.Identity(), nn.Sequential(OrderedDict(block=nn.Conv2d(3, 4, 3, padding=1))))
    model = Nested(first, nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()))
    names = list(model.state_dict())
    model = bitcycle.quantize_model(model, schedule=bitcycle.schedule("dfq", total_steps=10))
    assert list(float_state_dict(model)) == names


@pytest.mark.parametrize("name", ["dfq", "fractrain"])
def test_a_gated_schedule_needs_gates(name):
    """Without them every layer trained at static bits, and nothing said so."""
    model = bitcycle.quantize_model(resnet())
    with pytest.raises(
        SettingError, match=rf"schedule={name}: .* without gates .*quantize_model\(model, ..., schedule="
    ):
        bitcycle.PrecisionController(model, bitcycle.schedule(name, total_steps=10, steps_per_epoch=5))


def test_the_report_of_a_gated_network_names_its_layers():
    """Layers within blocks were listed as float and without a counterpart, gates as not converted yet."""
    model, _ = gated(resnet())
    report = bitcycle.conversion_report(model, images(2))
    reasons = {row.reason.partition(":")[0] for row in report.rows}
    assert reasons <= {"", "float_layers", "a part of the gates"}
    assert all(row.share for row in report.rows)
