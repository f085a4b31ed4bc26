"""What Hydra finds by itself: the sweeper, the launchers, and where the sweep files lie. The work is done in bitcycle.sweep."""
