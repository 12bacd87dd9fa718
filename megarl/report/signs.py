"""What a run's metrics say is wrong, and what to do about it: one table for the terminal, the log and the run's page.

`Watch` looks at each iteration as it is logged, and says a sign once, when so many iterations in a row have shown it.
`list_warnings` looks at a whole run, for its page: at the medians of the last RECENT points, since one value is noisy.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median_high
from typing import Any

from megarl.report.metrics import History
from megarl.report.text import format_number
from megarl.types import Metrics

HELDOUT, REWARD, GAP, ENTROPY = "reward/heldout", "reward/mean", "mismatch/logprob_gap_mean", "policy/entropy"
RECENT = 10
FEWEST = 20
"""Iterations from which a run is judged by what it has learned"""
PATIENCE = 3
"""Iterations in a row after which most signs are said; the first ones of a run count"""
NUM_RATIOS = 10
"""A critic no worse than the mean is worse by chance in all of them in one of 1,024 cases."""


@dataclass(frozen=True)
class Warned:
    title: str
    found: str
    do: str


@dataclass(frozen=True)
class Sign:
    title: str
    metric: str
    found: str
    """What is seen, with fields of the metrics"""
    do: str
    above: float = inf
    below: float = -inf
    equal: float | None = None
    """It shows where the metric is beyond one of the two bounds, or is this value"""
    patience: int = 0
    """Iterations in a row after which the terminal says it; 0: it does not"""
    fewest: int = PATIENCE
    """Iterations with the metric, from which the page says it; 0: it does not"""
    also: Callable[[Metrics], bool] = lambda _metrics: True
    """What must hold, too"""

    def shows(self, metrics: Metrics) -> bool:
        value = metrics.get(self.metric)
        if value is None or (value != self.equal and self.below <= value <= self.above):
            return False
        return self.also(metrics)


def _need_groups_a_difference(metrics: Metrics) -> bool:
    """Not with a critic, whose advantages need none, nor with shaped rewards, which differ where those of the task do
    not, nor once the task is solved.
    """
    mean = metrics.get("reward/mean", 0)
    is_shaped = abs(metrics.get("reward/shaped_mean", mean) - mean) > 1e-6
    is_solved = metrics.get("reward/correct", 0) >= 0.9
    return not ("critic/loss" in metrics or is_shaped or is_solved) and metrics["reward/equal_groups_frac"] < 1


def _updates_policy(metrics: Metrics) -> bool:
    return "policy/loss" in metrics


SMALLER_STEPS = (
    "lower policy.optimizer.lr, or make fewer optimizer steps per iteration (larger train.samples_per_minibatch,"
    " smaller train.epochs_per_iteration)"
)
BETTER_CRITIC = (
    "train it longer before the policy (algo.value_pretrain.steps), change critic.optimizer.lr, or raise"
    " critic.updates_per_policy_update"
)
BASELINES = {
    "critic/mse_vs_group": ("the mean reward of the prompt's other responses", "algo=rloo"),
    "critic/mse_vs_batch": ("the mean reward of the batch's other responses", "algo=reinforce_pp"),
}
"""Ratios of mean squared errors, the critic's over that of a baseline; what the baseline is, and a preset that has it
or one like it"""
# fmt: off
SIGNS = (
    Sign("No response ends by itself", "length/truncated_frac",
         "no response ends by itself, all {length/max:.0f} tokens are used: the policy never says its end-of-sequence"
         " token",
         "data.chat_template=true where the model has a template, an instruct model, or a longer"
         " rollout.response_length",
         equal=1, patience=PATIENCE),
    Sign("Responses are cut off", "length/truncated_frac",
         "{length/truncated_frac:.0%} of the responses are cut at the limit",
         "where right ones are that long, raise rollout.response_length (environment.turn_length with turns); else ask"
         " for brevity in data.instruction, begin the answer with data.response_prefix, or teach it with"
         " algo.overlong.penalty=1; algo.overlong.filter=true keeps cut responses out of the policy loss",
         above=0.2, patience=PATIENCE, also=lambda m: m["length/truncated_frac"] < 1),
    Sign("All rewards are equal", REWARD,
         "all rewards are equal ({reward/mean:.4g}), so nothing can be learned",
         "is a right answer ever given, and paid (reward=...)? Easier or harder prompts (data=...), or a larger"
         " train.responses_per_prompt",
         above=-inf, patience=PATIENCE,
         also=lambda m: m[REWARD] == m.get("reward/min", inf) == m.get("reward/max", inf)),
    Sign("An iteration had no signal", "advantage/max_abs",
         "every advantage of this iteration is 0, and its step was made all the same: of the momentum of earlier steps"
         " and of what else is in the loss (a KL, an entropy), whose gradient Adam scales to a full step of the"
         " learning rate even where it is only rounding",
         "algo.dynamic_sampling.enabled=true replaces groups without a signal",
         equal=0, patience=1, fewest=0, also=_updates_policy),
    Sign("The policy has no gradient", "policy/grad_norm",
         "the policy's gradient is 0 though the advantages are not, so nothing is learned",
         "are its trained weights cut off from the loss (model.lora), or are all tokens masked or clipped"
         " (policy/clip_frac)?",
         equal=0, patience=PATIENCE, also=lambda m: m.get("advantage/max_abs", 0) > 0),
    Sign("One iteration moved the policy far", "policy/approx_kl",
         "this iteration moved the policy by a KL of {policy/approx_kl:.3g} per token, which most often ruins it",
         "lower policy.optimizer.lr, and begin again or from a checkpoint before it",
         above=1, patience=1, fewest=0),
    Sign("One token stands out", "mismatch/logprob_gap_max",
         "the log-probs of trainer and rollout engine differ by {mismatch/logprob_gap_max:.3g} nats at one token, which"
         " no rounding explains: one of the two computes something else there",
         "the run's page shows the tokens; algo.mismatch.correction=tis bounds what such a token weighs",
         above=30, patience=1, fewest=0),
    Sign("Few groups carry a signal", "reward/equal_groups_frac",
         "{reward/equal_groups_frac:.0%} of the groups have equal rewards, so that only the others are learned from",
         "a reward with parts, prompts that are answered rightly now and then, a larger train.responses_per_prompt, or"
         " algo.dynamic_sampling.enabled=true, which replaces such groups",
         above=0.7, patience=PATIENCE, also=_need_groups_a_difference),
    Sign("The form is never met", "reward/format",
         "no response has the form that the reward asks for (reward/format is 0)",
         "say the form in data.instruction or data.system, or begin it with data.response_prefix",
         equal=0, patience=PATIENCE),
    Sign("No response has code", "reward/block", "no response has a block of code (reward/block is 0)",
         "ask for one in data.instruction, or raise rollout.response_length",
         equal=0, patience=PATIENCE),
    *(Sign("The critic is the worse baseline", metric,
           f"the critic's squared error is larger than that of {baseline} ({metric}: {{{metric}:.3g}}, should be"
           " below 1)",
           f"{BETTER_CRITIC}; {preset} needs no critic. Where nearly every response is right this is true and harmless",
           above=1, patience=NUM_RATIOS, fewest=NUM_RATIOS, also=_updates_policy)
      for metric, (baseline, preset) in BASELINES.items()),
    Sign("Responses have no reward", "reward/failed_frac",
         "{reward/failed_frac:.0%} of the responses could not be judged",
         "train.log has the most frequent reasons; the verifier or the environment must be mended", above=0.01),
    Sign("Many tokens are clipped", "policy/clip_frac", "{policy/clip_frac:.0%} of the tokens are clipped",
         SMALLER_STEPS, above=0.3),
    Sign("The policy makes large steps", "policy/approx_kl",
         "an iteration moves it by a KL of {policy/approx_kl:.3g} per token", SMALLER_STEPS, above=0.1),
    Sign("The policy hardly moves", "policy/approx_kl",
         "an iteration moves it by a KL of {policy/approx_kl:.3g} per token",
         "raise policy.optimizer.lr, unless policy.optimizer.warmup_steps is what keeps it low",
         below=1e-9, fewest=FEWEST),
    Sign("The critic is worse than a constant", "critic/explained_variance",
         "its explained variance is {critic/explained_variance:.3g}", BETTER_CRITIC, below=-0.1, fewest=5),
    Sign("Length-adaptive lambda is at its bound", "advantage/lambda_at_min_frac",
         "{advantage/lambda_at_min_frac:.0%} of the responses have algo.lambda_min",
         "their lambda does not depend on their length: lower algo.lambda_min, or set algo.lambda_policy to a number",
         above=0.7),
    Sign("Tokens are too stale to learn from", "rollout/too_stale_frac",
         "{rollout/too_stale_frac:.0%} of the tokens are older than rollout.max_staleness",
         "more or faster servers (rollout.num_servers), or a larger rollout.max_staleness with a correction",
         above=0.05),
    Sign("The longest responses are hardly learned from", "policy/learned_frac_of_length_4",
         "of the longest quarter of the responses {policy/learned_frac_of_length_4:.0%} of the tokens are learned from",
         "a smaller rollout.max_staleness, with which fewer episodes are under way at a time, or more servers where"
         " tokens are too old; a larger rollout.response_length where responses are cut: else the policy learns from"
         " what is short",
         below=0.7),
    Sign("Training waits for responses", "derived/rollout_frac",
         "the roles are idle for {derived/rollout_frac:.0%} of an iteration",
         "more servers (rollout.num_servers), or rollout.max_staleness=1 with algo.mismatch.correction=tis, which"
         " generates during the update",
         above=0.75),
)
# fmt: on


class Watch:
    """Looks at the metrics of every iteration, in order, and gives the warnings that are due."""

    def __init__(self) -> None:
        self._in_a_row = [0] * len(SIGNS)

    def check(self, metrics: Metrics) -> Iterator[str]:
        for number, sign in enumerate(SIGNS):
            # What has been said is not said again.
            if self._in_a_row[number] < sign.patience:
                self._in_a_row[number] = self._in_a_row[number] + 1 if sign.shows(metrics) else 0
                if self._in_a_row[number] == sign.patience:
                    rows = f"in each of the last {sign.patience} iterations " if sign.patience > PATIENCE else ""
                    yield f"warning: {rows}{sign.found.format(**metrics)}: {sign.do}"


def list_warnings(history: History, config: Mapping[str, Any]) -> list[Warned]:
    """All that apply now. config: the plain value of each dotted key, as far as it is known."""
    medians = _find_medians(history)
    found = [
        Warned(
            sign.title,
            f"{sign.found.format(**medians)} (median of the last {len(history.list_recent(sign.metric, RECENT))};"
            f" {sign.metric})",
            sign.do,
        )
        for sign in SIGNS
        if 0 < sign.fewest <= history.counts.get(sign.metric, 0) and sign.shows(medians)
    ]
    for cause in explain_mismatch(history, config):
        if cause.is_serious:
            found.append(Warned("Trainer and rollout engine disagree", f"{cause.found}: {cause.likely}", cause.do))
    return [*found, *_check_rewards(history), *_check_policy(history), *_check_phases(history, config)]


NUM_RULES = sum(sign.fewest > 0 for sign in SIGNS) + 8
"""What a page looks for: besides the table two things in the rewards, two of the policy, the gap, and three phases"""


def _find_medians(history: History) -> dict[str, float]:
    return {name: median_high(history.list_recent(name, RECENT)) for name in history.names}


def _check_rewards(history: History) -> Iterator[Warned]:
    values = history.list_recent(REWARD)
    if history.num_lines < FEWEST or len(values) < FEWEST:
        return
    first, last = median_high(values[:RECENT]), median_high(values[-RECENT:])
    if max(values) == min(values) or last <= first:
        yield Warned(
            "The training reward has not risen",
            f"{format_number(first)} in the first iterations, {format_number(last)} in the last ({REWARD})",
            "read responses: is the right answer ever given, and is it paid? Without any right answer there is nothing"
            " to reinforce: easier prompts, a larger train.responses_per_prompt, or a reward with parts",
        )
    if not (heldout := history.list_recent(HELDOUT)):
        return
    (best, iteration), newest, start = history.best[HELDOUT], history.last[HELDOUT], heldout[0]
    if best > start and newest < best - 0.2 * (best - start):
        more = " while the training reward is at its best" if last > 0.95 * history.best[REWARD][0] else ""
        yield Warned(
            "The held-out reward has fallen",
            f"from {format_number(best)} at iteration {iteration} to {format_number(newest)}{more} ({HELDOUT})",
            "go back to a checkpoint near its best (checkpoint.keep_best keeps them); overfitting: more prompts or"
            " fewer passes; an unstable policy: a lower policy.optimizer.lr, or a KL to the reference"
            " (algo.kl.in_loss=true)",
        )


def _check_policy(history: History) -> Iterator[Warned]:
    values = history.list_recent(ENTROPY)
    # What is solved needs no variety.
    is_solved = any(value > 0.9 for value in history.list_recent("reward/correct", 1))
    if len(values) >= RECENT and not is_solved:
        first, last = median_high(values[:3]), median_high(values[-(RECENT // 2) :])
        if last < 0.1 * first:
            yield Warned(
                "The entropy has collapsed",
                f"from {format_number(first)} to {format_number(last)} nats per token ({ENTROPY})",
                "raise algo.clip_high or algo.entropy_coef, or lower policy.optimizer.lr: a policy without variety"
                " finds nothing new",
            )
    for role in ("policy", "critic"):
        name = f"{role}/grad_norm"
        recent = [(point.metrics[name], point.last) for point in history.points if name in point.metrics][-5 * RECENT :]
        if len(recent) < FEWEST:
            continue
        middle = median_high([each.mean for each, _ in recent])
        high, at = max((each.high, at) for each, at in recent)
        if high > 20 * middle:
            yield Warned(
                f"The {role}'s gradient has spikes",
                f"{format_number(high)} near iteration {at}, {format_number(middle)} in the median ({name})",
                f"{role}.optimizer.clip_grad bounds what a spike does; look for its cause in the responses of that"
                " iteration and in mismatch/logprob_gap_max",
            )


def _check_phases(history: History, config: Mapping[str, Any]) -> Iterator[Warned]:
    for phase, do in (
        ("checkpoint", f"raise checkpoint.save_every (it is {config.get('checkpoint.save_every', 'unknown')})"),
        ("evaluate", "raise train.eval_every or lower train.num_eval_prompts"),
        ("sync", "look at the steps of a sync below; rollout.transport says how the weights travel"),
    ):
        share = history.sums.get(f"time/{phase}", 0.0) / (history.sums.get("perf/time_per_step") or inf)
        if share > 0.3 and history.num_lines > 3:
            yield Warned(f"Much time goes into {phase}", f"{share:.0%} of all seconds (time/{phase})", do)


ROUNDING, FLOAT32, LOW_PRECISION = 1e-5, 1e-3, 0.06
"""Mean gap that is explained, up to here, by float32 on both sides whatever the run; where both sides are known to be
float32; by bfloat16 on both sides"""
DTYPES = ("policy.dtype", "rollout.dtype")


@dataclass(frozen=True)
class Cause:
    found: str
    """What the metrics show"""
    likely: str
    """What most often causes it, and what tells whether it does here"""
    do: str
    is_serious: bool = False


def explain_mismatch(history: History, config: Mapping[str, Any]) -> list[Cause]:
    """Why the log-probs of trainer and rollout engine differ, as far as the last RECENT points tell; empty without
    mismatch metrics. Where along the response they do is said at that chart.

    config: the run's value of each dotted key, as far as it is known.
    """
    medians, gaps = _find_medians(history), history.list_recent(GAP)
    if not gaps:
        return []
    causes = [_explain_size(medians[GAP], medians.get("rollout/staleness_mean", 0.0), config)]
    first, mean = median_high(gaps[:RECENT]), medians[GAP]
    if len(gaps) >= 2 * RECENT and mean > max(ROUNDING, 5 * first):
        causes.append(
            Cause(
                f"it has grown from {first:.2g} to {mean:.2g} during the run",
                "the policy gets sharper or its weights larger, which makes the same rounding weigh more; often it"
                " comes before a collapse of the reward",
                "lower policy.optimizer.lr, or set algo.mismatch.correction=mis, which leaves out the worst tokens",
                True,
            )
        )
    return causes


def _explain_size(mean: float, stale: float, config: Mapping[str, Any]) -> Cause:
    # Without options of the servers' own, which may lower the precision.
    is_plain = config.get("policy.fp8") is None and not config.get("rollout.sglang")
    is_float32 = is_plain and all(config.get(key) == "float32" for key in DTYPES)
    found = f"the mean gap is {mean:.2g} nats per token"
    if stale > 0:
        return Cause(
            f"{found}, and a token is {stale:.2g} updates old in the mean",
            "the rollout engine had older weights (rollout.max_staleness), so that the gap has what was learned since"
            " in it",
            "keep a correction in the loss (algo.mismatch.correction=tis or mis); lower rollout.max_staleness where"
            " policy/clip_frac is large, too",
            mean > 10 * LOW_PRECISION,
        )
    if mean <= (FLOAT32 if is_float32 else ROUNDING):
        return Cause(found, "rounding of float32", "nothing")
    if mean <= LOW_PRECISION and not is_float32:
        known = ", ".join(f"{key}={config[key]}" for key in DTYPES if key in config)
        return Cause(
            found,
            f"the engines compute in low precision ({known or 'bfloat16 or FP8'}), in a different order of sums",
            "nothing as long as it does not grow; algo.mismatch.correction=tis takes it out of the gradient",
        )
    return Cause(
        found,
        "more than rounding: the two engines do not compute the same model. In the order of how often it is so: options"
        " that change the distribution which only one side applies (rollout.sglang with top_p, penalties or a"
        " quantization), other experts chosen in a mixture of experts (rollout.router_replay=true mends that), a model"
        " family whose layers differ",
        "compare with sync/probe_logprob_gap: where it is small the weights and the layers agree and the sampling"
        " options are to blame; where it is large the model is"
        + ("" if is_float32 else ". rollout.dtype=float32 rules out precision"),
        True,
    )
