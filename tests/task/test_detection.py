"""Object detection: golden values of the released code, formulas, scores, and small runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bitcycle.dataset.detection import VocSmall
from bitcycle.errors import RunError
from bitcycle.files import read_records
from bitcycle.layer import QuantizedConv2d
from bitcycle.model.retinanet import Predictions, RetinaNet, RetinaNetOptions
from bitcycle.optional_imports import require
from bitcycle.precision import Precision
from bitcycle.quantizer import Sbm
from bitcycle.settings import SettingError
from bitcycle.shapes import DetectionShape
from bitcycle.task.anchors import (
    NOTHING,
    anchors,
    boxes_of,
    detection_losses,
    focal_terms,
    match,
    offsets_of,
    smooth_l1,
)
from bitcycle.task.average_precision import AveragePrecision, Detections, Truth, area_under_envelope
from bitcycle.task.base import TaskSetup
from bitcycle.task.detection import Detection, DetectionOptions
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.detection_cases import write_voc_small
from tests.quantizer.test_golden import arrays

CPU = torch.device("cpu")


SHAPE = DetectionShape(3, 64, 96, 3)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_voc_small(root)
    return root


# ------------------------------------------------------------------------------------------- values of the released code


def test_quantized_bias_and_shared_observer_are_those_of_the_released_code():
    golden = arrays("voc_qconv_bias")
    layer = QuantizedConv2d(4, 6, 3, padding=1, quantizer=Sbm(quantized_bias=True, running_range="code"))
    layer.weight.data, layer.bias.data = golden["w"], golden["bias"]
    layer.precision.set(Precision(5, 5, 8))
    for level in range(3):
        y = layer(golden[f"level{level}__x"])
        torch.testing.assert_close(y, golden[f"level{level}__b5__y"], rtol=0, atol=1e-6)
        observer = layer.activation_quantizer
        for name in ("running_zero_point", "running_range"):
            expected = golden[f"level{level}__{name}_after"].flatten()[0]
            torch.testing.assert_close(getattr(observer, name), expected, rtol=1e-6, atol=0)
    layer.eval()
    for bits in (5, 8):
        layer.precision.set(Precision(bits, bits, 8))
        expected = golden[f"eval_level0__b{bits}__y"]
        torch.testing.assert_close(layer(golden["level0__x"]), expected, rtol=0, atol=1e-6)


def test_anchors_and_losses_are_those_of_the_released_code():
    golden = arrays("voc_retinanet")
    places = anchors(*golden["image_hw"].tolist())
    torch.testing.assert_close(places, golden["anchors"], rtol=0, atol=1e-4)
    scores, offsets = golden["scores"].requires_grad_(), golden["deltas"].requires_grad_()
    objects = golden["annotations"]
    matches = match(places, objects[..., :4], objects[..., 4].long())
    losses = detection_losses(scores, offsets, places, matches)
    torch.testing.assert_close(losses.classes, golden["class_loss"][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(losses.boxes, golden["box_loss"][0], rtol=1e-6, atol=0)
    (losses.classes + losses.boxes).backward()
    torch.testing.assert_close(scores.grad, golden["grad_scores"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(offsets.grad, golden["grad_deltas"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [0, 2])
def test_images_without_objects_cost_what_they_cost_in_the_released_code(rows):
    golden = arrays("voc_retinanet")
    places, offsets = golden["anchors"], golden["deltas"].requires_grad_()
    nothing = match(places, torch.zeros(2, rows, 4), torch.full((2, rows), NOTHING))
    losses = detection_losses(golden["scores"], offsets, places, nothing)
    torch.testing.assert_close(losses.classes, golden["empty_class_loss"][0], rtol=1e-6, atol=0)
    assert losses.boxes == golden["empty_box_loss"][0] == 0 == losses.right
    losses.boxes.backward()
    assert (offsets.grad == 0).all()


def test_average_precision_is_that_of_the_released_code():
    golden = arrays("voc_retinanet")
    area = area_under_envelope(golden["ap_recall"], golden["ap_precision"])
    assert area == pytest.approx(float(golden["ap"]), abs=1e-9)
    found, there = golden["map_detections"], golden["map_boxes"]
    metric = AveragePrecision(classes=3)
    for image in range(int(max(found[:, 0].max(), there[:, 0].max())) + 1):
        here, objects = found[found[:, 0] == image], there[there[:, 0] == image]
        boxes, classes = objects[:, 1:5], objects[:, 5].long()
        metric.update(Detections(here[:, 1:5], here[:, 5], here[:, 6].long()), Truth(boxes, classes))
    assert metric.objects == golden["map_count"].long().tolist()
    assert [metric.of_class(label) for label in range(3)] == pytest.approx(golden["map_ap"].tolist(), abs=1e-9)
    assert metric.mean() == pytest.approx(float(golden["map_ap"].mean()), abs=1e-9)


# ----------------------------------------------------------------------------------------------------------- formulas


def test_offsets_and_boxes_are_each_others_inverse():
    places = anchors(64, 64)[::37]
    boxes = places + torch.tensor([3.0, -2.0, 9.0, 4.0])
    torch.testing.assert_close(boxes_of(offsets_of(boxes, places), places), boxes, rtol=1e-5, atol=1e-3)
    by_hand = offsets_of(torch.tensor([[10.0, 10.0, 10.5, 30.0]]), torch.tensor([[0.0, 0.0, 20.0, 10.0]]))
    expected = [(10.25 - 10) / 20 / 0.1, (20 - 5) / 10 / 0.1, np.log(1 / 20) / 0.2, np.log(20 / 10) / 0.2]
    torch.testing.assert_close(by_hand[0], torch.tensor(expected, dtype=torch.float32))


def test_an_anchor_is_positive_ignored_or_negative_by_its_overlap():
    box = torch.tensor([[[0.0, 0.0, 10.0, 10.0]]])
    places = torch.tensor([[0.0, 0.0, 10.0, width] for width in (5.0, 4.5, 4.0, 3.9)])
    matches = match(places, box, torch.zeros(1, 1, dtype=torch.int64))
    assert matches.positive[0].tolist() == [True, False, False, False]
    assert matches.ignored[0].tolist() == [False, True, True, False]


def test_losses_by_hand():
    terms = focal_terms(torch.tensor([0.2, 0.2, 0.0]), torch.tensor([True, False, True]))
    expected = [-0.25 * 0.8**2 * np.log(0.2), -0.75 * 0.2**2 * np.log(0.8), -0.25 * 0.9999**2 * np.log(1e-4)]
    torch.testing.assert_close(terms, torch.tensor(expected, dtype=torch.float32))
    differences = smooth_l1(torch.tensor([0.1, -1.0]))
    torch.testing.assert_close(differences, torch.tensor([0.5 * 9 * 0.01, 1 - 0.5 / 9]))


def test_the_second_claim_of_an_object_is_wrong():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]])
    scores, labels = torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3, dtype=torch.int64)
    objects, classes = boxes[[0, 2]], torch.zeros(2, dtype=torch.int64)
    metric = AveragePrecision(1)
    found = Detections(boxes, scores, labels)
    metric.update(found, Truth(objects, classes))
    assert metric.of_class(0) == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert AveragePrecision(2).mean() == 0


@pytest.fixture(scope="module")
def network() -> RetinaNet:
    torch.manual_seed(0)
    return RetinaNetOptions(width=16).build(SHAPE)


# -------------------------------------------------------------------------------------------------------------- the task


class Oracle(nn.Module):
    """Says what there is: knows the objects of each batch, given in the order of evaluation."""

    def __init__(self, batches, classes: int) -> None:
        super().__init__()
        self.batches, self.classes = iter(batches), classes

    def forward(self, images):
        batch = next(self.batches)
        places = anchors(*images.shape[2:])
        matches = match(places, batch.boxes, batch.labels)
        right = nn.functional.one_hot(matches.labels.clamp_min(0), self.classes) * matches.positive[..., None]
        return Predictions(10.0 * right - 5, offsets_of(matches.boxes, places).nan_to_num(0, 0, 0))


def task(data_root, **options) -> Detection:
    dataset = VocSmall(shorter_side=96, longer_side=128)
    return DetectionOptions(**options).build(TaskSetup(dataset, data_root, dataset.info(data_root), 4, 0, CPU))


def test_perfect_predictions_have_a_perfect_score(data_root):
    detection = task(data_root)
    values = detection.evaluate(Oracle(detection.splits["test"], 3))
    assert values["test_map50"] == values["test_map"] == values["test_map50_all_points"] == 100
    assert values["test_loss"] < 0.1
    validation = detection.validate(Oracle(detection.splits["validation"], 3))
    assert validation["validation_map50"] == 100
    batch = next(detection.batches(0))
    assert float(detection.train(Oracle([batch], 3), batch).accuracy) == 1


def test_nothing_found_scores_nothing(data_root, network):
    values = task(data_root).evaluate(network.eval())
    assert values["test_map50"] == values["test_map"] == values["test_map50_all_points"] == 0


def test_detections_are_the_best_of_each_place_and_class(data_root, monkeypatch):
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [5, -5, 50, 50], [0, 0, 10, 10]])
    scores = torch.tensor([[0.9, 0.04], [0.8, 0.7], [0.6, 0.0], [0.05, 0.0]])
    found = task(data_root).detect(boxes, scores, (40, 30))
    assert found.scores.tolist() == pytest.approx([0.9, 0.7, 0.6])
    assert found.labels.tolist() == [0, 1, 0]
    assert found.boxes[2].tolist() == [5, 0, 30, 40]
    with monkeypatch.context() as patch:
        patch.setattr("bitcycle.task.detection.DETECTIONS", 2)
        assert len(task(data_root).detect(boxes, scores, (40, 30)).boxes) == 2
    monkeypatch.setattr("bitcycle.task.detection.CANDIDATES", 1)
    assert task(data_root).detect(boxes, scores, (40, 30)).scores.tolist() == pytest.approx([0.9])


def test_a_size_of_one_number_is_refused():
    with pytest.raises(SettingError, match="needs two numbers"):
        DetectionOptions(cost_size=[224])


def test_a_missing_library_is_named_with_its_extra():
    assert require("math", "detection").sqrt(4) == 2
    with pytest.raises(RunError, match=r"no_such_library is not installed: pip install .*'torchmetrics\[detection\]"):
        require("no_such_library", "detection")


# -------------------------------------------------------------------------------------------------------- plans and runs


def test_the_recipe_is_the_papers_and_the_saving_is_the_published_formulas():
    planned = plan(
        *("dataset=voc2012", "schedule=ETV", "schedule.q_min=5", "task.cost_size=[224,224]"),
        "hardware.convention=better",
    )
    assert planned.config.model.name == "retinanet" and planned.config.task.name == "detection"
    assert (planned.epoch.steps, planned.total_steps) == (1430, 171_600)
    training = planned.config.training
    assert (training.optimizer.name, training.learning_rate.rate(100_000, 171_600), training.clip_norm) == (
        "adam",
        1e-5,
        0.1,
    )
    assert training.evaluation_steps == 5 * 1430
    assert planned.cost().saving_percent == pytest.approx(23.08, abs=0.05)


def test_what_is_said_on_the_command_line_wins_over_the_data_sets_own():
    assert plan("dataset=voc_small", "training=voc", "model.width=8").total_steps == 120 * 18
    with pytest.raises(SettingError, match="does not accept the data of dataset=voc_small"):
        plan("dataset=voc_small", "model=resnet20")
    with pytest.raises(SettingError, match="cannot learn from dataset=voc_small"):
        plan("dataset=voc_small", "task=classification")


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=RTH", "schedule.cycles=2"],
        ["quantizer=none"],
    ],
    ids=" ".join,
)
def test_small_runs_end_with_all_metrics_and_the_predicted_cost(data_root, tmp_path, overrides):
    planned = plan(
        *("dataset=voc_small", "scale=smoke", "model.width=8", "dataset.shorter_side=48", "dataset.longer_side=64"),
        *("training.batch_size=2", "training.steps=4", "training.evaluation_steps=4", "dataset.test_samples=2"),
        *("training.log_steps=1", "training.compile=false"),
        *(f"data_root={data_root}", f"results_root={tmp_path}", *overrides),
    )
    summary = execute(planned)
    assert summary["metric"] == "test_map50"
    assert summary["cost"]["total"] == planned.cost().summary()
    evaluation = [record for record in read_records(planned.folder.metrics) if record["kind"] == "evaluation"][-1]
    assert {"test_map", "test_map50_all_points", "test_loss", "validation_map50"} <= evaluation.keys()
