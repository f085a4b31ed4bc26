"""A finished run, loaded from its folder: configuration, and trained network at the precision of the last evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from bitcycle.configuration import GROUPS, RunConfig, read_config
from bitcycle.errors import RunError
from bitcycle.files import read_records
from bitcycle.layer import PrecisionController
from bitcycle.layer.control.phase_transition import carry_quantized
from bitcycle.model import ModelOptions
from bitcycle.precision import FLOAT, Precision
from bitcycle.settings import SettingError, Settings
from bitcycle.training.naming import run_hash
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.run_folder import RunFolder


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done: its folder, its plan, and its trained network in evaluation mode, on the CPU, at the precision of the
    last evaluation or, for a network from the end of a phase, of that phase."""

    folder: RunFolder
    plan: Plan
    model: nn.Module
    precision: Precision

    @property
    def config(self) -> RunConfig:
        """Every setting of the run."""
        return read_run_config(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Training and evaluation records, in order."""
        return read_records(self.folder.metrics)

    @property
    def subject(self) -> dict[str, Any]:
        """Names of dataset and network."""
        return {"dataset": self.plan.config.dataset.name, "model": self.plan.config.model.name}

    @property
    def bits(self) -> list[int]:
        """Bits of weights and activations."""
        return [self.precision.weight, self.precision.activation]

    def make_float(self) -> None:
        """Replace the weights by their quantized values at `precision` and disable all quantizers."""
        carry_quantized(self.model)
        self._use(Precision(FLOAT, FLOAT, FLOAT), choose=False)

    def _use(self, precision: Precision, choose: bool) -> None:
        controller = PrecisionController(self.model, self.plan.schedule, workload=self.plan.workload)
        controller.use(precision, choose=choose)


def read_run_config(folder: RunFolder, data_root: str | None = None) -> RunConfig:
    """Read the configuration of a run from `config.yaml` in its folder, with another `data_root` if given. Raises RunError if
    the file cannot be read, or if settings that no longer exist affected the result of the run."""
    try:
        loaded = OmegaConf.create(folder.read_settings())
        kinds = {group: OmegaConf.structured(_kind(folder, group, loaded[group].name)) for group in GROUPS}
        declared: Any = OmegaConf.merge(OmegaConf.structured(RunConfig), kinds)
        former = sorted(_remove_former(loaded, declared))
        merged: Any = OmegaConf.merge(declared, loaded)
        config = read_config(merged)
    except (OSError, KeyError, AttributeError, OmegaConfBaseException, SettingError) as error:
        problem = f"{folder.config} cannot be read ({type(error).__name__}: {error})"
        raise RunError(f"{problem}. Give the folder of a finished run; its name ends with seed=N.") from error
    if former and run_hash(config) != folder.read_summary().get("hash", run_hash(config)):
        problem = f"{folder.config} has settings that no longer exist and changed the result, among {', '.join(former)}"
        raise RunError(f"{problem}. Use the version of bitcycle that trained it; environment.json names its commit.")
    return config if data_root is None else replace(config, data_root=data_root)


def _kind(folder: RunFolder, group: str, name: str) -> type[Settings]:
    """The class of the settings of a recorded run's preset. Raises RunError if the preset is not known here."""
    if name not in GROUPS[group]:
        remedy = "Name the folder of your own presets by --config-dir, or in Python by the environment variable BITCYCLE_CONF"
        raise RunError(f"{folder.config}: {group}={name} is not known here. {remedy}.")
    kind: type[Settings] = GROUPS[group][name].kind
    return kind


def _remove_former(config: DictConfig, declared: DictConfig, prefix: str = "") -> Iterator[str]:
    """Remove the settings of a recorded run that no longer exist, and yield their names."""
    for name in list(config):
        value, known = config.get(name), declared.get(name)
        if name not in declared.keys():  # noqa: SIM118  (`in` does not find those without a default)
            del config[name]
            yield f"{prefix}{name}"
        elif isinstance(value, DictConfig) and isinstance(known, DictConfig):
            yield from _remove_former(value, known, f"{prefix}{name}.")


def load_run(path: str | Path, data_root: str | None = None, phase: int | None = None) -> FinishedRun:
    """Load a finished run with its trained network.

    Args:
        path: run folder, which ends in seed=N.
        data_root: data root, if it has moved.
        phase: from 1, to load the weights from which the next phase started; None: the weights at the end of the run.

    Raises:
        RunError: if the folder has no finished run, or the weights of the phase were not kept.
        DataError: if data are needed and missing.
    """
    folder = RunFolder(Path(path))
    summary = finished_summary(folder)
    config = read_run_config(folder, data_root)
    plan = make_plan(replace(config, model=_with_present_weights(config.model, folder)))
    model = plan.build_model()
    if phase is None:
        state = folder.checkpoint.load()
        if state is None or state["step"] != summary["total_steps"]:
            problem = f"the last checkpoint in {folder.checkpoint.folder} is damaged or missing"
            raise RunError(f"{problem}. Remedy: restore last.pt, or move the folder away and run its command again.")
        model.load_state_dict(state["model"])
        precision = Precision(*[r["precision"] for r in read_records(folder.metrics) if r["kind"] == "evaluation"][-1])
    else:
        weights, precision = _result_of_phase(folder, summary.get("phases") or [], phase)
        model.load_state_dict(weights)
    run = FinishedRun(folder, plan, model.eval(), precision)
    run._use(precision, choose=True)  # also for float: a new model has another precision, and its gates are off
    return run


def _with_present_weights(options: ModelOptions, folder: RunFolder) -> ModelOptions:
    """The options with the weights of the run itself in the place of files it started from that are gone, as they have been
    trained since."""
    given = {name: getattr(options, name, None) for name in ("initial_weights", "backbone_weights", "weights")}
    gone: dict[str, Any] = {
        name: None for name, path in given.items() if path is not None and not Path(path).expanduser().exists()
    }
    return replace(options, **gone | {"initial_weights": str(folder.checkpoint.last)}) if gone else options


def finished_summary(folder: RunFolder) -> dict[str, Any]:
    """The summary of a finished run. Raises RunError if the run is not finished."""
    if folder.state() != "done":
        raise RunError(f"no finished run in {folder.path}; run its command until it is done")
    return folder.read_summary()


def _result_of_phase(folder: RunFolder, phases: list[Any], phase: int) -> tuple[dict[str, Any], Precision]:
    """The weights from which the phase after number `phase` started, and the precision of `phase`."""
    if not 1 <= phase < len(phases):
        known = f"use a phase before the last (1 to {len(phases) - 1})" if len(phases) > 1 else f"omit @{phase}"
        raise RunError(f"phase={phase}: {folder.path} has no weights of this phase. Remedy: {known}.")
    following = phases[phase]
    if following["start_from"] == "previous" or not folder.checkpoint.candidate(following["from_step"]).exists():
        problem = f"phase={phase}: its weights are not in {folder.checkpoint.folder}"
        raise RunError(
            f"{problem}; current versions keep only weights selected as the start of a later phase. Remedy: set "
            "schedule.start_from=best for the next phase, or move the folder away and run its command again."
        )
    weights = folder.checkpoint.load_candidate(following["from_step"])
    return weights, Precision(*phases[phase - 1]["precision"])
