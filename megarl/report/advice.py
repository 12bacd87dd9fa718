"""What a run's metrics say is wrong, and what to do about it: rules over its recent iterations.

A rule judges medians over the last RECENT points of the history, since one value is noisy.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from megarl.report.critic_watch import ADVICE as CRITIC_ADVICE
from megarl.report.critic_watch import BASELINES, UPDATED, CriticWatch
from megarl.report.history import History
from megarl.report.mismatch_cause import RECENT, explain_mismatch
from megarl.report.text import format_number

HELDOUT, REWARD = "reward/heldout", "reward/mean"
FEWEST = 20
"""Iterations from which a run is judged by what it has learned"""
FEWEST_OF_ENTROPY = 10


@dataclass(frozen=True)
class Warned:
    title: str
    found: str
    do: str


@dataclass(frozen=True)
class Limit:
    """Warns where the recent median of a metric is above `high` or below `low`."""

    metric: str
    title: str
    found: str
    """{} stands for the median"""
    do: str
    high: float = float("inf")
    low: float = float("-inf")
    is_share: bool = True
    fewest: int = 3
    """Iterations that have the metric, from which it is judged"""
    unless: tuple[str, float] | None = None
    """A metric above whose bound there is nothing to warn of"""


LIMITS = (
    Limit(
        "length/truncated_frac",
        "Responses are cut off",
        "{} of the responses end at the length limit",
        "raise rollout.response_length, or teach brevity with algo.overlong.penalty; algo.overlong.filter=true keeps"
        " cut responses out of the policy loss",
        high=0.2,
    ),
    Limit(
        "reward/equal_groups_frac",
        "Few groups carry a signal",
        "{} of the groups have equal rewards",
        "algo.dynamic_sampling.enabled=true replaces them; prompts of medium difficulty or a larger"
        " train.responses_per_prompt make them rarer",
        high=0.7,
        # What is solved has equal rewards, too.
        unless=("reward/correct", 0.9),
    ),
    Limit(
        "reward/failed_frac",
        "Responses have no reward",
        "{} of the responses could not be judged",
        "train.log has the most frequent reasons; the verifier or the environment must be mended",
        high=0.01,
    ),
    Limit(
        "policy/clip_frac",
        "Many tokens are clipped",
        "{} of the tokens are clipped",
        "lower policy.optimizer.lr, or make fewer optimizer steps per iteration (larger train.samples_per_minibatch,"
        " smaller train.epochs_per_iteration)",
        high=0.3,
    ),
    Limit(
        "policy/approx_kl",
        "The policy makes large steps",
        "an iteration moves it by a KL of {} per token",
        "lower policy.optimizer.lr, or make fewer optimizer steps per iteration",
        high=0.1,
        is_share=False,
    ),
    Limit(
        "policy/approx_kl",
        "The policy hardly moves",
        "an iteration moves it by a KL of {} per token",
        "raise policy.optimizer.lr, unless policy.optimizer.warmup_steps is what keeps it low",
        low=1e-9,
        is_share=False,
        fewest=FEWEST,
    ),
    Limit(
        "critic/explained_variance",
        "The critic is worse than a constant",
        "its explained variance is {}",
        CRITIC_ADVICE,
        low=-0.1,
        is_share=False,
        fewest=5,
    ),
    Limit(
        "advantage/lambda_at_min_frac",
        "Length-adaptive lambda is at its bound",
        "{} of the responses have algo.lambda_min",
        "their lambda does not depend on their length: lower algo.lambda_min, or set algo.lambda_policy to a number",
        high=0.7,
    ),
    Limit(
        "rollout/too_stale_frac",
        "Tokens are too stale to learn from",
        "{} of the tokens are older than rollout.max_staleness",
        "more or faster servers (rollout.num_servers), or a larger rollout.max_staleness with a correction",
        high=0.05,
    ),
    Limit(
        "policy/learned_frac_of_length_4",
        "The longest responses are hardly learned from",
        "of the longest quarter of the responses {} of the tokens are learned from",
        "a smaller rollout.max_staleness, with which fewer episodes are under way at a time, or more servers where"
        " tokens are too old; a larger rollout.response_length where responses are cut: else the policy learns from"
        " what is short",
        low=0.7,
    ),
    Limit(
        "derived/rollout_frac",
        "Training waits for responses",
        "the roles are idle for {} of an iteration",
        "more servers (rollout.num_servers), or rollout.max_staleness=1 with algo.mismatch.correction=tis, which"
        " generates during the update",
        high=0.75,
    ),
)


def list_warnings(history: History, config: Mapping[str, Any]) -> list[Warned]:
    """All that apply now. config: the plain value of each dotted key, as far as it is known."""
    found = [warned for limit in LIMITS if (warned := _check_limit(limit, history))]
    for rule in RULES:
        found += rule(history, config)
    return found


def _check_limit(limit: Limit, history: History) -> Warned | None:
    values = history.list_recent(limit.metric, RECENT)
    if history.counts.get(limit.metric, 0) < limit.fewest:
        return None
    if limit.unless and _is_last_above(history, *limit.unless):
        return None
    middle = median_high(values)
    if limit.low <= middle <= limit.high:
        return None
    shown = f"{middle:.0%}" if limit.is_share else format_number(middle)
    return Warned(
        limit.title, f"{limit.found.format(shown)} (median of the last {len(values)}; {limit.metric})", limit.do
    )


def _is_last_above(history: History, metric: str, bound: float) -> bool:
    return any(each > bound for each in history.list_recent(metric, 1))


def _check_learning(history: History, _config: Mapping[str, Any]) -> Iterator[Warned]:
    values = [point.metrics[REWARD] for point in history.points if REWARD in point.metrics]
    if history.num_lines < FEWEST or len(values) < FEWEST:
        return
    first, last = (median_high([each.mean for each in part]) for part in (values[:RECENT], values[-RECENT:]))
    spread = max(each.mean for each in values) - min(each.mean for each in values)
    if spread == 0 or last <= first:
        yield Warned(
            "The training reward has not risen",
            f"{format_number(first)} in the first iterations, {format_number(last)} in the last ({REWARD})",
            "read responses: is the right answer ever given, and is it paid? Without any right answer there is nothing"
            " to reinforce: easier prompts, a larger train.responses_per_prompt, or a reward with parts",
        )


def _check_fall(history: History, _config: Mapping[str, Any]) -> Iterator[Warned]:
    if HELDOUT not in history.best or history.num_lines < FEWEST:
        return
    best, iteration = history.best[HELDOUT]
    last, start = history.last[HELDOUT], history.points[0].metrics.get(HELDOUT)
    if start is not None and best > start.mean and last < best - 0.2 * (best - start.mean):
        more = " while the training reward is at its best" if _is_near_best(history, REWARD) else ""
        yield Warned(
            "The held-out reward has fallen",
            f"from {format_number(best)} at iteration {iteration} to {format_number(last)}{more} ({HELDOUT})",
            "go back to a checkpoint near its best (checkpoint.keep_best keeps them); overfitting: more prompts or"
            " fewer passes; an unstable policy: a lower policy.optimizer.lr, or a KL to the reference"
            " (algo.kl.in_loss=true)",
        )


def _is_near_best(history: History, metric: str) -> bool:
    recent = history.list_recent(metric, RECENT)
    return bool(recent) and median_high(recent) > 0.95 * history.best[metric][0]


def _check_entropy(history: History, _config: Mapping[str, Any]) -> Iterator[Warned]:
    name = "policy/entropy"
    values = [point.metrics[name].mean for point in history.points if name in point.metrics]
    # What is solved needs no variety.
    if len(values) < FEWEST_OF_ENTROPY or _is_last_above(history, "reward/correct", 0.9):
        return
    first, last = median_high(values[:3]), median_high(values[-(RECENT // 2) :])
    if last < 0.1 * first:
        yield Warned(
            "The entropy has collapsed",
            f"from {format_number(first)} to {format_number(last)} nats per token ({name})",
            "raise algo.clip_high or algo.entropy_coef, or lower policy.optimizer.lr: a policy without variety finds"
            " nothing new",
        )


def _check_gradients(history: History, _config: Mapping[str, Any]) -> Iterator[Warned]:
    for role in ("policy", "critic"):
        name = f"{role}/grad_norm"
        recent = [point for point in history.points if name in point.metrics][-5 * RECENT :]
        if len(recent) < FEWEST:
            continue
        middle = median_high([point.metrics[name].mean for point in recent])
        worst = max(recent, key=lambda point: point.metrics[name].high)
        high = worst.metrics[name].high
        if high > 20 * middle:
            yield Warned(
                f"The {role}'s gradient has spikes",
                f"{format_number(high)} near iteration {worst.last}, {format_number(middle)} in the median ({name})",
                f"{role}.optimizer.clip_grad bounds what a spike does; look for its cause in the responses of that"
                " iteration and in mismatch/logprob_gap_max",
            )


def _check_critic(history: History, _config: Mapping[str, Any]) -> Iterator[Warned]:
    watch = CriticWatch()
    for line in history.lines:
        watch.check(line)
    name = next((name for name in BASELINES if name in history.last), None)
    if name is not None and UPDATED in history.last and watch.has_warned:
        middle = median_high(history.list_recent(name, RECENT))
        baseline, preset = BASELINES[name]
        yield Warned(
            "The critic is the worse baseline",
            f"its squared error is {format_number(middle)} times that of {baseline} ({name})",
            f"{CRITIC_ADVICE}; {preset} needs no critic. Where nearly every response is right this is"
            " true and harmless",
        )


def _check_mismatch(history: History, config: Mapping[str, Any]) -> Iterator[Warned]:
    for cause in explain_mismatch(history, config):
        if cause.is_serious:
            yield Warned("Trainer and rollout engine disagree", f"{cause.found}: {cause.likely}", cause.do)


def _check_phases(history: History, config: Mapping[str, Any]) -> Iterator[Warned]:
    total = history.sums.get("derived/seconds", 0.0)
    for phase, do in (
        ("checkpoint", f"raise checkpoint.save_every (it is {config.get('checkpoint.save_every', 'unknown')})"),
        (
            "evaluate",
            f"raise train.eval_every (it is {config.get('train.eval_every', 'unknown')}) or lower"
            " train.num_eval_prompts",
        ),
        ("sync", "look at the steps of a sync below; rollout.transport says how the weights travel"),
    ):
        share = history.sums.get(f"time/{phase}", 0.0) / total if total else 0.0
        if share > 0.3 and history.num_lines > 3:
            yield Warned(f"Much time goes into {phase}", f"{share:.0%} of all seconds (time/{phase})", do)


RULES: tuple[Callable[[History, Mapping[str, Any]], Iterator[Warned]], ...] = (
    _check_learning,
    _check_fall,
    _check_entropy,
    _check_gradients,
    _check_critic,
    _check_mismatch,
    _check_phases,
)
NUM_RULES = len(LIMITS) + len(RULES)
