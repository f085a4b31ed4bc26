"""The command line `python train.py`: Hydra composes, bitcycle validates and runs, and every error is one readable line."""

import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from bitcycle import distributed
from bitcycle.configuration import read_config, refuse_renamed_options, unused_settings
from bitcycle.errors import EXIT_DONE
from bitcycle.guard import SWEEPS, JobFailed, guarded
from bitcycle.help import help_text
from bitcycle.optional_imports import explain_missing
from bitcycle.picture import pictures
from bitcycle.presets import add_sources, search_named_folders
from bitcycle.settings import SettingError
from bitcycle.sweep.execution import SweepEnded, worst
from bitcycle.sweep.grid import quoted
from bitcycle.threads import announced
from bitcycle.training.display import set_up_console
from bitcycle.training.outcome import no_validation, objective
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.processes import process_group
from bitcycle.training.report import plan_report, print_report, summary_report
from bitcycle.training.run import execute

logger = logging.getLogger("bitcycle")


def main(conf: Path) -> int:
    """Run the command line in `sys.argv` and return the exit code; `conf` is the folder of the configuration files."""
    if {"--help", "-h"} & {*sys.argv}:
        return guarded(lambda: _help(sys.argv[1:]))
    set_up_console()
    # Makes Hydra raise errors instead of printing them and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = map(quoted, sys.argv[1:])
    exit_codes: list[int] = []

    def job(config: DictConfig) -> Any:
        found: list[float] = []
        exit_codes.append(guarded(lambda: run(config, found)))
        if exit_codes[-1] != EXIT_DONE:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise JobFailed(exit_codes[-1])  # an optimizing sweeper would take the exit code for a metric
            return None
        return found[0] if len(found) == 1 else found

    launch = hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(job)
    try:
        exit_codes.append(guarded(launch))
    except SweepEnded as sweep:
        return sweep.code
    return worst(exit_codes)


def _help(arguments: list[str]) -> None:
    """Show the help on the word after `--help`."""
    words = search_named_folders(arguments)
    asked = next(index for index, word in enumerate(words) if word in ("--help", "-h"))
    show(help_text(*words[asked + 1 : asked + 2]))


def show(text: str) -> None:
    """Print a text, whose reader, such as `head`, may close the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(config: DictConfig, found: list[float]) -> int:
    """Run one composed configuration: validate, plan, then print the plan or execute it and add objectives to `found`."""
    add_sources(HydraConfig.get().runtime.config_sources)
    overrides, sweep = HydraConfig.get().overrides.task, HydraConfig.get().runtime.choices.get(SWEEPS)
    refuse_renamed_options(overrides)
    if sweep is not None:
        problem = "is a sweep of several runs, which needs -m"
        raise SettingError(f"+{SWEEPS}", sweep, problem, f"write python train.py -m +{SWEEPS}={sweep}")
    run_config = read_config(config)
    for key, choice in unused_settings(overrides, run_config):
        logger.warning("%s has no effect with %s", key, choice)
    plan = make_plan(run_config)
    _warn_of_batches(plan, overrides)
    if plan.schedule.shortfall:
        logger.warning(plan.schedule.shortfall)
    dataset = plan.config.dataset
    if "validation" in run_config.logging.objective and not dataset.validates:
        raise no_validation()
    if run_config.dry_run == "json":
        print(json.dumps(plan.describe()))
    elif run_config.dry_run == "true":
        print_report(plan_report(plan))
    else:
        with announced(), process_group(run_config.training.device):
            summary, is_first = execute(plan), distributed.rank() == 0
        if is_first:
            print_report(summary_report(summary, plan.schedule.reference))
            try:
                for picture in pictures(plan, summary):
                    print(f"picture: {picture}")
            except ModuleNotFoundError as error:  # what was trained is kept
                logger.warning("no picture: %s", explain_missing(error) or error)
            except OSError as error:  # such as a full disk
                logger.warning("no picture: %s", error)
            print(f"run folder: {plan.folder.path}")
        found += [objective(summary, name) for name in run_config.logging.objective]
    return EXIT_DONE


def _warn_of_batches(plan: Plan, overrides: Iterable[str]) -> None:
    """Warn of a batch size that steps do not have: one above the samples of an epoch, or any for steps on a whole graph."""
    size, epoch = plan.batch_size, plan.epoch
    is_set = any(override.lstrip("+").startswith("training.batch_size=") for override in overrides)
    if is_set and plan.config.task.epoch(plan.info, size + 1) == epoch:
        logger.warning("training.batch_size has no effect: each step trains on all %d samples", epoch.samples)
    elif epoch.samples_per_step > epoch.samples:
        logger.warning(
            "training.batch_size=%d is more than an epoch has: each of the %d steps trains on all %d samples, and is counted so"
            " in the cost",
            *(size, plan.total_steps, epoch.samples),
        )
