"""Float modules that PyTorch lacks: models are built of them, and conversion knows them."""
