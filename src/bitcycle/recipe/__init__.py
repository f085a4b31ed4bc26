"""The recipe of a run: length, optimizer, learning rate and averaging of weights."""
