"""How is it trained: the plan of a run, the loop, checkpoints, run folders and logs."""
