"""What ends a run before its last iteration, and how its last lines say so."""

from dataclasses import dataclass
from pathlib import Path

from megarl.config.schema.run import TrainConfig


@dataclass(frozen=True)
class Limit:
    """A limit that a run has reached."""

    key: str
    reached: str
    """`after 4 minutes`"""
    go_on: str
    """The override with which a resumed run goes on"""


def find_limit(train: TrainConfig, minutes: float, num_samples: int, heldout_reward: float) -> Limit | None:
    """The target or the limit that is reached. minutes: since the run started. heldout_reward: NaN reaches none."""
    goal = train.stop_at_heldout_reward
    if goal is not None and heldout_reward >= goal:
        reached = f"at the held-out reward {heldout_reward:.4f}, of at least {goal:g}"
        return Limit("train.stop_at_heldout_reward", reached, "train.stop_at_heldout_reward=null")
    if train.max_minutes is not None and minutes > train.max_minutes:
        reached = f"after {train.max_minutes:g} minute{'s' * (train.max_minutes != 1)}"
        return Limit("train.max_minutes", reached, "train.max_minutes=...")
    if train.max_samples is not None and num_samples >= train.max_samples:
        reached = f"after {num_samples} responses, of at least {train.max_samples}"
        return Limit("train.max_samples", reached, "train.max_samples=...")
    return None


def format_limit(limit: Limit, iteration: int, num_iterations: int) -> str:
    """`ended after 4 minutes (train.max_minutes): 3 of 8 iterations`."""
    return f"ended {limit.reached} ({limit.key}): {iteration} of {num_iterations} iterations"


def format_places(run_dir: Path, *, has_critic_alone: bool = False) -> str:
    """Where the trained model is and what shows the run. has_critic_alone: nothing but the critic was trained."""
    model, critic = run_dir / "policy", run_dir / "critic"
    use = f"trained model: {model} (megarl evaluate model=checkpoint model.path={model})"
    if has_critic_alone:
        use = f"trained critic: {critic} (megarl train critic.init={critic} algo.value_pretrain.enabled=false)"
    return f"{use}; page: megarl report {run_dir}"
