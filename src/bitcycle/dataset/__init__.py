"""Training data, in batches that depend only on (seed, epoch, sample)."""

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, Splits
from bitcycle.presets import Presets

__all__ = ["DATASETS", "DatasetInfo", "DatasetOptions", "Splits"]

DATASETS: Presets[DatasetOptions] = Presets("dataset")
"""Dataset name -> its options."""
