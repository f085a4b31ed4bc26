"""Layers of DGL and models of transformers."""

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer import QuantizedProduct
from bitcycle.precision import Precision

FLOAT = Precision(32, 32, 32)


def test_graph_convolutions_of_dgl():
    dgl = pytest.importorskip("dgl", reason="dgl ends with Python 3.11")
    from dgl.nn.pytorch import GraphConv, SAGEConv

    graph = dgl.add_self_loop(dgl.rand_graph(6, 20))
    for sizes in ((5, 3), (3, 5)):
        for layer in (GraphConv(*sizes), GraphConv(*sizes, norm="right", bias=False), SAGEConv(*sizes, "mean")):
            x = torch.randn(6, sizes[0])
            expected = layer(graph, x)
            model = bitcycle.quantize_model(nn.ModuleDict({"layer": layer}), float_layers=[])
            products = [module for module in model.modules() if isinstance(module, QuantizedProduct)]
            assert len(products) == (2 if isinstance(layer, SAGEConv) else 1)
            for product in products:
                product.precision.set(FLOAT)
            torch.testing.assert_close(model["layer"](graph, x), expected)


@pytest.mark.parametrize("with_sample", [True, False])
def test_a_network_of_dgl_has_one_first_and_one_last_layer(with_sample, caplog):
    """Every layer read the graph and was taken for the first, and a sample ended the process: DGL reads the memory of tensors."""
    dgl = pytest.importorskip("dgl", reason="dgl ends with Python 3.11")
    from dgl.nn.pytorch import GraphConv

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([GraphConv(5, 8), GraphConv(8, 8), GraphConv(8, 3)])

        def forward(self, graph, x):
            for layer in self.layers[:-1]:
                x = layer(graph, x).relu()
            return self.layers[-1](graph, x)

    graph, x = dgl.add_self_loop(dgl.rand_graph(6, 20)), torch.randn(6, 5)
    model = bitcycle.quantize_model(Network(), sample=(graph, x) if with_sample else None)
    assert [isinstance(layer, QuantizedProduct) for layer in model.layers] == [False, True, False]
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=3, q_max=8, cycles=1, total_steps=2))
    control.step(0)
    model(graph, x).sum().backward()
    assert control.cost().gbitops > 0 and "computed by functions" not in caplog.text


def test_a_graph_convolution_without_a_weight_is_no_layer():
    """It was converted, and its first call ended with an AttributeError."""
    dgl = pytest.importorskip("dgl", reason="dgl ends with Python 3.11")
    from dgl.nn.pytorch import GraphConv

    layers = [GraphConv(5, 8), GraphConv(8, 8, weight=False, bias=False)]
    model = bitcycle.quantize_model(nn.ModuleList(layers), float_layers=[])
    assert [isinstance(layer, QuantizedProduct) for layer in model] == [True, False]
    graph, x = dgl.add_self_loop(dgl.rand_graph(6, 20)), torch.randn(6, 5)
    assert model[1](graph, model[0](graph, x)).shape == (6, 8)


def test_a_network_that_holds_its_graph_takes_a_sample():
    dgl = pytest.importorskip("dgl", reason="dgl ends with Python 3.11")

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = dgl.add_self_loop(dgl.rand_graph(6, 20))
            self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                self.graph.ndata["h"] = x
                self.graph.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "h"))
                x = self.graph.ndata.pop("h")
            return x

    model = bitcycle.quantize_model(Network(), sample=torch.randn(6, 5))
    assert [isinstance(layer, QuantizedProduct) for layer in model.layers] == [False, True, False]


@pytest.mark.parametrize("bits", [32, 4])
def test_convolutions_of_timm_with_the_padding_of_tensorflow(bits):
    """The strided convolutions of the tf_ networks stayed float. Zeros of the padding are exact: they are not quantized."""
    layers = pytest.importorskip("timm.layers.conv2d_same")
    layer, x = layers.Conv2dSame(4, 6, 3, stride=2), torch.randn(2, 4, 8, 7)
    expected = layer(x)
    quantized = bitcycle.quantize_model(nn.Sequential(layer), float_layers=[])[0].eval()
    quantized.precision.set(Precision(bits, bits, bits))
    y = quantized(x)
    if bits < 32:
        operands = quantized.quantized_operands(x, quantized.call_key())
        padded = nn.functional.pad(operands[0], (1, 1, 0, 1))  # TensorFlow's for 8 x 7 and a stride of 2
        expected = nn.functional.conv2d(padded, operands[1], layer.bias, stride=2)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    "name", ["tf_mobilenetv3_small_minimal_100", "nf_resnet26", "eca_nfnet_l0", "resnetv2_50x1_bit"]
)
def test_a_network_of_timm_has_no_float_layers_within(name, caplog):
    """Standardized convolutions stayed float."""
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=3)
    bitcycle.quantize_model(model, sample=torch.randn(1, 3, 32, 32))
    assert "no quantized counterpart" not in caplog.text


def tiny_transformers() -> dict[str, tuple]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    tokens = {"input_ids": torch.randint(0, 50, (2, 7))}
    labelled = {**tokens, "labels": tokens["input_ids"]}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    vit = {**sizes, "image_size": 16, "patch_size": 8, "num_labels": 3}
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(vocab_size=50, **sizes), labelled),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**gpt2), labelled),
        "llama": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **sizes),
            labelled,
        ),
        "t5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(**t5, decoder_start_token_id=0, pad_token_id=0),
            labelled,
        ),
        "vit": (transformers.ViTForImageClassification, transformers.ViTConfig(**vit), images),
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_transformers_are_converted_with_their_attention(name):
    kind, config, batch = tiny_transformers()[name]
    torch.manual_seed(0)
    plain = kind(config).eval()
    model = bitcycle.quantize_model(copy.deepcopy(plain))
    rules = {rule.name: rule for rule in model.conversion_rules}
    blocks = {rule.treatment for found, rule in rules.items() if found.endswith(("query", "q_proj", "c_attn", ".q"))}
    assert blocks <= {"quantized"}  # an embedding, or a convolution, is the first layer
    assert any(found.endswith("score_product") for found in rules)
    state = next(module for module in model.modules() if isinstance(module, bitcycle.layer.PrecisionState))
    expected = plain(**batch).logits
    state.set(FLOAT)
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-4)
    state.set(Precision(8, 8, 8))
    error = (model(**batch).logits - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1
    model.train()(**batch).loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_execution_order_of_experts_is_found_with_values(capfd):
    """Their grouped products need values: with a sample conversion failed, and without one it printed a traceback."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=4, **sizes)
    for sample in ({"input_ids": torch.randint(0, 50, (2, 7))}, None):
        model = bitcycle.quantize_model(transformers.MixtralForCausalLM(config), sample=sample)
        assert {rule.name for rule in model.conversion_rules if "last" in rule.roles} == {"lm_head"}
    assert "Traceback" not in capfd.readouterr().err
