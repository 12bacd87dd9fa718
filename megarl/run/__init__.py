"""What surrounds the loop: a command's inputs, processes, attempts, checkpoints, signals and end."""
