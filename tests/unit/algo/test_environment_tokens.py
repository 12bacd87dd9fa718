"""Multi-turn responses: tokens that the policy did not generate have no loss, no advantage, no place in any mean."""

import dataclasses

import pytest
import torch
from algo_cases import (
    NAMES,
    build_targets,
    load_preset,
    make_experience,
    response_positions,
    start_kl,
    with_failures,
    with_turn_rewards,
)

from megarl.algo.algorithm import compute_targets, update_reward_moments
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.losses import count_minibatch, critic_loss, policy_loss
from megarl.algo.objective import needs_critic
from megarl.algo.statistics import RunningMoments
from megarl.config.schema.algo import uses_topr
from megarl.types import Sequences

pytestmark = pytest.mark.filterwarnings("ignore:length-adaptive")

LIMIT = 10_000
"""Far off: the overlong penalty counts every token, as the limit does."""
POISON = [float("nan"), float("inf"), 1e9]
SUM = "seq-mean-token-sum"
PER_TOKEN = ("old_logprobs", "rollout_logprobs", "sampling_logprobs", "ref_logprobs", "ref_kl", "values")


def insert(e, places, poison):
    """The experience with so many tokens of the environment before each of the places, int64 [B, T + 1]; and where its
    tokens went, int64 [B, T].
    """
    width = e.mask.shape[1]
    shift = places.long().cumsum(1)
    moved = torch.arange(width) + shift[:, :width]
    # Past the response there are no tokens at all.
    lengths = e.sequences.response_lengths
    ends = lengths + shift.gather(1, lengths[:, None]).squeeze(1)
    shape = (len(e.groups), int(ends.max()) + 4 * width)

    def move(x, fill):
        return torch.full(shape, fill, dtype=x.dtype).scatter(1, moved, x)

    prompts = e.sequences.prompt_lengths
    longer = Sequences(torch.zeros(int((prompts + ends).sum()), dtype=torch.int64), prompts + ends, prompts)
    tensors = {name: move(getattr(e, name), poison) for name in PER_TOKEN}
    masks = {name: move(getattr(e, name), False) for name in ("mask", "scored")}
    turns = None if e.turn_rewards is None else move(e.turn_rewards, 0.0)
    return dataclasses.replace(e, sequences=longer, turn_rewards=turns, **masks, **tensors), moved


def draw_places(e, seed, share=0.3):
    """Observations of one to three tokens before some of the tokens and at the end."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(e.groups), e.mask.shape[1] + 1)
    return torch.randint(1, 4, shape, generator=g) * (torch.rand(shape, generator=g) < share)


def learn(e, algo):
    """Losses, their gradients [B, T] in what the models give, and every metric."""
    moments = update_reward_moments(RunningMoments(), e, algo, LIMIT)
    samples, metrics = compute_targets(e, algo, 0.1, response_length=LIMIT, reward_moments=moments)
    rows = torch.arange(len(e.groups))
    at = response_positions(samples, rows)
    targets, counts = build_targets(samples, rows), count_minibatch(samples)
    # What the models say of the generated tokens; poison where there is none.
    inputs = [(x * 0.8).requires_grad_() for x in (e.old_logprobs, e.old_logprobs.abs(), e.ref_kl, e.values)]
    flat = [x[at] for x in inputs]
    outputs = [policy_loss(flat[0], flat[1], targets, algo, counts, LIMIT, flat[2])]
    if needs_critic(algo):
        outputs.append(critic_loss(flat[3], targets, algo, counts))
    loss = sum(out.loss for out in outputs)
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    metrics |= compute_batch_metrics(e)
    if algo.kl.in_reward:
        kl = dataclasses.replace(algo.kl, target=algo.kl.target or 0.1)
        metrics["kl/next"] = start_kl(kl).update(e)[0].coef
    for out in outputs:
        metrics |= {name: float(x) for name, x in (out.sums | out.maxima).items()}
    return samples, loss.detach(), gradients, metrics


def check(e, algo, places, poison):
    longer, moved = insert(e, places, poison)
    samples, loss, gradients, metrics = learn(e, algo)
    theirs, their_loss, their_gradients, their_metrics = learn(longer, algo)
    assert theirs.mask.sum() == e.mask.sum()
    torch.testing.assert_close(their_loss, loss)
    assert their_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    generated = torch.zeros_like(longer.mask).scatter(1, moved, e.mask)
    assert torch.equal(generated, longer.mask)
    for mine, other in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(other.gather(1, moved)[e.mask], mine[e.mask])
        assert torch.equal(other[~generated], torch.zeros_like(other[~generated]))
    for name in ("advantages", "returns"):
        other = getattr(theirs, name)
        if other is not None:
            assert torch.equal(other[~generated], torch.zeros_like(other[~generated])), name
            torch.testing.assert_close(other[generated], getattr(samples, name)[e.mask])
    assert not theirs.loss_mask[~generated].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", POISON)
def test_environment_tokens_change_nothing_under_any_preset(name, poison):
    algo, _ = load_preset(name)
    lengths, rewards = [3, 5, 12, 1, 25, 40, 2, 8], [1.0, 0.0, 0.3, 1.0, -1.0, 0.0, 1.0, 1.0]
    e = make_experience([0] * 4 + [1] * 4, lengths, rewards, [False, True] * 4, 9, holes=False)
    places = draw_places(e, 3, 0.4)
    # Somewhere before, within and after the generated tokens.
    places[:, 0] = 2
    places[4, 25] = 3
    check(with_turn_rewards(e, 5) if not uses_topr(algo) else e, algo, places, poison)
    check(with_failures(e, [False, False, True, False] * 2), algo, places, poison)
