"""Data-parallel training of one run with one process per GPU: the process group and its collective operations.

Processes are started by `torchrun --nproc-per-node=4 train.py ...` or `srun --ntasks-per-node=4 python train.py ...`. Each trains
the same network on its shard of every batch: `training.batch_size` is the global batch size, so that the name of a run, its cost
and, up to the rounding of sums, its result do not depend on the number of processes. Only process 0 writes the run
folder, but all processes must be able to read it, as all resume from the same checkpoint. A signal to one process stops
all after the same step.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitcycle import distributed
from bitcycle.errors import RunError
from bitcycle.schedule import GatedSchedule
from bitcycle.settings import SettingError
from bitcycle.signals import Interrupted
from bitcycle.task import TASKS
from bitcycle.training.display import be_quiet

if TYPE_CHECKING:
    from bitcycle.training.plan import Plan

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torchrun sets for its processes."""
_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:  # before torch 2.13
    _SYNC_BUFFERS = "broadcast_buffers"
FIRST_PORT, PORTS = 20_000, 12_000
"""Range of ports for the tasks of a SLURM job."""
STEP_PORTS = 1009
"""Ports between two steps of a job, which may run on the same machine at the same time, as do jobs with similar ids."""


def process_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for this process, as set or derived from those of SLURM's srun; empty for a single process.

    A batch script itself also runs as a single process, regardless of the number of tasks of its job.

    >>> srun = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7",
    ...         "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> " ".join(process_variables(srun).values())
    '2 3 0 1 gpu03 20007'

    Raises:
        RunError: if some of torchrun's variables are missing.
    """
    if int(environment.get("WORLD_SIZE") or 1) > 1:
        missing = [name for name in NEEDED if name not in environment]
        if missing:
            raise RunError(
                f"WORLD_SIZE={environment['WORLD_SIZE']} means several processes, but {', '.join(missing)} is not set: start "
                "them with torchrun or srun, or unset WORLD_SIZE"
            )
        return {name: environment[name] for name in NEEDED}
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) == 1 or "WORLD_SIZE" in environment:
        return {}
    on_nodes = tasks_on_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID") or 0)
    port = FIRST_PORT + (job + STEP_PORTS * step) % PORTS
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(on_nodes[int(environment["SLURM_NODEID"])]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("gpu[03-05,9],cpu1"), first_host("a1,a2"), first_host("r[1-2]n[4-8]")
    ('gpu03', 'a1', 'r1n4')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else nodes)


def tasks_on_nodes(counts: str) -> list[int]:
    """The number of tasks that SLURM starts on each machine.

    >>> tasks_on_nodes("4(x2),3")
    [4, 4, 3]
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Context that joins the process group (NCCL for a GPU `device`, Gloo for CPU tensors); does nothing in a single process.
    Raises RunError if the processes cannot connect, or this one has no GPU."""
    variables = process_variables(os.environ)
    if not variables:
        yield
        return
    os.environ.update(variables)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(own_gpu(int(variables["LOCAL_RANK"]), torch.cuda.device_count()))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    except (RuntimeError, ValueError) as error:
        place = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        raise RunError(
            f"the {variables['WORLD_SIZE']} processes of this run cannot connect at {place}: {error}. If that port "
            "is in use, set MASTER_PORT"
        ) from error
    if distributed.rank():
        be_quiet()
    try:
        yield
    except Interrupted:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not after a failure, as it could deadlock with waiting processes


def own_gpu(local_rank: int, gpus: int) -> int:
    """The GPU index of a process, to which SLURM may expose only its own. Raises RunError if there are too few GPUs."""
    if gpus == 1 or local_rank < gpus:
        return local_rank % max(gpus, 1)
    raise RunError(f"no GPU for process {local_rank} of this machine: start at most {gpus} processes per machine")


def check_same_run(plan: Plan) -> None:
    """Check that all processes were given the same run, which they share. Raises SettingError if not: they would add up gradients
    of different runs, and record only that of process 0."""
    runs = distributed.all_items(["/".join(plan.folder.path.parts[-3:])])
    for rank, run in enumerate(runs):
        if run != runs[0]:
            problem = (
                f"is that of process {rank}, but process 0 has {runs[0]}; processes that start together share one run"
            )
            remedy = (
                "give all the same settings; for several runs, start each by itself, as with srun --ntasks=1, or use -m"
            )
            raise SettingError("run", run, problem, remedy)


def check_sharing(plan: Plan) -> None:
    """Check that several processes can train this run. Raises SettingError for a setting that requires a single process."""
    config, number = plan.config, distributed.world_size()
    if number == 1:
        return
    alone = "train it in one process"
    if not config.task.can_be_shared:
        shared = ", ".join(name for name, kind in TASKS.kinds().items() if kind.can_be_shared)
        problem = f"cannot be trained in {number} processes; only {shared} can"
        raise SettingError("task.name", config.task.name, problem, alone)
    if ":" in config.training.device and torch.cuda.device_count() > 1:
        problem = f"is one GPU, but there are {number} processes, and each takes its own"
        raise SettingError("training.device", config.training.device, problem, "use training.device=cuda")
    if isinstance(plan.schedule, GatedSchedule):
        problem = f"counts the choices of gates in a single process, but there are {number}"
        raise SettingError("schedule", plan.schedule.name, problem, f"{alone}, or choose another schedule")
    for begin in ("start", "patience"):
        value = getattr(config.training.weight_averaging, begin)
        if value is not None:
            problem = f"batch-norm statistics of averaged weights need a single process, but there are {number}"
            raise SettingError(f"training.weight_averaging.{begin}", value, problem, alone)
    if config.training.compute == "codes":
        problem = f"the ranges of integer codes are determined in a single process, but there are {number}"
        raise SettingError("training.compute", config.training.compute, problem, "use training.compute=simulate")
    smallest = config.task.parts(plan.epoch.samples_of(plan.epoch.steps - 1), plan.batch_size)
    if smallest < number:
        problem = f"the last step of an epoch has fewer samples ({smallest}) than there are processes ({number})"
        remedy = "choose another batch size or dataset.train_samples, or start fewer processes"
        raise SettingError("training.batch_size", plan.batch_size, problem, remedy)
    try:
        config.quantizer.check_sharing()
    except SettingError as error:
        raise error.within("quantizer") from None


def replica(model: nn.Module) -> nn.Module:
    """A wrapper that training calls instead of the model, which sums gradients over the processes in the backward pass.

    Each process weights its loss by its share of the batch, so the sum is the gradient of the batch's loss.
    """
    if distributed.world_size() == 1:
        return model
    device_ids = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else None
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # channels-last weights of a single column
    # Without the search for unused parameters, the order of sums would change after the first step, also in resumed runs.
    options: dict[str, Any] = {_SYNC_BUFFERS: False, "find_unused_parameters": True}
    parallel = DistributedDataParallel(model, device_ids, **options)
    parallel.register_comm_hook(None, lambda _, bucket: _added_up(bucket.buffer()))
    return parallel


def _added_up(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """The sum over all processes, instead of DistributedDataParallel's mean."""
    work: Any = dist.all_reduce(gradients, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


class Agreement:
    """Lets all processes save or stop after the same step at the request of any one, without synchronisation: the result of a
    step's requests is read one step later, when it has already arrived."""

    def __init__(self) -> None:
        self._sent: tuple[Tensor, Any] | None = None

    def greatest(self, asked: int) -> int:
        """The greatest request among all processes one step ago, initially 0; with one process, the request itself."""
        if distributed.world_size() == 1:
            return asked
        answer = self.close()
        word = torch.tensor(asked)  # on the CPU, so that no process waits for a GPU
        self._sent = word, dist.all_reduce(word, dist.ReduceOp.MAX, async_op=True)
        return answer

    def close(self) -> int:
        """Receive the last result; 0 if there is none."""
        if self._sent is None:
            return 0
        (word, work), self._sent = self._sent, None
        work.wait()
        return int(word)


LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting")
"""Parts of error messages that indicate the end of another process."""


def explained(error: Exception) -> Exception:
    """The error itself, or an explanation if it is due to the end of another process."""
    if distributed.world_size() == 1 or isinstance(error, RunError) or not isinstance(error, RuntimeError):
        return error
    if not any(words in str(error) for words in LOST):
        return error
    return RunError(
        f"another process of this run has ended, see its output ({str(error).splitlines()[0]}). Run the same command "
        "again to resume from the last checkpoint"
    )
