"""Training of a run: its plan, the loop, checkpoints, run folders and logs."""
