"""Loss, error and gradient of networks on images of a run."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle.dataset.image_dataset import ImageBatches, ImageDatasetOptions, first_images
from bitcycle.dataset.images import Images
from bitcycle.device import widest_float
from bitcycle.errors import RunError
from bitcycle.recipe.weight_averaging import estimate_statistics
from bitcycle.task.classification import ClassificationOptions
from bitcycle.training.finished_run import FinishedRun


class Measurement:
    """Measures networks in evaluation mode on images of a run's train or test split, without augmentation: all, or `samples` of
    them in a fixed random order. Raises RunError if its task is not image classification; DataError if the images are missing."""

    def __init__(self, run: FinishedRun, split: str, samples: int | None, device: torch.device) -> None:
        config = run.plan.config
        if not isinstance(config.dataset, ImageDatasetOptions) or not isinstance(config.task, ClassificationOptions):
            raise RunError(
                f"task={config.task.name}: {run.folder.path} is not a run of image classification. Remedy: choose another run"
            )
        train, test, _ = config.dataset.load(config.data_folder, config.seed)
        self.options, self.device, self.batch_size = config.dataset, device, config.task.evaluation_batch_size
        self.use(first_images(train if split == "train" else test, samples))

    def use(self, images: Images) -> None:
        """Use other images from now on."""
        self.images = images
        self.batches = ImageBatches(images, self.options, self.batch_size, 0, self.device)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> tuple[float, float]:
        """Mean cross-entropy, and error in percent, summed on the device to synchronize only once."""
        sums = torch.zeros(2, dtype=widest_float(self.device), device=self.device)
        for batch in self.batches:
            logits = model(batch.inputs)
            wrong = (logits.argmax(1) != batch.targets).sum()
            sums += torch.stack([F.cross_entropy(logits, batch.targets, reduction="sum").to(sums), wrong.to(sums)])
        loss, errors = (sums / len(self.images)).tolist()
        return loss, 100 * errors

    def influential(self, model: nn.Module) -> list[nn.Parameter]:
        """The trained parameters on which the loss depends, as it does not on those of gates that are off."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        batch = next(iter(self.batches))
        loss = F.cross_entropy(model(batch.inputs), batch.targets)
        slopes = torch.autograd.grad(loss, trained, allow_unused=True)
        return [parameter for parameter, slope in zip(trained, slopes, strict=True) if slope is not None]

    def loss_and_gradient(self, model: nn.Module, parameters: list[nn.Parameter]) -> tuple[float, list[Tensor]]:
        """Mean cross-entropy and its gradient with respect to some parameters."""
        total, gradients = 0.0, [torch.zeros_like(parameter) for parameter in parameters]
        for batch in self.batches:
            loss = F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum") / len(self.images)
            for sum_, part in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                sum_ += part
            total += float(loss.detach().double())
        return total, gradients

    def estimate_batch_norm(self, model: nn.Module) -> None:
        """Re-estimate the running statistics of batch norm on these images; everything else stays in evaluation mode."""
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.train()
        estimate_statistics(model, self.batches, lambda batch: model(batch.inputs))
        model.eval()
