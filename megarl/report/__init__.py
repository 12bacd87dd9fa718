"""What a run tells: metrics.jsonl, TensorBoard, and the terminal or log file."""
