"""The `checkpoint` group: what of a run survives its processes."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    save_every: int | None = 20
    """Iterations between checkpoints in RUN_DIR/checkpoints; one more comes after the last iteration, after value
    pretraining, when the run is asked to stop and when it fails. null: neither checkpoints nor a journal of rollouts,
    so that the run cannot be resumed."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; older ones are removed once a newer one is complete."""
    keep_best: int = 0
    """Number of further checkpoints to keep: the evaluated ones with the highest `best_metric`."""
    best_metric: str = "reward/heldout"
    """The metric of metrics.jsonl that keep_best ranks by; higher is better."""
    stop_deadline_s: float = 120.0
    """Deadline in seconds of the checkpoint that is written after an error and after SIGTERM, SIGHUP, SIGUSR1 or
    Ctrl-C; after a signal it is counted from the end of the update in progress, if there is one."""
    max_restarts: int = 3
    """How many times in a row, without a new checkpoint in between, training resumes from the newest checkpoint after a
    training process died or did not answer."""
