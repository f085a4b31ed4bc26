"""`bitcycle doctor`: can a run work on this machine, and how long does it take? Library functions behind the command."""
