"""Recorded training steps, on a CPU with a stand-in for CUDA graphs that keeps their tensors and repeats the computation.

A CUDA graph keeps addresses and the numbers that were in Python when it was recorded. The stand-in refuses a replay after either
has changed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.quantizer import TensorQuantizer
from bitcycle.training import loop
from bitcycle.training.cuda_graphs import StepGraphs, can_record
from bitcycle.training.run import execute


class Repeated:
    """A graph that computes again and writes into the tensors that a recording has made, as a CUDA graph does."""

    def __init__(self, passes: Any, graphs: StepGraphs) -> None:
        self.passes, self.parameters, self.graphs = passes, graphs.parameters, graphs
        self.constants = constants(graphs.model)
        self.outputs = tuple(output.detach().clone() for output in self._without_traces(graphs))
        self.gradients = [parameter.grad for parameter in self.parameters]

    def _without_traces(self, graphs: StepGraphs) -> Any:
        """Recording runs nothing: it changes no tensor of the model."""
        model = graphs.model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        outputs = self.passes()
        model.load_state_dict(before)
        for product in graphs.products:
            product.precision.calls.clear()
        return outputs

    def replay(self) -> None:
        assert constants(self.graphs.model) == self.constants, "a graph would compute with what was there before"
        for parameter in self.parameters:
            parameter.grad = None
        with torch.no_grad():
            for mine, found in zip(self.outputs, self._computed(), strict=True):
                mine.copy_(found)
            for parameter, mine in zip(self.parameters, self.gradients, strict=True):
                if mine is not None:
                    mine.copy_(parameter.grad)
                parameter.grad = mine

    def _computed(self) -> Any:
        with torch.enable_grad():
            return [output.detach() for output in self.passes()]


def constants(model: Any) -> dict[str, Any]:
    """What a graph of a model's steps holds for good: addresses, bits, and numbers of its quantizers."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedProduct):
            found[f"{name}: bits"] = module.precision.precision
        kept = (*module._parameters, *module._buffers, *getattr(module, "held", ()))
        found |= {f"{name}.{key}": x.data_ptr() for key in kept if (x := getattr(module, key)) is not None}
        if isinstance(module, TensorQuantizer):
            numbers = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float))}
            found |= {f"{name}.{key}": value for key, value in numbers.items()}
    return found


def repeated(passes: Any, graphs: StepGraphs) -> Any:
    graph = Repeated(passes, graphs)
    return graph, graph.outputs


@pytest.fixture
def record_from_now_on(monkeypatch):
    """Makes trainers record their steps: `expected` runs come before."""

    def begin(record: Any) -> None:
        def recorder(model: Any, is_used: bool) -> StepGraphs:
            graphs = StepGraphs(model, True, record)
            graphs.model = model
            return graphs

        monkeypatch.setattr(loop, "StepGraphs", recorder)
        monkeypatch.setattr(StepGraphs, "replays", 0)
        monkeypatch.setattr(StepGraphs, "wait", 1)

    return begin


RUNS = {
    "static": ["schedule=static"],
    "a cycle": ["schedule=RTH", "schedule.cycles=4", "schedule.q_min=4"],
    "phases": [
        "schedule=hlhlp",
        "quantizer=uniform_l2",
        "schedule.candidates=2",
        "schedule.alpha=0.1",
        "schedule.later_length=1",
    ],
    "penalties": ["schedule=partial_pretrain", "model=resnet8_extra_skip", "quantizer=pact_binary"],
    "feedback": ["schedule=pfq", "schedule.epoch_steps=2", "schedule.epsilon=0.5", "schedule.alpha=1"],
    "adapting": [
        "schedule=RTH",
        "schedule.cycles=2",
        "quantizer=uniform_l2",
        "schedule.q_min=2",
        "schedule.q_max=3",
        "schedule.gradient_min=32",
    ],
    "clipping": ["schedule=static", "training.clip_norm=0.1"],
}


@pytest.mark.parametrize("name", RUNS)
def test_recorded_steps_change_nothing(name, digits, finished_digits, record_from_now_on):
    run = [*RUNS[name], "training.steps=24", "training.evaluation_steps=8", "training.log_steps=1"]
    expected, found = finished_digits(*run).folder, digits(*run)
    assert not StepGraphs.replays
    record_from_now_on(repeated)
    execute(found)
    assert StepGraphs.replays > (3 if name in ("a cycle", "adapting") else 8)
    assert found.folder.metrics.read_bytes() == expected.metrics.read_bytes()
    states = [folder.checkpoint.load()["model"] for folder in (found.folder, expected)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_step_that_cannot_be_recorded_is_computed_from_its_beginning(
    digits, finished_digits, record_from_now_on, caplog
):
    def refuse(passes: Any, graphs: StepGraphs) -> Any:
        before = {name: value.clone() for name, value in graphs.model.state_dict().items()}
        passes()
        graphs.model.load_state_dict(before)  # recording runs nothing; gradients and counted calls are there
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        except RuntimeError:
            raise RuntimeError("capture failed due to a previous error")  # noqa: B904  as PyTorch does

    run = ["schedule=static", "training.steps=12", "training.evaluation_steps=6", "training.log_steps=1"]
    expected, found = finished_digits(*run).folder, digits(*run)
    record_from_now_on(refuse)
    execute(found)
    assert "cannot be recorded as a CUDA graph, and takes longer without one: operation not permitted" in caplog.text
    assert found.folder.metrics.read_bytes() == expected.metrics.read_bytes()
    states = [folder.checkpoint.load()["model"] for folder in (found.folder, expected)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_nothing_is_recorded_before_it_pays(digits):
    """Recording takes as long as some steps: where bits change after fewer and quantizers adapt to each, it would cost time."""
    recorded: list[int] = []

    def record(passes: Any, graphs: StepGraphs) -> Any:
        recorded.append(sum(graphs.met.values()))
        raise RuntimeError("enough")

    graphs = StepGraphs(digits("schedule=static").build_model(), True, record)
    for product in graphs.products:
        product.adapted = True
    for step in range(40):
        graphs.compute(step % 2, torch.zeros(1), lambda batch: ())
    assert recorded == [2 * StepGraphs.wait]


def test_a_request_that_cannot_be_met_says_why(digits, caplog):
    assert not can_record(digits("schedule=static", "training.cuda_graphs=true"), torch.device("cpu"))
    assert "training.cuda_graphs=true records nothing: the device is cpu; use training.device=cuda" in caplog.text


def test_graphs_that_are_forgotten_leave_their_memory_alone(digits):
    """PyTorch refuses to record into the pool of graphs that are gone."""
    graphs = StepGraphs(digits("schedule=static").build_model(), True)
    graphs.pool = "that of a graph"
    graphs.forget()
    assert graphs.pool is None


@pytest.mark.parametrize(
    ("settings", "records"),
    [
        (["schedule=RTH", "schedule.cycles=4"], True),
        (["schedule=RTH", "schedule.cycles=4", "training.cuda_graphs=false"], False),
        (["schedule=static", "training.compute=codes"], False),
        (["schedule=dfq"], False),
        (["model=custom", "model.target=tests.accelerator.covering:small"], False),
        (["model=custom", "model.target=tests.accelerator.covering:small", "training.cuda_graphs=true"], True),
    ],
)
def test_what_is_recorded(settings, records, digits):
    plan = digits(*settings)
    assert can_record(plan, torch.device("cuda")) is records
    assert not can_record(plan, torch.device("cpu"))
