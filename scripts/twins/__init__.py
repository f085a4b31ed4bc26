"""Construction of pairs of networks, the released code's and ours, with equal weights; one module per type of
network."""
