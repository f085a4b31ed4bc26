"""Accuracy of a network on corrupted test images: `bitcycle corruption RUN_FOLDER[@PHASE]`.

The result has one row for the clean images and one for each corruption and severity; the papers report the mean over
the latter. With `folder`, the images are read from class folders FOLDER/CORRUPTION/SEVERITY/CLASS/, the layout of the
published ImageNet-C; otherwise the test images are corrupted here, with noise derived from (seed, corruption,
severity). For a severity with parameter s and pixels p in [0, 1]:

| corruption | p becomes, before clipping |
|---|---|
| gaussian_noise | p + s n, n standard normal |
| shot_noise | Poisson(s p) / s |
| impulse_noise | 0 or 1, each with probability s / 2, independently for each channel |
| gaussian_blur | Gaussian blur with standard deviation s (image width / 32) pixels and replicated border |
| brightness | p + s |
| contrast | mean + s (p - mean), with the mean of each image and channel |
| pixelate | means over tiles of about 1 / s pixels |

The corruptions and the five severities follow Hendrycks and Dietterich 2019; code and parameters are ours, for small
images, so the results are not ImageNet-C results. HLHLp, appendix D, tests on ImageNet-C; we do not know with
which corruptions.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcycle.dataset.image_dataset import first_images
from bitcycle.dataset.image_sources import read_class_folders
from bitcycle.dataset.images import Framing, Images
from bitcycle.errors import DataError, RunError
from bitcycle.layer.memory_format import channels_last
from bitcycle.randomness import derive
from bitcycle.reproduction.measurement.artifacts import CLEAN, Row
from bitcycle.reproduction.measurement.images import Measurement
from bitcycle.reproduction.measurement.job import Analysis, rounded, run_command
from bitcycle.settings import SettingError, nearest, setting
from bitcycle.threads import allowed_cores
from bitcycle.training.finished_run import FinishedRun

Corrupt = Callable[[Tensor, float, torch.Generator], Tensor]
"""(pixels [N, C, H, W] in [0, 1], s, generator) -> pixels."""


def _impulses(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(pixels.shape, generator=generator)
    return torch.where(drawn < s / 2, 0.0, torch.where(drawn < s, 1.0, pixels))


def _blur(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    width = s * pixels.shape[-1] / 32
    reach = max(1, round(3 * width))
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    kernel = torch.exp(-places.square() / (2 * width**2))
    kernel = kernel / kernel.sum()
    channels = pixels.shape[1]
    padded = F.pad(pixels, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, kernel.view(1, 1, 1, -1).repeat(channels, 1, 1, 1), groups=channels)
    return F.conv2d(rows, kernel.view(1, 1, -1, 1).repeat(channels, 1, 1, 1), groups=channels)


def _contrast(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    mean = pixels.mean((2, 3), keepdim=True)
    return mean + s * (pixels - mean)


def _pixelate(pixels: Tensor, s: float, generator: torch.Generator) -> Tensor:
    height, width = pixels.shape[2:]
    small = F.interpolate(pixels, (max(1, round(s * height)), max(1, round(s * width))), mode="area")
    return F.interpolate(small, (height, width), mode="nearest")


CORRUPTIONS: dict[str, tuple[Corrupt, tuple[float, ...]]] = {
    "gaussian_noise": (lambda p, s, g: p + s * torch.randn(p.shape, generator=g), (0.04, 0.08, 0.12, 0.18, 0.26)),
    "shot_noise": (lambda p, s, g: torch.poisson(p * s, generator=g) / s, (60, 25, 12, 5, 3)),
    "impulse_noise": (_impulses, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "gaussian_blur": (_blur, (0.4, 0.6, 0.8, 1.1, 1.5)),
    "brightness": (lambda p, s, g: p + s, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (_contrast, (0.6, 0.45, 0.3, 0.2, 0.1)),
    "pixelate": (_pixelate, (0.75, 0.5, 0.38, 0.25, 0.19)),
}
"""Name -> function of the pixels, and its parameter s for the severities 1 to 5."""


def corrupt(images: Tensor, name: str, severity: int, generator: torch.Generator) -> Tensor:
    """Apply a corruption of `CORRUPTIONS` at a severity from 1 to 5 to uint8 images [N, H, W, C].

    >>> grey = torch.full((1, 2, 2, 1), 51, dtype=torch.uint8)
    >>> corrupt(grey, "brightness", 2, torch.Generator()).unique().tolist()  # 0.2 + 0.2 of 255
    [102]
    """
    function, values = CORRUPTIONS[name]
    pixels = images.permute(0, 3, 1, 2).float() / 255
    changed = function(pixels, values[severity - 1], generator)
    return (changed.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


@dataclass
class Corruption(Analysis):
    """The test of one network; a unit is a corruption at a severity, and the first unit the clean images. Raises RunError if
    no folder is given and the dataset is too large to be corrupted in memory; DataError if the folder is missing or
    incomplete."""

    kind = "corruption"
    columns = ("corruption", "severity", "loss", "error_percent")

    corruptions: Optional[list[str]] = setting(
        None, "names of corruptions; null: all of the folder, or all of ours; []: clean images only"
    )
    severities: list[int] = setting([1, 2, 3, 4, 5], "severities", minimum=1, maximum=5)
    folder: Optional[str] = setting(
        None, "corrupted images FOLDER/CORRUPTION/SEVERITY/CLASS/, absolute or relative to data_root; null: ours"
    )
    samples: Optional[int] = setting(None, "number of test images, taken in a fixed random order; null: all", minimum=1)
    seed: int = setting(0, "seed of the noise in our corruptions", minimum=0)

    def validate(self) -> None:
        for name in self.corruptions or ():
            if self.folder is None and name not in CORRUPTIONS:
                raise SettingError("corruptions", name, "is not a corruption", nearest(name, CORRUPTIONS))

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> tuple[int, Row]:
        [run] = runs
        self.shape = run.plan.info.shape
        self.measure = Measurement(run, "test", self.samples, device)
        self.clean = self.measure.images
        self.published = None if self.folder is None else run.plan.config.data_folder / self.folder
        if self.published is None and type(self.clean) is not Images:
            problem = f"dataset={run.plan.config.dataset.name}: too large to be corrupted in memory"
            raise RunError(f"{problem}. Remedy: set folder=PATH to the published corrupted images.")
        names = self.corruptions
        if names is None:
            names = list(CORRUPTIONS) if self.published is None else _names(self.published)
        self.conditions = [(CLEAN, 0), *((name, severity) for name in names for severity in self.severities)]
        self.model = channels_last(run.model, device)
        return len(self.conditions), run.subject | {"bits": run.bits, "samples": len(self.clean)}

    def rows(self, unit: int) -> list[Row]:
        name, severity = self.conditions[unit]
        self.measure.use(self.clean if name == CLEAN else self.images(name, severity))
        loss, error = self.measure(self.model)
        return [{"corruption": name, "severity": severity, "loss": rounded(loss), "error_percent": rounded(error)}]

    def images(self, name: str, severity: int) -> Images:
        """The corrupted test images."""
        if self.published is None:
            generator = torch.Generator().manual_seed(derive(self.seed, "corruption", name, severity))
            return Images(corrupt(self.clean.pixels, name, severity, generator), self.clean.labels)
        folder = self.published / name / str(severity)
        channels, size, classes = self.shape
        encoded = read_class_folders(folder)
        if len(encoded.class_names) != classes:
            raise DataError(f"{folder} does not have the network's {classes} class folders; add the missing ones")
        framing, workers = Framing(size, size), min(8, allowed_cores())
        whole = replace(encoded, channels=channels, framing=framing, workers=workers)
        return first_images(whole, self.samples)


def _names(folder: Path) -> list[str]:
    names = sorted(sub.name for sub in folder.iterdir() if sub.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"no corrupted images in {folder}; download ImageNet-C, or set folder to its path")
    return names


if __name__ == "__main__":
    sys.exit(run_command(Corruption, __doc__))
