"""algo.*: the algorithm."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from megarl.config.schema.key import WITH_CRITIC, Effect, key, needs, with_choice

AdvantageStd = Enum("AdvantageStd", {"none": "none", "group": "group", "batch": "batch"})
StdOf = Enum("StdOf", {"raw": "raw", "centered": "centered"})
NormScope = Enum("NormScope", {"none": "none", "batch": "batch", "group": "group", "running": "running"})
KLEstimator = Enum(
    "KLEstimator", {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "full": "full"}
)
PositiveLMMean = Enum("PositiveLMMean", {"positive_tokens": "positive_tokens", "all_tokens": "all_tokens"})
RatioLevel = Enum(
    "RatioLevel", {"token": "token", "sequence": "sequence", "geometric": "geometric", "sequence_mean": "geometric"}
)
MismatchCorrection = Enum("MismatchCorrection", {"none": "none", "tis": "tis", "mis": "mis"})
ValueLoss = Enum(
    "ValueLoss", {"squared": "squared", "cross_entropy": "cross_entropy", "bradley_terry": "bradley_terry"}
)
LambdaLevel = Enum("LambdaLevel", {"token": "token", "turn": "turn"})
SamplingBy = Enum("SamplingBy", {"correct": "correct", "reward": "reward"})
SamplingRest = Enum("SamplingRest", {"learn": "learn", "mask": "mask"})
LossAggMode = StrEnum(
    "LossAggMode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)

ADAPTIVE = "adaptive"
"""`lambda_policy` as a function of the response's length (VAPO)."""

NO_ADVANTAGE = "none"
"""`advantage` of a policy that learns nothing from its rewards"""

LARGEST_KL_ERROR = 0.2
"""Clip of the relative error of the adaptive KL coefficient (1909.08593, section 2.2)."""

# When keys have an effect.

HAS_SURROGATE = Effect(
    lambda it: it.config.algo.rl_loss_coef != 0, "with algo.rl_loss_coef=0; it counts with a weight above 0"
)
CLIPS = with_choice("surrogate", "clip", "gspo", "cispo", "dis", "dppo")
HAS_LAMBDA_CRITIC = with_choice("advantage", "gae", "tether", "control_variate")
OF_GROUP = with_choice("advantage", "group")
HAS_LAMBDA_POLICY = with_choice("advantage", "gae", "control_variate")
IS_ADAPTIVE = (HAS_LAMBDA_POLICY, needs("lambda_policy", ADAPTIVE))
MEAN_STAYS = Effect(
    lambda it: (
        not it.objective.find_advantage(it.config.algo.advantage).compares_group
        or it.config.algo.reward_clip
        or it.node.mean is NormScope.group
    ),
    "under algo.advantage={config.algo.advantage}, where it cancels out; it counts with gae, or before a reward_clip",
)
HAS_PENALTY = needs("penalty")
KL_IN_REWARD, HAS_TARGET, KL_IN_LOSS = needs("in_reward", "true"), needs("target"), needs("in_loss", "true")
OF_REWARDS = Effect(
    lambda it: it.config.algo.advantage != NO_ADVANTAGE,
    "under algo.advantage=none, which learns from no reward; it counts with another one",
)
MISMATCH_KNOWN = Effect(
    lambda it: it.objective.reads_old_logprobs(it.config.algo),
    "under algo.surrogate={config.algo.surrogate}, where no log-probs are compared; it counts with clip or gspo",
)
DYNAMIC = needs("enabled", "true")
PRETRAINS = (WITH_CRITIC, needs("enabled", "true"), needs("steps"))


@dataclass
class RewardNormConfig:
    """R' = (R - mean) / (std + 1e-6), each over the batch, the group, or all samples of the run so far (running)."""

    mean: NormScope = key(NormScope.none, when=(OF_REWARDS, MEAN_STAYS))
    """Rewards whose mean is subtracted."""
    std: NormScope = key(NormScope.none, when=OF_REWARDS)
    """Rewards whose standard deviation divides."""
    parts: dict[str, float] = field(default_factory=dict)
    """Weights w of parts r of the reward by name (`reward/NAME`), as {right: 1, short: 0.5}; R is then the sum of
    w * (r - mean) / (std + 1e-6) over them, each within its group (GDPO 2601.05242, equations 4 and 5)."""


@dataclass
class OverlongConfig:
    penalty: float = key(0.0, low=0, when=OF_REWARDS)
    """Reward subtracted at the length limit; it grows linearly over the last tokens before the limit (DAPO: 1)."""
    buffer_frac: float = key(0.2, low=0, high=1, when=HAS_PENALTY)
    """Share of rollout.response_length over which the penalty grows (DAPO: a fifth)."""
    filter: bool = False
    """Responses cut at the length limit get no policy loss; their reward stays in the statistics."""
    filter_critic: bool = key(False, when=(WITH_CRITIC, needs("filter", "true")), strict=True)
    """With `filter`, they get no critic loss either."""

    def count_buffer(self, response_length: int) -> int:
        """Tokens before the limit over which the penalty grows."""
        return round(self.buffer_frac * response_length)


@dataclass
class KLConfig:
    in_reward: bool = False
    """Subtract coef * KL(old policy, reference) from every token's reward."""
    reward_estimator: KLEstimator = key(KLEstimator.k1, when=KL_IN_REWARD)
    """With d = log-prob difference: k1 (or kl) = d, abs = |d|, k2 (or mse) = d^2/2, k3 = exp(-d) + d - 1; full: sum
    over the vocabulary."""
    coef: float = key(0.01, above=0, when=KL_IN_REWARD)
    """beta, the weight of the KL in the reward; with `target`, its first value."""
    target: float | None = key(None, above=0, when=KL_IN_REWARD, strict=True)
    """Adapt `coef` so that the KL, the mean over sequences of their mean per token, stays near this."""
    horizon: float = key(10000.0, above=0, when=(KL_IN_REWARD, HAS_TARGET))
    """With `target`: an iteration changes the coefficient by a share of at most 0.2 * samples / horizon."""
    in_loss: bool = False
    """Add loss_coef * KL(policy, reference) to the policy loss."""
    loss_estimator: KLEstimator = key(KLEstimator.k3, when=KL_IN_LOSS)
    """As reward_estimator, but k1 is refused."""
    loss_coef: float = key(0.001, above=0, when=KL_IN_LOSS)
    """Weight of the KL in the loss."""
    in_advantage: bool = False
    """Subtract advantage_coef * (old log-prob - reference's log-prob) of each token from its own advantage alone:
    on-policy distillation from reference.init. algo.advantage says what the reward adds (none: nothing)."""
    advantage_coef: float = key(1.0, above=0, when=needs("in_advantage", "true"))
    """Weight of the KL in the advantage."""

    @property
    def is_subtracted(self) -> bool:
        """Whether rewards or advantages have a KL of the policy before the update."""
        return self.in_reward or self.in_advantage


@dataclass
class MismatchConfig:
    """The ratio exp(old_logprobs - rollout_logprobs) of training engine to rollout engine. It is not logged with
    surrogate=dis or dppo, which need no old_logprobs."""

    correction: MismatchCorrection = key(MismatchCorrection.none, when=HAS_SURROGATE, strict=True)
    """Weight of the surrogate. tis: the ratio, at most `high`; mis: the ratio, 0 outside of the bounds (IcePop). Stale,
    replayed and saved samples need tis or mis, except with algo=sao (dis), bpco (dppo) or topr."""
    level: RatioLevel = key(RatioLevel.token, when=MISMATCH_KNOWN)
    """One ratio per token; sequence: product over the response's tokens; geometric (or sequence_mean): their geometric
    mean."""
    low: float = key(0.5, low=0, high=1, when=MISMATCH_KNOWN)
    """Lower bound of the ratio for mis and mismatch/outside_frac."""
    high: float = key(2.0, low=1, when=MISMATCH_KNOWN)
    """Upper bound of the ratio."""


@dataclass
class ToprConfig:
    """Tapered off-policy REINFORCE, added to the surrogate, whose weight is algo.rl_loss_coef (0 in algo=topr)."""

    positive_loss_coef: float = key(0.0, low=0)
    """Weight of -A * log-prob for A >= 0."""
    negative_loss_coef: float = key(0.0, low=0)
    """Weight of -clip(ratio to the sampling policy, 0, 1) * A * log-prob for A < 0."""
    ratio_level: RatioLevel = key(RatioLevel.sequence, when=needs("negative_loss_coef"))
    """As algo.mismatch.level."""


@dataclass
class TetherConfig:
    """Weight rho of the critic's value in the baseline (1 - rho) * (mean of the others' rewards) + rho * V; each batch
    fits rho for the next one (TETHER 2608.16739, equations 15 to 17)."""

    decay: float = key(0.95, low=0, high=1)
    """rho = decay * rho + (1 - decay) * (rho fitted to the batch)."""
    initial: float = key(0.0, low=0, high=1)
    """rho of the first iteration, from 0 (the group alone) to 1 (the critic alone)."""


@dataclass
class DynamicSamplingConfig:
    """Replaces groups that are all correct or all wrong by groups of further prompts (DAPO 2503.14476, section 3.2)."""

    enabled: bool = False
    """Whether such groups are replaced."""
    by: SamplingBy = key(SamplingBy.correct, when=DYNAMIC)
    """What must differ in a kept group: correct (right and wrong responses; DAPO, equation 11) or reward."""
    max_rounds: int = key(10, low=1, high=1000, when=DYNAMIC)
    """Maximum rounds of generation in an iteration; after them, groups that are not kept fill the rest."""
    low: float | None = key(None, when=DYNAMIC)
    """Keep only groups whose mean of `by`, the share of correct responses or the reward, is above this."""
    high: float | None = key(None, when=DYNAMIC)
    """Keep only groups whose mean is below this."""
    rest: SamplingRest = key(SamplingRest.learn, when=DYNAMIC)
    """Whether groups that are not kept have a policy loss. mask with max_rounds=1 is ROLL's difficulty_mask."""
    skip_epochs: int = key(0, low=0, when=DYNAMIC)
    """Epochs in which the prompt of a group that was not kept is passed over, before it is tried again."""
    value_low: float | None = key(None, when=(DYNAMIC, WITH_CRITIC))
    """Pass over prompts to which the critic gives no value above this, before anything is generated."""
    value_high: float | None = key(None, when=(DYNAMIC, WITH_CRITIC))
    """Pass over those to which it gives no value below this."""


@dataclass
class ReplayConfig:
    """Trains on groups of past iterations together with new ones (TOPR 2503.14286). Needs a loss for stale samples, and
    no critic."""

    num_iterations: int = key(0, low=0)
    """Past iterations that are kept; 0: off."""
    frac: float = key(0.5, above=0, below=1, when=needs("num_iterations"))
    """Share of an iteration's groups from past iterations."""


@dataclass
class ValuePretrainConfig:
    """Before iteration 1 (these iterations have numbers up to 0) the critic learns the Monte-Carlo return, with the
    policy frozen."""

    enabled: bool = key(False, when=WITH_CRITIC, strict=True)
    """Whether the critic is pretrained. Presets of algorithms set this, presets of models set `steps`."""
    steps: int = key(50, low=0, off=0, when=(WITH_CRITIC, needs("enabled", "true")))
    """Maximum iterations of value pretraining, each a rollout and the critic's minibatches; 0: off."""
    rollouts: str | None = key(None, when=PRETRAINS)
    """A rollouts.jsonl of an earlier run (logger.save_rollouts), used instead of fresh responses."""
    patience: int | None = key(20, low=3, when=PRETRAINS)
    """End early if a line fitted to the explained variance of this many iterations rises by less than
    `min_improvement`, with a margin of 1.5 standard errors; null: do not."""
    min_improvement: float = key(0.02, low=0, high=1, when=(*PRETRAINS, needs("patience")))
    """Minimum rise over `patience` iterations that is needed to continue."""
    stop_at_explained_variance: float | None = key(None, high=1, when=PRETRAINS)
    """End once the explained variance of a new rollout reaches this."""

    @property
    def num_steps(self) -> int:
        """Maximum number of iterations of value pretraining; 0 where there is none."""
        return self.steps if self.enabled else 0

    def count_step(self, iteration: int) -> int:
        """The number, from 1, of the step that is in this iteration, which is 0 or less."""
        return self.num_steps + iteration


@dataclass
class AlgoConfig:
    name: str = key("custom", names_folder=True)
    """The preset's name, in the run's directory and the printed objective."""
    advantage: str = "gae"
    """The advantage estimator: `gae`, `group`, `reinforce`, `rloo`, `tether`, `control_variate`, `none`
    (docs/algorithms.md), or FILE.py:NAME of your own."""
    gamma: float = key(1.0, low=0, high=1, when=with_choice("advantage", "gae", "reinforce"), strict=True)
    """Discount of later rewards."""
    lambda_policy: float | int | str = key(0.95, low=0, high=1, why="or adaptive", when=HAS_LAMBDA_POLICY)
    """GAE's lambda for the policy: a number, or `adaptive` = clip(1 - 1/(length_alpha * length), lambda_min, 1)."""
    lambda_floor: float = key(0.0, low=0, high=1, when=HAS_LAMBDA_POLICY)
    """Share of the advantage that has lambda 1 in place of lambda_policy: a TD error l tokens later counts
    (1 - lambda_floor) * lambda_policy^l + lambda_floor."""
    lambda_critic: float = key(1.0, low=0, high=1, when=HAS_LAMBDA_CRITIC)
    """GAE's lambda for the critic's returns; 1 gives Monte-Carlo returns."""
    lambda_level: LambdaLevel = key(LambdaLevel.token, when=HAS_LAMBDA_POLICY, strict=True)
    """Where lambda and gamma count: at each token, or once after each turn, where the environment answers."""
    length_alpha: float = key(0.05, above=0, when=IS_ADAPTIVE)
    """alpha of the adaptive lambda; a larger one brings lambda closer to 1 (VAPO: 0.05)."""
    lambda_min: float = key(0.5, low=0, high=1, when=IS_ADAPTIVE)
    """Lower bound of the adaptive lambda."""
    tether: TetherConfig = key(factory=TetherConfig, when=with_choice("advantage", "tether"))
    advantage_std: AdvantageStd = key(AdvantageStd.none, when=OF_GROUP, strict=True)
    """With advantage=group: divide by nothing, by the standard deviation of the group (GRPO) or of the batch
    (LitePPO)."""
    std_of: StdOf = key(StdOf.raw, when=(OF_GROUP, needs("advantage_std", "batch")), strict=True)
    """With advantage_std=batch: the standard deviation of the rewards (raw, LitePPO), or of the rewards minus their
    group's mean (centered, ROLL's div_std_global)."""
    whiten_advantages: bool = key(False, when=OF_REWARDS)
    """Scale the advantages of all generated tokens of the batch to mean 0 and standard deviation 1."""
    advantage_clip: float | None = key(None, above=0)
    """Clip advantages to [-c, c]."""
    reward_norm: RewardNormConfig = field(default_factory=RewardNormConfig)
    reward_clip: float | None = key(None, above=0, when=OF_REWARDS)
    """Clip rewards to [-c, c] after reward_norm."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    positive_threshold: float = 1.0
    """Lowest score of a correct response, for the positive-LM loss."""
    surrogate: str = key("clip", when=HAS_SURROGATE)
    """The policy loss: `clip`, `gspo`, `cispo`, `sapo`, `dis`, `dppo`, `logprob` (docs/algorithms.md), or FILE.py:NAME
    of your own."""
    surrogate_options: dict[str, Any] = key(factory=dict, when=HAS_SURROGATE)
    """Numbers that the policy loss itself names, for example {tau_negative: 1.1} with sapo."""
    rl_loss_coef: float = key(1.0, low=0)
    """Weight of the surrogate."""
    clip_low: float = key(0.2, low=0, high=1, when=(HAS_SURROGATE, CLIPS))
    """Lower clip at 1 - clip_low; dis masks tokens at or below it; dppo: how much a probability may fall."""
    clip_high: float = key(0.2, low=0, when=(HAS_SURROGATE, CLIPS))
    """Upper clip at 1 + clip_high (DAPO, VAPO: 0.28); dis masks tokens at or above it; dppo: how much a probability may
    rise."""
    dual_clip: float | None = key(
        None, above=1, when=(HAS_SURROGATE, with_choice("surrogate", "clip", "gspo")), strict=True
    )
    """Dual clip c > 1: if A < 0, the loss of a token is at most c * |A|."""
    positive_lm_coef: float = key(0.0, low=0)
    """Weight of the positive-LM loss, the mean negative log-likelihood of correct responses (VAPO: 0.1)."""
    positive_lm_mean_over: PositiveLMMean = key(PositiveLMMean.positive_tokens, when=needs("positive_lm_coef"))
    """Tokens over which the positive-LM loss is averaged: of correct responses (VAPO), or all with a policy loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    topr: ToprConfig = field(default_factory=ToprConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss_agg_mode: LossAggMode = LossAggMode["token-mean"]
    """How the token losses of a minibatch become one number (formulas: docs/algorithms.md)."""
    value_loss: ValueLoss = key(ValueLoss.squared, when=WITH_CRITIC, strict=True)
    """The critic's loss: half the squared error, or with critic.value_range the cross-entropy, for returns that are
    mostly at its ends: value and return as probabilities of the upper one. bradley_terry: the critic becomes a reward
    model, and nothing else runs (experiment=reward_model)."""
    value_clip: float | None = key(None, above=0, when=WITH_CRITIC, strict=True)
    """Largest change of the critic's value from its value before the update."""
    value_loss_agg_mode: LossAggMode = key(LossAggMode["token-mean"], when=WITH_CRITIC)
    """As loss_agg_mode, for the critic's loss."""
    value_pretrain: ValuePretrainConfig = field(default_factory=ValuePretrainConfig)


def needs_reference(config: AlgoConfig) -> bool:
    """Whether the reference scores the responses: a KL term of sampled tokens' log-probs is configured."""
    kl, full = config.kl, KLEstimator.full
    in_reward = kl.in_reward and kl.reward_estimator is not full
    return in_reward or kl.in_advantage or (kl.in_loss and kl.loss_estimator is not full)


def needs_full_kl(config: AlgoConfig) -> bool:
    """Whether the reference's whole distribution is needed, which the policy's own workers then hold."""
    kl, full = config.kl, KLEstimator.full
    return (kl.in_reward and kl.reward_estimator is full) or (kl.in_loss and kl.loss_estimator is full)


def compares_pairs(config: AlgoConfig) -> bool:
    """Whether the critic learns which of two responses is the better one, as a reward model."""
    return config.value_loss is ValueLoss.bradley_terry


def needs_entropy(config: AlgoConfig) -> bool:
    return config.entropy_coef != 0.0


def needs_reward_moments(config: AlgoConfig) -> bool:
    """Whether reward normalisation carries statistics from one iteration to the next."""
    return NormScope.running in (config.reward_norm.mean, config.reward_norm.std)


def uses_topr(config: AlgoConfig) -> bool:
    return config.topr.positive_loss_coef != 0.0 or config.topr.negative_loss_coef != 0.0
