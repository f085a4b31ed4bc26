"""The name of a run, without PyTorch: a hash of the settings that can change its result.

These are the option chosen in each group, and other settings only if they differ from their default, or from what it was when the
first runs were named, so that neither a new setting nor a new default changes existing names. The seed is not hashed: runs that
differ only in the seed share a parent folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitcycle.configuration import RunConfig


def _content(path: str, field: str) -> str:
    """A digest of the weights in a file. Raises SettingError about the field if they cannot be read."""
    from bitcycle.training.initial_weights import content_digest  # with PyTorch, which reads them

    return content_digest(path, field)


def run_hash(config: RunConfig) -> str:
    """Ten hexadecimal digits that identify what a configuration computes. Raises SettingError if initial weights cannot
    be read."""
    text = json.dumps(config.result_settings(_content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def run_path(config: RunConfig) -> Path:
    """The folder of a run: results_root/SCALE/MODEL-DATASET-QUANTIZER-SCHEDULE-HASH/seed=N. Raises SettingError as `run_hash`."""
    words = (config.model.name, config.dataset.name, config.quantizer.name, config.schedule.name, run_hash(config))
    return Path(config.results_root) / config.scale / "-".join(words) / f"seed={config.seed}"
