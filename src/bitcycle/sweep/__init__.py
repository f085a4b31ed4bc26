"""Many runs at once: sweeps as lists of grids, which of their runs are missing, and where these are run."""

from bitcycle.sweep.grid import command_line, expand, substitute
from bitcycle.sweep.item import SCALES, Sweep, read_sweep

__all__ = ["SCALES", "Sweep", "command_line", "expand", "read_sweep", "substitute"]
