"""How well a trained network classifies corrupted test images: `python -m bitcycle.measurement.corruption RUN_FOLDER[@PHASE]`.

One row for the images as they are, and one for each corruption and severity; the papers' number is the mean over the latter. With
`folder` the images are read from class folders FOLDER/CORRUPTION/SEVERITY/CLASS/, the layout of the published ImageNet-C;
otherwise the test images are corrupted here (`corruptions.py`), which is none of ImageNet-C. The noise follows from
(seed, corruption, severity). HLHLp, appendix D, tests on ImageNet-C; which of its corruptions is not known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from bitcycle.dataset import Images
from bitcycle.dataset.images import EncodedImages, Framing
from bitcycle.dataset.source import read_class_folders
from bitcycle.errors import DataError, RunError
from bitcycle.layer.compilation import channels_last
from bitcycle.measurement.artifacts import Row
from bitcycle.measurement.command import run_command
from bitcycle.measurement.corruptions import CORRUPTIONS, corrupt
from bitcycle.measurement.finished_run import FinishedRun
from bitcycle.measurement.job import Analysis, AnalysisOptions, rounded
from bitcycle.measurement.measurement import Measurement
from bitcycle.randomness import derive
from bitcycle.settings import SettingError, nearest, setting

CLEAN = "none"


@dataclass
class CorruptionOptions(AnalysisOptions):
    """Options of a test on corrupted images."""

    kind = "corruption"

    corruptions: Optional[list[str]] = setting(None, "their names; null: all, of the folder or of ours")
    severities: list[int] = setting([1, 2, 3, 4, 5], "severities", minimum=1, maximum=5)
    folder: Optional[str] = setting(
        None, "corrupted images, absolute or below data_root, as FOLDER/CORRUPTION/SEVERITY/CLASS/; null: made here"
    )
    samples: Optional[int] = setting(None, "so many test images of a fixed random order; null: all", minimum=1)
    seed: int = setting(0, "of what is made here", minimum=0)

    def validate(self) -> None:
        for name in self.corruptions or ():
            if self.folder is None and name not in CORRUPTIONS:
                raise SettingError("corruptions", name, "is not one of ours", nearest(name, CORRUPTIONS))

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> Corruption:
        return Corruption(self, runs[0], device)


class Corruption(Analysis):
    """The test of one network; a unit is a corruption at a severity, the first one the images as they are.

    Raises:
        RunError: if the test images do not fit into memory, and no folder of corrupted ones is given.
        DataError: if that folder is missing or lacks what is asked for.
    """

    columns = ("corruption", "severity", "loss", "error_percent")

    def __init__(self, options: CorruptionOptions, run: FinishedRun, device: torch.device) -> None:
        self.options, self.run, self.device = options, run, device
        self.measure = Measurement(run, "test", options.samples, device)
        self.clean = self.measure.images
        self.folder = None if options.folder is None else run.plan.config.data_folder / options.folder
        if self.folder is None and type(self.clean) is not Images:
            problem = f"corruption: the images of {run.plan.config.dataset.name} are too many to be corrupted here"
            raise RunError(f"{problem}. Remedy: give folder=PATH with the published corrupted images.")
        names = options.corruptions or (list(CORRUPTIONS) if self.folder is None else _names(self.folder))
        self.conditions = [(CLEAN, 0), *((name, severity) for name in names for severity in options.severities)]
        self.units = len(self.conditions)
        self.model = channels_last(run.model, device)
        self.facts: dict[str, Any] = {
            "samples": len(self.clean),
            "bits": [run.precision.weight, run.precision.activation],
            "dataset": run.plan.config.dataset.name,
            "model": run.plan.config.model.name,
        }

    def rows(self, unit: int) -> list[Row]:
        name, severity = self.conditions[unit]
        self.measure.use(self.clean if name == CLEAN else self.images(name, severity))
        loss, error = self.measure(self.model)
        return [{"corruption": name, "severity": severity, "loss": rounded(loss), "error_percent": rounded(error)}]

    def images(self, name: str, severity: int) -> Images:
        """The corrupted test images."""
        if self.folder is not None:
            return self._published(self.folder / name / str(severity))
        generator = torch.Generator().manual_seed(derive(self.options.seed, "corruption", name, severity))
        return Images(corrupt(self.clean.pixels, name, severity, generator), self.clean.labels)

    def _published(self, folder: Path) -> Images:
        channels, size = next(iter(self.measure.batches)).inputs.shape[1:3]
        classes = int(self.clean.labels.max()) + 1
        encoded = read_class_folders(folder)
        if len(encoded.class_names) != classes:
            raise DataError(f"{folder} does not have the {classes} class folders that the network knows; complete it")
        framing, workers = Framing(size, size), min(8, os.cpu_count() or 1)
        return EncodedImages(encoded.images, encoded.labels, channels, framing, workers)


def _names(folder: Path) -> list[str]:
    names = sorted(sub.name for sub in folder.iterdir() if sub.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"there are no corrupted images in {folder}; get ImageNet-C, or set folder to where it lies")
    return names


if __name__ == "__main__":
    sys.exit(run_command(CorruptionOptions, __doc__))
