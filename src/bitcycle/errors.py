"""Errors that a user can act on, each with the exit code of the command line."""

from pickle import PickleError
from zipfile import BadZipFile

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_CONFIGURATION = 2
EXIT_DATA_MISSING = 3
EXIT_INTERRUPTED = 75

UNREADABLE = (OSError, ValueError, LookupError, TypeError, RuntimeError, EOFError, BadZipFile, PickleError)
"""Exceptions that libraries raise when they read damaged files."""


class DataError(RuntimeError):
    """A dataset is missing or unreadable; the message names the files and the remedy."""

    kind, exit_code = "data missing", EXIT_DATA_MISSING


class RunError(RuntimeError):
    """A run cannot continue: full disk, damaged checkpoints, non-finite loss, a run in progress."""

    kind, exit_code = "run failed", EXIT_FAILED
