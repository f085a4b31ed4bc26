"""A finished run, as its folder says: its configuration, and its trained network at the bits of its last step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from bitcycle.configuration import GROUPS, RunConfig, read_config
from bitcycle.errors import RunError
from bitcycle.layer import PrecisionController
from bitcycle.schedule import FLOAT, Precision
from bitcycle.settings import SettingError
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.run_folder import RunFolder, read_records


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done.

    Attributes:
        folder: where it lies.
        plan: what it ran.
        model: the trained network in evaluation mode, on the CPU, at `precision`.
        precision: bits of its last step.
    """

    folder: RunFolder
    plan: Plan
    model: nn.Module
    precision: Precision


def read_run_config(folder: RunFolder, data_root: str | None = None) -> RunConfig:
    """The configuration of a run, as `config.yaml` in its folder says; with another data_root, if given.

    Raises:
        RunError: if it cannot be read, or was written by another version.
    """
    try:
        loaded: Any = OmegaConf.load(folder.config)
        kinds = {group: OmegaConf.structured(options[loaded[group].name]) for group, options in GROUPS.items()}
        config = read_config(OmegaConf.merge(OmegaConf.structured(RunConfig), kinds, loaded))  # type: ignore[arg-type]
    except (OSError, KeyError, AttributeError, OmegaConfBaseException, SettingError) as error:
        problem = f"{folder.config} cannot be read ({type(error).__name__}: {error})"
        raise RunError(f"{problem}. Give the folder of a finished run; its name ends with seed=N.") from error
    return config if data_root is None else replace(config, data_root=data_root)


def load_run(path: str | Path, data_root: str | None = None) -> FinishedRun:
    """A finished run with its trained network.

    Args:
        path: the run's folder, which ends with seed=N.
        data_root: where the data lie, if not where they lay.

    Raises:
        RunError: if there is no finished run in the folder.
        DataError: if its data are needed and missing.
    """
    folder = RunFolder(Path(path))
    if folder.state() != "done":
        raise RunError(f"{folder.path} holds no finished run; run its command until it is done")
    plan = make_plan(read_run_config(folder, data_root))
    state = folder.checkpoint.load(torch.device("cpu"))
    assert state is not None, "a finished run has a checkpoint"
    model = plan.build_model()
    model.load_state_dict(state["model"])
    precision = Precision(*[r["precision"] for r in read_records(folder.metrics) if r["kind"] == "evaluation"][-1])
    if precision.weight < FLOAT or precision.activation < FLOAT:
        PrecisionController(model, plan.schedule, workload=plan.workload).use(precision)
    return FinishedRun(folder, plan, model.eval(), precision)
