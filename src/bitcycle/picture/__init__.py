"""Pictures of single runs: what was trained, at which bits, and how well; with matplotlib, an optional dependency."""
