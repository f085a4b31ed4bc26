"""Setup of the fork server before it forks runs, beyond imports; only the fork server imports this module."""

import contextlib
import importlib
import os
import signal
import warnings

with contextlib.suppress(PermissionError):  # already a session leader
    os.setsid()  # signals to the sweep's process group do not reach the runs: the sweep forwards them
# SLURM and systemd signal every process of a job. Without the server, all runs would count as failed before they have saved their
# checkpoints. Blocked, not ignored: a run that is just forked gets what is sent to it.
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED))
# the thread that causes this warning belongs to a library that stops it around a fork
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
importlib.import_module("bitcycle.configuration")
with contextlib.suppress(ImportError):
    importlib.import_module("hydra.core.plugins").Plugins.instance()  # Hydra searches for plugins once per process
