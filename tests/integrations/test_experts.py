"""Mixtures of experts of transformers."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F

import bitcycle
from bitcycle.layer import PrecisionState
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS
from bitcycle.settings import SettingError

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe", reason="experts have a registry from transformers 5 on")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
QWEN = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "head_dim": 8}


def mixtures():
    few = {"num_key_value_heads": 1}
    return {
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, **few, num_local_experts=4)
        ),
        "qwen2": lambda: transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **few, **QWEN)),
    }


def set_bits(model, bits):
    for state in {module for module in model.modules() if isinstance(module, PrecisionState)}:
        state.set(bits)


@pytest.mark.parametrize("name", mixtures())
def test_experts_are_quantized(name):
    """They were 69 % of the network's products, and stayed float."""
    torch.manual_seed(0)
    plain, x = mixtures()[name]().eval(), torch.randint(0, 50, (2, 7))
    model = bitcycle.quantize_model(copy.deepcopy(plain))
    report = bitcycle.conversion_report(model, x)
    assert report.quantized_share > 0.8
    assert {row.bits for row in report.rows if row.name.endswith(("up_product", "down_product"))} == {"8/8/8"}
    expected = plain(x).logits
    assert 1e-5 < (model(x).logits - expected).norm() / expected.norm() < 0.1
    set_bits(model, Precision(32, 32, 32))
    torch.testing.assert_close(model(x).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("quantizer", ["sbm", "mx", "uniform_l2"])
def test_a_step_of_training_counts_their_cost(quantizer):
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(mixtures()["mixtral"](), quantizer), torch.randint(0, 50, (2, 7))
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, gradient=32, total_steps=2))
    control.step(0)
    model(input_ids=x, labels=x).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    operations = control.meter.workload.operations
    experts = sum(o.macs for o in operations if "experts" in o.name and not o.is_float)
    assert experts == 2 * 2 * (2 * 7) * 16 * 32 * 3  # layers, experts of a token, tokens, three products of 16 x 32
    assert not any(operation.kind == "unknown" for operation in operations)


@pytest.mark.parametrize("quantizer", ["sbm", "mx", "fp8", "multibit"])
def test_a_batch_without_tokens(quantizer):
    """As where a mixture of experts drops all tokens of a batch; it ended with an error of torch.cat."""
    model = bitcycle.quantize_model(mixtures()["mixtral"](), quantizer)
    (experts, *_) = (module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    x = torch.zeros(0, 16, requires_grad=True)
    y = experts(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    assert y.shape == (0, 16)
    y.sum().backward()
    assert x.grad.shape == (0, 16) and all(not p.grad.any() for p in experts.parameters() if p.grad is not None)


def affine(x, bits, dims):
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return ((x - low) / scale).round() * scale + low


@pytest.mark.parametrize("bits", [3, 8])
def test_the_numbers_are_those_of_single_experts(bits):
    """Each expert written down again as two linear layers."""
    torch.manual_seed(0)
    model = bitcycle.quantize_model(mixtures()["mixtral"]().double())
    set_bits(model, Precision(bits, bits, bits))
    experts = model.model.layers[0].mlp.experts
    x, chosen = torch.randn(9, 16).double(), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    shares = torch.rand(9, 2).double()
    hidden, expected = {}, torch.zeros(9, 16).double()
    rows = affine(x, bits, (0, 1))
    for token, k in [(token, k) for token in range(9) for k in range(2)]:
        gate, up = F.linear(rows[token], affine(experts.gate_up_proj[chosen[token, k]], bits, 1)).chunk(2)
        hidden[token, k] = F.silu(gate) * up
    every = affine(torch.stack(list(hidden.values())), bits, (0, 1))
    for row, (token, k) in zip(every, hidden):
        expected[token] += shares[token, k] * F.linear(row, affine(experts.down_proj[chosen[token, k]], bits, 1))
    torch.testing.assert_close(experts(x, chosen, shares), expected, rtol=1e-5, atol=1e-6)


def test_versions_that_do_not_say_where_experts_are(monkeypatch):
    """transformers 5.17 lacks the attribute, and numbers the experts of other processes like one more."""
    experts = bitcycle.quantize_model(mixtures()["mixtral"]()).model.layers[0].mlp.experts
    found = inspect.getattr_static(experts, "_is_expert_parallel", None)
    if "_is_expert_parallel" in vars(experts):
        del experts._is_expert_parallel
    elif found is not None:
        owner = next(kind for kind in type(experts).__mro__ if "_is_expert_parallel" in vars(kind))
        monkeypatch.delattr(owner, "_is_expert_parallel")
    assert not hasattr(experts, "_is_expert_parallel")
    x, chosen, shares = torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [0, 3]]), torch.rand(3, 2)
    assert experts(x, chosen, shares).isfinite().all()
    with pytest.raises(SettingError, match="experts in other processes"):
        experts(x, torch.where(chosen == 3, 4, chosen), shares)


def test_transposed_weights_with_biases():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, **GPT_OSS)
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    config._experts_implementation = "eager"
    x, chosen, shares = torch.randn(9, 16), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected = experts(x, chosen, shares)
    model = bitcycle.quantize_model(torch.nn.ModuleList([experts]), float_layers=[])
    y = model[0](x, chosen, shares)
    assert 1e-5 < (y - expected).norm() / expected.norm() < 0.03
    set_bits(model, Precision(32, 32, 32))
    torch.testing.assert_close(model[0](x, chosen, shares), expected, atol=1e-4, rtol=1e-4)


def gradients_of_experts(build, quantizer=None):
    """The gradients of experts with 18 pairs of tokens and experts, in float or in float bits."""
    torch.manual_seed(0)
    experts, config = build()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    config._experts_implementation = "eager"
    x, chosen, shares = torch.randn(9, 16), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    if quantizer is not None:
        experts = bitcycle.quantize_model(torch.nn.ModuleList([experts]), quantizer, float_layers=[])[0]
        set_bits(experts, Precision(32, 32, 32))
    experts(x, chosen, shares).square().sum().backward()
    return {name: parameter.grad for name, parameter in experts.named_parameters()}


def gpt_oss():
    config = transformers.GptOssConfig(**SIZES, **GPT_OSS)
    return transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config), config


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4)
    return transformers.models.mixtral.modeling_mixtral.MixtralExperts(config), config


def test_gradients_of_biases_in_blocks_are_those_of_their_expert():
    """Rows were dealt out to the biases in turn, whatever their expert; other numbers of rows ended in an error."""
    expected = gradients_of_experts(gpt_oss)
    assert "down_proj_bias" in expected
    torch.testing.assert_close(gradients_of_experts(gpt_oss, "mx"), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("build", [mixtral, gpt_oss])
def test_rotations_of_the_tokens_do_not_cross_experts(build):
    """A tile with tokens of two experts mixed their weight gradients, which no rotation of the other operand undid."""
    options = QUANTIZERS["nvfp4"](hadamard=["wgrad"])
    expected = gradients_of_experts(build)
    torch.testing.assert_close(gradients_of_experts(build, options), expected, rtol=1e-4, atol=1e-3)


def test_saved_and_restored(tmp_path):
    import bitcycle.integrations.transformers

    torch.manual_seed(0)
    x = torch.randint(0, 50, (2, 7))
    model = bitcycle.quantize_model(mixtures()["mixtral"](), layer_bits={"*.down_product": 6})
    model(x)
    model.eval().save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(found(x).logits, model(x).logits)
    float_keys = set(mixtures()["mixtral"]().state_dict())
    assert set(bitcycle.float_state_dict(model)) == float_keys
    bitcycle.finalize(model, bits=4, path=tmp_path / "integers.safetensors")
    final = bitcycle.load_finalized(copy.deepcopy(model), tmp_path / "integers.safetensors")
    set_bits(model, Precision(6, 6, 32))
    assert len(final.model.layers[0].mlp.experts.gate_up_proj[0, 0].unique()) <= 16
