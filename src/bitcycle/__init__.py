"""bitcycle: neural networks trained at a precision that varies during training.

>>> import bitcycle
>>> schedule = bitcycle.schedule("RTH", q_min=3, q_max=8, cycles=8, total_steps=64_000)
>>> schedule(0)
Precision(weight=8, activation=8, gradient=8)

Schedules are pure numbers and imported eagerly; everything that needs PyTorch is imported on first use.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitcycle.precision import Precision
from bitcycle.schedule import schedule
from bitcycle.threads import choose_threads, runs_a_module

if runs_a_module():  # `python -m bitcycle.benchmark` is a command, and its module imports PyTorch at once
    choose_threads()

if TYPE_CHECKING:
    from bitcycle.integrations.onnx import export_onnx
    from bitcycle.layer import PrecisionController, conversion_report, float_state_dict, quantize_model
    from bitcycle.layer.conversion.finalize import finalize, load_finalized
    from bitcycle.quantizer import quantize
    from bitcycle.training.finished_run import FinishedRun

__version__ = "0.1.0"

__all__ = [
    "Precision",
    "PrecisionController",
    "conversion_report",
    "export_onnx",
    "finalize",
    "float_state_dict",
    "load_finalized",
    "load_run",
    "quantize",
    "quantize_model",
    "schedule",
]

_HOMES = {
    "PrecisionController": "bitcycle.layer",
    "conversion_report": "bitcycle.layer",
    "export_onnx": "bitcycle.integrations.onnx",
    "finalize": "bitcycle.layer.conversion.finalize",
    "float_state_dict": "bitcycle.layer",
    "load_finalized": "bitcycle.layer.conversion.finalize",
    "quantize": "bitcycle.quantizer",
    "quantize_model": "bitcycle.layer",
}
"""Public name -> the package it is imported from on first use."""


def load_run(path: str | Path, data_root: str | None = None, phase: int | None = None) -> "FinishedRun":
    """Load a finished run of the command line with its trained network.

    Args:
        path: run folder, which ends in seed=N.
        data_root: data root, if it has moved.
        phase: from 1, to load the weights from which the next phase started; None: the weights at the end of the run.

    Raises:
        RunError: if the folder has no finished run, or the weights of the phase were not kept.
        DataError: if data are needed and missing.
    """
    from bitcycle.training import finished_run  # imports what composes configurations

    return finished_run.load_run(path, data_root, phase)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bitcycle' has no attribute '{name}'")
    globals()[name] = getattr(import_module(_HOMES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
