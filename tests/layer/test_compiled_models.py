"""Converted networks under torch.compile, torch.export and autocast, and tracers and transforms that are refused."""

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.quantizer import QUANTIZERS
from bitcycle.settings import SettingError


@pytest.mark.parametrize("tracer", [lambda m, x: torch.jit.trace(m, x), lambda m, _: torch.fx.symbolic_trace(m)])
@pytest.mark.parametrize("layer", [nn.Linear(2, 3), nn.LSTM(2, 3), nn.Conv1d(2, 3, 1)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_that_freeze_bits_are_refused_by_name(tracer, layer):
    """Findings on networks of others, line 11."""
    model = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(layer)), float_layers=[])
    with pytest.raises(SettingError, match=r"torch\..*trace.*torch.export"):
        tracer(model, torch.randn(1, 2, 2))


def counting_backend(graphs: list):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize("order", ["compile last", "compile first", "eager step first", "wrapper"])
def test_whole_models_compile_once_for_all_bits(order):
    """Findings on networks of others, line 10."""
    torch._dynamo.reset()

    def build():
        torch.manual_seed(0)
        return bitcycle.quantize_model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), float_layers=[])

    schedule = bitcycle.schedule("LR", q_min=3, q_max=8, cycles=1, total_steps=11)
    graphs: list = []
    model, x = build(), torch.randn(5, 6)
    if order == "compile first":
        compiled = torch.compile(model, backend=counting_backend(graphs))
        control = bitcycle.PrecisionController(model, schedule)
    elif order == "wrapper":
        compiled = torch.compile(model, backend=counting_backend(graphs), fullgraph=True)
        control = bitcycle.PrecisionController(compiled, schedule)
    else:
        control = bitcycle.PrecisionController(model, schedule)
        if order == "eager step first":
            control.step(0)
            model(x)
        compiled = torch.compile(model, backend=counting_backend(graphs))
    eager = build()
    eager_control = bitcycle.PrecisionController(eager, schedule)
    bits, first = set(), 0
    for step in range(11):
        found = []
        for network, controller, call in ((model, control, compiled), (eager, eager_control, eager)):
            bits.add(controller.step(step))
            network.zero_grad()
            y = call(x)
            y.square().sum().backward()
            found.append((y, network[0].weight.grad.clone()))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        first = first or len(graphs)
        assert len(graphs) == first <= 2  # PyTorch 2.11 compiles each layer by itself
    assert len(bits) == 6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("quantizer", ["sbm", "mx"])
def test_calls_of_one_step_have_their_own_noise_in_compiled_models(quantizer, backend):
    """The backward pass computed the number of a call again from the count, which had changed by then."""
    torch._dynamo.reset()

    def gradients(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        model = bitcycle.quantize_model(nn.Sequential(*layers), quantizer, float_layers=[])
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=6, total_steps=2))
        call, found = torch.compile(model, backend=backend) if compiles else model, []
        for step in range(2):
            control.step(step)
            for _ in range(3):
                model.zero_grad()
                call(torch.randn(5, 6)).square().sum().backward()
                found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_export_in_evaluation_is_kept():
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), float_layers=[])
    x = torch.randn(5, 6)
    model(x)
    model.eval()
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("quantizer", ["sbm", "dorefa", "uniform_l2"])
def test_export_of_a_network_that_never_ran_is_refused(quantizer):
    """Its output was a constant, or that of steps of 1."""

    def build():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        return bitcycle.quantize_model(nn.Sequential(*layers), quantizer, float_layers=[]).eval()

    trained, model, x = build(), build(), torch.randn(5, 6)
    with pytest.raises(SettingError, match=r"layer '0' has no range to export.*run it on a batch"):
        torch.export.export(model, (x,))
    model(x)  # what the message recommends
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    trained.train()(x)
    loaded = build()
    loaded.load_state_dict(trained.state_dict())
    if quantizer != "sbm":  # that the inputs of a layer are unsigned is not saved
        loaded(x)
    expected = trained.eval()(x)
    torch.testing.assert_close(torch.export.export(loaded, (x,)).module()(x), expected)


@pytest.mark.parametrize("quantizer", sorted(QUANTIZERS.keys() - {"none", "pact_binary"}))
def test_autocast_changes_gradients_by_the_rounding_of_bfloat16_at_most(quantizer):
    def gradients(autocast: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layers = nn.Unflatten(1, (6, 4)), nn.Conv1d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)
        model = bitcycle.quantize_model(nn.Sequential(*layers), quantizer, float_layers=[])
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradients(False)
    assert (gradients(True) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_of_torch_func_are_refused_with_a_remedy(transform):
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), float_layers=[])
    with pytest.raises(SettingError, match=r"model=torch\.func: .*use backward"):
        transform(lambda x: model(x).sum())(torch.randn(5, 6))
    assert torch.autograd.functional.jacobian(lambda x: model(x).sum(0), torch.randn(5, 6)).any()
