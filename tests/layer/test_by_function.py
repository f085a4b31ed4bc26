"""Attention and linear products that a network computes by functions."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import linear as project
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import bitcycle
from bitcycle.layer import QuantizedProduct
from bitcycle.precision import Precision
from bitcycle.settings import SettingError

pytestmark = pytest.mark.usefixtures("codes_everywhere")

FLOAT = Precision(32, 32, 32)


class Attention(nn.Module):
    def __init__(self, width=8, heads=2, **options):
        super().__init__()
        self.heads, self.options = heads, options
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


class Helped(Attention):
    """Its function is called by another, and the function is imported by name."""

    def forward(self, x, mask=None):
        return _attend(self, x, mask)


def _attend(self, x, mask):
    return Attention.forward(self, x, mask)


class Renamed(nn.Module):
    """Its functions are imported under other names."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads, self.options = heads, {}
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        y = attend(q, k, v, attn_mask=mask, **self.options)
        return project(y.transpose(1, 2).flatten(2), self.out.weight, self.out.bias)


class Processor:
    """Attention of an object that is no module, as in diffusers."""

    def __call__(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def a_closure():
    return lambda q, k, v, mask: attend(q, k, v, attn_mask=mask)


def a_closure_of(function):
    def closure(q, k, v, mask, inner=None):
        return (inner or function)(q, k, v, mask)

    return closure


HELD = {
    "function": attend,
    "partial": functools.partial(attend, dropout_p=0.0),
    "closure": a_closure(),
    "closure of a function": a_closure_of(attend),
    "closure of a partial": a_closure_of(functools.partial(attend, is_causal=False)),
    "processor": Processor(),
    "method": Processor().__call__,
}


class Holding(nn.Module):
    """Its attention is computed by what it holds."""

    def __init__(self, held=None, width=8, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        if held is not None:
            self.compute = HELD[held]

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        return self.out(self.compute(q, k, v, mask).transpose(1, 2).flatten(2))


class Static(Holding):
    """Its attention is a static method."""

    compute = staticmethod(attend)


def set_bits(model, bits):
    for state in {module for module in model.modules() if isinstance(module, bitcycle.layer.PrecisionState)}:
        state.set(bits)


MASKS = {
    "none": None,
    "boolean": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool(),
    "added": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_in_float_is_that_of_pytorch(options, mask):
    if mask != "none" and options.get("is_causal"):
        pytest.skip("PyTorch has no such attention")
    torch.manual_seed(0)
    plain, x = Attention(**options), torch.randn(3, 4, 8, requires_grad=True)
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[])
    set_bits(model, FLOAT)
    found = [(y, torch.autograd.grad(y.square().sum(), x)[0]) for y in (m(x, MASKS[mask]) for m in (plain, model))]
    torch.testing.assert_close(found[1], found[0])


def rows(x, bits):
    """The affine quantizer with one range per row, written down again."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return ((x - low) / scale).round() * scale + low


@pytest.mark.parametrize(
    "kind",
    [Attention, Helped, Renamed, Static, *(pytest.param(functools.partial(Holding, held), id=held) for held in HELD)],
)
@pytest.mark.parametrize("bits", [3, 8])
def test_both_products_of_attention_are_quantized(kind, bits):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4, 8)
    model = bitcycle.quantize_model(model, float_layers=["qkv", "out"])
    set_bits(model, Precision(bits, bits, bits))
    q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in model.qkv(x).chunk(3, 2))
    p = (rows(q, bits) @ rows(k.mT, bits) * 0.5).softmax(-1)
    expected = model.out((rows(p, bits) @ rows(v, bits)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(model(x), expected)
    report = bitcycle.conversion_report(model, x)
    assert report.quantized_share == pytest.approx(2 * 4 * 4 * 8 / (2 * 4 * 4 * 8 + 4 * 8 * 32))
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_linear_function_of_another_name_is_quantized():
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(Renamed(), float_layers=["qkv", "*_product"]), torch.randn(3, 4, 8)
    set_bits(model, Precision(2, 2, 2))
    expected = Attention.forward(model, x)  # which calls the layer itself
    torch.testing.assert_close(model(x), expected)


def test_queries_share_keys():
    class Grouped(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    torch.manual_seed(0)
    operands = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 6, 3), torch.randn(2, 2, 6, 3)
    expected = Grouped()(*operands)
    model = bitcycle.quantize_model(Grouped(), float_layers=[])
    assert 1e-5 < (model(*operands) - expected).norm() / expected.norm() < 0.03
    set_bits(model, FLOAT)
    torch.testing.assert_close(model(*operands), expected)


def test_products_of_attention_can_stay_float():
    model = bitcycle.quantize_model(Attention(), float_layers=["*_product"])
    assert {name for name, module in model.named_modules() if isinstance(module, QuantizedProduct)} == {"qkv", "out"}
    assert type(model) is Attention


class Nested(Attention):
    """Attention on the output of other attention."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x, mask=None):
        return super().forward(self.inner(x), mask)


def test_float_attention_within_quantized_attention_stays_float():
    """It once used the quantized products of the module that contains it."""
    torch.manual_seed(0)
    plain = Nested()
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=["inner"])
    set_bits(model, Precision(2, 2, 32))
    outputs, x = [], torch.randn(2, 4, 8)
    for network in (plain, model, pickle.loads(pickle.dumps(model))):
        network.inner.register_forward_hook(lambda _module, _inputs, y: outputs.append(y))
        network(x)
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


def test_attention_whose_forward_was_assigned_is_refused():
    """Its products stayed float."""
    model = nn.Sequential(Attention(), nn.Linear(8, 8))
    model[0].forward = model[0].forward
    with pytest.raises(SettingError, match=r"layer '0\..*its module.*keep it float"):
        bitcycle.quantize_model(model, float_layers=[])


class Reading(nn.Module):
    """As Swin v2: a function reads the weight and changes the bias."""

    def __init__(self):
        super().__init__()
        self.qkv, self.plain, self.free = nn.Linear(8, 6), nn.Linear(6, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        h = F.linear(x, self.qkv.weight, self.qkv.bias * 2)
        return F.linear(self.plain(h), self.free)


@pytest.mark.parametrize("quantizer", ["sbm", "mx", "uniform_l2"])
@pytest.mark.parametrize("compute", ["simulate", "codes"])
def test_a_function_that_reads_the_weight_of_a_layer(quantizer, compute):
    torch.manual_seed(0)
    x, model = torch.randn(5, 8), Reading()
    model = bitcycle.quantize_model(model, quantizer, float_layers=[], compute=compute)
    expected = copy.deepcopy(model.qkv)
    expected.bias.data *= 2
    expected, plain = (copy.deepcopy(layer) for layer in (expected, model.plain))
    torch.testing.assert_close(model(x), F.linear(plain(expected(x)), model.free))
    report = bitcycle.conversion_report(model, x)
    assert report.quantized_share == pytest.approx((48 + 24) / (48 + 24 + 12))


class Merged(nn.Module):
    """Computes with a weight of its own and reads that of its layer."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x):
        return self.base(x) + F.linear(x, self.b @ self.a) + self.base.weight.sum()


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize("parametrization", [weight_norm, spectral_norm, pruned])
def test_the_weight_of_a_parametrized_layer_is_not_taken_for_another(parametrization):
    """A product by another matrix was once that layer's, as both were temporary tensors; power iterations were added."""

    def built():
        torch.manual_seed(0)
        model = bitcycle.quantize_model(nn.Sequential(Merged()), float_layers=[])
        parametrization(model[0].base)
        return model

    model, plain, x = built(), built(), torch.randn(8, 6)
    plain[0].__class__ = Merged
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_a_product_is_not_quantized_twice():
    """In float, and once finalized, the layer multiplies by the parameter itself."""
    torch.manual_seed(0)
    model = bitcycle.quantize_model(Reading(), float_layers=[])
    model.qkv.precision.set(Precision(32, 8, 8))
    counted = []
    model.qkv.register_forward_hook(lambda *_: counted.append("qkv"))
    model.plain.register_forward_hook(lambda *_: counted.append("plain"))
    model(torch.randn(5, 8))
    assert counted == ["qkv", "plain"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", [Attention, Reading])
def test_copies_and_pickles(copied, kind):
    torch.manual_seed(0)
    model = bitcycle.quantize_model(kind(), float_layers=[])
    x = torch.randn(2, 4, 8)
    other = copied(model)
    assert isinstance(other, kind) and type(other) is type(model) and torch.equal(other(x), model(x))
    assert list(other.state_dict()) == list(model.state_dict())


def test_the_model_itself_is_converted_in_place():
    model = Attention()
    assert bitcycle.quantize_model(model) is model and type(model).__name__ == "Attention"


def test_gradients_are_quantized():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    found = []
    for bits in (2, 8):
        torch.manual_seed(1)
        model = bitcycle.quantize_model(Attention(), float_layers=["qkv", "out"])
        control = bitcycle.PrecisionController(
            model, bitcycle.schedule("static", q_max=8, gradient=bits, total_steps=1)
        )
        control.step(0)
        model(x).square().sum().backward()
        found.append(model.qkv.weight.grad)
    assert (found[0] - found[1]).norm() > 0.01 * found[1].norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Attention, Reading])
def test_a_compiled_model_computes_the_same(kind):
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(kind(), float_layers=[]), torch.randn(2, 4, 8)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model)(x), expected)


def test_swin_computes_its_linear_layers_by_functions():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4]}
    model = torchvision.models.SwinTransformer(
        **sizes, num_classes=5, block=torchvision.models.swin_transformer.SwinTransformerBlockV2
    )
    x = torch.randn(2, 3, 32, 32)
    expected = model.eval()(x)
    model = bitcycle.quantize_model(model, sample=x)
    assert bitcycle.conversion_report(model, x).quantized_share > 0.75
    assert 1e-5 < (model(x) - expected).norm() / expected.norm() < 0.05
    set_bits(model, FLOAT)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", [Attention, Reading])
def test_autocast_and_averages_of_weights(kind):
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(kind(), float_layers=[]), torch.randn(2, 4, 8)
    average = torch.optim.swa_utils.AveragedModel(model)
    expected = model(x)
    torch.testing.assert_close(average(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert (y - expected).norm() < 0.1 * expected.norm()
    y.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Checkpointed(nn.Module):
    """Recomputes a method, or a function within its forward."""

    def __init__(self, computes, recomputes, use_reentrant=False):
        super().__init__()
        self.inner, self.read = nn.Linear(8, 8), nn.Linear(8, 8)
        self.computes, self.recomputes, self.use_reentrant = computes, recomputes, use_reentrant

    def linear(self, x):
        return F.linear(F.relu(self.inner(x)), self.read.weight, self.read.bias)

    def attention(self, x):
        h = self.inner(x)
        return F.scaled_dot_product_attention(h, h.tanh(), self.read(x))

    def forward(self, x):
        function = getattr(self, self.computes, lambda x: F.linear(self.inner(x), self.read.weight))
        return checkpoint(function, x, use_reentrant=self.use_reentrant) if self.recomputes else function(x)


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("computes", ["linear", "attention"])
def test_a_method_is_redirected_when_it_is_recomputed(computes, use_reentrant, bits):
    """The recomputation in the backward pass was that of float products."""
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model, x = Checkpointed(computes, recomputes, use_reentrant), torch.randn(2, 4, 8, requires_grad=True)
        model = bitcycle.quantize_model(model, float_layers=[])
        bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=1)).step(0)
        model(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found)) and all(gradient.any() for gradient in found[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_function_that_cannot_be_redirected_again_is_refused(use_reentrant):
    model = bitcycle.quantize_model(Checkpointed("lambda", True, use_reentrant), float_layers=[])
    x = torch.randn(2, 4, 8, requires_grad=True)
    with pytest.raises(SettingError, match=r"model=Checkpointed: checkpoints a function.*checkpoint a method"):
        model(x)
    with torch.no_grad():
        expected = model(x)
    model.recomputes = False
    torch.testing.assert_close(model(x), expected)
