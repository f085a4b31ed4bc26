"""The acoustic model: parameters, products, delay and dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bitcycle.model.speech_lstm import SpeechLstmOptions, stacked
from bitcycle.shapes import SpeechShape
from tests.conftest import plan
from tests.speech_data import digit_rows, write_digits, write_manifests


@pytest.fixture(scope="module")
def rows():
    return digit_rows()


@pytest.fixture(scope="module")
def data_root(tmp_path_factory, rows):
    """Manifests and spoken digits below one folder."""
    return write_digits(write_manifests(tmp_path_factory.mktemp("speech")), rows)


@pytest.fixture
def speech(tmp_path, data_root):
    """Plans of small runs on made-up speech."""

    def make(*overrides: str, dataset: str = "speech_manifest"):
        return plan(
            *("scale=smoke", f"dataset={dataset}", "dataset.sampling_rate=8000", "dataset.nominal_seconds=0.1"),
            *("dataset.train_samples=40", "dataset.test_samples=8", "training.batch_size=8", "training.steps=20"),
            *("training.evaluation_steps=5", "model.hidden=8", f"data_root={data_root}"),
            *(f"results_root={tmp_path}/runs", *overrides),
        )

    return make


# Network


@pytest.mark.parametrize(
    ("options", "shape", "parameters"),
    [
        (SpeechLstmOptions(), SpeechShape(120, 16, 42), 5_509_136),
        (SpeechLstmOptions(hidden=128), SpeechShape(120, 16, 42), 394_256),
        (SpeechLstmOptions(hidden=10, layers=2, stack=3), SpeechShape(6, 5, 42), None),
    ],
)
def test_parameters_are_those_of_the_formula(options, shape, parameters):
    with torch.device("meta"):
        model = options.build(shape)
    inputs = [shape.features * options.stack, *[options.hidden] * (options.layers - 1)]
    formula = sum(4 * options.hidden * (size + options.hidden) + 8 * options.hidden for size in inputs)
    formula += (options.hidden + 1) * shape.symbols
    assert sum(p.numel() for p in model.parameters()) == formula
    assert parameters in (None, formula)


def test_products_of_an_utterance(data_root):
    """Per frame and layer 4 H (I + H) products, and H S of the output layer."""
    found = plan("dataset=fsdd", "model=speech_lstm", "quantizer=none", f"data_root={data_root}").workload.macs
    assert found == 42 * (4 * 512 * (120 + 512) + 2 * 4 * 512 * 1024 + 512 * 16)


def test_the_network_sees_the_past_only():
    torch.manual_seed(0)
    model = SpeechLstmOptions(hidden=5, stack=2).build(SpeechShape(3, 4, 10)).eval()
    x = torch.randn(2, 7, 3)
    y = model(x)
    assert y.shape == (2, 4, 4)
    assert model.output_lengths(torch.tensor([1, 2, 3, 7])).tolist() == [1, 1, 2, 4]
    torch.testing.assert_close(model(F.pad(x, (0, 0, 0, 9)))[:, :4], y)
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(model(changed)[:, :2], y[:, :2])


def test_a_delayed_answer_has_heard_so_many_frames_more():
    """Answer t of a delay of 2 is what the network says at t + 2; behind the last frame lie zeros, however long the batch is."""
    torch.manual_seed(0)
    plain = SpeechLstmOptions(hidden=5, stack=2).build(SpeechShape(3, 4, 10)).eval()
    model = SpeechLstmOptions(hidden=5, stack=2, delay=2).build(SpeechShape(3, 4, 10)).eval()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 3)
    y = model(x)
    assert y.shape == (2, 4, 4)
    torch.testing.assert_close(y, plain(F.pad(x, (0, 0, 0, 4)))[:, 2:])
    torch.testing.assert_close(model(F.pad(x, (0, 0, 0, 6)))[:, :4], y)
    changed = x.clone()
    changed[:, 6:] += 1
    assert [torch.allclose(model(changed)[:, t], y[:, t]) for t in range(4)] == [True, False, False, False]


def test_frames_are_stacked_in_order():
    x = torch.arange(10.0).reshape(1, 5, 2)
    assert stacked(x, 2).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]]
    assert stacked(x, 1) is x or torch.equal(stacked(x, 1), x)


def test_dropout_is_on_all_connections_that_are_not_recurrent():
    shape = SpeechShape(3, 4, 10)
    assert SpeechLstmOptions().build(shape).dropout_input.p == 0.5
    model = SpeechLstmOptions(hidden=5, dropout=1.0, dropout_input=0.0).build(shape).train()
    assert torch.equal(model(torch.randn(1, 3, 3)), model.output.bias.expand(1, 3, 4))
