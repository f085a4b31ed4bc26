"""Gates that choose the bits of a block for each sample, and the backward pass of what they chose."""
