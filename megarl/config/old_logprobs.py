"""Whether the policy scores the responses of an iteration before its update, or old_logprobs are the update's own."""

from megarl.algo.registry import reads_old_logprobs
from megarl.config.schema.algo import uses_topr
from megarl.config.schema.root import Config

JITTER = "moe_input_jitter_eps"
"""Of model.megatron: random factors of a router's input in training alone"""


def list_pass_reasons(config: Config) -> list[str]:
    """Why the policy has to score the responses before its update, one reason each; empty: where something reads
    old_logprobs at all, the update's own are the same up to rounding.

    The loss reads them in its first optimizer step where the ratio to them is 1; the correction of
    algo.mismatch.correction and the metrics can be computed from those of the update.
    """
    train, algo = config.train, config.algo
    steps = train.num_optimizer_steps
    reasons = {
        f"{steps} optimizer steps in an iteration, of which all but the first need those before it": steps != 1,
        "algo.kl.in_reward=true: the rewards need them": algo.kl.in_reward,
        "the topr terms need them as log-probs of the policy that sampled": uses_topr(algo),
        "policy.fp8: the rounding of a pass for training is another": config.policy.fp8 is not None,
        "rollout.router_replay=true: policy/moe_routing_agreement is counted in the pass": config.rollout.router_replay,
        f"model.megatron.{JITTER}: a pass for training is random": bool(config.model.megatron.get(JITTER)),
    }
    return [reason for reason, applies in reasons.items() if applies]


def reuses_logprobs(config: Config, num_samples: int | None = None, iteration: int | None = None) -> bool:
    """Whether old_logprobs are the update's own, and the policy does not score the responses before it.

    num_samples: of the iteration, which replayed groups may make more than one minibatch; None: as many as configured.
    iteration: one in which the policy is frozen has no update; None: it is not.
    """
    if num_samples is not None and num_samples > config.train.minibatch_size:
        return False
    if iteration is not None and config.policy.is_frozen(iteration):
        return False
    return config.train.reuse_logprobs and reads_old_logprobs(config.algo) and not list_pass_reasons(config)


def scores_first(config: Config) -> bool:
    """Whether the policy has a forward pass over the responses of an iteration before its update."""
    return reads_old_logprobs(config.algo) and not reuses_logprobs(config)
