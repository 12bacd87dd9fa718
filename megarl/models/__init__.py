"""Models: their families, and their checkpoints on this machine."""
