"""What happens to a converted model during training: its bits, its cost, changes of phase, and a report of them."""
