"""What a job takes before it starts: memory of every GPU and node by phase, bytes, seconds, and whether it fits."""
