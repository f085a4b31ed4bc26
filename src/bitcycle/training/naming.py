"""The name of a run, without PyTorch: a hash of the settings that can change its result.

These are the option chosen in each group, and other settings only if they differ from their default, or from what it was when the
first runs were named, so that neither a new setting nor a new default changes existing names. The seed is not hashed: runs that
differ only in the seed share a parent folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitcycle.settings import SettingError, Settings, unnamed_value

if TYPE_CHECKING:
    from bitcycle.configuration import RunConfig


def result_settings(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value, for all option names and for other settings that affect the result and are not default, or not what
    the default once was (`unnamed`)."""
    found: dict[str, Any] = {f"{prefix}{name}": value for name, value in settings.identity().items()}
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        if not one.metadata.get("affects_result", True):
            continue
        if isinstance(value, Settings):
            found |= result_settings(value, f"{prefix}{one.name}.")
        elif one.name == "name" or value != unnamed_value(one):  # names distinguish the options' classes
            found[prefix + one.name] = _content(prefix, value) if one.metadata.get("content") else value
    return found


def _content(prefix: str, path: str) -> str:
    """A digest of the weights in a file. Raises SettingError if they cannot be read."""
    from bitcycle.training.initial_weights import content_digest  # with PyTorch, which reads them

    try:
        return content_digest(path)
    except SettingError as error:
        raise error.within(prefix.rstrip(".")) from None


def run_hash(config: RunConfig) -> str:
    """Ten hexadecimal digits that identify what a configuration computes. Raises SettingError if initial weights cannot
    be read."""
    text = json.dumps(result_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def run_path(config: RunConfig) -> Path:
    """The folder of a run: results_root/SCALE/MODEL-DATASET-QUANTIZER-SCHEDULE-HASH/seed=N. Raises SettingError as `run_hash`."""
    words = (config.model.name, config.dataset.name, config.quantizer.name, config.schedule.name, run_hash(config))
    return Path(config.results_root) / config.scale / "-".join(words) / f"seed={config.seed}"
