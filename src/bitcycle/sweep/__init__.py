"""Sweeps: lists of grids of runs, the state of each run, and launchers for one machine and for SLURM."""
