"""Errors that a user can act on, each with the exit code of the command line."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_CONFIGURATION = 2
EXIT_DATA_MISSING = 3
EXIT_INTERRUPTED = 75


class DataError(RuntimeError):
    """A data set that is missing or cannot be read; the message says what was looked for and what to do. Exit code 3."""

    exit_code = EXIT_DATA_MISSING


class RunError(RuntimeError):
    """A run that cannot go on: full disk, damaged checkpoints, a loss that is not finite, a run in progress. Exit code 1."""

    exit_code = EXIT_FAILED
