"""Many runs at once: sweeps as lists of grids, which of their runs are missing, and where these are run."""
