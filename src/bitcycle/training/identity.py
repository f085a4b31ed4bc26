"""Names of runs: a hash of the settings that can change the result.

The hash includes the option chosen in each group, and other settings only if they differ from their default, so that a
new setting with a neutral default does not change existing names. The seed is not hashed: runs that differ only in the
seed share a parent folder.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from bitcycle.configuration import RunConfig
from bitcycle.settings import SettingError, Settings, default_of
from bitcycle.training.initial_weights import content_digest


def result_settings(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value, for all option names and for other settings that affect the result and are not default."""
    found: dict[str, Any] = {f"{prefix}{name}": value for name, value in settings.identity().items()}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not field.metadata.get("affects_result", True):
            continue
        if isinstance(value, Settings):
            found |= result_settings(value, f"{prefix}{field.name}.")
        elif field.name == "name" or value != default_of(field):  # names distinguish the options' classes
            found[prefix + field.name] = _digest(prefix, value) if field.metadata.get("content") else value
    return found


def _digest(prefix: str, path: str) -> str:
    try:
        return content_digest(path)
    except SettingError as error:
        raise error.within(prefix.rstrip(".")) from None


def run_hash(config: RunConfig) -> str:
    """Ten hexadecimal digits that identify what a configuration computes."""
    text = json.dumps(result_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def run_path(config: RunConfig) -> Path:
    """The folder of a run: results_root/SCALE/MODEL-DATASET-QUANTIZER-SCHEDULE-HASH/seed=N."""
    words = (config.model.name, config.dataset.name, config.quantizer.name, config.schedule.name, run_hash(config))
    return Path(config.results_root) / config.scale / "-".join(words) / f"seed={config.seed}"
