"""The cost of a user's loop in two processes."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bitcycle
from bitcycle import distributed
from tests.gate_cases import images, resnet


def _train(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=2))
    shared = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        control.step(step)
        shared(torch.randn(3, 4)).sum().backward()
    torch.save((control.cost().gbitops, [p.grad for p in model.parameters()]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_know_the_cost_of_both(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_train, (port, str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for one, other in zip(found[0][1], found[1][1]):
        assert torch.equal(one, other)
    # 2 steps of 2 x 3 samples; forward, weight gradient, and the error product of the second layer, at 8 x 8 bits
    expected = 2 * 2 * 3 * (2 * 16 + 3 * 8) * 64 / 1e9
    assert found[0][0] == found[1][0] == pytest.approx(expected)


def test_gates_count_the_samples_of_all_processes(monkeypatch):
    """Those of other processes once counted as if they had skipped every block."""
    costs = []
    for processes in (1, 2):
        monkeypatch.setattr(distributed, "world_size", lambda processes=processes: processes)
        schedule = bitcycle.schedule("dfq", total_steps=1)
        model = bitcycle.quantize_model(resnet(), schedule=schedule)
        control = bitcycle.PrecisionController(model, schedule, rank=0)
        control.step(0)
        model(images())
        costs.append(control.cost())
    assert costs[1].samples == 2 * costs[0].samples
    assert costs[1].relative_to_static == costs[0].relative_to_static
