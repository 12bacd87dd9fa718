"""The `logger` group: what the terminal shows, and where metrics go besides metrics.jsonl, which is always written."""

from dataclasses import dataclass
from enum import Enum


class WandbMode(Enum):
    """How Weights & Biases gets the metrics."""

    offline = "offline"
    """Into RUN_DIR/wandb, without network; `wandb sync` uploads it."""
    online = "online"
    """To wandb.ai, or WANDB_BASE_URL, as the user of `wandb login` or WANDB_API_KEY."""


@dataclass
class LoggerConfig:
    """[Monitoring](monitoring.md) says how to look at each of them, and [metrics](metrics.md) what the numbers mean."""

    tensorboard: bool | None = None
    """Write the metrics to RUN_DIR/tensorboard, too. null: where the package is installed (extra `tensorboard`, which
    `make install` includes)."""
    wandb: WandbMode | None = None
    """Write the metrics to Weights & Biases, too; null: no. Needs the extra `wandb`."""
    wandb_project: str = "megarl"
    """The project there. WANDB_ENTITY names the team, if it is not your own."""
    mlflow: str | None = None
    """Write the metrics to MLflow, too: the tracking URI, `http://HOST:5000` of a server or `sqlite:///mlflow.db` of a
    file without one; null: no. Needs the extra `mlflow`."""
    mlflow_experiment: str = "megarl"
    """The experiment there; it is made where there is none."""
    terminal: bool = True
    """Show the run on the terminal: live where it is one, as lines of at most 80 columns in a file or pipe.
    RUN_DIR/train.log has the same, whatever this key says."""
    capture_output: bool = True
    """Write what libraries and your own functions print or warn in the trainer's process to RUN_DIR/logs/driver.log.
    false: to the terminal, for breakpoint() in a function of your own."""
    num_logged_samples: int = 2
    """Responses printed with their rewards after every evaluation."""
    save_rollouts: bool = False
    """Write every response that training sampled, with its reward and log-probs, to RUN_DIR/rollouts.jsonl."""
    num_token_records: int = 8
    """Responses of each iteration, and of each evaluation, that are written token by token to RUN_DIR/tokens.jsonl,
    with log-probs, values and advantages, for the rollout viewer in the page of tools/report.py; 0: none."""
    token_record_kb: int = 100
    """Largest size of an iteration's responses in tokens.jsonl, and of an evaluation's, in kB of 1000 bytes. Longer
    responses lose tokens of their middle."""
    token_passes: bool = False
    """Also write the entropy of the policy at these tokens and how the update changed their log-probs. Each takes
    forward passes of the policy over these responses, three an iteration in all."""
