"""Training recipe: length of a run, optimizer, learning rate and weight averaging."""
