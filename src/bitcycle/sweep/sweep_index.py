"""The runs of sweeps, each once: how it is started, where its folder is, and its state.

Composing thousands of configurations takes a minute; where the run folders are follows from files alone, so it is kept in
results_root and used as long as no file of the sweeps, the configuration or the code has changed. Runs that begin from files of
weights are named by what these hold, and composed each time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from bitcycle.cache import code_digest
from bitcycle.configuration import GROUPS, RunConfig
from bitcycle.settings import SettingError
from bitcycle.sweep.composition import composing
from bitcycle.sweep.grid import Overrides, command_line
from bitcycle.sweep.item import read_sweep
from bitcycle.training.plan import locate
from bitcycle.training.run_folder import RunFolder, read_object, write_json

STATES = ("done", "running", "queued", "resumable", "failed", "missing", "wrong")
CONTENT = {
    f"{group}.{field.name}"
    for group, options in GROUPS.items()
    for kind in options.values()
    for field in dataclasses.fields(kind)
    if field.metadata.get("content")
}
"""Settings that name a file of weights."""
Compose = Callable[[Overrides], RunConfig | str]
"""Settings of a run -> its validated configuration, or what is wrong with them."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        overrides: its settings, as on the command line.
        path: its run folder; None if the configuration is wrong.
        problem: what is wrong with it.
        samples: training samples of its steps; None where its length is given in epochs.
        config: the configuration, where it was composed just now.
        queued: whether a cluster has it in its queue.
    """

    overrides: Overrides
    path: Optional[str]
    problem: str = ""
    samples: Optional[int] = None
    config: Optional[RunConfig] = field(default=None, compare=False, repr=False)
    queued: bool = False

    @property
    def arguments(self) -> list[str]:
        """The run as arguments of train.py."""
        return command_line(self.overrides)

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        assert self.path is not None, "a wrong configuration has no folder"
        return RunFolder(Path(self.path))

    @property
    def hash(self) -> str:
        """Names what the run computes, seeds apart; the end of its folder's name."""
        return self.folder.path.parent.name.rpartition("-")[2]

    @property
    def state(self) -> str:
        """One of `STATES`, as it is now; resumable: begun, and nobody goes on with it."""
        if self.path is None:
            return "wrong"
        folder = self.folder
        if folder.state() == "done":
            return "done"
        if self.queued:
            return "queued"
        if folder.is_in_use():
            return "running"
        if folder.read_status().get("state") == "failed":
            return "failed"
        return "resumable" if folder.checkpoint.exists() else "missing"


SweepIndex = dict[str, list[SweepRun]]
"""PAPER/ITEM -> its runs, each once."""


def index_runs(runs: Iterable[Overrides], compose: Compose) -> list[SweepRun]:
    """Every run of a sweep once.

    Runs that compute the same (static precision whatever q_min, say) are one; the first stands for all.

    Args:
        runs: as expanded from grids.
        compose: makes configurations, whatever the seed.
    """
    found: dict[str, SweepRun] = {}
    for run in runs:
        config = compose(run)
        try:
            if isinstance(config, RunConfig):
                if run.get("seed", "").isdigit():
                    config = replace(config, seed=int(run["seed"]))
                steps = config.training.steps
                samples, path = steps and steps * config.training.batch_size, str(locate(config).path)
                found.setdefault(path, SweepRun(run, path, "", samples, config))
                continue
        except SettingError as error:
            config = str(error)
        found[str(run)] = SweepRun(run, None, config)
    return list(found.values())


def mark_queued(runs: Sequence[SweepRun], queued: Callable[[Sequence[Path]], set[Path]]) -> list[SweepRun]:
    """The runs, where those that wait or run in the queue of a cluster say so.

    Args:
        runs: as found on disk.
        queued: tells which of some run folders are in the queue.
    """
    folders = queued([run.folder.path for run in runs if run.state not in ("done", "wrong")])
    return [replace(run, queued=run.path is not None and Path(run.path) in folders) for run in runs]


def sweep_index(
    root: Path, scale: str, results_root: str = "results/runs", watch: Callable[..., Any] = iter
) -> SweepIndex:
    """The runs of every sweep file.

    Args:
        root: folder of `conf` and `sweeps`.
        scale: paper, mini or smoke.
        results_root: folder of the run folders.
        watch: goes through the sweep files and may show how far it is.

    Raises:
        SettingError: for an unknown scale, or where there are no sweep files.
    """
    files = sorted((root / "sweeps").glob("*/*.yaml"))
    if not files or not (root / "conf").is_dir():
        raise SettingError("sweeps", root, "has no folders conf and sweeps", "start this in the repository's root")
    cache, version = Path(results_root) / scale / ".sweeps.json", _version(root)
    kept = read_object(cache)
    known: dict[str, Any] = kept.get("sweeps", {}) if kept.get("version") == version else {}
    index: SweepIndex = {}
    with composing(root / "conf") as compose:
        for file in watch(files):
            name = f"{file.parent.name}/{file.stem}"
            if name in known:
                index[name] = [SweepRun(**run) for run in known[name]]
            else:
                settings = {"scale": scale, "results_root": results_root}
                index[name] = index_runs(read_sweep(file).expand(scale, settings), compose)
    lasting = {name: runs for name, runs in index.items() if not any(map(_may_move, runs))}
    if lasting.keys() != known.keys() and cache.parent.is_dir():
        fields = ("overrides", "path", "samples")
        plain = {name: [{key: getattr(run, key) for key in fields} for run in runs] for name, runs in lasting.items()}
        write_json(cache, {"version": version, "sweeps": plain})
    return index


def distinct(index: SweepIndex) -> list[SweepRun]:
    """All runs, those that several sweeps share once; wrong ones by their settings."""
    return list({run.path or str(run.overrides): run for runs in index.values() for run in runs}.values())


def _may_move(run: SweepRun) -> bool:
    """Whether a run can get another folder without a change of any file of sweeps, configuration and code."""
    return run.path is None or bool(CONTENT & run.overrides.keys())


def _version(root: Path) -> str:
    """A digest of every file that decides where run folders are."""
    digest = hashlib.sha256(code_digest().encode())
    for folder in ("conf", "sweeps"):
        for file in sorted((root / folder).rglob("*.yaml")):
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
