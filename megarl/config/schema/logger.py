"""The `logger` group: where metrics go besides metrics.jsonl, which is always written."""

from dataclasses import dataclass


@dataclass
class LoggerConfig:
    tensorboard: bool = True
    terminal: bool = True
    num_logged_samples: int = 2
    """Responses printed with their rewards after every evaluation."""
    save_rollouts: bool = False
    """Write every response that training sampled, with its reward and log-probs, to RUN_DIR/rollouts.jsonl."""
