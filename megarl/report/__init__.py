"""The output of a run: metrics.jsonl, TensorBoard, the terminal or log file, and the reports of sweeps."""
