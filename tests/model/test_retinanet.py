"""RetinaNet: its parameters, initial values, quantized layers and frozen batch norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitcycle.layer import QuantizedLayer, conversion_plan, quantize_model
from bitcycle.model.retinanet import RetinaNet, RetinaNetOptions
from bitcycle.quantizer import Dorefa, Sbm
from bitcycle.settings import SettingError
from bitcycle.shapes import DetectionShape
from bitcycle.task.anchors import anchors

SHAPE = DetectionShape(3, 64, 96, 3)


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
    from bitcycle.layer.conversion.plan import has_signed_input, layer_roles

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
    assert not RetinaNetOptions().freezes_bn
    with pytest.raises(SettingError, match=r"backbone_weights.*instead of \[.*model.depth"):
        RetinaNetOptions(depth=50, width=8, backbone_weights=options.backbone_weights).build(SHAPE)
    (tmp_path / "text").write_text("none")
    with pytest.raises(SettingError, match="cannot be read as weights"):
        RetinaNetOptions(width=8, backbone_weights=str(tmp_path / "text")).build(SHAPE)
    (tmp_path / "empty").touch()
    with pytest.raises(SettingError, match="EOFError: the file ends too early"):
        RetinaNetOptions(width=8, backbone_weights=str(tmp_path / "empty")).build(SHAPE)
    torch.save([1], tmp_path / "list")
    with pytest.raises(SettingError, match="contains no weights"):
        RetinaNetOptions(width=8, backbone_weights=str(tmp_path / "list")).build(SHAPE)


def test_networks_that_do_not_exist_and_grey_images_are_refused():
    with pytest.raises(SettingError, match="use 18, 34, 50 or 101"):
        RetinaNetOptions(depth=20)
    with pytest.raises(SettingError, match="use colour images"):
        RetinaNetOptions().check(DetectionShape(1, 64, 64, 3))
