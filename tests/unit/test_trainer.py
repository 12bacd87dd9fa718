"""The pure parts of the loop."""

import pytest
import torch
from fakes.backend import Done

from megarl.config.load import load_config
from megarl.run.components import Roles, average_steps, split_minibatches
from megarl.types import Experience, FinishReason, Prompt, Response, Rollout, Sample, Score, Sequences


def test_metrics_of_optimizer_steps_are_averaged_over_those_that_have_them_maxima_kept_and_sums_added():
    steps = [{"loss": 1.0, "ratio_max": 3.0, "a_sum": 1.0}, {"loss": 3.0, "ratio_max": 2.0, "a_sum": 3.0, "b": 2.0}]
    assert average_steps(steps) == {"loss": 2.0, "ratio_max": 3.0, "a_sum": 4.0, "b": 2.0}


def test_every_epoch_has_all_rows_in_an_order_of_its_own_and_the_same_seed_the_same():
    config = load_config(["train.epochs_per_iteration=3", "train.num_minibatches=2"])
    num = 2 * config.train.minibatch_size
    minibatches = split_minibatches(config, num, 1)
    epochs = [torch.cat(minibatches[first : first + 2]).tolist() for first in (0, 2, 4)]
    assert [sorted(rows) for rows in epochs] == [list(range(num))] * 3
    assert len({tuple(rows) for rows in epochs}) == 3
    assert all(map(torch.equal, split_minibatches(config, num, 1), minibatches))
    assert not all(map(torch.equal, split_minibatches(config, num, 2), minibatches))


class CountingPolicy:
    """Log-probs of -1 at every response token, and how often they were asked for."""

    num_calls = 0

    def logprobs(self, sequences: Sequences, temperature: float) -> Done[torch.Tensor]:
        self.num_calls += 1
        return Done(-torch.ones(sequences.num_samples, int(sequences.response_lengths.max())))


def compute(*overrides: str, reuses_logprobs: bool = False) -> tuple[Experience, int]:
    """At version 5, a response whose three tokens are 3, 2 and 1 versions behind; and how often the policy scored."""
    response = Response((7, 8, 9), "", (-0.5,) * 3, (True,) * 3, (2, 3, 4), FinishReason.stop)
    rollout = Rollout((Sample(Prompt("p", "p", (1,), ""), response, Score(1.0, True), 0),), 5)
    config, policy = load_config(overrides), CountingPolicy()
    experience, _ = Roles(config, policy, None, None).score(rollout, 1, reuses_logprobs=reuses_logprobs)
    return experience, policy.num_calls


@pytest.mark.parametrize(("max_staleness", "too_stale"), [(1, [1, 1, 0]), (2, [1, 0, 0])])
def test_a_token_one_update_older_than_allowed_is_too_stale(max_staleness: int, too_stale: list[int]):
    given = [f"rollout.max_staleness={max_staleness}", "algo.mismatch.correction=tis"]
    assert compute("algo=grpo", *given)[0].too_stale.int().tolist() == [too_stale]
    assert compute("algo=grpo", "rollout.max_staleness=3", "algo.mismatch.correction=tis")[0].too_stale is None


def test_the_policy_scores_once_and_not_at_all_where_the_update_does():
    scored, num_calls = compute("algo=grpo")
    assert (scored.old_logprobs.tolist(), num_calls) == ([[-1.0] * 3], 1)
    reusing, num_calls = compute("algo=grpo", reuses_logprobs=True)
    assert (reusing.old_logprobs.tolist(), num_calls) == ([[-0.5] * 3], 0)
