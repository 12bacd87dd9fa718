"""Everything around the loop: a command's inputs, processes, attempts, checkpoints, signals and exit."""
