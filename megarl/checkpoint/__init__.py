"""Checkpoints on disk: the folder of a run's checkpoints, their manifests with checksums, and the run's lock."""
