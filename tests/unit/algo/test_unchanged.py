"""What changes no result: tokens that the policy did not generate, samples without a reward, how a batch is split into
blocks of rows, and how far it is padded.
"""

import dataclasses

import pytest
import torch
from algo_cases import (
    NAMES,
    build_targets,
    configure,
    experiences,
    load_preset,
    make_experience,
    response_positions,
    some,
    start_kl,
    with_failures,
    with_turn_rewards,
)
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import statistics
from megarl.algo.algorithm import compute_targets, update_reward_moments
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.losses import count_minibatch, critic_loss, policy_loss
from megarl.algo.objective import needs_critic
from megarl.algo.statistics import RunningMoments
from megarl.config.load import list_options, load_config
from megarl.config.schema.algo import RatioLevel, uses_topr
from megarl.types import Experience, Sequences, TrainingSamples

pytestmark = [pytest.mark.filterwarnings(f"ignore:{name}") for name in ("length-adaptive", "TOPR")]

LIMIT = 10_000
"""Far off: the overlong penalty counts every token, as the limit does."""
POISON = [float("nan"), float("inf"), 1e9]
MIXTURES = ("control_variate", "tether")
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


def learn(e, algo, limit=LIMIT):
    """Losses, their gradients [B, T] in what the models give, every metric and every running statistic."""
    moments = update_reward_moments(RunningMoments(3, 0.5, 1.0), e, algo, limit)
    samples, metrics = compute_targets(e, algo, 0.1, response_length=limit, reward_moments=moments)
    metrics |= {f"moments/{name}": value for name, value in vars(moments).items()}
    rows = torch.arange(len(e.groups))
    at = response_positions(samples, rows)
    targets, counts = build_targets(samples, rows), count_minibatch(samples)
    # What the models say of the generated tokens; poison where there is none.
    inputs = [(x * 0.8).requires_grad_() for x in (e.old_logprobs, e.old_logprobs.abs(), e.ref_kl, e.values)]
    flat = [x[at] for x in inputs]
    outputs = [policy_loss(flat[0], flat[1], targets, algo, counts, limit, flat[2])]
    if needs_critic(algo):
        outputs.append(critic_loss(flat[3], targets, algo, counts))
    loss = sum(out.loss for out in outputs)
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    metrics |= compute_batch_metrics(e)
    controller, kl_metrics = start_kl(dataclasses.replace(algo.kl, in_reward=True, target=0.1)).update(e)
    metrics |= kl_metrics | {"kl/next": controller.coef}
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


@some
@given(experiences(), st.sampled_from([*NAMES, *MIXTURES]), st.data())
def test_targets_losses_and_metrics_with_failed_samples_are_those_of_the_others_under_any_preset(e, name, data):
    algo = configure(advantage=name, surrogate="logprob") if name in MIXTURES else load_preset(name)[0]
    failed = [True for _ in e.groups] if data.draw(st.booleans()) else [data.draw(st.booleans()) for _ in e.groups]
    lost = with_failures(e, failed)
    kept = torch.tensor([i for i, f in enumerate(failed) if not f], dtype=torch.int64)
    samples, loss, _, metrics = learn(lost, algo, 30)
    alone, their_loss, _, their_metrics = learn(e.select(kept), algo, 30)
    for found in (metrics, their_metrics):
        found.pop("reward/failed_frac", None)
    torch.testing.assert_close(loss, their_loss)
    assert metrics == pytest.approx(their_metrics, rel=1e-12)
    assert not samples.mask[lost.failed].any()
    assert not samples.loss_mask[lost.failed].any()
    assert not samples.positive[lost.failed].any()
    for field in dataclasses.fields(TrainingSamples):
        mine, other = getattr(samples, field.name), getattr(alone, field.name)
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine[kept], other, equal_nan=True)
            assert not mine[lost.failed].any(), field.name
    assert samples.sequences is lost.sequences


def test_tokens_of_a_failed_sample_are_refused():
    e = make_experience([0, 0], [2, 4], [1.0, 0.0], [False] * 2, 0, holes=False)
    with pytest.raises(ValueError, match="mask: found tokens of failed samples"):
        compute_targets(dataclasses.replace(e, failed=torch.tensor([True, False])), configure(), 0.0)


HEAVY = configure(whiten_advantages=True, advantage_clip=1.0, kl__in_reward=True, mismatch__level=RatioLevel.sequence)


def make_clean(dtype: torch.dtype = torch.float64) -> Experience:
    ages = torch.tensor([0, 0, 0, 1, 1, 0])
    return dataclasses.replace(
        make_experience([0, 0, 1, 1, 2, 2], [5, 20, 0, 40, 3, 17], [1, 0, 0.3, 0, 1, 0.3], [False] * 6, 1, dtype=dtype),
        ages=ages,
    )


def pad(experience: Experience, num: int) -> Experience:
    """The same with `num` more positions in each row; NaN where nothing is to be read."""
    changed = {}
    for field in dataclasses.fields(experience):
        value = getattr(experience, field.name)
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            fill = False if value.dtype == torch.bool else torch.nan
            changed[field.name] = torch.cat([value, torch.full((len(value), num), fill, dtype=value.dtype)], dim=1)
    return dataclasses.replace(experience, **changed)


def compute_all(experience: Experience, algo) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    samples, metrics = compute_targets(experience, algo, 0.1, response_length=64, reward_moments=None)
    kl = start_kl(dataclasses.replace(algo.kl, in_reward=True, target=0.1, horizon=100.0))
    tensors = {name: x for name in ("advantages", "returns") if (x := getattr(samples, name)) is not None}
    return tensors, metrics | kl.update(experience)[1]


@pytest.mark.parametrize("preset", [*list_options("algo"), "heavy"])
def test_every_presets_targets_and_metrics_are_the_same_in_blocks_of_few_tokens(preset, monkeypatch):
    algo = HEAVY if preset == "heavy" else load_config([f"algo={preset}"]).algo
    tensors, metrics = compute_all(make_clean(), algo)
    for num_tokens in (1, 25):
        monkeypatch.setattr(statistics, "NUM_TOKENS", num_tokens)
        found, found_metrics = compute_all(make_clean(), algo)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)
        assert list(found_metrics) == list(metrics)
        assert found_metrics == pytest.approx(metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("preset", ["vapo", "dapo", "reinforce_pp", "rloo", "topr"])
def test_more_padding_changes_no_bit(preset):
    algo = load_config([f"algo={preset}"]).algo
    tensors, metrics = compute_all(make_clean(torch.float32), algo)
    found, found_metrics = compute_all(pad(make_clean(torch.float32), 33), algo)
    assert found_metrics == metrics
    for name, tensor in tensors.items():
        assert torch.equal(found[name][:, :40], tensor)
        assert not found[name][:, 40:].any()
