"""Image classification: cross-entropy loss; top-1 and top-5 accuracy on the test images."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.image_dataset import Batch, ImageBatches, ImageDatasetOptions
from bitcycle.optional_imports import require
from bitcycle.settings import SettingError, setting
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, accuracies_and_loss, evaluation_splits


@dataclass
class ClassificationOptions(TaskOptions):
    """Options of image classification."""

    takes = ImageDatasetOptions
    can_be_shared = True
    steps_are_alike = True

    name: str = "classification"
    evaluation_batch_size: int = setting(500, "images evaluated at once", minimum=1, affects_result=False)

    def sample(self, info: DatasetInfo) -> Sample:
        channels, size, _ = info.shape
        return Sample((torch.zeros(1, channels, size, size, device="meta"),), samples=1)

    def build(self, setup: TaskSetup) -> "Classification":
        require("torchmetrics", "images")  # fail before training instead of at the first evaluation
        return Classification(self, setup)


class Classification(Task):
    """A classification task on splits of images. Raises SettingError if there are more processes than images to evaluate."""

    def __init__(self, options: ClassificationOptions, setup: TaskSetup) -> None:
        data = setup.dataset.load(setup.data_root, setup.seed)
        self.options, self.classes = options, setup.info.shape.classes
        self.majority_baseline = float(data.train.labels.bincount().max()) / len(data.train)
        self.training_batches = ImageBatches(data.train, setup.dataset, setup.batch_size, setup.seed, setup.device)
        self.splits = evaluation_splits(ImageBatches, data, options.evaluation_batch_size, setup)

    def train(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        _check_logits(model, logits, len(batch.targets), self.classes)
        loss = F.cross_entropy(logits, batch.targets)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.targets).float().mean())

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """`test_accuracy` and `test_accuracy_top5` in percent, `test_loss` as mean cross-entropy; of all processes' shards."""
        batches = self.splits[split]
        outputs = ((model(batch.inputs), batch.targets) for batch in batches)
        return accuracies_and_loss(outputs, split, {"": 1, "_top5": min(5, self.classes)}, self.classes, batches.device)


def _check_logits(model: nn.Module, logits: Any, images: int, classes: int) -> None:
    """Raise SettingError if a network does not return a logit for each class, as one that was not told their number:
    cross-entropy accepts more classes, too."""
    if isinstance(logits, Tensor) and logits.shape == (images, classes):
        return
    found = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    told = "a parameter `classes` of model.target is told their number, another by"
    remedy = f"let it have {classes} outputs: {told} model.arguments={{num_classes: {classes}}}"
    if not isinstance(logits, Tensor):
        remedy = "let its forward return the logits alone"
    raise SettingError("model", type(model).__name__, f"returns {found}, not logits {[images, classes]}", remedy)
