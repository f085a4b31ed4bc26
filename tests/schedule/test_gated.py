"""DFQ and FracTrain as numbers: lists of options, defaults by family, targets of the stages; and as runs."""

from __future__ import annotations

import pytest

from bitcycle.files import read_records
from bitcycle.layer import PrecisionController
from bitcycle.picture.run import draw_run
from bitcycle.precision import Precision
from bitcycle.schedule import schedule
from bitcycle.schedule.gated import FAMILIES, OPTION_LISTS, Dfq, FracTrain
from bitcycle.settings import SettingError
from bitcycle.training.run import execute
from tests.conftest import configure, plan
from tests.settings import OPTIONS


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        (None, "paper", "paper_resnet"),
        ("resnet", "code", "code_cifar"),
        ("mobilenet_v2", "paper", "paper_mobilenet_v2"),
        ("mobilenet_v2", "code", "code_cifar"),
        ("imagenet", "paper", "code_imagenet"),  # the paper names none
        ("resnet", "code_imagenet", "code_imagenet"),
    ],
)
def test_lists_of_options_by_word_and_family(family, options, expected):
    assert Dfq(family=family, options=options).pairs == OPTION_LISTS[expected]


def test_lists_are_those_of_the_paper_and_its_code():
    """FracTrain, appendix F; released code."""
    words = {name: " ".join(f"{a}/{g}" for a, g in pairs) for name, pairs in OPTION_LISTS.items()}
    assert words == {
        "paper_resnet": "0/0 2/6 3/6 4/6 4/12 6/8 6/12",
        "paper_mobilenet_v2": "0/0 4/8 6/8 6/10 8/8",
        "code_cifar": "3/6 4/6 4/8 6/8 6/12",
        "code_imagenet": "3/6 4/8 6/12 8/16",
    }
    assert {name: family.weight_bits for name, family in FAMILIES.items()} == {
        "resnet": 4,
        "mobilenet_v2": 4,
        "imagenet": 6,
    }


def test_own_lists_and_precisions():
    bound = schedule("dfq", total_steps=10, options=[[0, 0], [3, 6], [5, 4]], weight_bits=2)
    assert bound.options.precisions == (None, Precision(2, 3, 6), Precision(2, 5, 4))
    assert bound(0) == bound(9) == Precision(2, 5, 6)  # layers outside the blocks: the most
    assert bound.precisions == {Precision(2, 3, 6), Precision(2, 5, 4), Precision(2, 5, 6)}
    assert (bound.fixed, bound.reference, bound.compute_target) == (False, Precision(8, 8, 8), 3.0)
    assert not hasattr(schedule("static", total_steps=1), "compute_target")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": "papre"}, "did you mean 'paper'"),
        ({"options": []}, "is not a list of options"),
        ({"options": [[0, 0]]}, "every option skips"),
        ({"options": [[0, 6]]}, r"\[0, 6\] is not an option"),
        ({"options": [[3, 40]]}, "is not an option"),
        ({"options": [[3]]}, "is not an option"),
        ({"options": [3, 6]}, "is not an option"),
        ({"options": [[3, 6], [3, 6]]}, "occurs twice"),
        ({"depthwise_bits": [8]}, "two numbers"),
        ({"target": -1}, "use 0 or more"),
        ({"family": "vgg"}, "imagenet, mobilenet_v2, resnet"),
    ],
)
def test_nonsense_is_refused(options, words):
    with pytest.raises(SettingError, match=words):
        schedule("dfq", total_steps=10, **options)
    with pytest.raises(SettingError, match=words):
        schedule("fractrain", total_steps=10, steps_per_epoch=2, **options)


def test_fractrain_refuses_what_pfq_and_percent_refuse():
    with pytest.raises(SettingError, match="set epoch_steps"):
        schedule("fractrain", total_steps=10)
    with pytest.raises(SettingError, match="stay below 100"):
        FracTrain(target=99, target_step=1)


def test_target_of_fractrain_rises_with_the_turning_points():
    bound = schedule("fractrain", total_steps=1000, steps_per_epoch=10)
    targets = []
    for _ in range(25):
        bound.observe(1.0, 0.5)
        targets.append(bound.compute_target)
    assert targets == [1.5] * 4 + [2.0] * 5 + [2.5] * 5 + [3.0] * 11
    assert sum(bound.options.target + k * 0.5 for k in range(4)) / 4 == 2.25  # the paper's overall cp
    other = schedule("fractrain", total_steps=1000, steps_per_epoch=10)
    other.load_state_dict(bound.state_dict())
    assert other.compute_target == 3.0
    own = schedule("fractrain", total_steps=100, steps_per_epoch=1, target=3, target_step=0.25, stages=2)
    for _ in range(20):
        own.observe(1.0, 0.5)
    assert own.compute_target == 3.25


def test_defaults_fit_the_network():
    assert plan("schedule=dfq", "model=resnet8").schedule.options.sizes == (32, 16, 16)
    mobile = plan("schedule=dfq", "model=mobilenet_v2")
    assert mobile.schedule.options.sizes == (64, 32, 32)
    assert mobile.schedule(0) == Precision(4, 8, 10)
    treatments = {rule.name: rule.treatment for rule in mobile.layers}
    assert [treatments[name] for name in ("conv1", "blocks.0.conv1", "blocks.0.conv2", "conv2", "fc")] == [
        "float",
        "by gate",
        "fixed 4/8/16",
        "quantized",
        "float",
    ]
    assert configure("schedule=dfq", "schedule.options=[[0,0],[3,6]]").schedule.pairs == ((0, 0), (3, 6))


def test_every_cifar_resnet_is_gated_block_by_block():
    for depth in (8, 20, 38):
        assert len(plan("schedule=dfq", f"model=resnet{depth}").choices.blocks) == (depth - 2) // 2


def records_of(run, kind: str):
    return [record for record in read_records(run.folder.metrics) if record["kind"] == kind]


def test_fractrain_goes_through_its_targets_and_logs_what_was_chosen(digits):
    run = digits("schedule=fractrain", *OPTIONS["fractrain"], "training.log_steps=4", "hardware=all")
    summary = execute(run)
    train, evaluations = records_of(run, "train"), records_of(run, "evaluation")
    assert list(dict.fromkeys(record["cp_target"] for record in train)) == [1.5, 2.0, 2.5, 3.0]
    assert all(0 <= record["cp"] <= 100 * 144 / 3072 for record in train)
    mean = sum(record["cp"] for record in train) / len(train)
    assert summary["gates"]["mean_cp"] == pytest.approx(mean, rel=1e-9)
    for name, shares in summary["gates"]["allocation"].items():
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
        halves = [record["allocation"][name] for record in evaluations]
        assert len(halves) == 2
        for option, share in shares.items():
            assert share == pytest.approx(sum(half[option] for half in halves) / 2, abs=1e-3)
    bounds, total = run.describe()["cost_bounds"], summary["cost"]["total"]
    for unit in ("gbitops", "effective_macs"):
        assert bounds["least"][unit] <= total[unit] <= bounds["most"][unit]
    assert total["bitfusion"]["energy_j"] > 0 and total["zc706"]["latency_s"] > 0
    assert evaluations[-1]["cost"] == total
    assert draw_run(run).stat().st_size > 10_000


def test_accuracy_at_q_max_is_that_of_the_whole_network_at_q_max(digits, monkeypatch):
    """Also where the layers outside the blocks have just these bits in training."""
    chosen: list[tuple[Precision, bool]] = []
    use = PrecisionController.use

    def watched(self, precision, choose=None):
        use(self, precision, choose)
        chosen.append((precision, self.record.gates[0].active))

    monkeypatch.setattr(PrecisionController, "use", watched)
    options = ["schedule=dfq", "schedule.options=[[2,6],[8,8]]", "schedule.weight_bits=8", "training.steps=2"]
    execute(digits(*options))
    assert chosen == [(Precision(8, 8, 8), active) for active in (True, False, True)]


def test_indicator_sees_the_loss_with_the_cost_term(digits):
    run = digits(
        *("schedule=fractrain", "training.steps=4", "schedule.epoch_steps=4", "schedule.beta=0.1"),
        *("schedule.target=50", "training.log_steps=4"),
    )
    execute(run)
    record = records_of(run, "train")[0]
    # cp = 100 C / (16 samples * 3 * 3 blocks) and the sign is -1, far below the target
    expected = record["loss"] - 0.1 * record["cp"] / 100 * 16 * 9
    assert run.schedule.indicator.first_losses[0] == pytest.approx(expected, rel=1e-5)


def test_dfq_without_quantizer_is_a_float_run():
    run = plan("schedule=dfq", "quantizer=none", "model=resnet8")
    assert run.choices is None
    assert run.cost() is not None
