"""What processes do with their shares of a batch, tried in one: quantization, refusals, and how they find each other."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle import distributed
from bitcycle.errors import RunError
from bitcycle.files import read_json
from bitcycle.layer import share_batch_norm
from bitcycle.layer.batch_norm import SharedBatchNorm
from bitcycle.model.retinanet import RetinaNet
from bitcycle.quantizer import QUANTIZERS, compiler_works
from bitcycle.settings import SettingError
from bitcycle.training.processes import check_sharing, own_gpu, process_variables
from bitcycle.training.run import execute
from tests.conftest import plan, run_train
from tests.pair import variables
from tests.training.test_distributed import SMALL
from tests.training.test_resume import Crash, crash_at


def test_frozen_statistics_stay_frozen_where_batch_norm_counts_the_whole_batch():
    model = share_batch_norm(RetinaNet(18, 2, width=4, frozen_bn=True)).train()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    assert norms and all(isinstance(norm, SharedBatchNorm) and not norm.training for norm in norms)


def in_turn(function, x: torch.Tensor, patch: pytest.MonkeyPatch) -> torch.Tensor:
    """function of two shares of x, one after the other, each knowing the extremes of the whole."""
    low, high = torch.aminmax(x)
    parts = []
    for process in range(2):
        share = distributed.shard_of(len(x), process, 2)
        patch.setattr(distributed, "_shard", share)
        patch.setattr(distributed, "all_min_max", lambda *_: (low, high))
        patch.setattr(distributed, "all_max", lambda _: x.abs().amax())
        parts.append(
            function(x[share.first : share.first + share.samples].contiguous(memory_format=torch.channels_last))
        )
    patch.undo()
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "compile"), [("sbm", False), ("sbm", True), ("dorefa", False), ("wageubn", False)])
def test_shares_of_a_batch_are_quantized_as_the_whole(name, compile, monkeypatch):
    """The same bits, noise included, compiled or not."""
    if compile and not compiler_works("cpu"):
        pytest.skip("no C++ compiler on this machine")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 5, 3, 2, generator=generator).contiguous(memory_format=torch.channels_last)
    options = QUANTIZERS[name]()
    bits, step_key, layer_key = torch.tensor(3), torch.tensor(77, dtype=torch.int32), torch.tensor(5, dtype=torch.int32)
    expected = options.gradient(compile=False).quantize(x, bits, step_key, layer_key)
    gradient = options.gradient(compile)
    assert torch.equal(
        in_turn(lambda part: gradient.quantize(part, bits, step_key, layer_key), x, monkeypatch), expected
    )
    expected, activation = options.activation(compile=False, signed=True)(x, bits), options.activation(compile, True)
    assert torch.equal(in_turn(lambda part: activation(part, bits), x, monkeypatch), expected)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["schedule=dfq"], "schedule=dfq"),
        (["quantizer=mx", "schedule.q_min=4"], "quantizer.name=mx"),
        (["training.compute=codes"], "training.compute=codes"),
        (["training.weight_averaging.start=0.5"], "training.weight_averaging.start=0.5"),
        (["dataset.train_samples=33"], "training.batch_size=16: the last step of an epoch has fewer samples (1)"),
        (["dataset=cora", "model=gcn_small"], "task.name=node_classification"),
        (["training.device=cuda:1"], "training.device=cuda:1"),
    ],
)
def test_what_cannot_be_shared_is_refused(settings, field, monkeypatch):
    run = plan("dataset=digits", "model=resnet8", "scale=smoke", *settings)
    check_sharing(run)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingError, match="Remedy") as refused:
        check_sharing(run)
    assert str(refused.value).startswith(field)


def test_processes_are_found_where_somebody_started_several():
    torchrun = variables(1, 29500)
    assert process_variables({**torchrun, "SLURM_STEP_NUM_TASKS": "4"}) == torchrun
    assert process_variables({}) == process_variables({"WORLD_SIZE": "1", "RANK": "0"}) == {}
    assert (
        process_variables({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == {}
    )  # a batch script, whose step is one process
    with pytest.raises(RunError, match=r"MASTER_ADDR.*torchrun"):
        process_variables(
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
        )
    srun = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "7",
    }
    srun |= {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ports = {process_variables({**srun, "SLURM_STEP_ID": step})["MASTER_PORT"] for step in ("0", "1")}
    assert len(ports) == 2  # two runs of one job side by side
    assert [own_gpu(rank, gpus) for rank, gpus in ((3, 4), (3, 1), (0, 2))] == [3, 0, 0]
    with pytest.raises(RunError, match="start at most 2 processes"):
        own_gpu(2, 2)


def test_a_sweep_in_several_processes_is_refused(tmp_path):
    done = run_train("-m", *SMALL, "seed=0,1", f"results_root={tmp_path}", env=variables(1, 1), launches=False)
    assert done.returncode == 2
    assert done.stderr.startswith("wrong configuration: WORLD_SIZE=2")


def test_another_number_of_processes_is_said(tmp_path):
    run = plan(*SMALL, "training.checkpoint_seconds=0", f"results_root={tmp_path}")
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 6, 5)
        with pytest.raises(Crash):
            execute(run)
    environment = read_json(run.folder.environment)
    run.folder.environment.write_text(json.dumps({**environment, "processes": 4}))
    execute(run)
    assert "resumed with processes=1 instead of 4" in run.folder.log.read_text()
