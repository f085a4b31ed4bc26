"""What the training loop needs to know of a task: batches, a loss and metrics. Nothing else differs between tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.dataset import DatasetInfo, DatasetOptions
from bitcycle.dataset.epoch import Epoch
from bitcycle.settings import MISSING, SettingError, Settings, setting


class StepOutput(NamedTuple):
    """What one training batch gave: the loss to descend, and the detached share of right answers; both scalars."""

    loss: Tensor
    accuracy: Tensor


class Sample(NamedTuple):
    """Arguments of the model's forward pass that its products are traced with, and how many samples they hold.

    Tensors lie on the meta device, where only shapes count, unless values decide the shapes of what the model computes.
    """

    arguments: tuple[Any, ...]
    samples: int


class Task:
    """One learning task with its data, ready to train on."""

    metric: str
    """Name of the main metric, a key of what `evaluate` returns."""
    unit: str = "%"
    """Unit of the main metric; empty for a pure number."""
    higher_is_better: bool
    """Whether a larger main metric is better."""
    validation_metric: str
    """Name of the metric that choices are made by, a key of what `validate` returns; better as the main metric is."""
    majority_baseline: float
    """Share of right answers of always giving the most frequent one of the training data."""

    def batches(self, step: int) -> Iterator[Any]:
        """Training batches of steps `step`, `step` + 1, ... without end."""
        raise NotImplementedError

    def parts(self, samples: int) -> int:
        """Of how many parts a step of `samples` consists, of which each process has some; see `TaskOptions.parts`."""
        return samples

    def train(self, model: nn.Module, batch: Any) -> StepOutput:
        """Loss and accuracy of one training batch."""
        raise NotImplementedError

    def rate_factor(self, batch: Any) -> float:
        """What the learning rate is multiplied with for a batch; other than 1 where batches differ in length by chance."""
        return 1.0

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the test split."""
        raise NotImplementedError

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the validation split; empty without one."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the next batch depends on beside the step's number (a recurrent state that is carried on, say)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class TaskSetup:
    """What a task is built from, beside its own options.

    Attributes:
        dataset: options of the data set; of a kind that the task has accepted.
        data_root: where data sets lie.
        info: what the data set holds.
        batch_size: training samples a step, of all processes together.
        seed: of order, augmentation and everything else that is drawn.
        device: where batches are made.
    """

    dataset: DatasetOptions
    data_root: Path
    info: DatasetInfo
    batch_size: int
    seed: int
    device: torch.device


@dataclass
class TaskOptions(Settings):
    """Options that every task has."""

    takes: ClassVar[type[DatasetOptions]] = DatasetOptions
    """The kind of data set that the task learns from."""
    can_be_shared: ClassVar[bool] = False
    """Whether several processes can share the batches: `train` and `evaluate` then see this process's shares."""

    name: str = setting(MISSING, "the task's name, as in task=NAME")

    def check(self, dataset: DatasetOptions) -> None:
        """Raise SettingError where the task cannot learn from such data."""
        if not isinstance(dataset, self.takes):
            problem = f"cannot learn from dataset={dataset.name}, which holds data of another kind"
            raise SettingError("name", self.name, problem, "leave task= out: it follows from the data set")

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        """How an epoch is divided into steps."""
        return Epoch(info.train_samples, batch_size)

    def parts(self, samples: int, batch_size: int) -> int:
        """Into how many parts a step of `samples` can be cut for several processes: samples, or whole sequences of them."""
        return samples

    def sample(self, info: DatasetInfo) -> Sample:
        """What the model's products are traced with; needs no data."""
        raise NotImplementedError

    def build(self, setup: TaskSetup) -> Task:
        """The task with its data.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        raise NotImplementedError


def check_shares(batch_size: int, **splits: Sized | None) -> None:
    """Refuse an evaluation whose first batch has not a sample for each process: all have to see the same bits first.

    Args:
        batch_size: samples evaluated at once.
        splits: setting of the data set -> the samples that follow from it, None for none.

    Raises:
        SettingError (a ValueError): naming the setting.
    """
    sizes = {f"dataset.{name}": len(split) for name, split in splits.items() if split is not None}
    for name, size in {"task.evaluation_batch_size": batch_size, **sizes}.items():
        if size < distributed.world_size():
            problem = (
                f"lets {size} samples be evaluated at once, which {distributed.world_size()} processes cannot share"
            )
            raise SettingError(name, size, problem, "evaluate more, or start fewer processes")
