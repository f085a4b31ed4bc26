"""Execution of one run from plan to summary: skipped if finished, resumed if interrupted, otherwise started."""

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from bitcycle import distributed
from bitcycle.errors import RunError
from bitcycle.files import read_object, write_atomically
from bitcycle.hardware import CostMeter
from bitcycle.schedule import SearchSchedule
from bitcycle.signals import Interrupted, StopSignal
from bitcycle.threads import fair_share, has_share, runs_beside, users_threads
from bitcycle.training.display import ProgressBar, log_to_file
from bitcycle.training.environment import describe_environment, processor, set_up_torch, threads_kept
from bitcycle.training.loop import Trainer
from bitcycle.training.outcome import Best, merit
from bitcycle.training.plan import Plan
from bitcycle.training.processes import check_same_run, check_sharing, explained
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

MEAN_OF_LAST = 5
"""Number of final evaluations that the summary averages."""


def execute(plan: Plan) -> dict[str, Any]:
    """Train the planned run and return its summary; returns the existing summary of a finished run.

    Raises Interrupted after a signal, with a checkpoint saved; DataError if the data are missing; RunError if the run fails,
    with the reason in status.json; SettingError (a ValueError) if the run does not support several processes, or these were given
    different runs.
    """
    check_same_run(plan)
    check_sharing(plan)
    if distributed.rank():
        plan = replace(plan, folder=RunFolder(plan.folder.path, writes=False))
    if _is_done(plan):
        return _finished(plan)
    log = plan.folder.log if plan.folder.writes else Path(os.devnull)
    with plan.folder.lock(), log_to_file(log), threads_kept():
        if _is_done(plan):  # just finished by another process
            return _finished(plan)
        try:
            resolved = _resolved(plan)
            return _train(resolved)
        except Interrupted as stop:
            logger.warning("interrupted: %s; run the same command again to resume", stop)
            raise
        except Exception as error:
            meaning = explained(_explain_disk(error, plan))
            _record_failure(plan, meaning)
            if meaning is error:
                raise
            raise meaning from error


def _explain_disk(error: Exception, plan: Plan) -> Exception:
    """The error itself, or an explanation if a disk takes no more: that of the run folder, or of the file that it names."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    place = plan.folder.path if error.filename is None else error.filename
    remedy = "Make it writable" if error.errno == errno.EROFS else "Free space on that disk"
    again = "run the same command again; it resumes from the last checkpoint"
    return RunError(f"cannot write to {place}: {error.strerror}. {remedy}, and {again}.")


def _is_done(plan: Plan) -> bool:
    """Whether the run is finished, according to process 0. Raises RunError if that has ended, as when another process trains the
    run."""
    try:
        return bool(distributed.broadcast(plan.folder.state() == "done"))
    except RuntimeError as error:
        meaning = explained(error)
        if meaning is error:
            raise
        raise meaning from error


def _resolved(plan: Plan) -> Plan:
    """The plan with its final schedule, after executing the preliminary run if there is one."""
    preliminary = plan.preliminary
    if preliminary is None:
        return plan
    logger.info("%s runs first, as this run depends on its result", preliminary.schedule.name)
    plan.folder.write_status("running", None, plan.total_steps)
    summary = execute(preliminary)
    first = {"total_steps": summary["total_steps"], "cost": summary["cost"]["total"]}
    return plan.resolve(summary["found"], {preliminary.schedule.name: first})


def _finished(plan: Plan) -> dict[str, Any]:
    logger.info("already done: %s", plan.folder.path)
    summary = recounted(plan)
    if summary["counting"] != plan.folder.read_summary()["counting"]:
        logger.info("the cost is counted again with these settings; summary.json keeps the one that was counted before")
    return summary


def recounted(plan: Plan) -> dict[str, Any]:
    """The summary of a finished run, with costs recomputed for the hardware settings of this configuration.

    The first recomputation that estimates an energy is recorded if it counts the same bit operations, and if the folder can be
    written.
    """
    summary = plan.folder.read_summary()
    if summary["counting"] == plan.counting():
        return summary
    recorded = summary["cost"]["total"]
    for part in ("total", "to_best"):
        summary["cost"][part] = _cost_of(plan, summary["samples"][part])
    first = plan.preliminary
    if first is not None and first.folder.state() == "done":
        summary["preliminary"][first.schedule.name]["cost"] = recounted(first)["cost"]["total"]
    summary["counting"] = plan.counting()
    total = summary["cost"]["total"]
    if recorded["energy_j"] is None and total["energy_j"] is not None and total["gbitops"] == recorded["gbitops"]:
        try:
            plan.folder.write(plan.folder.summary, summary)
        except OSError as error:
            logger.info("the energy is not kept in %s: %s", plan.folder.summary, error)
    return summary


def _cost_of(plan: Plan, samples: dict[str, int]) -> dict[str, Any]:
    """The cost of recorded samples with the cost model of this plan."""
    meter = CostMeter(plan.workload, plan.config.hardware, plan.schedule.reference)
    meter.load_state_dict(samples)
    return meter.cost().summary()


def _record_failure(plan: Plan, error: Exception) -> None:
    logger.debug("failed", exc_info=error)  # the traceback goes to log.txt; the command line prints one line
    try:
        plan.folder.write_status("failed", None, plan.total_steps, reason=f"{type(error).__name__}: {error}")
    except OSError as second:
        logger.error("cannot write %s: %s", plan.folder.status, second)


def _train(plan: Plan) -> dict[str, Any]:
    folder, device = plan.folder, set_up_torch(plan.config.training)
    trainer = Trainer(plan, device)
    state = folder.checkpoint.load(trainer.identity())
    if state is not None:
        _resume(trainer, state)
    first = distributed.broadcast(trainer.step)
    if trainer.step != first:
        raise RunError(
            f"process {distributed.rank()} would start at step {trainer.step}, process 0 at step {first}: results_root must be "
            "on a disk that all machines share"
        )
    _share_cores(trainer)
    if folder.writes:
        _write_beginning(trainer)
    folder.write_status("running", trainer.step, plan.total_steps)
    trainer.open_logs()
    bar = ProgressBar(plan.total_steps, trainer.step, plan.config.logging.progress and folder.writes)
    started = time.monotonic()
    try:
        with StopSignal() as stop:
            _train_until_stopped(trainer, bar, stop)
    finally:
        bar.close()
        trainer.close()
    logger.info("trained in %.0f s", time.monotonic() - started)
    summary = summarise(trainer)
    folder.write(folder.summary, summary)
    folder.write_status("done", trainer.total_steps, trainer.total_steps)
    return summary


def _share_cores(trainer: Trainer) -> None:
    """Unless the user chose a number of threads, go on with as many as before, since with others sums would be rounded otherwise;
    a new run shares the cores with those that compute on them already, unless its sweep has divided them."""
    if trainer.device.type != "cpu" or distributed.world_size() > 1:
        return
    before = read_object(trainer.folder.environment).get("threads") if trainer.step else None
    in_sweep = has_share()  # of the cores, which depends on how many runs were left when the sweep began
    if trainer.plan.config.training.threads or (users_threads() and not (in_sweep and before)):
        return
    allowed = fair_share(1) if in_sweep else torch.get_num_threads()
    others = runs_beside()
    threads = min(allowed, before or fair_share(1 + others))
    if threads != torch.get_num_threads():
        beside = "another run computes" if others == 1 else f"{others} other runs compute"
        why = "as before" if before else f"as {beside} on the same cores"
        logger.info("%d of %d threads, %s (training.threads)", threads, allowed, why)
        torch.set_num_threads(threads)


def _write_beginning(trainer: Trainer) -> None:
    """Record and log the start or continuation of the run, its settings and its environment."""
    plan, folder, environment = trainer.plan, trainer.folder, describe_environment(trainer.device)
    data = plan.config.dataset
    environment["remark"] = data.remark(plan.config.data_folder)
    if environment["remark"]:
        message = "the data of %s are %s: for results comparable with published ones, use the official files"
        logger.warning(message, data.name, environment["remark"])
    before = read_object(folder.environment) if trainer.step else {}
    environment["started"] = before.get("started") or datetime.now(UTC).isoformat(timespec="seconds")
    if trainer.step:
        _warn_of_other_machine(before, environment)
        _warn_of_other_costs(trainer)
        logger.info("resuming after step %d of %d: %s", trainer.step, plan.total_steps, folder.path)
    else:
        logger.info("new run of %d steps: %s", plan.total_steps, folder.path)
    if distributed.world_size() > 1:
        logger.info("%d processes share each batch of %d samples", distributed.world_size(), plan.batch_size)
    settings = OmegaConf.to_yaml(OmegaConf.create(asdict(plan.config)))
    write_atomically(folder.config, lambda stream: stream.write(settings.encode()))
    folder.write(folder.environment, environment)


def _train_until_stopped(trainer: Trainer, bar: ProgressBar, stop: StopSignal) -> None:
    """Train, with readable errors for signals and batches that PyTorch cannot handle."""
    try:
        trainer.train(bar, stop)
    except RuntimeError as error:
        if stop.received and type(error) is RuntimeError:  # the signal also ended the image decoding processes
            raise Interrupted(f"received {stop.received}; the last checkpoint is kept") from error
        raise
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RunError(
            f"step {trainer.step} has a batch of one sample, which batch normalisation does not support: choose "
            "training.batch_size or dataset.train_samples so that the last batch of an epoch is larger"
        ) from error


def _resume(trainer: Trainer, state: dict[str, Any]) -> None:
    try:
        trainer.resume(state)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise RunError(
            f"the checkpoint in {trainer.folder.path} was written by another version of this code and is incompatible "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Finish the run with that version, or delete the folder."
        ) from error


def _warn_of_other_machine(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn if a resumed run may differ from an uninterrupted one in rounding."""
    remedies = {"threads": "; set training.threads", "processes": "; start as many as before for identical results"}
    for what in ("threads", "processes", "device", "processor"):
        if what in before and before[what] != now[what]:
            advice = remedies.get(what, "")
            logger.warning(
                "resumed with %s=%s instead of %s: sums may differ in rounding%s",
                *(what, now[what], before[what], advice),
            )


def _warn_of_other_costs(trainer: Trainer) -> None:
    """Warn if a resumed run counts its cost otherwise than before: records that are written are not counted again."""
    try:
        before = trainer.folder.read_settings()["hardware"]
    except (OSError, RunError, KeyError):
        return
    now = asdict(trainer.plan.config.hardware)
    if other := [name for name in now if before.get(name, now[name]) != now[name]]:
        logger.warning(
            "resumed with another cost model (hardware.%s): costs of evaluations up to step %d in metrics.jsonl, and in curves, "
            "are those of the former; summary.json counts all with the new one",
            *(other[0], trainer.step),
        )


def _selection(best: Best, choose: Callable[[list[float]], float]) -> dict[str, float]:
    """The result of a selection without test data: the final and the best validation value, and the test value at the best."""
    selected = best.validation.index(choose(best.validation))
    return {
        "final": best.validation[-1],
        "best": best.validation[selected],
        "test_at_best": best.history[selected],
    }


def summarise(trainer: Trainer) -> dict[str, Any]:
    """The result of a finished run: final and best metric, its unit and direction, its level by guessing
    (`chance`), those of each phase (`phases`: name, steps, metric, chance and more), cost in total and up to the best, speed."""
    plan, best, config = trainer.plan, trainer.best, trainer.plan.config
    last = best.history[-MEAN_OF_LAST:]
    choose = partial(max, key=lambda value: merit(value, trainer.task.higher_is_better))
    found = plan.schedule.result if isinstance(plan.schedule, SearchSchedule) else plan.found
    averaged = {"final": best.averaged[-1], "best": choose(best.averaged)} if best.averaged else {}
    return {
        "metric": trainer.task.metric,
        "unit": trainer.task.unit,
        "higher_is_better": trainer.task.higher_is_better,
        "chance": trainer.task.chance,
        "final": best.history[-1],
        "best": best.value,
        "best_step": best.step,
        "mean_of_last": {"mean": sum(last) / len(last), "evaluations": len(last)},
        "at_q_max": {"final": best.at_q_max[-1], "best": choose(best.at_q_max)},
        **({"validation": _selection(best, choose)} if best.validation else {}),
        **({"phases": trainer.phases.records} if len(plan.schedule.phases) > 1 else {}),
        "cost": {"total": trainer.controller.cost().summary(), "to_best": _cost_of(plan, best.samples)},
        "samples": {"total": trainer.controller.meter.state_dict(), "to_best": best.samples},
        "counting": plan.counting(),
        **trainer.controller.record.summary(),
        "scale": config.scale,
        "model": config.model.name,
        "dataset": config.dataset.name,
        "quantizer": config.quantizer.name,
        "schedule": config.schedule.name,
        "seed": config.seed,
        "hash": plan.hash,
        "total_steps": trainer.total_steps,
        "train_samples": plan.info.train_samples,
        "parameters": plan.parameters,
        "seconds": trainer.elapsed,
        "evaluation_seconds": trainer.evaluating,
        "steps_per_second": trainer.total_steps / max(trainer.elapsed - trainer.evaluating, 1e-9),
        "processor": processor(trainer.device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **({"processes": distributed.world_size()} if distributed.world_size() > 1 else {}),
        **({"averaged": averaged | {"weights": trainer.average.count}} if averaged else {}),
        **({"found": found} if found else {}),
        **({"preliminary": plan.preceded_by} if plan.preceded_by else {}),
    }
