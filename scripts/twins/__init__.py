"""How a network of the released code and ours are built with the same weights, one module for each kind of network."""
