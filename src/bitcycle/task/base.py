"""The interface between the training loop and a task: batches, a loss and metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.dataset import DatasetInfo, DatasetOptions
from bitcycle.dataset.epoch import Epoch
from bitcycle.settings import MISSING, SettingError, Settings, setting


class StepOutput(NamedTuple):
    """Result of a training batch: the loss to minimise and the detached accuracy, both scalars."""

    loss: Tensor
    accuracy: Tensor


class Sample(NamedTuple):
    """Arguments of a forward pass for tracing, on the meta device unless shapes depend on values; their number of samples."""

    arguments: tuple[Any, ...]
    samples: int


class Task:
    """A learning task with its data."""

    metric: str = "test_accuracy"
    """Name of the main metric, a key of the result of `evaluate`."""
    unit: str = "%"
    """Unit of the main metric; empty for a pure number."""
    higher_is_better: bool = True
    """Whether a larger main metric is better."""
    validation_metric: str = "validation_accuracy"
    """Name of the selection metric, a key of the result of `validate`; better in the same direction as the main metric."""
    majority_baseline: float
    """Accuracy of always predicting the most frequent class of the training data."""
    training_batches: Any
    """Training batches, with a method `starting_at`, unless `batches` is overridden."""
    splits: Mapping[str, Any]
    """What is evaluated: the split `test`, and `validation` if there is one."""

    @property
    def chance(self) -> float | None:
        """The main metric reached by guessing, in its unit, for accuracies by always predicting the most frequent class of the
        training data; None if there is no such level. A phase or run that ends worse has diverged."""
        return 100 * self.majority_baseline if self.metric.endswith("accuracy") else None

    def batches(self, step: int) -> Iterator[Any]:
        """Yield training batches of steps `step`, `step` + 1, ... indefinitely."""
        return self.training_batches.starting_at(step)

    def train(self, model: nn.Module, batch: Any) -> StepOutput:
        """Loss and accuracy of one training batch."""
        raise NotImplementedError

    def rate_factor(self, batch: Any) -> float:
        """Learning-rate factor of a batch; differs from 1 if batches have random lengths."""
        return 1.0

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Metrics of the model in evaluation mode on a split, their names beginning with that of the split. No gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the test split."""
        return self.measure(model, "test")

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the validation split; empty without one."""
        return self.measure(model, "validation") if "validation" in self.splits else {}

    def begin_anew(self) -> None:
        """Forget what earlier batches left, as their network has been replaced by a new one."""

    def state_dict(self) -> dict[str, Any]:
        """State besides the step index, such as a recurrent state carried over to the next batch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class TaskSetup:
    """Arguments for building a task, besides its own options: a dataset of the type that the task `takes`, and more.

    `batch_size` counts samples over all processes.
    """

    dataset: Any
    data_root: Path
    info: DatasetInfo
    batch_size: int
    seed: int
    device: torch.device


@dataclass
class TaskOptions(Settings):
    """Options that every task has."""

    takes: ClassVar[type[DatasetOptions]] = DatasetOptions
    """Type of dataset that the task learns from."""
    can_be_shared: ClassVar[bool] = False
    """Whether batches can be sharded over processes; `train` and `evaluate` then receive this process's shards."""

    steps_are_alike: ClassVar[bool] = False
    """Whether `train` launches the same kernels for all batches of the same shapes, keeps nothing between steps, and does not
    make the host wait, so that a step can be recorded as a CUDA graph."""

    name: str = setting(MISSING, "the task's name, as in task=NAME")

    def check(self, dataset: DatasetOptions) -> None:
        """Raise SettingError if the task cannot learn from this dataset."""
        if not isinstance(dataset, self.takes):
            problem = f"cannot learn from dataset={dataset.name}, which has data of another type"
            raise SettingError("name", self.name, problem, "omit task=; the dataset determines it")

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        """Return the division of an epoch into steps."""
        return Epoch(info.train_samples, batch_size)

    def parts(self, samples: int, batch_size: int) -> int:
        """Number of parts (samples or sequences) of a step of `samples` that can be sharded over processes."""
        return samples

    def sample(self, info: DatasetInfo) -> Sample:
        """Return a sample for tracing the model's products; needs no data."""
        raise NotImplementedError

    def build(self, setup: TaskSetup) -> Task:
        """Return the task with its data. Raises DataError if the data are missing or unreadable."""
        raise NotImplementedError


def check_shares(batch_size: int, **splits: Sized | None) -> None:
    """Raise SettingError if an evaluation's first batch has fewer samples than processes; `splits` are named as settings."""
    sizes = {f"dataset.{name}": len(split) for name, split in splits.items() if split is not None}
    for name, size in {"task.evaluation_batch_size": batch_size, **sizes}.items():
        if size < distributed.world_size():
            problem = f"gives evaluation batches of fewer samples than there are processes ({distributed.world_size()})"
            raise SettingError(name, size, problem, "evaluate more, or start fewer processes")


def accuracies_and_loss(
    outputs: Iterable[tuple[Tensor, Tensor]], split: str, top: Mapping[str, int], classes: int, device: torch.device
) -> dict[str, float]:
    """Accuracies in percent and mean cross-entropy of all processes' shards, from logits and labels of each batch of a split.
    Logits [N, K], labels [N].

    `top` maps endings of `test_accuracy` to the number of classes with the largest logits that count as predicted.
    """
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    mean_loss = MeanMetric().to(device)
    accuracies = {
        f"{split}_accuracy{name}": MulticlassAccuracy(classes, count, average="micro").to(device)
        for name, count in top.items()
    }
    for logits, labels in outputs:
        mean_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        for accuracy in accuracies.values():
            accuracy.update(logits, labels)
    percent = {name: round(100 * float(accuracy.compute()), 4) for name, accuracy in accuracies.items()}
    return {**percent, f"{split}_loss": float(mean_loss.compute())}


T = TypeVar("T")


def evaluation_splits(batches: Callable[..., T], data: Any, size: int, setup: TaskSetup) -> dict[str, T]:
    """The batches of the splits `test` and, if there is one, `validation`, of `size` samples each; see `check_shares`."""
    check_shares(size, test_samples=data.test, validation=data.validation)
    splits = data.evaluated.items()
    return {name: batches(split, setup.dataset, size, setup.seed, setup.device) for name, split in splits}
