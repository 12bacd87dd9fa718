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


def find_limit(train: TrainConfig, minutes: float, num_samples: int) -> Limit | None:
    """The limit of time or samples that is reached. minutes: since the run started."""
    if train.max_minutes is not None and minutes > train.max_minutes:
        key = "train.max_minutes"
        return Limit(key, f"after {train.max_minutes:g} minute{'s' * (train.max_minutes != 1)}", f"{key}=...")
    if train.max_samples is not None and num_samples >= train.max_samples:
        key = "train.max_samples"
        return Limit(key, f"after {num_samples} responses, of at least {train.max_samples}", f"{key}=...")
    return None


def find_goal(train: TrainConfig, heldout_reward: float) -> Limit | None:
    """The held-out reward at which the run is to end, where this one reaches it; NaN does not."""
    goal, key = train.stop_at_heldout_reward, "train.stop_at_heldout_reward"
    if goal is None or not heldout_reward >= goal:
        return None
    return Limit(key, f"at the held-out reward {heldout_reward:.4f}, of at least {goal:g}", f"{key}=null")


def format_limit(limit: Limit, iteration: int, num_iterations: int) -> str:
    """`ended after 4 minutes (train.max_minutes): 3 of 8 iterations`."""
    return f"ended {limit.reached} ({limit.key}): {iteration} of {num_iterations} iterations"


def format_resume(limit: Limit, run_dir: Path) -> str:
    """How a run that has a checkpoint goes on."""
    return f"go on with megarl train resume={run_dir} {limit.go_on}"


def format_places(run_dir: Path, *, has_critic_alone: bool = False) -> str:
    """Where the trained model is and what shows the run. has_critic_alone: nothing but the critic was trained."""
    model = run_dir / "policy"
    if has_critic_alone:
        use = f"critic.init={run_dir / 'critic'} algo.value_pretrain.enabled=false"
        return f"trained critic: {run_dir / 'critic'} (megarl train {use}); page: megarl report {run_dir}"
    return (
        f"trained model: {model} (megarl evaluate model=checkpoint model.path={model}); page: megarl report {run_dir}"
    )
