"""Record what each row of the settings does on this machine's accelerator: `python -m tests.accelerator.hardware [WORD ...]`.

Words choose the rows whose names contain one of them; rows of an earlier record of the same device are replaced. Each row is
trained whole, killed and resumed there, and trained on the CPU for comparison. JOBS rows at a time (an environment variable).
"""

from __future__ import annotations

import collections
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bitcycle.device import choose_device, device_name
from bitcycle.errors import RunError
from bitcycle.files import read_csv, write_csv
from bitcycle.training.cuda_graphs import StepGraphs
from bitcycle.training.run import execute
from tests.accelerator.case import trained_twice
from tests.accelerator.covering import recorded_rows, trained
from tests.accelerator.pretended import origin
from tests.accelerator.record import row_of, row_of_pair
from tests.conftest import ROOT, digits_plan
from tests.made_data import with_made_data
from tests.settings import RESUME, run_of

RECORD = ROOT / "results" / "summary" / "hardware.csv"
COLUMNS = ("case", "error", "same", "steady", "waits", "first_loss", "first_loss_cpu", "graphs", "device", "torch")
LIMIT = 120.0
"""Seconds without any row that ends, after which the rest is given up."""


@contextmanager
def watch() -> Iterator[collections.Counter[str]]:
    """Context that counts where the host waits for a CUDA device, as PyTorch notices it."""
    seen: collections.Counter[str] = collections.Counter()

    def note(message: Warning | str, *arguments: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            seen[f"a wait at {origin()}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def metrics_of(folder: Path) -> str:
    """The log of a run, or of that before which another one comes."""
    return min(folder.rglob("metrics.jsonl"), key=lambda file: len(file.parts)).read_text()


def first_loss(folder: Path) -> float | None:
    """The first training loss that a run recorded."""
    records = map(json.loads, metrics_of(folder).splitlines())
    return next((record["loss"] for record in records if record.get("kind") == "train"), None)


def with_graphs(overrides: list[str], folder: Path) -> dict[str, Any]:
    """The same run, logged at each step, with CUDA graphs and compiled quantizers, whole and killed; with neither; on the CPU:
    replays, whether the first three are equal, and the losses of the first step."""
    settings = [*overrides, "training.log_steps=1"]
    StepGraphs.replays = 0
    found = trained_twice([*settings, "training.cuda_graphs=true"], folder / "graphs", watch, compile=True)
    if found["error"]:
        raise RuntimeError(f"with CUDA graphs: {found['error']}")
    replays, StepGraphs.replays = StepGraphs.replays, 0
    with pytest.MonkeyPatch.context() as patch:
        settings = [*with_made_data(settings, folder, patch), "training.compile=false", "training.cuda_graphs=false"]
        for name, device in {"plain": "auto", "cpu": "cpu"}.items():
            execute(digits_plan(folder / name, *settings, f"training.device={device}"))
    same = found["same"] and metrics_of(folder / "graphs" / "whole") == metrics_of(folder / "plain")
    graphs = f"{replays} {'equal' if same else 'DIFFERENT'}" if replays else ""
    return {"graphs": graphs, "first_loss": first_loss(folder / "plain"), "first_loss_cpu": first_loss(folder / "cpu")}


def row(case: str) -> dict[str, Any]:
    """The record of a row; its error if it has one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            if case not in RESUME:
                pairs = {pair.name: pair for pair in recorded_rows()}
                return row_of_pair(case, trained(pairs[case], watch, compiler=True))
            StepGraphs.replays = 0
            found = row_of(case, trained_twice([*run_of(case), "training.cuda_graphs=false"], path, watch))
            if not found["error"]:
                (path / "other").mkdir()
                found |= with_graphs(run_of(case), path / "other")
            return found
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return {"case": case, "error": f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}"[:600]}


def quietly() -> None:
    """Prepare a worker."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.fsync = lambda descriptor: None  # as in the other tests
    StepGraphs.wait = 1  # these runs are short


def main(words: list[str]) -> None:
    """Run the chosen rows. Raises RunError without an accelerator."""
    device = choose_device("auto")
    if device.type == "cpu":
        raise RunError(
            "PyTorch sees no accelerator here, and the record is of real ones: check the driver, `bitcycle doctor`"
        )
    cases = [*RESUME, *(pair.name for pair in recorded_rows())]
    chosen = [case for case in cases if not words or any(word in case for word in words)]
    chosen.sort(key=lambda case: "compile" in case)  # which takes longest
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    facts = {"torch": torch.__version__}
    recorded = {found["case"]: found for found in read_csv(RECORD, missing_ok=True)}
    with context.Pool(int(os.environ.get("JOBS", 1)), quietly) as pool:
        results = pool.imap_unordered(row, chosen)
        for number in range(1, len(chosen) + 1):
            try:
                found = results.next(LIMIT)
            except multiprocessing.TimeoutError:
                pool.terminate()
                raise RunError(f"no row has ended for {LIMIT:g} seconds; recorded so far: {RECORD}") from None
            facts["device"] = device_name(device) or device.type
            recorded[found["case"]] = {**facts, **found}
            print(
                f"{number}/{len(chosen)} {time.monotonic() - began:.0f} s {found['case']}: {found['error'] or 'well'}",
                flush=True,
            )
            write_csv(RECORD, list(COLUMNS), [recorded[case] for case in cases if case in recorded])
    if wrong := [case for case in chosen if recorded[case]["error"]]:
        raise RunError(f"{len(wrong)} of {len(chosen)} rows have an error, which {RECORD} tells: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
