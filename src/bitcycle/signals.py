"""The signals that ask a run to save a checkpoint and stop."""

import signal

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # Windows has no SIGUSR1, which is SLURM's warning
