"""Plugins that Hydra discovers: sweeper, launchers, and search path of the sweep files; based on bitcycle.sweep."""
