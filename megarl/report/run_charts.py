"""Which charts the page of a run has, from which metrics, and what would turn on those that are empty."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.report.history import MFU, ONCE, SECONDS, History
from megarl.report.responses import ENTROPY_ESTIMATE
from megarl.report.run_svg import Series
from megarl.report.text import TIME

NUM_COLOURS = 8
MOST_CURVES = 12
"""Of a chart whose metrics are named by their beginning"""

SYNC_STEP = "sync/seconds_"
SHARED = 8
"""Number of the colour of everything beyond NUM_COLOURS"""


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    metrics: Mapping[str, str]
    """The label of each metric; a name that ends in * stands for all that begin with it, * in its label for the rest"""
    note: str = ""
    """How to read it, in a sentence"""
    turn_on: str = ""
    """What a user does to get it; empty: a chart without values is not mentioned"""
    floor: float = float("-inf")
    """Values below are drawn there."""
    is_stack: bool = False
    without: Sequence[str] = field(default_factory=tuple)
    """Metrics that a * does not stand for"""


CRITIC = "an algorithm with a critic, for example algo=vapo"
SERVED = "servers that generate (rollout.file=null)"

LEARNING = (
    Chart(
        "Reward",
        "mean per response",
        {"reward/heldout": "held out, greedy", "reward/mean": "training, sampled"},
        "The held-out prompts are never trained on: a gap that widens is overfitting, or a reward that is gamed.",
    ),
    Chart(
        "Right answers",
        "share of responses",
        {"heldout/correct": "held out, greedy", "reward/correct": "training, sampled"},
    ),
    Chart(
        "Parts of the reward",
        "training, mean",
        {"reward/*": "*"},
        without=(
            *("reward/mean", "reward/std", "reward/min", "reward/max", "reward/heldout", "reward/correct"),
            *("reward/equal_groups_frac", "reward/failed_frac", "reward/positive_frac", "reward/shaped_mean"),
        ),
        turn_on="a reward function that returns named parts (docs/environments-and-rewards.md)",
    ),
    Chart(
        "Response length",
        "generated tokens",
        {"length/mean": "mean", "length/max": "longest", "length/min": "shortest"},
    ),
    Chart(
        "Cut off",
        "share of responses",
        {
            "length/truncated_frac": "at the length limit",
            "environment/max_turns_frac": "at environment.max_turns",
            "policy/dropped_frac": "left out of the policy loss",
        },
        "A cut response is judged without its end.",
    ),
    Chart(
        "Groups and responses without a signal",
        "share",
        {
            "reward/equal_groups_frac": "groups of equal rewards",
            "sampling/equal_correct_frac": "sampled groups, all right",
            "sampling/equal_wrong_frac": "sampled groups, all wrong",
            "reward/failed_frac": "responses without a reward",
        },
        "Without a critic, a group of equal rewards has advantages of 0.",
    ),
    Chart(
        "Episodes",
        "mean per episode",
        {"environment/*": "*"},
        without=("environment/max_turns_frac", "environment/tokens_mean"),
        turn_on="an environment of several turns, for example experiment=guess",
    ),
)

POLICY = (
    Chart(
        "Entropy",
        "nats per token",
        {"policy/entropy": "of the distribution", ENTROPY_ESTIMATE: "estimate: mean -log prob of sampled tokens"},
        "A fall to nearly 0 ends exploration: all responses to a prompt are then alike.",
        turn_on="algo.entropy_coef above 0, or logger.num_token_records above 0 for an estimate from sampled tokens",
    ),
    Chart(
        "Step of the policy",
        "KL per token, before to after",
        {"policy/approx_kl": "approx_kl"},
        "How far one iteration moves the policy from the one that sampled the responses.",
    ),
    Chart(
        "KL to the reference",
        "per token",
        {"kl/mean": "in the reward", "policy/kl_loss": "in the loss", "kl/coef": "coefficient"},
        turn_on="algo.kl.in_reward=true or algo.kl.in_loss=true",
    ),
    Chart(
        "Clipped",
        "share of tokens",
        {
            "policy/clip_frac": "policy",
            "policy/dual_clip_frac": "policy, dual clip",
            "critic/clip_frac": "critic",
        },
    ),
    Chart(
        "Importance ratio",
        "policy over the one that sampled",
        {"policy/ratio_mean": "mean", "policy/ratio_max": "largest"},
    ),
    Chart(
        "Gradient norm",
        "before clipping",
        {"policy/grad_norm": "policy", "critic/grad_norm": "critic"},
    ),
    Chart(
        "Policy loss",
        "",
        {"policy/loss": "loss", "policy/loss_size": "mean size", "policy/positive_lm": "positive examples' term"},
    ),
    Chart(
        "Advantages",
        "over the tokens",
        {"advantage/mean": "mean", "advantage/std": "standard deviation", "advantage/max_abs": "largest size"},
    ),
    Chart("Learning rate", "", {"policy/lr": "policy", "critic/lr": "critic"}),
    Chart(
        "TOPR's taper",
        "tokens of negative advantage",
        {"topr/*": "*"},
    ),
    Chart(
        "Experts",
        "mixture of experts",
        {
            "policy/moe_max_load": "largest load, policy",
            "critic/moe_max_load": "largest load, critic",
            "policy/moe_aux_loss": "balance loss, policy",
        },
    ),
)

CRITIC_CHARTS = (
    Chart(
        "Explained variance",
        "of the returns",
        {
            "critic/explained_variance": "all tokens",
            "critic/ev_at_0_25": "first quarter",
            "critic/ev_at_75_100": "last quarter",
        },
        "1 foresees every return, 0 is as good as a constant; below -1 is drawn at -1.",
        turn_on=CRITIC,
        floor=-1.0,
    ),
    Chart(
        "Error against the mean",
        "ratio of squared errors",
        {
            "critic/mse_vs_group": "all tokens, over the group's mean",
            "critic/mse_vs_group_first": "first state",
            "critic/mse_vs_batch": "all tokens, over the batch's mean",
            "critic/mse_vs_batch_first": "first state, batch",
        },
        "Above 1 the mean of the other responses is the better baseline.",
    ),
    Chart(
        "Value and return",
        "mean",
        {"critic/value_mean": "value", "critic/return_mean": "return"},
        "Values that stay below a rising return are a critic that lags behind its policy.",
    ),
    Chart(
        "Calibration",
        "of the first and middle state",
        {
            "critic/calibration_error_first": "error, first",
            "critic/calibration_error_middle": "error, middle",
            "critic/calibration_corr_first": "correlation, first",
            "critic/calibration_corr_middle": "correlation, middle",
        },
    ),
    Chart("Value loss", "", {"critic/loss": "loss", "critic/abs_error": "mean absolute error"}),
    Chart(
        "Length-adaptive lambda",
        "of the policy's advantages",
        {"advantage/lambda_mean": "mean lambda", "advantage/lambda_at_min_frac": "share at algo.lambda_min"},
        "Responses at the lower bound are too short for the formula 1 - 1/(alpha l).",
        turn_on="algo.lambda_policy=adaptive, as algo=vapo has it",
    ),
    Chart(
        "Weight of the value",
        "in the baseline",
        {"advantage/tether_rho": "rho", "advantage/tether_rho_batch": "best of the batch"},
    ),
)

ENGINES = (
    Chart(
        "Gap between the log-probs",
        "trainer and rollout engine, per token",
        {"mismatch/logprob_gap_mean": "mean", "mismatch/logprob_gap_max": "largest"},
        "The same weights in two engines: what is left is rounding, or a fault.",
        turn_on="a loss that reads old_logprobs (any but that of algo.surrogate=dis or dppo)",
    ),
    Chart("Mismatch", "KL to the rollout engine", {"mismatch/kl": "per token"}),
    Chart(
        "Ratio of the engines",
        "at algo.mismatch.level",
        {"mismatch/ratio_mean": "mean", "mismatch/ratio_max": "largest", "mismatch/outside_frac": "share outside"},
    ),
    Chart(
        "Staleness",
        "updates between sampling and learning",
        {
            "rollout/staleness_mean": "mean",
            "rollout/staleness_max": "largest",
            "rollout/too_stale_frac": "share too stale",
            "rollout/mixed_frac": "share of several versions",
        },
        turn_on="rollout.max_staleness above 0; at 0 every token is sampled by the weights that learn from it",
    ),
    Chart(
        "Replay",
        "older groups",
        {"replay/frac": "share of samples", "replay/age_mean": "mean age, iterations", "replay/kl": "KL per token"},
        turn_on="algo.replay.num_iterations above 0",
    ),
    Chart("Agreement of the routers", "share", {"policy/moe_routing_agreement": "trainer's own choice, as replayed"}),
    Chart("Weights sent", "bytes per sync", {"sync/bytes": "bytes"}, turn_on=SERVED),
    Chart("Steps of a sync", "seconds", {f"{SYNC_STEP}*": "*"}, is_stack=True),
    Chart(
        "Probe after each sync",
        "largest gap of its log-probs",
        {"sync/probe_logprob_gap": "gap"},
        "Fixed tokens through both engines, once the checksums have been found equal.",
    ),
)

TIME_CHARTS = (
    Chart(
        "Where the time goes",
        "seconds per iteration",
        {f"{TIME}*": "*"},
        is_stack=True,
        without=tuple(f"{TIME}{name}" for name in ONCE),
    ),
    Chart(
        "Waiting",
        "share of the iteration",
        {"derived/rollout_frac": "roles wait for responses", "derived/servers_idle_frac": "servers have no rollout"},
        "With rollout.max_staleness above 0 the servers also generate during the update.",
    ),
    Chart("Tokens per second", "", {"derived/generated_tokens_per_second": "generated, over the whole iteration"}),
    Chart(
        "Model FLOPs utilization (MFU) of the update",
        "share of the processors' peak",
        {MFU: "policy and critic"},
        note="Operations of the models' forward and backward passes, over what the processors of policy and critic"
        " could do in the update's seconds: GPUs by their data sheet in bfloat16, a CPU as measured.",
        turn_on="a known GPU (`cluster.hardware`)",
    ),
    Chart("Seconds per iteration", "all phases", {SECONDS: "seconds"}),
)


def name_metrics(chart: Chart, names: Iterable[str]) -> dict[str, str]:
    """(metric, label) of those of `names` that the chart shows, in its order; at most MOST_CURVES for a *."""
    found: dict[str, str] = {}
    known = list(names)
    for pattern, label in chart.metrics.items():
        if "*" not in pattern:
            if pattern in known:
                found[pattern] = label
            continue
        start, end = pattern.split("*")
        matching = [name for name in known if name.startswith(start) and name.endswith(end)]
        matching = [name for name in matching if name not in chart.without and len(name) > len(start) + len(end) - 1]
        for name in matching[:MOST_CURVES]:
            rest = name[len(start) : len(name) - len(end)].strip("_/") or end
            found[name] = label.replace("*", rest)
    return found


def build_series(history: History, metrics: Mapping[str, str], run: int = 0, *, is_stack: bool = False) -> list[Series]:
    """One of each metric that has values. is_stack: means over all lines of a point, those without the metric as 0."""
    return [
        series
        for number, (metric, label) in enumerate(metrics.items())
        if (series := _build_one(history, metric, label, number, run, is_stack)).values
    ]


def _build_one(history: History, metric: str, label: str, number: int, run: int, is_stack: bool) -> Series:
    found = [(index, point) for index, point in enumerate(history.points) if metric in point.metrics]
    ranges = [point.metrics[metric] for _, point in found]
    means = [
        each.total / (point.num_lines if is_stack else each.count)
        for each, (_, point) in zip(ranges, found, strict=True)
    ]
    return Series(
        label,
        number if number < NUM_COLOURS else SHARED,
        run,
        [index for index, _ in found],
        [point.last for _, point in found],
        means,
        [each.low for each in ranges] if history.width > 1 else means,
        [each.high for each in ranges] if history.width > 1 else means,
    )


def list_others(names: Sequence[str], sections: Iterable[Sequence[Chart]]) -> Iterator[str]:
    """The metrics that none of the charts shows, sorted."""
    shown = {name for charts in sections for chart in charts for name in name_metrics(chart, names)}
    yield from (name for name in sorted(names) if name not in shown)
