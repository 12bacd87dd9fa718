"""What a run's metrics say is wrong, and what to do about it: one table for the terminal, the log and the run's page.

`Watch` looks at each iteration as it is logged, and says a sign once, when so many iterations in a row have shown it.
`list_warnings` looks at a whole run, for its page: at the medians of the last RECENT points, since one value is noisy;
at the critic after its value pretraining alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from statistics import median_high

from megarl.report.record import HELDOUT, History
from megarl.report.text import format_number
from megarl.types import Metrics

REWARD, GAP, ENTROPY = "reward/mean", "mismatch/logprob_gap_mean", "policy/entropy"
RECENT = 10
FEWEST = 20
"""Iterations from which a run is judged by what it has learned"""
PATIENCE = 3
"""Iterations in a row after which most signs are said; the first ones of a run count"""
LOW_PRECISION = 0.06
"""Mean gap of the log-probs that bfloat16 on both sides explains"""
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
    "train it longer before the policy (algo.value_pretrain.steps), change critic.optimizer.lr (explained variance near"
    " 0: raise it; below 0: lower it), or raise critic.updates_per_policy_update; a larger algo.length_alpha makes the"
    " policy depend less on it"
)
BASELINES = {
    "critic/mse_vs_group": ("the mean reward of the prompt's other responses", "algo=dr_grpo"),
    "critic/mse_vs_batch": ("the mean reward of the batch's other responses", "algo=reinforce_pp"),
}
"""Ratios of mean squared errors, the critic's over that of a baseline; what the baseline is, and a preset that has it
or one like it"""
WITHOUT_CRITIC = "{} (one response per prompt: {}) needs no critic".format(
    *(preset for _, preset in BASELINES.values())
)
# fmt: off
SIGNS = (
    Sign("No response ends by itself", "length/truncated_frac",
         "no response ends by itself, all {length/max:.0f} tokens are used: the policy never says its end-of-sequence"
         " token",
         "set data.chat_template=true if the model has a template, use an instruct model, or raise"
         " rollout.response_length",
         equal=1, patience=PATIENCE),
    Sign("Responses are cut off", "length/truncated_frac",
         "{length/truncated_frac:.0%} of the responses are cut at the limit",
         "if correct responses are that long, raise rollout.response_length (with turns: environment.turn_length);"
         " otherwise ask for brevity in data.instruction, begin the answer with data.response_prefix, or set"
         " algo.overlong.penalty=1; algo.overlong.filter=true keeps cut responses out of the policy loss",
         above=0.2, patience=PATIENCE, also=lambda m: m["length/truncated_frac"] < 1),
    Sign("All rewards are equal", REWARD,
         "all rewards are equal ({reward/mean:.4g}), so nothing can be learned",
         "check that some responses are correct and get a reward; then try easier or harder prompts, or a larger"
         " train.responses_per_prompt",
         above=-inf, patience=PATIENCE,
         also=lambda m: m[REWARD] == m.get("reward/min", inf) == m.get("reward/max", inf)),
    Sign("An iteration had no signal", "advantage/max_abs",
         "every advantage of this iteration is 0, but its step was made: from the momentum of earlier steps and from"
         " a KL or entropy in the loss, whose gradient Adam scales to a full step even if it is only rounding",
         "algo.dynamic_sampling.enabled=true replaces groups without a signal",
         equal=0, patience=1, fewest=0, also=_updates_policy),
    Sign("The policy has no gradient", "policy/grad_norm",
         "the policy's gradient is 0 though the advantages are not, so nothing is learned",
         "check whether the trained weights are cut off from the loss (policy.lora), or all tokens are masked or"
         " clipped (policy/clip_frac)",
         equal=0, patience=PATIENCE, also=lambda m: m.get("advantage/max_abs", 0) > 0),
    Sign("One iteration moved the policy far", "policy/approx_kl",
         "this iteration moved the policy by a KL of {policy/approx_kl:.3g} per token, which most often ruins it",
         "lower policy.optimizer.lr, and start again, or from a checkpoint before this iteration",
         above=1, patience=1, fewest=0),
    Sign("One token stands out", "mismatch/logprob_gap_max",
         "the log-probs of trainer and rollout engine differ by {mismatch/logprob_gap_max:.3g} nats at one token, which"
         " no rounding explains: one of the two computes something else there",
         "the run report shows the tokens; algo.mismatch.correction=tis bounds the weight of such a token",
         above=30, patience=1, fewest=0),
    Sign("Trainer and rollout engine disagree", GAP,
         "their log-probs differ by {mismatch/logprob_gap_mean:.2g} nats per token in the mean, more than rounding: the"
         " two do not compute the same model",
         "a mixture of experts: rollout.router_replay=true trains with the experts that the servers chose, and logs"
         " policy/moe_routing_agreement. Other models: if sync/probe_logprob_gap is small, weights and layers agree, so"
         " look for options in rollout.sglang that change the distribution, such as penalties or a quantization."
         " Precision: compare with rollout.dtype=float32",
         above=LOW_PRECISION, also=lambda m: m.get("rollout/staleness_mean", 0) == 0),
    Sign("Few groups carry a signal", "reward/equal_groups_frac",
         "{reward/equal_groups_frac:.0%} of the groups have equal rewards, so that only the others train the policy",
         "use prompts that are sometimes answered correctly, a reward with parts (reward=weighted), a larger"
         " train.responses_per_prompt, or algo.dynamic_sampling.enabled=true, which replaces such groups",
         above=0.7, patience=PATIENCE, also=_need_groups_a_difference),
    Sign("No response has the required format", "reward/format",
         "no response has the format that the reward asks for (reward/format is 0)",
         "describe the format in data.instruction or data.system, or begin it with data.response_prefix",
         equal=0, patience=PATIENCE),
    *(Sign("The critic is the worse baseline", metric,
           f"the critic's squared error is larger than that of {baseline} ({metric}: {{{metric}:.3g}}, should be"
           " below 1)",
           "on a short task, or if nearly every response is correct, this alone is harmless; if"
           f" critic/explained_variance is below 0, too: {BETTER_CRITIC}; {WITHOUT_CRITIC}",
           above=1, patience=NUM_RATIOS, fewest=NUM_RATIOS, also=_updates_policy)
      for metric, (baseline, _) in BASELINES.items()),
    Sign("Responses have no reward", "reward/failed_frac",
         "{reward/failed_frac:.0%} of the responses could not be judged",
         "train.log has the most frequent reasons; repair the reward or the environment", above=0.01),
    Sign("Many tokens are clipped", "policy/clip_frac", "{policy/clip_frac:.0%} of the tokens are clipped",
         SMALLER_STEPS, above=0.3),
    Sign("The policy hardly moves", "policy/approx_kl",
         "an iteration moves it by a KL of {policy/approx_kl:.3g} per token",
         "raise policy.optimizer.lr, unless policy.optimizer.warmup_steps keeps it low",
         below=1e-9, fewest=FEWEST),
    Sign("The critic is worse than a constant", "critic/explained_variance",
         "its explained variance is {critic/explained_variance:.3g}", BETTER_CRITIC, below=-0.1, fewest=5),
    Sign("Length-adaptive lambda is at its bound", "advantage/lambda_at_min_frac",
         "{advantage/lambda_at_min_frac:.0%} of the responses have algo.lambda_min",
         "raise algo.length_alpha, lower algo.lambda_min, or set algo.lambda_policy to a number",
         above=0.7),
    Sign("Tokens are too old to train on", "rollout/too_stale_frac",
         "{rollout/too_stale_frac:.0%} of the tokens are older than rollout.max_staleness",
         "add servers (rollout.num_servers), or raise rollout.max_staleness with an algo.mismatch.correction",
         above=0.05),
    Sign("The longest responses hardly train the policy", "policy/learned_frac_of_length_4",
         "of the longest quarter of the responses {policy/learned_frac_of_length_4:.0%} of the tokens train the policy",
         "if tokens are too old, lower rollout.max_staleness, or add servers; if responses are cut, raise"
         " rollout.response_length",
         below=0.7),
    Sign("Training waits for responses", "derived/rollout_frac",
         "the roles are idle for {derived/rollout_frac:.0%} of an iteration",
         "add servers (rollout.num_servers), or set rollout.max_staleness=1 with algo.mismatch.correction=tis, which"
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


def list_warnings(history: History) -> list[Warned]:
    """All that apply now."""
    starts = {name: 1 if name.startswith("critic/") else -inf for name in history.names}
    judged = {name: history.list_ranges(name, start) for name, start in starts.items()}
    recent = {name: history.list_recent(name, RECENT, starts[name] if judged[name] else -inf) for name in judged}
    medians = {name: median_high(values) for name, values in recent.items()}
    found = [
        Warned(
            sign.title,
            f"{sign.found.format(**medians)} (median of the last {len(recent[sign.metric])}; {sign.metric})",
            sign.do,
        )
        for sign in SIGNS
        if 0 < sign.fewest <= sum(each.count for each in judged.get(sign.metric, [])) and sign.shows(medians)
    ]
    return [*found, *_check_rewards(history), *_check_policy(history), *_check_phases(history)]


NUM_RULES = sum(sign.fewest > 0 for sign in SIGNS) + 7
"""What a page looks for: besides the table two things in the rewards, two of the policy, and three phases"""


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
        found = [(point.metrics[name], point) for point in history.points if name in point.metrics]
        recent = [(each, point.last) for each, point in found if point.first >= 1][-5 * RECENT :]
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


def _check_phases(history: History) -> Iterator[Warned]:
    for phase, do in (
        ("checkpoint", "raise checkpoint.save_every"),
        ("evaluate", "raise train.eval_every or lower train.num_eval_prompts"),
        ("sync", "look at the steps of a sync below; rollout.transport says how the weights travel"),
    ):
        share = history.sums.get(f"time/{phase}", 0.0) / (history.sums.get("perf/time_per_step") or inf)
        if share > 0.3 and history.num_lines > 3:
            yield Warned(f"Much time goes into {phase}", f"{share:.0%} of all seconds (time/{phase})", do)
