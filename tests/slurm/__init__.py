"""Tests that need a SLURM cluster: `make test-slurm` starts one on this machine."""
