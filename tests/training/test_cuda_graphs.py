"""Recorded training steps, on a CPU with a stand-in for CUDA graphs that keeps their tensors and repeats the computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitcycle.training import loop
from bitcycle.training.cuda_graphs import StepGraphs, can_record
from bitcycle.training.run import execute


class Repeated:
    """A graph that computes again and writes into the tensors that a recording has made, as a CUDA graph does."""

    def __init__(self, passes: Any, graphs: StepGraphs) -> None:
        self.passes, self.parameters = passes, graphs.parameters
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


@pytest.fixture
def recording(monkeypatch):
    """Trainers record their steps; yields the graphs of each."""
    made = []

    def record(passes: Any, graphs: StepGraphs) -> Any:
        graph = Repeated(passes, graphs)
        return graph, graph.outputs

    def recorder(model: Any, is_used: bool) -> StepGraphs:
        graphs = StepGraphs(model, True, record)
        graphs.model = model
        made.append(graphs)
        return graphs

    monkeypatch.setattr(loop, "StepGraphs", recorder)
    monkeypatch.setattr(StepGraphs, "replays", 0)
    return made


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
    "clipping": ["schedule=static", "training.clip_norm=0.1"],
}


@pytest.mark.parametrize("name", RUNS)
def test_recorded_steps_change_nothing(name, digits, finished_digits, recording):
    run = [*RUNS[name], "training.steps=24", "training.evaluation_steps=8", "training.log_steps=1"]
    expected = finished_digits(*run).folder
    found = digits(*run)
    execute(found)
    assert recording and StepGraphs.replays > (4 if name == "a cycle" else 8)
    assert found.folder.metrics.read_bytes() == expected.metrics.read_bytes()
    states = [folder.checkpoint.load()["model"] for folder in (found.folder, expected)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_step_that_cannot_be_recorded_is_computed(digits, finished_digits, monkeypatch, caplog):
    def refuse(passes: Any, graphs: StepGraphs) -> Any:
        passes()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(loop, "StepGraphs", lambda model, is_used: StepGraphs(model, True, refuse))
    run = ["schedule=static", "quantizer=dorefa", "training.steps=6", "training.evaluation_steps=6"]
    expected, found = finished_digits(*run).folder, digits(*run)
    execute(found)
    assert "cannot be recorded as a CUDA graph (operation not permitted" in caplog.text
    assert found.folder.checkpoint.load()["step"] == expected.checkpoint.load()["step"] == 6


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
