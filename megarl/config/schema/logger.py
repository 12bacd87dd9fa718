"""The `logger` group: where metrics go besides metrics.jsonl, which is always written."""

from dataclasses import dataclass


@dataclass
class LoggerConfig:
    tensorboard: bool = True
    """Write the metrics to RUN_DIR/tensorboard, too."""
    terminal: bool = True
    """Print a line for each iteration."""
    num_logged_samples: int = 2
    """Responses printed with their rewards after every evaluation."""
    save_rollouts: bool = False
    """Write every response that training sampled, with its reward and log-probs, to RUN_DIR/rollouts.jsonl."""
