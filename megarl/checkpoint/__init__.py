"""What a checkpoint directory is on disk: its manifest with checksums, and the folder of a run's checkpoints."""
