"""Halves of a dataset, and training that goes on from the weights of another one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.base import Splits
from bitcycle.dataset.image_dataset import PARTS, classes_of
from bitcycle.dataset.image_sets import Cifar, Digits
from bitcycle.dataset.images import Images
from bitcycle.files import read_json
from bitcycle.picture.curve import curve_of
from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from bitcycle.training.finished_run import load_run
from bitcycle.training.loop import Trainer
from bitcycle.training.naming import run_hash
from bitcycle.training.run import execute
from tests.conftest import configure

HALVES = [("first_classes", "second_classes"), ("first_samples", "second_samples")]
CLASSES, PER_CLASS = 100, 6


def numbered(per_class: int) -> Images:
    """Images that are told apart by two pixels: class and number."""
    labels = torch.arange(CLASSES).repeat(per_class)
    pixels = torch.stack([labels, torch.arange(per_class).repeat_interleave(CLASSES)], 1)
    return Images(pixels.to(torch.uint8).reshape(-1, 1, 2, 1).expand(-1, 2, 2, 1), labels)


class Hundred(Cifar):
    """CIFAR-100 with a handful of made-up images."""

    def full_info(self, data_root):
        return DatasetInfo(ImageShape(1, 2, CLASSES), CLASSES * PER_CLASS, CLASSES * 2)

    def read(self, data_root):
        return Splits(numbered(PER_CLASS), numbered(2))


def half(part: str) -> tuple[Splits, DatasetInfo]:
    options = Hundred(name="cifar100", part=part, mean=[0.5], std=[0.5])
    return options.load(None, seed=0), options.info(None)


def identities(images: Images) -> set[tuple[int, int]]:
    return {tuple(pixels) for pixels in images.pixels[:, 0, :, 0].tolist()}


@pytest.mark.parametrize("parts", HALVES, ids=lambda p: p[0])
def test_halves_are_disjoint_and_complete(parts):
    (first, _), (second, _) = halves = [half(part) for part in parts]
    for split in range(2):
        mine, theirs = identities(first[split]), identities(second[split])
        whole = identities(half("all")[0][split])
        if split == 1 and parts[0] == "first_samples":
            assert mine == theirs == whole
        else:
            assert mine | theirs == whole and not mine & theirs
    for splits, info in halves:
        assert (len(splits.train), len(splits.test)) == (info.train_samples, info.test_samples) != (0, 0)
        classes = info.shape.classes
        assert torch.equal(splits.train.labels.bincount(), torch.full((classes,), len(splits.train) // classes))
        assert torch.equal(splits.test.labels.unique(), torch.arange(classes))


def test_halves_of_classes_have_new_labels_in_the_old_order():
    for part in HALVES[0]:
        splits, info = half(part)
        kept = classes_of(part, CLASSES)
        assert info.shape.classes == len(kept) == 50
        for images in splits[:2]:
            assert torch.equal(images.pixels[:, 0, 0, 0].long(), kept[images.labels])
    # for ever: finished runs depend on them
    assert classes_of("first_classes", 10).tolist() == [1, 3, 4, 5, 7]
    assert classes_of("first_classes", 100)[:8].tolist() == [4, 5, 7, 8, 10, 15, 16, 19]


def test_halves_of_unequal_classes_differ_by_one_sample_at_most():
    first, second = (Digits(part=part) for part in HALVES[1])
    counts = [options.load(None, seed=0).train.labels.bincount() for options in (first, second)]
    assert (counts[0] - counts[1]).abs().max() == 1
    assert [int(count.sum()) for count in counts] == [first.info(None).train_samples, second.info(None).train_samples]
    assert first.info(None).test_samples == 359


def test_fewer_samples_of_a_half():
    options = Hundred(name="cifar100", part="first_classes", mean=[0.5], std=[0.5], train_samples=10)
    assert len(options.load(None, seed=0).train) == options.info(None).train_samples == 10
    with pytest.raises(SettingError, match="only 300"):
        Hundred(name="cifar100", part="first_classes", mean=[0.5], std=[0.5], train_samples=301).info(None)


def test_adaptation_of_cifar_100_in_a_dry_run(command):
    for part, samples in (("first_classes", 25_000), ("second_samples", 25_000), ("all", 50_000)):
        code, out, _ = command("dataset=cifar100", f"dataset.part={part}", "dry_run=true")
        assert code == 0 and f"({samples} in the training set)" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("dataset=digits dataset.part=first_classes", "use first_samples or second_samples"),
        ("dataset=cifar100 dataset.part=half", "Known: all, first_classes"),
        ("model.initial_weights=absent", "model.initial_weights=absent: no such file or folder. Remedy: give"),
        ("model.initial_weights=src", "this folder has no checkpoint of a run"),
        ("model.initial_weights=README.md", "cannot be read as weights"),
        ("model.initial_classifier=old", "fitting, random, refused"),
    ],
)
def test_nonsense_is_refused(command, arguments, words):
    code, _, err = command(*arguments.split(), "dry_run=true")
    assert code == 2
    assert words in err and len(err.splitlines()) == 1


FLOAT, LOW = ("quantizer=none", "dataset.part=first_samples"), ("schedule=CR", "dataset.part=second_samples")


def test_float_pretraining_and_quantized_retraining_compose(digits):
    first = digits(*FLOAT)
    execute(first)
    second = digits(*LOW, f"model.initial_weights='{first.folder.path}'")
    trained = torch.load(first.folder.checkpoint.last, weights_only=True)["model"]
    begun = second.build_model().state_dict()
    for name, value in trained.items():
        assert torch.equal(begun[name], value), name
    assert set(begun) > set(trained)  # quantizers have states of their own
    assert execute(second)["final"] > 0
    assert "initial weights from" in second.folder.log.read_text()
    # and on from a quantized run
    third = digits("schedule=RTH", f"model.initial_weights='{second.folder.path}'")
    quantized = torch.load(second.folder.checkpoint.last, weights_only=True)["model"]
    assert torch.equal(third.build_model().state_dict()["conv1.weight"], quantized["conv1.weight"])


@pytest.mark.parametrize("schedule", ["static", "dfq"])
def test_a_fine_tuned_run_is_loaded_without_the_run_that_it_started_from(digits, schedule):
    """A run that was given to somebody else, or whose predecessor was deleted, could not be analysed."""
    first = digits(*FLOAT)
    execute(first)
    second = digits(f"schedule={schedule}", "training.steps=4", f"model.initial_weights='{first.folder.path}'")
    execute(second)
    expected = load_run(second.folder.path).model.state_dict()
    shutil.rmtree(first.folder.path)
    found = load_run(second.folder.path)
    assert found.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.model.state_dict().items())


@pytest.mark.parametrize("method", ["schedule=dfq", "schedule=hlhlp quantizer=uniform_l2"])
def test_the_initial_weights_are_evaluated_before_training(digits, method, tmp_path, monkeypatch):
    """In float, whatever the first bits are, without an effect on training. HLHLp with bits [2,8,2] has no float phase, so
    that nothing else recorded the float network that it starts from."""
    first = digits("quantizer=none")
    before = execute(first)
    settings = (*method.split(), f"model.initial_weights='{first.folder.path}'")
    plan = digits(*settings)
    after = execute(plan)
    records = [json.loads(line) for line in plan.folder.metrics.read_text().splitlines()]
    start = records[0]
    assert (start["kind"], start["step"]) == ("initial_weights", 0)
    assert start["test_accuracy"] == pytest.approx(before["final"], abs=1e-9)
    assert curve_of(records, after)["initial_weights"] == start["test_accuracy"]
    assert "test_accuracy of the initial weights, in float: " in plan.folder.log.read_text()
    monkeypatch.setattr(Trainer, "evaluate_initial_weights", lambda self: None)
    again = digits(*settings, f"results_root={tmp_path}/unevaluated")
    execute(again)
    lines = again.folder.metrics.read_text().splitlines()
    assert [json.loads(line) for line in lines] == records[1:]


def test_a_network_that_chose_its_bits_can_be_retrained(digits):
    """Its blocks have other names, and its gates are not taken over, whether the new run has gates or not."""
    first = digits("schedule=dfq", "training.steps=2")
    execute(first)
    trained = torch.load(first.folder.checkpoint.last, weights_only=True)["model"]
    for schedule in ("static", "dfq"):
        plan = digits(f"schedule={schedule}", f"model.initial_weights='{first.folder.path}'")
        model = plan.build_model().state_dict()
        weight = model["group2.0.block.conv1.weight" if schedule == "dfq" else "group2.0.conv1.weight"]
        assert torch.equal(weight, trained["group2.0.block.conv1.weight"])
        assert torch.equal(model["conv1.weight"], trained["conv1.weight"])


def test_the_content_names_the_run(digits, tmp_path):
    first = digits(*FLOAT)
    execute(first)
    copied = tmp_path / "weights.pt"
    torch.save(torch.load(first.folder.checkpoint.last, weights_only=True)["model"], copied)

    def name(path: object) -> str:
        return run_hash(configure("dataset=digits", "model=resnet8", f"model.initial_weights='{path}'"))

    shutil.copytree(first.folder.path, tmp_path / "elsewhere")
    same = {name(first.folder.path), name(first.folder.checkpoint.last), name(copied), name(tmp_path / "elsewhere")}
    assert len(same) == 1
    state = torch.load(copied, weights_only=True)
    state["conv1.weight"][0, 0, 0, 0] += 1e-3
    torch.save(state, tmp_path / "other.pt")
    assert name(tmp_path / "other.pt") not in same
    assert run_hash(configure("dataset=digits", "model=resnet8")) not in same


@pytest.mark.parametrize(("model", "field"), [("retinanet", "backbone_weights"), ("resnet8", "initial_weights")])
def test_weights_without_a_file_name_their_own_field(tmp_path, model, field):
    with pytest.raises(SettingError, match=rf"model\.{field}=\S*nowhere: no such file"):
        run_hash(configure(f"model={model}", f"model.{field}={tmp_path}/nowhere"))


def test_a_sweep_is_planned_before_its_published_weights_are_there():
    """Runs with published weights are named by their path, as those of better/fig7_rates are listed on machines without them."""
    run_hash(configure("model=bert_tiny", "model.weights=pretrained/nowhere"))


def saved(tmp_path, state) -> str:
    torch.save(state, tmp_path / "weights.pt")
    return f"model.initial_weights={tmp_path}/weights.pt"


def test_a_classifier_of_another_size_is_reinitialized_or_refused(digits, tmp_path):
    plain = digits("quantizer=none")
    state = plain.build_model().state_dict()
    state["conv1.weight"] += 1
    state["fc.weight"], state["fc.bias"] = torch.randn(50, 64), torch.randn(50)
    here = saved(tmp_path, state)
    begun, random = digits(here).build_model().state_dict(), plain.build_model().state_dict()
    assert torch.equal(begun["fc.weight"], random["fc.weight"])
    assert torch.equal(begun["conv1.weight"], state["conv1.weight"])
    state["fc.weight"], state["fc.bias"] = torch.randn(10, 64), torch.randn(10)
    for choice, expected in (
        ("fitting", state),
        ("refused", state),
        ("random", random),
    ):  # the same size, other classes
        fresh = digits(saved(tmp_path, state), f"model.initial_classifier={choice}").build_model().state_dict()
        assert torch.equal(fresh["fc.weight"], expected["fc.weight"])
        assert torch.equal(fresh["fc.bias"], expected["fc.bias"])
    state["fc.weight"], state["fc.bias"] = torch.randn(50, 64), torch.randn(50)
    here = saved(tmp_path, state)
    with pytest.raises(
        SettingError, match=r"a different number of classes: fc.weight is \[50, 64\] instead of \[10, 64\]"
    ):
        digits(here, "model.initial_classifier=refused")
    plan = digits(here)
    execute(plan)
    assert "starts with random weights: fc.weight, fc.bias are not loaded" in plan.folder.log.read_text()


def test_weights_of_another_network_are_refused(digits, tmp_path):
    state = digits("quantizer=none").build_model().state_dict()
    with pytest.raises(
        SettingError, match=r"model.initial_weights=.*does not fit resnet14: group1.1.conv1.weight is missing"
    ):
        digits(saved(tmp_path, state), "model=resnet14")
    larger = digits("quantizer=none", "model=resnet14").build_model().state_dict()
    with pytest.raises(SettingError, match=r"does not fit resnet8: group1.1.conv1.weight is not in the network"):
        digits(saved(tmp_path, larger))
    state["conv1.weight"] = torch.zeros(8, 1, 3, 3)
    with pytest.raises(SettingError, match=r"conv1.weight is \[8, 1, 3, 3\] instead of \[16, 1, 3, 3\]"):
        digits(saved(tmp_path, state))
    for nothing in ({"epoch": 3}, [1, 2], 7):
        with pytest.raises(SettingError, match="contains no weights"):
            digits(saved(tmp_path, nothing))


class Code:
    """What a checkpoint must not hold."""


def test_code_in_a_file_is_not_run(digits, tmp_path):
    with pytest.raises(SettingError, match="cannot be read as weights"):
        digits(saved(tmp_path, {"conv1.weight": Code()}))


def test_a_run_folder_needs_no_quotes_on_the_command_line(digits, command):
    first = digits(*FLOAT)
    execute(first)
    common = ("dataset=digits", "model=resnet8", "scale=smoke")
    code, out, _ = command(*common, f"model.initial_weights={first.folder.path}", "dry_run=json")
    assert code == 0
    assert json.loads(out)["state"] == "new"


def test_an_unfinished_run_is_refused(digits):
    first = digits(*FLOAT)
    execute(first)
    first.folder.write_status("running", 3, 64)
    with pytest.raises(SettingError, match="this run is not finished"):
        digits(f"model.initial_weights='{first.folder.path}'")


def test_the_file_may_go_once_the_run_has_begun(digits, tmp_path, monkeypatch):
    here = saved(tmp_path, digits("quantizer=none").build_model().state_dict())
    plan, train_step = digits(here), Trainer.train_step

    def step(self, batch):
        (tmp_path / "weights.pt").unlink(missing_ok=True)
        train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", step)
    assert execute(plan)["hash"] in str(plan.folder.path)


def test_the_range_test_begins_from_the_same_weights(digits):
    first = digits(*FLOAT)
    execute(first)
    overrides = ["schedule=CR", "schedule.q_min=auto", f"model.initial_weights='{first.folder.path}'"]
    plan = digits(*overrides)
    summary = execute(plan)
    assert read_json(plan.folder.below("range_test").summary)["found"] == summary["found"]
    assert torch.equal(plan.preliminary.build_model().conv1.weight, plan.build_model().conv1.weight)


def test_parts_are_words_of_the_configuration():
    for part in PARTS[1:]:
        assert run_hash(configure("dataset=cifar100", f"dataset.part={part}")) != run_hash(
            configure("dataset=cifar100")
        )
