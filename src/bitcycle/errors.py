"""Errors that a user can act on, each with the exit code of the command line."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_CONFIGURATION = 2
EXIT_DATA_MISSING = 3
EXIT_INTERRUPTED = 75


class DataError(RuntimeError):
    """A dataset is missing or unreadable; the message names the files and the remedy."""

    kind, exit_code = "data missing", EXIT_DATA_MISSING


class RunError(RuntimeError):
    """A run cannot continue: full disk, damaged checkpoints, non-finite loss, a run in progress."""

    kind, exit_code = "run failed", EXIT_FAILED
