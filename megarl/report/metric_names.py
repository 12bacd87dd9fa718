"""Every metric that a run logs: its name, unit and meaning. docs/metrics.md is generated from this table.

A name may have placeholders, `{quarter}` for example; PLACEHOLDERS has what stands for each.
"""

import re
from dataclasses import dataclass
from functools import cache

ONE = "1"
"""The unit of numbers without one: ratios, correlations, coefficients"""
SHARE, TOKENS, REWARD, NATS, SECONDS, BYTES, COUNT = "share", "tokens", "reward", "nats", "s", "bytes", "count"
TFLOP = "TFLOP"
GIBIBYTES = "GiB"
UNITS = {
    ONE: "none: a ratio, a coefficient or a number of an optimizer",
    SHARE: "0 to 1",
    TOKENS: "generated tokens, unless the text says otherwise",
    REWARD: "the unit of the reward, as `reward=` scores it",
    NATS: "natural logarithm of a probability",
    SECONDS: "seconds",
    BYTES: "bytes",
    GIBIBYTES: "2**30 bytes",
    TFLOP: "1e12 floating-point operations",
    COUNT: "a number of things",
}
NAME = r"[^{}\s]+"
"""What a user's reward or environment may call its numbers"""
QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Of a response, as metrics name them; `megarl.algo.diagnostics.QUARTERS`, which this room may not import"""
PLACEHOLDERS = {
    "quarter": "|".join(QUARTERS),
    "quartile": r"[1-4]",
    "state": r"first|middle",
    "baseline": r"group|batch",
    "set": r"[^{}\s/]+",
    "role": r"policy|critic|reference",
    "name": NAME,
}
PLACEHOLDER_TEXTS = {
    "quarter": "`0_25`, `25_50`, `50_75`, `75_100`: the quarter of its response, in percent, in which a token lies",
    "quartile": "`1` to `4`, the lowest first",
    "state": "`first`, `middle`: the first or the middle state of a response",
    "baseline": "`group`: the mean of the prompt's other responses; `batch`: with one response per prompt, that of the"
    " batch's others",
    "set": "the name of a set of train.eval_sets",
    "role": "`policy`, `critic` or `reference`",
    "name": "a name that your reward or environment gives",
}


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str
    """One sentence or more, without the final full stop"""


def _role(role: str) -> tuple[Metric, ...]:
    """What the optimizer steps of a role log."""
    return (
        Metric(f"{role}/grad_norm", ONE, "Norm of the gradient before it is clipped, mean over the optimizer steps"),
        Metric(f"{role}/lr", ONE, "Learning rate, mean over the optimizer steps"),
        Metric(f"{role}/real_tokens_frac", SHARE, "Tokens of the samples over those computed, padding included"),
        Metric(
            f"{role}/model_tflop_sum",
            TFLOP,
            "Forward and backward passes of all optimizer steps, without what is computed again; a prompt that several"
            " responses of a micro-batch share counts once",
        ),
        Metric(
            f"{role}/moe_max_load",
            ONE,
            "Tokens of a layer's busiest expert over those of an average one, mean of layers",
        ),
        Metric(f"{role}/moe_aux_loss", ONE, "Load-balancing loss of the routers, without its coefficient"),
        Metric(f"{role}/moe_z_loss", ONE, "Z-loss of the routers, without its coefficient"),
        Metric(
            f"{role}/moe_routing_agreement",
            SHARE,
            "With rollout.router_replay: tokens and layers whose set of experts is also the router's own choice",
        ),
    )


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", REWARD, "Mean reward of the iteration's fresh responses that have one"),
    Metric("reward/std", REWARD, "Their standard deviation"),
    Metric("reward/min", REWARD, "The lowest of them"),
    Metric("reward/max", REWARD, "The highest of them"),
    Metric("reward/correct", SHARE, "Fresh responses that the verifier calls correct"),
    Metric("reward/failed_frac", SHARE, "Fresh responses without a reward: verifier or environment failed"),
    Metric("reward/equal_groups_frac", SHARE, "Groups whose responses all have the same reward, and so no signal"),
    Metric("reward/positive_frac", SHARE, "Responses that count as positive for the loss on positive responses"),
    Metric("reward/shaped_mean", REWARD, "Mean of what is learned from: after reward.wrong, penalties and scaling"),
    Metric(
        "reward/heldout", REWARD, "Mean reward of greedy responses to held-out prompts; without a reward counts as 0"
    ),
    Metric("reward/{name}", REWARD, "Mean of a named part of the reward"),
    Metric("heldout/correct", SHARE, "Held-out prompts whose greedy response is correct"),
    Metric("heldout/failed_frac", SHARE, "Held-out prompts whose greedy response has no reward"),
    Metric("heldout/{name}", REWARD, "Mean of a named part of the reward over the held-out prompts"),
    Metric("heldout/environment/turns_mean", COUNT, "Turns of an episode, mean over the held-out prompts"),
    Metric("heldout/environment/max_turns_frac", SHARE, "Held-out episodes cut at environment.max_turns"),
    Metric("heldout/environment/tokens_mean", TOKENS, "Tokens of actions and observations of a held-out episode"),
    Metric("heldout/environment/{name}", ONE, "Sum of an environment's number over an episode, mean of the held-out"),
    Metric("eval/{set}/reward_mean", REWARD, "Mean reward on a set of train.eval_sets; without a reward counts as 0"),
    Metric("eval/{set}/correct", SHARE, "Responses to the set that are correct"),
    Metric("eval/{set}/failed_frac", SHARE, "Responses to the set without a reward"),
    Metric("eval/{set}/length_mean", TOKENS, "Mean length of the responses to the set"),
    Metric("eval/{set}/truncated_frac", SHARE, "Responses to the set that are cut at the limit"),
    Metric("environment/turns_mean", COUNT, "Turns of an episode"),
    Metric("environment/max_turns_frac", SHARE, "Episodes cut at environment.max_turns"),
    Metric("environment/tokens_mean", TOKENS, "Tokens of actions and observations together of an episode"),
    Metric("environment/{name}", ONE, "Sum of an environment's number over an episode, mean of the episodes"),
    Metric("length/sum", TOKENS, "Sum of the lengths of the iteration's fresh responses"),
    Metric("length/mean", TOKENS, "Mean length of the fresh responses"),
    Metric("length/min", TOKENS, "The shortest"),
    Metric("length/max", TOKENS, "The longest"),
    Metric("length/truncated_frac", SHARE, "Responses cut at rollout.response_length or environment.turn_length"),
    Metric("policy/loss", ONE, "The policy's whole loss, mean over the optimizer steps"),
    Metric(
        "policy/loss_size",
        ONE,
        "The aggregate of the absolute losses of the tokens: what sums near 0 are compared with",
    ),
    Metric(
        "policy/clip_frac", SHARE, "Tokens whose importance ratio is clipped, or which algo.policy_loss masks for it"
    ),
    Metric("policy/dual_clip_frac", SHARE, "Tokens whose loss algo.dual_clip bounds"),
    Metric("policy/ratio_mean", ONE, "Mean importance ratio of a token to the policy before the update"),
    Metric("policy/ratio_max", ONE, "The largest importance ratio of a token in any of the optimizer steps"),
    Metric("policy/approx_kl", NATS, "KL from the policy before the update to the trained one, per token (k3)"),
    Metric(
        "policy/entropy",
        NATS,
        "Entropy of the policy at a token, mean over the tokens learned from and the optimizer steps",
    ),
    Metric("policy/kl_loss", NATS, "KL to the reference in the loss, without its coefficient"),
    Metric("policy/positive_lm", NATS, "Negative log-likelihood of the positive responses, without its coefficient"),
    Metric(
        "policy/positive_lm_weight_max",
        ONE,
        "Weight of a positive token's log-likelihood against that of a token of the loss, the largest of the steps",
    ),
    Metric("policy/dropped_frac", SHARE, "Generated tokens that the policy does not learn from"),
    Metric(
        "policy/learned_frac_at_{quarter}",
        SHARE,
        "Tokens learned from over tokens generated, by their place in the response; where some are not learned from",
    ),
    Metric(
        "policy/learned_frac_of_length_{quartile}",
        SHARE,
        "The same of a quarter of the responses, by their length",
    ),
    *_role("policy"),
    Metric("critic/loss", ONE, "The critic's loss, mean over the optimizer steps"),
    Metric("critic/abs_error", REWARD, "Absolute difference of value and return at a token, during the update"),
    Metric("critic/clip_frac", SHARE, "Tokens whose value loss algo.value_clip bounds"),
    *_role("critic"),
    Metric("critic/explained_variance", ONE, "1 - Var(return - value) / Var(return), before the update; 1 is perfect"),
    Metric("critic/value_mean", REWARD, "Mean value of a token, before the update"),
    Metric("critic/return_mean", REWARD, "Mean return of a token, which the critic learns"),
    Metric("critic/ev_at_{quarter}", ONE, "Explained variance over the tokens in a quarter of their response"),
    Metric("critic/ev_length_q{quartile}", ONE, "Explained variance over the responses in a quartile of length"),
    Metric(
        "critic/calibration_error_{state}",
        REWARD,
        "Expected calibration error of the state's value against the outcome; 0 is perfect",
    ),
    Metric(
        "critic/calibration_slope_{state}",
        ONE,
        "Slope of the outcome over the state's value; 1 is perfect, below 1 the values vary too much",
    ),
    Metric("critic/calibration_corr_{state}", ONE, "Correlation of the state's value and the outcome"),
    Metric("critic/value_{state}_q{quartile}", REWARD, "Mean value of the states in a quartile of value"),
    Metric("critic/outcome_{state}_q{quartile}", REWARD, "Mean outcome of the states in a quartile of value"),
    Metric(
        "critic/mse_vs_{baseline}",
        ONE,
        "The critic's squared error over that of a baseline; below 1 the critic is better",
    ),
    Metric("critic/mse_vs_{baseline}_first", ONE, "The same at the first state of each response"),
    Metric("advantage/mean", ONE, "Mean advantage of a token, as it is learned from"),
    Metric("advantage/std", ONE, "Standard deviation of the advantages"),
    Metric("advantage/max_abs", ONE, "The largest absolute advantage"),
    Metric("advantage/lambda_mean", ONE, "Mean of the policy's length-adaptive lambda over the responses"),
    Metric(
        "advantage/lambda_at_min_frac", SHARE, "Responses whose length-adaptive lambda is raised to algo.lambda_min"
    ),
    Metric(
        "advantage/signal_frac_at_{quarter}", SHARE, "What of the squared advantage is about its token; an estimate"
    ),
    Metric(
        "advantage/signal_frac_{baseline}_at_{quarter}",
        SHARE,
        "The same for the advantage over a baseline, which needs no critic",
    ),
    Metric("advantage/tether_rho", ONE, "Mixture of critic and baseline that this iteration used (algo.tether)"),
    Metric("advantage/tether_rho_batch", ONE, "The mixture that this iteration's batch alone would have chosen"),
    Metric("kl/mean", NATS, "KL to the reference of a token, where it is in the reward"),
    Metric("kl/coef", ONE, "Coefficient of the KL that this iteration used"),
    Metric("kl/compared", NATS, "KL that the adaptive coefficient compares with its target"),
    Metric("mismatch/kl", NATS, "KL from the rollout engine to the trainer, per token (k3)"),
    Metric("mismatch/kl_at_{quarter}", NATS, "The same over the tokens in a quarter of their response"),
    Metric("mismatch/logprob_gap_mean", NATS, "Mean absolute difference of the two engines' log-probs of a token"),
    Metric("mismatch/logprob_gap_max", NATS, "The largest difference"),
    Metric("mismatch/logprob_gap_at_{quarter}", NATS, "Mean difference over the tokens in a quarter of their response"),
    Metric("mismatch/worst_quarter", COUNT, "1 to 4: the quarter of the responses with the largest mean difference"),
    Metric("mismatch/ratio_mean", ONE, "Mean ratio of trainer to rollout engine, at algo.mismatch.level"),
    Metric("mismatch/ratio_max", ONE, "The largest ratio"),
    Metric("mismatch/outside_frac", SHARE, "Tokens whose ratio is outside algo.mismatch.low to algo.mismatch.high"),
    Metric("replay/frac", SHARE, "Samples of the iteration that are replayed"),
    Metric("replay/age_mean", COUNT, "Iterations since the replayed samples were generated"),
    Metric(
        "replay/ratio_mean", ONE, "Mean ratio of the policy before the update to the one that sampled, older samples"
    ),
    Metric("replay/ratio_max", ONE, "The largest of these ratios"),
    Metric("replay/kl", NATS, "KL from the policy that sampled to the one before the update, older samples (k3)"),
    Metric("replay/logprob_above", NATS, "Log-prob of a token of older responses with rewards above their mean"),
    Metric("replay/logprob_below", NATS, "Log-prob of a token of the other older responses"),
    Metric("rollout/staleness_mean", COUNT, "Policy updates between sampling and training, mean over the tokens used"),
    Metric("rollout/staleness_max", COUNT, "The most such updates of a token used"),
    Metric("rollout/mixed_frac", SHARE, "Responses whose tokens come from more than one version of the weights"),
    Metric("rollout/too_stale_frac", SHARE, "Generated tokens older than rollout.max_staleness, not learned from"),
    Metric("sampling/total_samples", COUNT, "Responses sampled for training since the run began"),
    Metric("sampling/reward_mean", REWARD, "Mean reward of all that dynamic sampling has sampled, kept or not"),
    Metric("sampling/rounds", COUNT, "Rounds of dynamic sampling"),
    Metric("sampling/num_prompts", COUNT, "Prompts that dynamic sampling has tried"),
    Metric("sampling/signal_frac", SHARE, "Of these, prompts with a signal, as algo.dynamic_sampling.by says"),
    Metric("sampling/equal_correct_frac", SHARE, "Of these, prompts whose responses are all correct"),
    Metric("sampling/equal_wrong_frac", SHARE, "Of these, prompts whose responses are all wrong"),
    Metric("saved/epoch", COUNT, "Passes over rollout.file, whole and begun"),
    Metric("saved/reward_mean", REWARD, "Mean reward of the saved responses of this iteration"),
    Metric("saved/correct_frac", SHARE, "Saved responses of this iteration that are correct"),
    Metric("topr/taper_mean", ONE, "Mean taper of the tokens with negative advantage"),
    Metric("topr/taper_zero_frac", SHARE, "Of these tokens, those whose taper is below 0.01"),
    Metric("topr/taper_one_frac", SHARE, "Of these tokens, those whose taper is above 0.99"),
    Metric("topr/engine_mu_frac", SHARE, "Of these tokens, those whose sampling log-prob is the rollout engine's"),
    Metric("topr/engine_taper", ONE, "Mean taper that the rollout engine's noise alone would leave them"),
    Metric("sync/bytes", BYTES, "Weights that one sync moves to the servers"),
    Metric("sync/bytes_over_bound", ONE, "These bytes over the fewest that could do"),
    Metric("sync/probe_logprob_gap", NATS, "The median log-prob gap of a token of the probe text after a sync"),
    Metric("sync/verify_share", SHARE, "What of a sync's time verification takes"),
    Metric("sync/seconds_probe", SECONDS, "Log-probs of the probe text, by policy and servers"),
    Metric("sync/seconds_pause", SECONDS, "Until the servers have paused"),
    Metric("sync/seconds_open", SECONDS, "Handshake of the ranks, where it is new"),
    Metric("sync/seconds_move", SECONDS, "Moving the weights"),
    Metric("sync/seconds_checksum", SECONDS, "Verification of the checksums"),
    Metric("sync/seconds_resume", SECONDS, "Until the servers generate again"),
    Metric("sync/seconds_export", SECONDS, "With rollout.transport=disk: writing the checkpoint"),
    Metric("sync/seconds_load", SECONDS, "With rollout.transport=disk: loading it"),
    Metric("sync/seconds_verify", SECONDS, "With rollout.transport=disk: verification"),
    Metric("time/start", SECONDS, "Start of Ray, servers and workers"),
    Metric("time/load", SECONDS, "Loading a checkpoint"),
    Metric("time/rollout", SECONDS, "Generation and rewards"),
    Metric("time/experience", SECONDS, "Log-probs and values of policy, reference and critic"),
    Metric("time/update", SECONDS, "Optimizer steps of policy and critic"),
    Metric("time/checkpoint", SECONDS, "The part of saving a checkpoint that training waits for"),
    Metric("time/sync", SECONDS, "Weight sync with its verification"),
    Metric("time/evaluate", SECONDS, "Greedy responses to the held-out prompts"),
    Metric("perf/time_per_step", SECONDS, "Of the iteration: the sum of its phases, without start and load"),
    Metric("perf/tokens_per_second", ONE, "Generated tokens of the iteration's fresh responses over its seconds"),
    Metric("perf/samples_per_second", ONE, "Fresh responses over the iteration's seconds"),
    Metric("perf/cpu_memory_used_gb", GIBIBYTES, "Memory in use on the driver's machine, by all programs"),
    Metric(
        "perf/{role}_peak_memory_gb",
        GIBIBYTES,
        "The most that the role's process with the most has had since it started: of tensors on its GPU, on a CPU of"
        " resident memory",
    ),
    Metric(
        "perf/servers_peak_memory_gb",
        GIBIBYTES,
        "The same of the server with the most, in resident memory, the sum over its processes; what it has of a GPU is"
        " fixed by rollout.sglang.mem_fraction_static",
    ),
)
"""In the order of docs/metrics.md: by the part before the first slash."""


def find_metric(name: str) -> Metric | None:
    """The table's row for a logged name; a row without placeholders comes first. None: it is not in the table."""
    exact, patterns = _index()
    if name in exact:
        return exact[name]
    return next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


@cache
def _index() -> tuple[dict[str, Metric], tuple[tuple[re.Pattern[str], Metric], ...]]:
    """The rows by name; those with placeholders as patterns, those that match anything last."""
    exact = {metric.name: metric for metric in METRICS}
    open_last = sorted((m for m in METRICS if "{" in m.name), key=lambda m: ("{name}" in m.name, -m.name.count("/")))
    return exact, tuple((re.compile(build_pattern(metric.name)), metric) for metric in open_last)


def build_pattern(name: str) -> str:
    """A regular expression for a row's name."""
    parts = re.split(r"\{(\w+)\}", name)
    return "".join(f"(?:{PLACEHOLDERS[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


PEERS: dict[str, tuple[str, str]] = {
    "reward/mean": ("critic/score/mean", "reward"),
    "reward/min": ("critic/score/min", ""),
    "reward/max": ("critic/score/max", ""),
    "reward/equal_groups_frac": ("", "frac_reward_zero_std"),
    "reward/{name}": ("", "rewards/NAME/mean"),
    "length/mean": ("response_length/mean", "completions/mean_length"),
    "length/min": ("response_length/min", "completions/min_length"),
    "length/max": ("response_length/max", "completions/max_length"),
    "length/truncated_frac": ("response_length/clip_ratio", "completions/clipped_ratio"),
    "policy/entropy": ("actor/entropy", "entropy"),
    "policy/loss": ("actor/pg_loss", "loss"),
    "policy/clip_frac": ("actor/pg_clipfrac", "clip_ratio/region_mean"),
    "policy/kl_loss": ("actor/kl_loss", "kl"),
    "policy/grad_norm": ("actor/grad_norm", "grad_norm"),
    "policy/lr": ("actor/lr", "learning_rate"),
    "critic/loss": ("critic/vf_loss", ""),
    "critic/clip_frac": ("critic/vf_clipfrac", ""),
    "critic/explained_variance": ("critic/vf_explained_var", ""),
    "critic/value_mean": ("critic/values/mean", ""),
    "critic/return_mean": ("critic/returns/mean", ""),
    "critic/grad_norm": ("critic/grad_norm", ""),
    "critic/lr": ("critic/lr", ""),
    "advantage/mean": ("critic/advantages/mean", ""),
    "time/rollout": ("timing_s/gen", ""),
    "perf/time_per_step": ("perf/time_per_step", "step_time"),
    "perf/cpu_memory_used_gb": ("perf/cpu_memory_used_gb", ""),
}
"""Our name -> what the dashboards of (verl, TRL) call the number that means the same, empty where they have none.

Left out are names whose number is another: verl's actor/ppo_kl is k1, TRL's reward_std the mean of the groups'."""
