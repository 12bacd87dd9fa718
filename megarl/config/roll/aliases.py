"""ROLL's names for our keys (github.com/alibaba/ROLL): one table, one documented meaning each.

What ROLL means was read in its PPOConfig, RLVRConfig and functionals.py (releases 0.1.0 to 0.3.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Alias:
    targets: tuple[str, ...]
    """Our keys; () where there is no such thing here, and then `text` says why."""
    text: str
    choices: Mapping[str, str] = field(default_factory=dict)
    """ROLL's value -> ours, where they differ; empty: the value as it is."""
    off: tuple[object, ...] = ()
    """Where there are no targets: the values that ask for nothing."""
    is_read: bool = True
    """Whether ROLL's RLVR pipeline reads it."""


_KL_PENALTIES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "k3": "k3", "full": "full"}

ALIASES: dict[str, Alias] = {
    "rollout_batch_size": Alias(("train.prompts_per_iteration",), "prompts of an iteration"),
    "num_return_sequences_in_group": Alias(("train.responses_per_prompt",), "responses of a prompt, the group"),
    "ppo_epochs": Alias(("train.epochs_per_iteration",), "passes over the samples of an iteration"),
    "prompt_length": Alias(("data.prompt_length",), "most tokens of a prompt; longer ones are dropped"),
    "response_length": Alias(("rollout.response_length",), "most tokens of a response"),
    # Advantages and the statistics of rewards, which mean something only together.
    "adv_estimator": Alias(
        ("algo.advantage", "algo.advantage_std"),
        "gae, reinforce; grpo is the group-relative advantage divided by the group's standard deviation (of the"
        " population here, of n-1 in ROLL); rloo and group are ours",
    ),
    "reward_norm": Alias(
        ("algo.reward_norm.mean", "algo.reward_norm.std"),
        "both statistics; ROLL's reward_shift=true leaves the mean alone, reward_scale=true the standard deviation",
    ),
    "reward_shift": Alias(("algo.reward_norm.std",), "true: only the mean of reward_norm is subtracted"),
    "reward_scale": Alias(("algo.reward_norm.mean",), "true: only the standard deviation of reward_norm divides"),
    "norm_mean_type": Alias(("algo.reward_norm.mean",), "mean that is subtracted from the rewards"),
    "norm_std_type": Alias(("algo.reward_norm.std",), "standard deviation that the rewards are divided by"),
    "div_std_global": Alias(
        ("algo.advantage_std", "algo.std_of"),
        "true: the group-relative advantage is divided by the batch's standard deviation of the centred rewards",
    ),
    "gamma": Alias(("algo.gamma",), "discount"),
    "lambd": Alias(("algo.lambda_policy", "algo.lambda_critic"), "ROLL has one lambda for policy and critic"),
    "lambda": Alias(("algo.lambda_policy", "algo.lambda_critic"), "one lambda for policy and critic"),
    "whiten_advantages": Alias(("algo.whiten_advantages",), "over the tokens of the global batch"),
    "advantage_clip": Alias(("algo.advantage_clip",), "advantages clamped to plus or minus this"),
    "reward_clip": Alias(("algo.reward_clip",), "normalised rewards clamped; ROLL clamps the token rewards again"),
    "max_len_mask": Alias(("algo.overlong.filter",), "responses cut at the length limit have no policy loss"),
    # KL.
    "add_token_level_kl": Alias(("algo.kl.in_reward",), "KL to the reference in every token's reward"),
    "kl_penalty": Alias(("algo.kl.reward_estimator",), "estimator of the KL in the reward", _KL_PENALTIES),
    "init_kl_coef": Alias(("algo.kl.coef",), "weight of the KL in the reward, the first one where it adapts"),
    "target_kl": Alias(("algo.kl.target",), "KL that the weight adapts to, as the same mean; null: a fixed weight"),
    "kl_horizon": Alias(("algo.kl.horizon",), "samples over which the weight adapts"),
    "use_kl_loss": Alias(("algo.kl.in_loss",), "KL to the reference in the loss, k3 as in ROLL by default"),
    "kl_loss_coef": Alias(("algo.kl.loss_coef",), "weight of that; ROLL multiplies it by rl_loss_coef, too"),
    # Loss.
    "pg_clip": Alias(("algo.clip_low", "algo.clip_high"), "ROLL's pg_clip sets both"),
    "use_pg_clip_range": Alias(
        ("algo.clip_low", "algo.clip_high"), "true: pg_clip_low and pg_clip_high (0.2 by default) instead of pg_clip"
    ),
    "pg_clip_low": Alias(("algo.clip_low",), "with use_pg_clip_range=true"),
    "pg_clip_high": Alias(("algo.clip_high",), "with use_pg_clip_range=true"),
    "dual_clip_loss": Alias(("algo.dual_clip",), "true: the bound is 1 + 2 * pg_clip (0.2 by default); false: none"),
    "importance_sampling": Alias(
        ("algo.surrogate",),
        "token: the ratio of each token; seq: GSPO's, of the response",
        {"token": "clip", "seq": "gspo"},
    ),
    "value_clip": Alias(("algo.value_clip",), "values clipped around the old ones; null: off"),
    "loss_agg_mode": Alias(
        ("algo.loss_agg_mode",),
        "the same four names; of seq-mean-token-sum-norm ROLL's is the number of samples times as large, and its"
        " divisor is the padded width of the batch instead of rollout.response_length",
    ),
    "token_level_loss": Alias(
        ("algo.loss_agg_mode",), "true: token-mean; false: seq-mean-token-mean, ROLL's default; ROLL never reads it"
    ),
    "entropy_loss_coef": Alias(("algo.entropy_coef",), "weight of the entropy bonus"),
    "rl_loss_coef": Alias(("algo.rl_loss_coef",), "weight of the surrogate alone; ROLL's weights the KL loss, too"),
    "positive_loss_coef": Alias(("algo.topr.positive_loss_coef",), "TOPR's weight where the advantage is positive"),
    "postive_loss_coef": Alias(("algo.topr.positive_loss_coef",), "ROLL's spelling of positive_loss_coef"),
    "use_topr_neg_loss_coef": Alias(
        ("algo.topr.negative_loss_coef",),
        "TOPR's weight where the advantage is negative, true is 1; ROLL's ratio is algo.topr.ratio_level=token",
    ),
    "critic_warmup": Alias(
        ("algo.value_pretrain.enabled", "algo.value_pretrain.steps"),
        "iterations of the critic alone, before the first one here; 0: none",
    ),
    "max_grad_norm": Alias(
        ("policy.optimizer.clip_grad",), "of the policy; the critic's is critic.optimizer.clip_grad"
    ),
    # What has no counterpart.
    "whiten_rewards": Alias((), "token rewards are not whitened; reward_norm normalises the responses'", off=(False,)),
    "use_reward_scaling": Alias(
        (), "ROLL's RLVR pipeline does not read it; reward_norm is what it has", off=(False,), is_read=False
    ),
    "use_reward_norm": Alias(
        (), "ROLL's RLVR pipeline does not read it; reward_norm is what it has", off=(False,), is_read=False
    ),
    "add_len_reward": Alias(
        (), "ROLL reads it nowhere; algo.overlong.penalty prices long responses", off=(False,), is_read=False
    ),
    "difficulty_mask": Alias(
        (),
        "samples are not dropped by their group's mean; algo.dynamic_sampling replaces groups that are all right or"
        " all wrong",
        off=(False,),
    ),
    "difficulty_low_threshold": Alias((), "there is no difficulty_mask here", off=(0, 0.0)),
    "difficulty_high_threshold": Alias((), "there is no difficulty_mask here", off=(1, 1.0)),
    "error_max_len_clip": Alias((), "wrong answers are not dropped by their length", off=(False,)),
    "error_max_len_threshold": Alias((), "there is no error_max_len_clip here"),
    "difficulty_loss_weight": Alias((), "samples are not weighted by difficulty", off=(False,)),
    "length_loss_weight": Alias((), "samples are not weighted by length; loss_agg_mode decides", off=(False,)),
    "mask_type": Alias(
        (), "ROLL reads it nowhere; algo.overlong.filter_critic extends the filter to the critic", is_read=False
    ),
    "use_policy_loss_type": Alias(
        (), "ROLL reads it nowhere; algo.surrogate=logprob is its PG", off=("PPO",), is_read=False
    ),
    "use_topr_loss": Alias(
        (), "ROLL reads it nowhere; algo=topr, or the topr weights, choose TOPR", off=(False,), is_read=False
    ),
    "enable_reference": Alias(
        (), "a reference is loaded exactly where a KL term is configured", off=(False,), is_read=False
    ),
    "l2": Alias((), "ROLL reads it nowhere; policy.optimizer.weight_decay is the decay", off=(0, 0.0), is_read=False),
    "async_generation_ratio": Alias((), "rollout and update alternate", off=(0, 0.0)),
    "use_opd": Alias((), "there is no distillation from a teacher", off=(False,)),
    "is_pure_opd": Alias((), "there is no distillation from a teacher", off=(False,)),
}
