"""Object detection: golden values of the released code, data in Pascal VOC's layout, batches, network, and small runs."""

from __future__ import annotations

import itertools
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bitcycle.dataset import DatasetInfo, TrainingBatches, fetch, voc
from bitcycle.dataset.detection import (
    DetectionDatasetOptions,
    DetectionEvaluationBatches,
    DetectionTrainingBatches,
    grouped_order,
)
from bitcycle.dataset.fetch import unpack_to_cache
from bitcycle.dataset.imagenet import ImageNet, ImageNetMini
from bitcycle.dataset.voc import Voc2012, VocSmall
from bitcycle.errors import DataError, RunError
from bitcycle.layer import QuantizedConv2d, QuantizedLayer, conversion_plan, quantize_model
from bitcycle.model import DetectionShape
from bitcycle.model.retinanet import Predictions, RetinaNet, RetinaNetOptions
from bitcycle.optional_imports import require
from bitcycle.quantizer import Dorefa, Sbm
from bitcycle.schedule import Precision
from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from bitcycle.task.anchors import anchors, decode, encode, intersection_over_union
from bitcycle.task.average_precision import AveragePrecision, area_under_envelope
from bitcycle.task.detection import Detection, DetectionOptions
from bitcycle.task.detection_loss import NOTHING, detection_losses, focal_terms, match, smooth_l1
from bitcycle.training.run import execute
from bitcycle.training.run_folder import read_records
from tests.conftest import plan
from tests.test_dataset import write_parquet
from tests.test_quantizer_golden import arrays

CPU = torch.device("cpu")
SHAPE = DetectionShape(3, 64, 96, 3)


# ---------------------------------------------------------------------------------------------------- made-up data


def write_picture(folder, name: str, size: tuple[int, int], objects, number: int) -> None:
    """An image of `size` (width, height) whose objects (class, x1, y1, x2, y2[, difficult]) are boxes of their colour."""
    pixels = np.random.default_rng(number).integers(100, 130, (size[1], size[0], 3), dtype=np.uint8)
    lines = []
    for label, x1, y1, x2, y2, *difficult in objects:
        pixels[y1 - 1 : y2, x1 - 1 : x2] = 40 * (1 + sum(map(ord, label)) % 5)
        box = f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
        mark = f"<difficult>{int(any(difficult))}</difficult>"
        lines.append(f"<object><name>{label}</name>{mark}<bndbox>{box}</bndbox></object>")
    Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{sides}{''.join(lines)}</annotation>")


def write_voc(folder, splits: dict[str, int], classes: tuple[str, ...]) -> None:
    """Pascal VOC's layout with so many images in each split; portrait and landscape, with 0 to 2 objects."""
    for sub in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / sub).mkdir(parents=True)
    numbers = itertools.count()
    for split, count in splits.items():
        names = []
        for _ in range(count):
            number = next(numbers)
            size = ((64, 48), (48, 64), (64, 40))[number % 3]
            objects = [
                (classes[number % len(classes)], 5, 5, 36, 36),
                (classes[(number + 1) % len(classes)], 9, 9, 24, 28),
            ]
            names.append(f"2012_{number:06}")
            write_picture(folder, names[-1], size, objects[: (number + 2) % 4 % 3], number)
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names) + "\n")


def write_voc_small(data_root) -> None:
    write_voc(
        data_root / "voc-small" / "VOCdevkit" / "VOC2007", {"train": 70, "val": 25, "test": 25}, VocSmall().class_names
    )


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_voc_small(root)
    return root


def small(**options) -> VocSmall:
    return VocSmall(shorter_side=48, longer_side=64, **options)


# ------------------------------------------------------------------------------------------- values of the released code


def test_quantized_bias_and_shared_observer_are_those_of_the_released_code():
    golden = arrays("voc_qconv_bias")
    layer = QuantizedConv2d(4, 6, 3, padding=1, quantizer=Sbm(quantized_bias=True))
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
        metric.update(here[:, 1:5], here[:, 5], here[:, 6].long(), objects[:, 1:5], objects[:, 5].long())
    assert metric.objects == golden["map_count"].long().tolist()
    assert metric.compute() == pytest.approx(golden["map_ap"].tolist(), abs=1e-9)
    assert metric.mean() == pytest.approx(float(golden["map_ap"].mean()), abs=1e-9)


# ----------------------------------------------------------------------------------------------------------- formulas


def test_offsets_and_boxes_are_each_others_inverse():
    places = anchors(64, 64)[::37]
    boxes = places + torch.tensor([3.0, -2.0, 9.0, 4.0])
    torch.testing.assert_close(decode(encode(boxes, places), places), boxes, rtol=1e-5, atol=1e-3)
    by_hand = encode(torch.tensor([[10.0, 10.0, 10.5, 30.0]]), torch.tensor([[0.0, 0.0, 20.0, 10.0]]))
    expected = [(10.25 - 10) / 20 / 0.1, (20 - 5) / 10 / 0.1, np.log(1 / 20) / 0.2, np.log(20 / 10) / 0.2]
    torch.testing.assert_close(by_hand[0], torch.tensor(expected, dtype=torch.float32))


def test_overlap_agrees_with_torchvision():
    from torchvision.ops import box_iou

    a, b = torch.rand(2, 7, 4, generator=torch.Generator().manual_seed(0)) * 10
    a[:, 2:], b[:, 2:] = a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:]
    torch.testing.assert_close(intersection_over_union(a, b), box_iou(a, b))


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


def test_the_second_claim_of_an_object_is_wrong_and_difficult_ones_count_nothing():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]])
    scores, labels = torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3, dtype=torch.int64)
    objects, classes = boxes[[0, 2]], torch.zeros(2, dtype=torch.int64)
    metric = AveragePrecision(1)
    metric.update(boxes, scores, labels, objects, classes)
    assert metric.compute() == pytest.approx([0.5 + 0.5 * 2 / 3])
    metric = AveragePrecision(1)
    metric.update(boxes, scores, labels, objects, classes, ignored=torch.tensor([False, True]))
    assert metric.compute() == [1.0]
    assert AveragePrecision(2).mean() == 0


# ---------------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(("depth", "channels"), [(18, 512), (50, 2048)])
def test_parameters_are_those_of_torchvisions_retinanet(depth, channels):
    from torchvision.models.detection import RetinaNet as Theirs
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    extra = LastLevelP6P7(channels, 256)
    options = {"trainable_layers": 5, "norm_layer": nn.BatchNorm2d, "returned_layers": [2, 3, 4]}
    with torch.device("meta"):
        backbone = resnet_fpn_backbone(backbone_name=f"resnet{depth}", weights=None, extra_blocks=extra, **options)
        theirs, ours = Theirs(backbone, 20), RetinaNet(depth, 20)
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    assert count == {18: 20_165_400, 50: 36_723_992}[depth]


@pytest.fixture(scope="module")
def network() -> RetinaNet:
    torch.manual_seed(0)
    return RetinaNetOptions(width=16).build(SHAPE)


def test_the_network_begins_at_the_prior(network):
    logits, offsets = network.eval()(torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (1, len(anchors(64, 96)), 3)
    torch.testing.assert_close(logits.sigmoid(), torch.full_like(logits, 0.01))
    assert offsets.shape == (1, len(anchors(64, 96)), 4)
    assert (offsets == 0).all()
    for layer in (
        network.backbone.conv1,
        network.pyramid.extra_blocks.p6,
        network.heads.classification_head.conv[2][0],
    ):
        taps = layer.weight[0, 0].numel()
        assert float(layer.weight.detach().std()) == pytest.approx((2 / (taps * layer.out_channels)) ** 0.5, rel=0.05)


def test_every_convolution_is_quantized_with_its_bias(network):
    rules = conversion_plan(network, Sbm())
    assert len(rules) == 38 == sum(isinstance(module, nn.Conv2d) for module in network.modules())
    assert {rule.treatment for rule in rules} == {"quantized"}
    for quantizer, expected in ((Sbm(), 18), (Sbm(quantized_bias=False), 0), (Dorefa(), 0)):
        converted = quantize_model(RetinaNet(18, 3, width=8), quantizer)
        layers = [module for module in converted.modules() if isinstance(module, QuantizedLayer)]
        assert sum(layer.bias_quantizer is not None for layer in layers) == expected
    unlike = quantize_model(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)), Sbm(), float_layers=["first"])
    assert unlike[1].bias_quantizer is None


def test_inputs_with_sign_are_known():
    from bitcycle.layer.conversion import has_signed_input, layer_roles

    model = RetinaNet(18, 3, width=8)
    signed = [name for name, roles in layer_roles(model).items() if has_signed_input(model, name, roles)]
    assert signed == [
        "backbone.conv1",
        *(f"pyramid.layer_blocks.{level}.0" for level in range(3)),
        *(f"heads.{head}_head.conv.0.0" for head in ("classification", "regression")),
    ]


def test_observers_of_the_heads_see_five_levels_a_step_the_finest_first():
    model = quantize_model(RetinaNet(18, 3, width=8), "sbm").train()
    seen = []
    observer = model.heads.classification_head.conv[0][0].activation_quantizer
    observer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape[2:])))
    model(torch.randn(1, 3, 64, 128))
    assert seen == [(8, 16), (4, 8), (2, 4), (1, 2), (1, 1)]


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_scale(frozen):
    model = RetinaNet(18, 3, width=8, frozen_bn=frozen).eval().train()
    before = model.backbone.bn1.running_mean.clone()
    nn.init.normal_(model.heads.classification_head.cls_logits.weight)
    model(torch.randn(1, 3, 64, 64)).logits.sum().backward()
    assert torch.equal(model.backbone.bn1.running_mean, before) == frozen
    assert float(model.backbone.bn1.weight.grad.abs().sum()) > 0
    assert model.heads.training


def test_backbone_weights_come_from_a_file(tmp_path):
    from torchvision.models import resnet18

    theirs = resnet18(weights=None)
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    options = RetinaNetOptions(width=8, backbone_weights=str(tmp_path / "resnet18.pth"))
    model = options.build(SHAPE)
    assert model.frozen_bn
    assert torch.equal(model.backbone.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    assert not RetinaNetOptions(backbone_weights="file", frozen_bn="false").freezes_bn
    assert not RetinaNetOptions().freezes_bn
    with pytest.raises(SettingError, match=r"backbone_weights.*expected \[.*model.depth"):
        RetinaNetOptions(depth=50, width=8, backbone_weights=options.backbone_weights).build(SHAPE)
    (tmp_path / "text").write_text("none")
    with pytest.raises(SettingError, match="cannot be read as weights"):
        RetinaNetOptions(width=8, backbone_weights=str(tmp_path / "text")).build(SHAPE)
    torch.save([1], tmp_path / "list")
    with pytest.raises(SettingError, match="holds no weights"):
        RetinaNetOptions(width=8, backbone_weights=str(tmp_path / "list")).build(SHAPE)


def test_networks_that_do_not_exist_and_grey_images_are_refused():
    with pytest.raises(SettingError, match="use 18, 34, 50 or 101"):
        RetinaNetOptions(depth=20)
    with pytest.raises(SettingError, match="use colour images"):
        RetinaNetOptions().check(DetectionShape(1, 64, 64, 3))


# ------------------------------------------------------------------------------------------------------------- the data


def test_sizes_are_known_without_data(tmp_path):
    assert Voc2012().info(tmp_path) == ((3, 640, 832, 20), 5717, 5823)
    assert small().info(tmp_path) == ((3, 64, 96, 3), 70, 25)
    assert small(train_samples=256, test_samples=9).info(tmp_path)[1:] == (70, 9)
    assert Voc2012(validation=0.1).info(tmp_path)[1:] == (5145, 5823)


def test_annotations_are_read_as_they_stand(data_root):
    image = VocSmall().read(data_root).train[2]
    assert (image.width, image.height) == (64, 40)
    assert image.objects.boxes.tolist() == []
    image = VocSmall().read(data_root).train[0]
    assert image.objects.boxes.tolist() == [[4.0, 4.0, 36.0, 36.0], [8.0, 8.0, 24.0, 28.0]]
    assert image.objects.labels.tolist() == [0, 1]
    assert not image.objects.difficult.any()


@pytest.fixture(autouse=True)
def users_cache(tmp_path, monkeypatch):
    """Small archives are unpacked there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users_cache"))


def test_the_archive_gives_what_the_folder_gives(data_root, tmp_path):
    (tmp_path / "voc-small").mkdir()
    with tarfile.open(tmp_path / "voc-small" / "VOCdevkit-small.tar", "w") as tar:
        tar.add(data_root / "voc-small" / "VOCdevkit", "VOCdevkit")
    packed, unpacked = (small().load(root, seed=0) for root in (tmp_path, data_root))
    for split in ("train", "validation", "test"):
        batches = [
            next(iter(DetectionEvaluationBatches(getattr(splits, split), small(), 3, CPU)))
            for splits in (packed, unpacked)
        ]
        for one, other in zip(*batches, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_official_layout_of_voc_2012_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Voc2012, "sizes", (6, 4))
    write_voc(tmp_path / "VOCdevkit" / "VOC2012", {"train": 6, "val": 4}, voc.VOC_CLASSES)
    options = Voc2012(validation=0.3, shorter_side=48, longer_side=64)
    splits = options.load(tmp_path, seed=0)
    assert [len(split) for split in splits] == [4, 2, 4]
    assert len(Voc2012(train_samples=3).load(tmp_path, seed=0).train) == 3
    assert {image.image.origin for image in splits.train}.isdisjoint(image.image.origin for image in splits.validation)
    monkeypatch.setattr(Voc2012, "sizes", (5, 4))
    with pytest.raises(DataError, match=r"holds 6, 4 training and test images; the whole voc2012 has 5, 4"):
        options.load(tmp_path, seed=0)


def test_missing_data_are_an_error_that_says_what_to_put_where(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"voc_small is not in .*VOCdevkit-small\.tar"):
        VocSmall().read(tmp_path)

    def no_network(*arguments, **keywords):
        raise OSError("no network")

    monkeypatch.setattr(fetch, "urlopen", no_network)
    with pytest.raises(DataError, match=r"no network.*VOCdevkit/VOC2012.*voc_small is a small proxy"):
        Voc2012().read(tmp_path)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        ("<annotation>", "cannot use"),
        ("<annotation></annotation>", "cannot use"),
        ("<size><width>9</width><height>9</height></size>", "cannot use"),
        ("CLASS", "not in tuple"),
        ("BOX", "ends before it begins"),
    ],
)
def test_damaged_annotations_are_named(tmp_path, annotation, problem):
    folder = tmp_path / "voc-small" / "VOCdevkit" / "VOC2007"
    write_voc(folder, {"train": 1, "val": 1, "test": 1}, VocSmall().class_names)
    source = folder / "Annotations" / "2012_000000.xml"
    if annotation == "CLASS":
        annotation = source.read_text().replace("Platelets", "boat")
    if annotation == "BOX":
        annotation = source.read_text().replace("<xmin>5<", "<xmin>50<")
    source.write_text(annotation.removeprefix("<size>") if annotation.startswith("<size>") else annotation)
    with pytest.raises(DataError, match=problem):
        VocSmall().read(tmp_path)
    source.unlink()
    with pytest.raises(DataError, match=r"cannot use .*Fetch the data set again"):
        VocSmall().read(tmp_path)


def test_an_image_that_is_not_as_annotated_is_refused(tmp_path):
    folder = tmp_path / "voc-small" / "VOCdevkit" / "VOC2007"
    write_voc(folder, {"train": 1, "val": 1, "test": 1}, VocSmall().class_names)
    Image.new("RGB", (10, 10)).save(folder / "JPEGImages" / "2012_000000.jpg")
    train = voc.read_split(tmp_path / "voc-small", "2007", "train", VocSmall().class_names)
    with pytest.raises(DataError, match="is 10x10 pixels, its annotation says 64x48"):
        next(iter(DetectionEvaluationBatches(train, small(), 1, CPU)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"longer_side": 300}, "is less than shorter_side=320"),
        ({"mean": [0.5, 0.5]}, "images have 3 channels"),
        ({"validation": 0.1}, "comes with a validation split"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, problem):
    with pytest.raises(SettingError, match=problem):
        VocSmall(**options)


@pytest.mark.parametrize(
    ("size", "scaled", "padded"),
    [
        ((500, 375), (608, 811), (640, 832)),
        ((375, 500), (811, 608), (832, 640)),
        ((500, 150), (307, 1024), (320, 1056)),
    ],
)
def test_sizes_of_images(size, scaled, padded):
    options = DetectionDatasetOptions("any")
    assert options.scaled_size(*size) == scaled
    assert tuple(map(options.padded, scaled)) == padded
    assert DetectionDatasetOptions("any", extra_padding=False).padded(608) == 608


def test_pixels_are_normalised_first_and_padded_with_zeros_then(data_root):
    images = VocSmall().read(data_root).train[:2]  # 64x48 and 48x64, which stay as they are
    batch = next(iter(DetectionEvaluationBatches(images, small(), 2, CPU)))
    assert batch.images.shape == (2, 3, 96, 96)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.sizes == ((64, 48), (48, 64))
    assert (batch.images[0, :, 64:] == 0).all() and (batch.images[0, :, :, 48:] == 0).all()
    pixels = np.array(
        Image.open(data_root / "voc-small/VOCdevkit/VOC2007/JPEGImages/2012_000000.jpg"), dtype=np.float32
    )
    expected = (pixels / 255 - np.array(small().mean)) / np.array(small().std)
    np.testing.assert_allclose(batch.images[1, :, :48, :64].permute(1, 2, 0), expected, atol=1e-5)
    assert batch.labels.tolist() == [[NOTHING, NOTHING], [0, 1]] or batch.labels.shape[1] == 2
    scaled = next(iter(DetectionEvaluationBatches(images[:1], VocSmall(shorter_side=96, longer_side=128), 1, CPU)))
    assert scaled.boxes[0, 0].tolist() == [8.0, 8.0, 72.0, 72.0]


def test_epochs_go_through_all_images_in_groups_of_like_shape():
    ratios = torch.tensor([1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5])
    epochs = [grouped_order(ratios, 2, seed=3, epoch=epoch) for epoch in range(20)]
    for groups in epochs:
        assert [len(group) for group in groups] == [2, 2, 2, 2, 1]
        assert sorted(itertools.chain(*groups)) == list(range(9))
        assert sum(len(set(ratios[group].tolist())) > 1 for group in groups) <= 1
    assert len({str(groups) for groups in epochs}) == 20
    assert epochs[4] == grouped_order(ratios, 2, seed=3, epoch=4)
    assert len({groups[-1][0] for groups in epochs}) > 3


def test_any_step_can_be_the_first_with_or_without_memory(data_root):
    train = VocSmall().read(data_root).train[:7]
    expected = list(itertools.islice(_batches(train).starting_at(0), 9))
    for step, options in ((0, {"memory_gib": 0, "workers": 0}), (5, {}), (6, {"memory_gib": 0, "workers": 1})):
        found = list(itertools.islice(_batches(train, **options).starting_at(step), 9 - step))
        for one, other in zip(found, expected[step:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def _batches(images, **options) -> DetectionTrainingBatches:
    return DetectionTrainingBatches(images, small(flip=True, **options), 3, 5, CPU)


def test_a_flip_takes_the_boxes_along(data_root):
    train = VocSmall().read(data_root).train[:1]
    plain = next(_plain(train))
    flipped = next(batch for batch in _batches(train).starting_at(0) if not torch.equal(batch.images, plain.images))
    torch.testing.assert_close(flipped.images[..., :48, :64], plain.images[..., :48, :64].flip(3))
    assert flipped.boxes[0, 0].tolist() == [64 - 36.0, 4.0, 64 - 4.0, 36.0]


def _plain(images):
    return iter(DetectionEvaluationBatches(images, small(), 1, CPU))


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
        return Predictions(10.0 * right - 5, encode(matches.boxes, places).nan_to_num(0, 0, 0))


def task(data_root, **options) -> Detection:
    dataset = VocSmall(shorter_side=96, longer_side=128)
    return Detection(DetectionOptions(**options), dataset, dataset.load(data_root, 0), 4, 0, CPU)


def test_perfect_predictions_have_a_perfect_score(data_root):
    detection = task(data_root)
    values = detection.evaluate(Oracle(detection.test_batches, 3))
    assert values["test_map50"] == values["test_map"] == values["test_map50_all_points"] == 100
    assert values["test_loss"] < 0.1
    validation = detection.validate(Oracle(detection.validation_batches, 3))
    assert validation["validation_map50"] == 100
    batch = next(detection.batches(0))
    assert float(detection.train(Oracle([batch], 3), batch).accuracy) == 1


def test_nothing_found_scores_nothing(data_root, network):
    values = task(data_root).evaluate(network.eval())
    assert values["test_map50"] == values["test_map"] == values["test_map50_all_points"] == 0


def test_detections_are_the_best_of_each_place_and_class(data_root):
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [5, -5, 50, 50], [0, 0, 10, 10]])
    scores = torch.tensor([[0.9, 0.04], [0.8, 0.7], [0.6, 0.0], [0.05, 0.0]])
    found = task(data_root).detect(boxes, scores, (40, 30))
    assert found.scores.tolist() == pytest.approx([0.9, 0.7, 0.6])
    assert found.labels.tolist() == [0, 1, 0]
    assert found.boxes[2].tolist() == [5, 0, 30, 40]
    assert len(task(data_root, detections=2).detect(boxes, scores, (40, 30)).boxes) == 2
    assert task(data_root, nms_candidates=1).detect(boxes, scores, (40, 30)).scores.tolist() == pytest.approx([0.9])


def test_difficult_objects_count_or_are_ignored(data_root):
    counts, ignores = (task(data_root, difficult=word) for word in ("count", "ignore"))
    marked = [batch._replace(difficult=batch.labels == 0, labels=batch.labels.clone()) for batch in counts.test_batches]
    for detection in (counts, ignores):
        detection.test_batches = marked
    without = [batch._replace(labels=batch.labels.masked_fill(batch.labels == 0, NOTHING)) for batch in marked]
    assert ignores.evaluate(Oracle(without, 3))["test_map50_all_points"] == 100
    assert ignores.evaluate(Oracle(without, 3))["test_map50"] == 100
    assert counts.evaluate(Oracle(without, 3))["test_map50"] == pytest.approx(200 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"negative_overlap": 0.6}, "is above positive_overlap=0.5"),
        ({"cost_size": [224]}, "needs two numbers"),
    ],
)
def test_task_options_that_make_no_sense_are_refused(options, problem):
    with pytest.raises(SettingError, match=problem):
        DetectionOptions(**options)


def test_a_missing_library_is_named_with_its_extra():
    assert require("math", "detection").sqrt(4) == 2
    with pytest.raises(RunError, match=r"no_such_library is not installed: pip install 'torchmetrics\[detection\]"):
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
    with pytest.raises(SettingError, match="is not made for the data of dataset=voc_small"):
        plan("dataset=voc_small", "model=resnet20")
    with pytest.raises(SettingError, match="cannot learn from dataset=voc_small"):
        plan("dataset=voc_small", "task=classification")


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=RTH", "schedule.cycles=2", "model.frozen_bn=true"],
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


# ---------------------------------------------------------------------------------------------- ImageNet and its proxy


def write_imagenet_mini(folder, classes: int = 100) -> None:
    for label in range(classes):
        picture = Image.fromarray(np.random.default_rng(label).integers(0, 256, (20, 24, 3), dtype=np.uint8))
        for split in ("train", "val"):
            (folder / split / f"n{label:08}").mkdir(parents=True)
            picture.save(folder / split / f"n{label:08}" / f"n{label:08}_name.JPEG")


def test_the_stand_in_for_imagenet_is_read_from_folder_and_archive(tmp_path):
    write_imagenet_mini(tmp_path / "unpacked" / "imagenet-mini")
    (tmp_path / "packed" / "imagenet-mini").mkdir(parents=True)
    with tarfile.open(tmp_path / "packed" / "imagenet-mini" / "imagenet-mini.tar", "w") as tar:
        tar.add(tmp_path / "unpacked" / "imagenet-mini", "imagenet-mini")
    options = ImageNetMini(image_size=16, resize=18, workers=0, train_samples=256, test_samples=7)
    assert options.info(tmp_path) == ((3, 16, 100), 100, 7)
    found = []
    for kind in ("unpacked", "packed"):
        splits = options.load(tmp_path / kind)
        assert (len(splits.train), len(splits.test)) == (100, 7)
        found.append(next(TrainingBatches(splits.train, options, 8, 0, CPU).starting_at(3)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with pytest.raises(DataError, match=r"imagenet_mini is not in .*imagenet-mini\.tar"):
        options.load(tmp_path)
    write_imagenet_mini(tmp_path / "fewer" / "imagenet-mini", classes=3)
    with pytest.raises(
        DataError, match="holds 3, 3 training and validation images; the whole imagenet_mini has 100, 100"
    ):
        options.load(tmp_path / "fewer")


def test_imagenet_itself_is_read_in_its_official_layout(tmp_path, monkeypatch):
    write_imagenet_mini(tmp_path / "imagenet", classes=4)
    monkeypatch.setattr(ImageNet, "full_info", lambda *_: DatasetInfo(ImageShape(3, 224, 1000), 4, 4))
    splits = ImageNet(workers=0).load(tmp_path)
    assert splits.train.labels.tolist() == splits.test.labels.tolist() == [0, 1, 2, 3]


def test_imagenet_in_the_hubs_layout(tmp_path, monkeypatch):
    """train and validation; the labels of test are -1 there."""
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1])):
        write_parquet(tmp_path / "imagenet" / "data" / f"{split}-00000-of-00001.parquet", labels)
    monkeypatch.setattr(ImageNet, "full_info", lambda *_: DatasetInfo(ImageShape(3, 224, 1000), 3, 2))
    splits = ImageNet(workers=0).load(tmp_path)
    assert (splits.train.labels.tolist(), splits.test.labels.tolist()) == ([0, 1, 1], [1, 0])


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "archive.tar").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"cannot unpack .*archive\.tar.*[Ff]etch it again"):
        unpack_to_cache(tmp_path / "archive.tar")
