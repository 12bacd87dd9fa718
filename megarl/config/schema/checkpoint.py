"""The `checkpoint` group: what of a run survives its processes."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    save_every: int | None = 20
    """Iterations between checkpoints in RUN_DIR/checkpoints, and steps between those of value pretraining in
    RUN_DIR/value_pretraining; one more comes after the last iteration, after value pretraining, and when the run is
    asked to stop. null: none, and no journal of rollouts: nothing can be resumed."""
    keep_last: int = 2
    """Checkpoints that stay; older ones are removed once a newer one is complete."""
    keep_best: int = 0
    """Evaluated checkpoints that stay besides, those of the highest `best_metric`."""
    best_metric: str = "reward/heldout"
    """A metric of metrics.jsonl; higher is better."""
    stop_deadline_s: float = 120.0
    """Seconds for the checkpoint that is written after SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C, counted from the end of the
    update under way, if there is one."""
    max_restarts: int = 3
    """Times in a row, without a new checkpoint in between, that training resumes from the newest checkpoint after a
    training process died or gave no answer."""
