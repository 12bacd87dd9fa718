"""Warns, once each, of what makes a run learn nothing: cut responses, equal rewards, a form that is never met."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.types import Metrics

PATIENCE = 3
"""Iterations in a row that show it; the first ones of a run count"""


@dataclass(frozen=True)
class Sign:
    name: str
    shows: Callable[[Metrics], bool]
    text: str
    """With fields of the metrics, / as _"""
    patience: int = PATIENCE


def _is_zero(name: str) -> Callable[[Metrics], bool]:
    return lambda metrics: metrics.get(name) == 0


def _have_few_groups_a_signal(metrics: Metrics) -> bool:
    """Never with a critic, whose advantages need no differences within a group, nor with shaped rewards, which differ
    where those of the task do not, nor once the task is solved.
    """
    is_shaped = abs(metrics.get("reward/shaped_mean", 0) - metrics.get("reward/mean", 0)) > 1e-6
    is_solved = metrics.get("reward/correct", 0) >= 0.9
    is_exempt = "critic/loss" in metrics or is_shaped or is_solved
    return not is_exempt and 0.7 < metrics.get("reward/equal_groups_frac", 0) < 1


SIGNS = (
    Sign(
        "no end",
        lambda m: m.get("length/truncated_frac", 0) == 1,
        "no response ends by itself, all {length_max:.0f} tokens are used: the policy never says its end-of-sequence"
        " token. data.chat_template=true where the model has a template, an instruct model, or a longer"
        " rollout.response_length",
    ),
    Sign(
        "cut",
        lambda m: 0.2 < m.get("length/truncated_frac", 0) < 1,
        "{length_truncated_frac:.0%} of the responses are cut at the limit: where right ones are that long, raise"
        " rollout.response_length (environment.turn_length with turns); else ask for brevity in data.instruction, begin"
        " the answer with data.response_prefix, or teach it with algo.overlong.penalty=1",
    ),
    Sign(
        "equal",
        lambda m: "reward/mean" in m and m.get("reward/min") == m.get("reward/max"),
        "all rewards are equal ({reward_mean:.4g}), so nothing can be learned: is a right answer ever given, and paid"
        " (reward=...)? Easier or harder prompts (data=...), or a larger train.responses_per_prompt",
    ),
    Sign(
        "no signal",
        lambda m: m.get("advantage/max_abs") == 0 and "policy/loss" in m,
        "every advantage of this iteration is 0, and its step was made all the same: of the momentum of earlier steps"
        " and of what else is in the loss (a KL, an entropy), whose gradient Adam scales to a full step of the learning"
        " rate even where it is only rounding. algo.dynamic_sampling.enabled=true replaces groups without a signal",
        patience=1,
    ),
    Sign(
        "no gradient",
        lambda m: m.get("policy/grad_norm") == 0 and m.get("advantage/max_abs", 0) > 0,
        "the policy's gradient is 0 though the advantages are not, so nothing is learned: are its trained weights cut"
        " off from the loss (model.lora), or are all tokens masked or clipped (policy/clip_frac)?",
    ),
    Sign(
        "large step",
        lambda m: m.get("policy/approx_kl", 0) > 1,
        "this iteration moved the policy by a KL of {policy_approx_kl:.3g} per token, which most often ruins it: lower"
        " policy.optimizer.lr, and begin again or from a checkpoint before it",
        patience=1,
    ),
    Sign(
        "gap",
        lambda m: m.get("mismatch/logprob_gap_max", 0) > 30,
        "the log-probs of trainer and rollout engine differ by {mismatch_logprob_gap_max:.3g} nats at one token, which"
        " no rounding explains: one of the two computes something else there. The run's page shows the tokens;"
        " algo.mismatch.correction=tis bounds what such a token weighs",
        patience=1,
    ),
    Sign(
        "few groups",
        _have_few_groups_a_signal,
        "{reward_equal_groups_frac:.0%} of the groups have equal rewards, so that only the others are learned from:"
        " a reward with parts, prompts that are answered rightly now and then, a larger train.responses_per_prompt, or"
        " algo.dynamic_sampling.enabled=true, which replaces such groups",
    ),
    Sign(
        "format",
        _is_zero("reward/format"),
        "no response has the form that the reward asks for (reward/format is 0): say the form in data.instruction or"
        " data.system, or begin it with data.response_prefix",
    ),
    Sign(
        "block",
        _is_zero("reward/block"),
        "no response has a block of code (reward/block is 0): ask for one in data.instruction, or raise"
        " rollout.response_length",
    ),
)


class RunWatch:
    """Looks at the metrics of every iteration, in order."""

    def __init__(self) -> None:
        self._in_a_row = dict.fromkeys((sign.name for sign in SIGNS), 0)

    def check(self, metrics: Metrics) -> Iterator[str]:
        """The warnings that this iteration is the first to justify."""
        values = {name.replace("/", "_"): value for name, value in metrics.items()}
        for sign in SIGNS:
            count = self._in_a_row[sign.name]
            if count >= sign.patience:
                continue
            self._in_a_row[sign.name] = count + 1 if sign.shows(metrics) else 0
            if self._in_a_row[sign.name] == sign.patience:
                yield f"warning: {sign.text.format(**values)}"
