"""The `algo` group: an algorithm as a set of values, and which values contradict one another."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite

from megarl.config.algo_choices import (
    Advantage,
    AdvantageStd,
    KLEstimator,
    LossAggMode,
    MismatchCorrection,
    MismatchLevel,
    NormScope,
    RatioLevel,
    StdOf,
    Surrogate,
)

ADAPTIVE = "adaptive"
"""`lambda_policy` as a function of the response's length (VAPO)."""


@dataclass
class RewardNormConfig:
    """R' = (R - mean) / (std + 1e-6), each over the batch, the group, or every sample of the run so far."""

    mean: NormScope = NormScope.none
    std: NormScope = NormScope.none


@dataclass
class OverlongConfig:
    penalty: float = 0.0
    """Reward subtracted at the length limit; it grows linearly over the last `buffer` tokens (DAPO: 1)."""
    buffer: int = 0
    """Tokens before the length limit over which the penalty grows."""
    filter: bool = False
    """Responses cut at the length limit get no policy loss; their reward stays in the statistics."""
    filter_critic: bool = False
    """They get no critic loss either."""


@dataclass
class KLConfig:
    in_reward: bool = False
    """Subtract coef * KL(old policy, reference) from every token's reward."""
    reward_estimator: KLEstimator = KLEstimator.k1
    coef: float = 0.01
    target: float | None = None
    """Adapt `coef` so that the mean KL per token stays near this; null: fixed."""
    horizon: float = 10000.0
    """Samples over which the adaptive coefficient moves by its own size."""
    in_loss: bool = False
    """Add loss_coef * KL(policy, reference) to the policy loss."""
    loss_estimator: KLEstimator = KLEstimator.k3
    loss_coef: float = 0.001


@dataclass
class MismatchConfig:
    """Ratio between training engine and rollout engine, exp(old_logprobs - rollout_logprobs); always
    logged.
    """

    correction: MismatchCorrection = MismatchCorrection.none
    """How the surrogate is weighted with the ratio."""
    level: MismatchLevel = MismatchLevel.token
    low: float = 0.5
    high: float = 2.0


@dataclass
class ToprConfig:
    """Tapered off-policy REINFORCE, added to the surrogate (its own weight is `algo.rl_loss_coef`)."""

    positive_loss_coef: float = 0.0
    """Weight of -A * log-prob where A >= 0."""
    negative_loss_coef: float = 0.0
    """Weight of -clip(ratio to the sampling policy, 0, 1) * A * log-prob where A < 0."""
    ratio_level: RatioLevel = RatioLevel.sequence


@dataclass
class ValuePretrainConfig:
    """Critic updates towards the Monte-Carlo return before the first policy update, the policy frozen."""

    steps: int = 0
    """Most iterations of it (each a rollout and the critic's minibatches); 0: off."""
    patience: int | None = 10
    """End once the explained variance has not risen by `min_improvement` in so many iterations; null: never
    early.
    """
    min_improvement: float = 0.01


@dataclass
class AlgoConfig:
    name: str = "custom"
    """The preset's name, in the run's directory and in the printed objective."""
    advantage: Advantage = Advantage.gae
    gamma: float = 1.0
    lambda_policy: float | int | str = 0.95
    """GAE's lambda for the policy: a number, or `adaptive` = clip(1 - 1/(length_alpha * length), lambda_min,
    1).
    """
    lambda_critic: float = 1.0
    """GAE's lambda for the critic's returns; 1 gives Monte-Carlo returns."""
    length_alpha: float = 0.05
    lambda_min: float = 0.5
    advantage_std: AdvantageStd = AdvantageStd.none
    std_of: StdOf = StdOf.raw
    whiten_advantages: bool = False
    advantage_clip: float | None = None
    reward_norm: RewardNormConfig = field(default_factory=RewardNormConfig)
    reward_clip: float | None = None
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    positive_threshold: float = 1.0
    """A response is correct when its raw reward is at least this."""
    surrogate: Surrogate = Surrogate.clip
    rl_loss_coef: float = 1.0
    """Weight of the surrogate."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Bound c > 1 of the loss where A < 0: at most c * |A|; null: off."""
    positive_lm_coef: float = 0.0
    """mu: weight of the mean negative log-likelihood of the correct responses' tokens (VAPO: 0.1)."""
    entropy_coef: float = 0.0
    topr: ToprConfig = field(default_factory=ToprConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    loss_agg_mode: LossAggMode = LossAggMode["token-mean"]
    value_clip: float | None = None
    value_loss_agg_mode: LossAggMode = LossAggMode["token-mean"]
    value_pretrain: ValuePretrainConfig = field(default_factory=ValuePretrainConfig)


def needs_critic(config: AlgoConfig) -> bool:
    return config.advantage is Advantage.gae


def needs_reference(config: AlgoConfig) -> bool:
    return config.kl.in_reward or config.kl.in_loss


def needs_entropy(config: AlgoConfig) -> bool:
    return config.entropy_coef != 0.0


def needs_reward_moments(config: AlgoConfig) -> bool:
    """Whether reward normalisation carries statistics from one iteration to the next."""
    return NormScope.running in (config.reward_norm.mean, config.reward_norm.std)


def uses_topr(config: AlgoConfig) -> bool:
    return config.topr.positive_loss_coef != 0.0 or config.topr.negative_loss_coef != 0.0


def check_algo(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps_per_iteration: int) -> list[str]:
    """What is wrong with the values: one message each, naming the key, what was found and what would be
    right.
    """
    return [
        *_check_ranges(algo),
        *_check_advantage(algo, responses_per_prompt),
        *_check_reward(algo, responses_per_prompt),
        *_check_loss(algo, optimizer_steps_per_iteration),
        *_check_critic(algo),
    ]


def _check_ranges(algo: AlgoConfig) -> Iterator[str]:
    ranges: list[tuple[str, float | None, float, float]] = [
        ("gamma", algo.gamma, 0.0, 1.0),
        ("lambda_critic", algo.lambda_critic, 0.0, 1.0),
        ("lambda_min", algo.lambda_min, 0.0, 1.0),
        ("length_alpha", algo.length_alpha, 1e-9, inf),
        ("advantage_clip", algo.advantage_clip, 1e-9, inf),
        ("reward_clip", algo.reward_clip, 1e-9, inf),
        ("overlong.penalty", algo.overlong.penalty, 0.0, inf),
        ("overlong.buffer", algo.overlong.buffer, 0, inf),
        ("kl.target", algo.kl.target, 1e-9, inf),
        ("kl.horizon", algo.kl.horizon, 1e-9, inf),
        ("rl_loss_coef", algo.rl_loss_coef, 0.0, inf),
        ("clip_low", algo.clip_low, 0.0, 1.0),
        ("clip_high", algo.clip_high, 0.0, inf),
        ("positive_lm_coef", algo.positive_lm_coef, 0.0, inf),
        ("topr.positive_loss_coef", algo.topr.positive_loss_coef, 0.0, inf),
        ("topr.negative_loss_coef", algo.topr.negative_loss_coef, 0.0, inf),
        ("mismatch.low", algo.mismatch.low, 0.0, 1.0),
        ("mismatch.high", algo.mismatch.high, 1.0, inf),
        ("value_clip", algo.value_clip, 1e-9, inf),
        ("value_pretrain.steps", algo.value_pretrain.steps, 0, inf),
        ("value_pretrain.patience", algo.value_pretrain.patience, 1, inf),
        ("value_pretrain.min_improvement", algo.value_pretrain.min_improvement, 0.0, 1.0),
        ("entropy_coef", algo.entropy_coef, -inf, inf),
        ("positive_threshold", algo.positive_threshold, -inf, inf),
    ]
    for key, value, low, high in ranges:
        if value is not None and not (isfinite(value) and low <= value <= high):
            allowed = "a finite number" if low == -inf else f"at least {low:g}"
            yield f"algo.{key}: {value} found; must be {allowed}" + (f", at most {high:g}" if high < inf else "")
    if algo.dual_clip is not None and not (isfinite(algo.dual_clip) and algo.dual_clip > 1):
        yield f"algo.dual_clip: {algo.dual_clip} found; must be above 1, or null (off)"
    number = algo.lambda_policy
    if isinstance(number, str):
        if number != ADAPTIVE:
            yield f"algo.lambda_policy: {number!r} found; must be a number from 0 to 1, or {ADAPTIVE}"
    elif not 0 <= number <= 1:
        yield f"algo.lambda_policy: {number} found; must be from 0 to 1, or {ADAPTIVE}"


def _check_advantage(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    name, relative = algo.advantage.name, algo.advantage in (Advantage.rloo, Advantage.group)
    if relative and responses_per_prompt < 2:
        yield (
            f"train.responses_per_prompt: {responses_per_prompt} found; algo.advantage={name} compares the "
            "responses of a group, so it must be at least 2"
        )
    if relative and algo.reward_norm.mean is NormScope.group:
        yield (
            f"algo.reward_norm.mean: group found; algo.advantage={name} subtracts the group's mean already, "
            "so it must be none (or batch, running)"
        )
    if relative and algo.gamma != 1:
        yield (
            f"algo.gamma: {algo.gamma} found; it has no effect under algo.advantage={name}, so it must be 1 "
            "(or advantage must be gae or reinforce)"
        )
    if algo.advantage_std is not AdvantageStd.none and algo.advantage is not Advantage.group:
        yield (
            f"algo.advantage_std: {algo.advantage_std.name} found; it belongs to algo.advantage=group and "
            f"has no "
            f"effect under {name}, so it must be none"
        )
    if algo.std_of is not StdOf.raw and algo.advantage_std is not AdvantageStd.batch:
        yield (
            f"algo.std_of: {algo.std_of.name} found; it has an effect only with algo.advantage_std=batch "
            f"({algo.advantage_std.name} found), so it must be raw"
        )
    if algo.lambda_policy == ADAPTIVE and algo.advantage is not Advantage.gae:
        yield (
            f"algo.lambda_policy: {ADAPTIVE} found; it has no effect under algo.advantage={name}, so it "
            f"must be a "
            "number (or advantage must be gae)"
        )


def _check_reward(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    for key, scope in (("mean", algo.reward_norm.mean), ("std", algo.reward_norm.std)):
        if scope is NormScope.group and responses_per_prompt < 2:
            yield (
                f"algo.reward_norm.{key}: group found with "
                f"train.responses_per_prompt={responses_per_prompt}; a group "
                "of one has no statistics: must be none, batch or running, or at least 2 responses per prompt"
            )
    overlong, kl = algo.overlong, algo.kl
    if overlong.penalty > 0 and overlong.buffer == 0:
        yield "algo.overlong.buffer: 0 found with algo.overlong.penalty > 0; must be at least 1 token"
    if overlong.buffer > 0 and overlong.penalty == 0:
        yield (
            f"algo.overlong.buffer: {overlong.buffer} found; it has no effect with algo.overlong.penalty=0: "
            "must be 0, or the penalty above 0"
        )
    if overlong.filter_critic and not overlong.filter:
        yield "algo.overlong.filter_critic: true found; it has an effect only with algo.overlong.filter=true"
    if kl.in_reward and not (isfinite(kl.coef) and kl.coef > 0):
        yield f"algo.kl.coef: {kl.coef} found with algo.kl.in_reward=true; must be above 0"
    if kl.target is not None and not kl.in_reward:
        yield (
            f"algo.kl.target: {kl.target} found; it adapts algo.kl.coef, which has an effect only with "
            "algo.kl.in_reward=true: must be null"
        )


def _check_loss(algo: AlgoConfig, optimizer_steps_per_iteration: int) -> Iterator[str]:
    kl, steps = algo.kl, optimizer_steps_per_iteration
    if kl.in_loss and not (isfinite(kl.loss_coef) and kl.loss_coef > 0):
        yield f"algo.kl.loss_coef: {kl.loss_coef} found with algo.kl.in_loss=true; must be above 0"
    if kl.in_loss and kl.loss_estimator is KLEstimator.k1:
        yield (
            "algo.kl.loss_estimator: k1 found; as a loss its expected gradient on-policy is zero, so that it "
            "holds nothing near the reference: must be k2, k3 or abs"
        )
    if algo.rl_loss_coef == 0 and not uses_topr(algo):
        yield (
            "algo.rl_loss_coef: 0 found with both topr weights 0; no term would learn from the reward: must "
            "be "
            "above 0, or algo.topr.positive_loss_coef or algo.topr.negative_loss_coef above 0"
        )
    if algo.surrogate is Surrogate.logprob and algo.rl_loss_coef != 0 and steps != 1:
        yield (
            f"algo.surrogate: logprob found with {steps} optimizer steps per iteration; it has no ratio to "
            f"correct "
            "with from the second step on: must be clip, or train.prompts_per_iteration * "
            "train.responses_per_prompt = train.samples_per_minibatch and train.epochs_per_iteration=1"
        )
    if algo.dual_clip is not None and (algo.surrogate is not Surrogate.clip or algo.rl_loss_coef == 0):
        yield f"algo.dual_clip: {algo.dual_clip} found; it belongs to algo.surrogate=clip: must be null"
    if uses_topr(algo) and algo.advantage not in (Advantage.group, Advantage.rloo):
        yield (
            f"algo.advantage: {algo.advantage.name} found; the topr terms split the responses by the sign "
            f"of their "
            "advantage, one for all tokens: must be group or rloo"
        )
    if algo.mismatch.correction is not MismatchCorrection.none and algo.rl_loss_coef == 0:
        yield (
            f"algo.mismatch.correction: {algo.mismatch.correction.name} found; it weights the surrogate, "
            f"which "
            "algo.rl_loss_coef=0 switches off: must be none"
        )


def _check_critic(algo: AlgoConfig) -> Iterator[str]:
    if algo.value_loss_agg_mode is LossAggMode["seq-mean-token-sum-norm"]:
        yield (
            "algo.value_loss_agg_mode: seq-mean-token-sum-norm found; must be token-mean, "
            "seq-mean-token-sum or "
            "seq-mean-token-mean"
        )
    if needs_critic(algo):
        return
    if algo.value_pretrain.steps > 0:
        yield (
            f"algo.value_pretrain.steps: {algo.value_pretrain.steps} found; "
            f"algo.advantage={algo.advantage.name} has "
            "no critic: must be 0 (or advantage must be gae)"
        )
    if algo.value_clip is not None:
        yield (
            f"algo.value_clip: {algo.value_clip} found; algo.advantage={algo.advantage.name} has no critic: "
            f"must be "
            "null (or advantage must be gae)"
        )
