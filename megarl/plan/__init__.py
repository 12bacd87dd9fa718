"""The needs of a job before it starts: memory of every GPU and node by phase, bytes, seconds, and whether it fits."""
