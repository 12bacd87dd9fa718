"""The `train` group: sizes of an iteration, how long to train, evaluation."""

from dataclasses import dataclass


@dataclass
class TrainConfig:
    num_iterations: int = 100
    prompts_per_iteration: int = 512
    responses_per_prompt: int = 1
    """K, the group size."""
    samples_per_minibatch: int = 512
    """Samples per optimizer step."""
    tokens_per_microbatch: int = 16384
    """Tokens per forward, prompts included; a longer sequence makes a micro-batch of its own."""
    epochs_per_iteration: int = 1
    eval_every: int = 10
    """Iterations between evaluations on held-out prompts; they also run before the first and after the last."""
    num_eval_prompts: int = 256
    """Most held-out prompts of an evaluation."""
    stop_at_heldout_reward: float | None = None
    """End early once the held-out reward reaches this."""
    max_samples: int | None = None
    """End after the iteration in which this many responses have been generated in all, those of value pretraining and
    of groups that dynamic sampling dropped included."""
    max_minutes: float | None = None
    """End cleanly after the iteration in which this much time has passed since the processes stood; counted anew by a
    run that goes on."""
