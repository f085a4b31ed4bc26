"""Attention that a module computes by matmul, bmm, `@` or einsum."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitcycle
from bitcycle.layer import MatrixProduct, PrecisionState, QuantizedProduct
from bitcycle.layer.conversion.by_matmul import operands_of
from bitcycle.precision import Precision

FLOAT = Precision(32, 32, 32)


class Attention(nn.Module):
    """With modules for its products, as the remedy of the warning says."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def parts(self, x):
        return (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))

    def forward(self, x):
        q, k, v = self.parts(x)
        return self.out(self.mixed(q * q.shape[-1] ** -0.5, k, v).transpose(1, 2).flatten(2))


class WithModules(Attention):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.score_product, self.value_product = MatrixProduct(), MatrixProduct()

    def mixed(self, q, k, v):
        return self.value_product(self.score_product(q, k.transpose(-2, -1)).softmax(-1), v)


class WithOperator(Attention):
    """As in nanoGPT."""

    def mixed(self, q, k, v):
        return F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


class WithMatmul(Attention):
    """As in vit-pytorch, with a module for the softmax."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.attend = nn.Softmax(dim=-1)

    def mixed(self, q, k, v):
        return torch.matmul(self.attend(torch.matmul(q, k.transpose(-1, -2))), v)


class WithEinsum(Attention):
    def mixed(self, q, k, v):
        return torch.einsum("bhij, bhjd -> bhid", torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1), v)


class WithBmm(Attention):
    def mixed(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.bmm(q.bmm(k.transpose(1, 2)).softmax(-1), v).unflatten(0, (-1, self.heads))


class WithSum(Attention):
    """As in Bloom: the product is added to something, and arguments have names."""

    def mixed(self, q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = q.new_zeros(1, 1, 1).baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=0.5, alpha=2) / 2
        return torch.bmm(scores.softmax(-1), mat2=v).unflatten(0, (-1, self.heads))


class WithFunction(Attention):
    """As torchvision's windows."""

    def mixed(self, q, k, v):
        return attend(q, k, v)


class WithMethods(Attention):
    """Weights and their product with values in methods of their own."""

    def weights(self, q, k):
        return (q @ k.transpose(-2, -1)).softmax(-1)

    def mixture(self, weights, v):
        return weights @ v

    def mixed(self, q, k, v):
        return self.mixture(self.weights(q, k), v)


class WithSpecial(Attention):
    def mixed(self, q, k, v):
        return torch.special.softmax(q @ k.transpose(-2, -1), -1) @ v


class Masked(nn.Module):
    def forward(self, scores):
        return F.softmax(scores.masked_fill(torch.zeros_like(scores, dtype=torch.bool), -torch.inf), -1)


class WithSoftmax(Attention):
    """With a module of its own for a masked softmax."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.normalized, self.dropout = Masked(), nn.Dropout(0)

    def mixed(self, q, k, v):
        return self.dropout(self.normalized(q @ k.transpose(-2, -1))) @ v


def attend(q, k, v):
    return q.matmul(k.transpose(-2, -1)).softmax(-1).matmul(v)


KINDS = (WithOperator, WithMatmul, WithEinsum, WithFunction, WithBmm, WithSum, WithMethods, WithSpecial, WithSoftmax)


def network(kind, container=nn.Sequential, **options):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), kind(), nn.ReLU(), kind(), nn.Linear(8, 3)
    return bitcycle.quantize_model(container(*layers), **{"sample": torch.zeros(2, 5, 4), **options})


def trained(model, x, bits, **precision):
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=2, **precision))
    for step in range(2):
        control.step(step)
        y = model(x)
        (100 * y.square().mean()).backward()
    return [y, *(parameter.grad for parameter in model.parameters())], control.cost()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("quantizer", "bits"), [("sbm", 3), ("sbm", 8), ("dorefa", 4), ("mx", 8)])
def test_products_are_those_of_modules(kind, quantizer, bits):
    """They stayed float: with the same bits, names and noise, outputs, gradients and costs are those of `MatrixProduct`."""
    x = torch.randn(2, 5, 4)
    expected, cost = trained(network(WithModules, quantizer=quantizer), x, bits)
    found, own = trained(network(kind, quantizer=quantizer), x, bits)
    if kind in (WithBmm, WithSum):  # whose gradients have one range for each head of each sample
        assert (found[0] - expected[0]).norm() < 0.02 * expected[0].norm()
    else:
        torch.testing.assert_close(found, expected)
    assert own.gbitops == cost.gbitops and own.relative_to_static == 1


@pytest.mark.parametrize("kind", KINDS)
def test_with_float_bits_nothing_changes(kind):
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(2, 5, 8)
    model = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(plain)), float_layers=[])
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for state in {module for module in copied.modules() if isinstance(module, PrecisionState)}:
            state.set(FLOAT)
        torch.testing.assert_close(copied(x), plain(x))
    assert set(bitcycle.layer.float_state_dict(model)) == {f"0.{name}" for name in plain.state_dict()}


class WithGenerator(Attention):
    """Whose forward PyTorch's compiler skips: the generator unpacks within the method itself."""

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        return self.out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class WithBreak(WithOperator):
    def mixed(self, q, k, v):
        for _ in range(2):
            torch._dynamo.graph_break()
            q = (q @ k.mT / 2).softmax(-1) @ v
        return q


class Registered(nn.Module):
    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key):
        Registered.known[key] = cls


class WithKey(Registered, WithOperator, key="own"):
    pass


def test_a_hook_of_subclasses_does_not_see_the_classes_of_conversion():
    """It raised a TypeError after half of the conversion, or its registry got an internal class."""
    model = network(WithKey)
    assert isinstance(model[1], WithKey) and Registered.known == {"own": WithKey}


@pytest.mark.parametrize("kind", [WithOperator, WithEinsum, WithGenerator, WithBreak, WithSoftmax])
def test_a_compiled_model_computes_the_same(kind):
    torch._dynamo.reset()
    model, x = network(kind).eval(), torch.randn(2, 5, 4)
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=1)).step(0)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


class Recomputed(nn.Sequential):
    use_reentrant = False

    def forward(self, x):
        h = checkpoint(self[1], self[0](x), use_reentrant=self.use_reentrant)
        return self[4](self[3](self[2](h)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_number(use_reentrant, monkeypatch):
    monkeypatch.setattr(Recomputed, "use_reentrant", use_reentrant)
    x = torch.randn(2, 5, 4)
    found, _ = trained(network(WithOperator, container=Recomputed), x, 4)
    torch.testing.assert_close(found, trained(network(WithOperator), x, 4)[0])


class Twice(Attention):
    """Two attentions in one method, whose scores are both computed first, as in differential transformers."""

    def forward(self, x):
        q, k, v = self.parts(x)
        first, second = ((part @ k.transpose(-2, -1)).softmax(-1) for part in (q, -q))
        return self.out((first @ v - 0.5 * second @ v).transpose(1, 2).flatten(2))


class TwiceWithModules(WithModules):
    def forward(self, x):
        q, k, v = self.parts(x)
        first, second = (self.score_product(part, k.transpose(-2, -1)).softmax(-1) for part in (q, -q))
        mixed = self.value_product(first, v) - self.value_product(0.5 * second, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("kind", "modules"), [(Twice, TwiceWithModules), (WithSoftmax, WithModules)])
@pytest.mark.parametrize("options", [{"layer_bits": {"*.value_product": 2}}, {"quantizer": "uniform_l2"}])
def test_a_product_with_weights_is_known_by_its_operand(kind, modules, options):
    """That of the second scores had the bits and steps of a product with weights, as a softmax came before it."""
    x = torch.randn(2, 5, 4)
    found, _ = trained(network(kind, **options), x, 8, gradient=32)
    torch.testing.assert_close(found, trained(network(modules, **options), x, 8, gradient=32)[0])


def test_one_of_the_products_can_stay_float():
    x, names = torch.randn(2, 5, 4), ["first", "last", "*.value_product"]
    found, _ = trained(network(WithOperator, float_layers=names), x, 3)
    torch.testing.assert_close(found, trained(network(WithModules, float_layers=names), x, 3)[0])


class Around(nn.Module):
    """Names softmax and a product, and contains attention whose products stay float."""

    def __init__(self):
        super().__init__()
        self.inner, self.heads = WithOperator(), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = self.inner(x)
        return (h @ x.transpose(1, 2)).softmax(-1) @ self.heads(h, h, h, need_weights=False)[0]


class AroundWithModules(Around):
    def __init__(self):
        super().__init__()
        self.score_product, self.value_product = MatrixProduct(), MatrixProduct()

    def forward(self, x):
        h = self.inner(x)
        weights = self.score_product(h, x.transpose(1, 2)).softmax(-1)
        return self.value_product(weights, self.heads(h, h, h, need_weights=False)[0])


@pytest.mark.parametrize("names", [["first", "last"], ["first", "last", "*.inner.*_product"]])
def test_products_of_parts_are_their_own(names):
    """Neither quantized twice, nor by the module around them."""
    x = torch.randn(2, 5, 4)
    found, cost = trained(network(Around, float_layers=names), x, 4)
    expected, of_modules = trained(network(AroundWithModules, float_layers=names), x, 4)
    torch.testing.assert_close(found, expected)
    assert cost.gbitops == of_modules.gbitops


class WithoutSamples(nn.Module):
    """Attention of all rows of a matrix to each other, as in dense graphs."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.T).softmax(-1) @ v


def test_products_of_matrices_without_samples_are_said_to_stay_float():
    """The report spoke of functions that read weights, of which a product has none."""
    model = bitcycle.quantize_model(WithoutSamples(), float_layers=[])
    rows = {row.name: row for row in bitcycle.conversion_report(model, torch.randn(5, 4)).rows}
    assert rows["score_product"].bits == "float" and "fewer than three dimensions" in rows["score_product"].reason


class WithWeights(nn.Module):
    """Products with weights, which are no activations."""

    def __init__(self):
        super().__init__()
        self.weights, self.layer = nn.Parameter(torch.randn(2, 4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x) @ self.weights
        return (h @ self.weights.transpose(1, 2)).softmax(-1) @ self.layer.weight.expand(2, 4, 4)


def test_products_with_weights_stay_as_they_are():
    torch.manual_seed(0)
    x, plain = torch.randn(2, 5, 4), WithWeights()
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[], layer_bits={"layer": 32})
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=3, total_steps=1)).step(0)
    torch.testing.assert_close(model(x), plain(x))


def test_without_a_softmax_or_without_a_product_there_is_no_attention():
    class Gram(nn.Linear):
        def forward(self, x):
            return x @ x.transpose(1, 2)

    class Classifier(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    for kind in (Gram, Classifier):
        model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4), kind(4, 4)), float_layers=[])
        assert not [module for module in model.modules() if isinstance(module, MatrixProduct)]
        assert [module for module in model.modules() if isinstance(module, QuantizedProduct)]


EINSUMS = (
    "bid,bjd->bij",
    "bhid,bhjd->bhij",
    "bihd,bjhd->bhij",
    "bhij,bjhd->bihd",
    "ibnd,jbnd->bnij",
    "B I D, B D J -> J I B",
)
OTHERS = (
    "bhwc,hkc->bhwk",
    "bijc,bkc->bkij",
    "bid,bjd",
    "bid,bjd->bd",
    "...id,...jd->...ij",
    "bii,bij->bj",
    "bid,cjd->bcij",
    "bid,bid->bi",
    "bi,bj->bij",
)


@pytest.mark.parametrize("equation", EINSUMS + OTHERS)
def test_an_einsum_is_a_product_of_matrices(equation):
    """Also in float64, exactly the sums of torch.einsum up to their order; None for what is no batched product."""
    torch.manual_seed(0)
    words = equation.replace(" ", "").partition("->")[0].split(",")
    sizes = {letter: 2 + number for number, letter in enumerate(sorted({"b", *"".join(words)} - {"."}))}
    a, b = (torch.randn([sizes[letter] for letter in word.replace("...", "b")], dtype=torch.float64) for word in words)
    found = operands_of(torch.einsum, (equation, a, b), {})
    assert (found is None) == (equation in OTHERS)
    if found is not None:
        torch.testing.assert_close(found.result(found.a @ found.b), torch.einsum(equation, a, b))
        assert torch.equal(found.plain(), torch.einsum(equation, a, b))


@pytest.mark.parametrize("factors", [{}, {"alpha": 0.5}, {"beta": 0, "alpha": 2}, {"beta": 3}])
def test_a_product_that_is_added(factors):
    x, a, b = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    found = operands_of(torch.baddbmm, (x, a, b), factors)
    torch.testing.assert_close(found.result(found.a @ found.b), torch.baddbmm(x, a, b, **factors))
    torch.testing.assert_close(found.plain(), torch.baddbmm(x, a, b, **factors))
    assert operands_of(torch.bmm, (a,), {"mat2": b, "out": x}) is None


def test_a_dimension_of_one_that_einsum_repeats_is_no_product_of_matrices():
    assert operands_of(torch.einsum, ("bid,bjd->bij", torch.ones(1, 3, 4), torch.ones(2, 5, 4)), {}) is None
