"""Random small experiences, and their two forms: megarl's types, and lists for the reference."""

import copy
import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megarl.algo.algorithm import KlController, compute_targets
from megarl.algo.diagnostics import CriticSummary
from megarl.algo.losses import LossCounts, TokenTargets, policy_loss
from megarl.algo.statistics import count_generated, split_blocks
from megarl.config.checks import Place, check_algo, check_keys
from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig, KLConfig, NormScope, RewardNormConfig
from megarl.config.schema.root import Config, TrainConfig
from megarl.types import Experience, Sequences, TrainingSamples

settings.register_profile("algo", derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
few = settings(settings.get_profile("algo"), max_examples=15)
some = settings.get_profile("algo")

LIMIT = 24
"""rollout.response_length"""
REWARDS = [-1.0, 0.0, 0.3, 1.0]


def configure(**values) -> AlgoConfig:
    """AlgoConfig with nested keys as name__key=value."""
    config = AlgoConfig()
    for name, value in values.items():
        *path, last = name.split("__")
        node = config
        for part in path:
            node = getattr(node, part)
        assert hasattr(node, last), name
        setattr(node, last, value)
    return config


def norm(mean: str, std: str) -> RewardNormConfig:
    return RewardNormConfig(NormScope[mean], NormScope[std])


@st.composite
def experiences(draw, min_group: int = 1, holes: bool = True, min_length: int = 0, dtype=torch.float64):
    """Ragged lengths from 0 on, tool tokens in the middle, groups of `min_group`..4, equal rewards among them."""
    sizes = draw(st.lists(st.integers(min_group, 4), min_size=1, max_size=3))
    groups = [g for g, k in enumerate(sizes) for _ in range(k)]
    lengths = [draw(st.sampled_from([0, 1, 2, 3, 5, 20] if min_length == 0 else [1, 2, 3, 5, 20])) for _ in groups]
    equal = draw(st.booleans())
    rewards = [0.3 if equal else draw(st.sampled_from(REWARDS)) for _ in groups]
    truncated = [draw(st.booleans()) for _ in groups]
    seed = draw(st.integers(0, 2**31))
    return make_experience(groups, lengths, rewards, truncated, seed, holes=holes, dtype=dtype)


def make_experience(groups, lengths, rewards, truncated, seed, holes=True, dtype=torch.float64) -> Experience:
    g = torch.Generator().manual_seed(seed)
    width, n = max([*lengths, 1]), len(groups)
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = inside & (torch.rand(n, width, generator=g) < 0.8) if holes else inside
    # Outside the mask everything is poison: nothing of it may come out anywhere.
    draw_ = lambda scale, shift: torch.where(  # noqa: E731
        mask, torch.randn(n, width, generator=g, dtype=torch.float64) * scale + shift, torch.nan
    ).to(dtype)
    prompts = torch.randint(1, 4, (n,), generator=g)
    total = prompts + torch.tensor(lengths)
    return Experience(
        sequences=Sequences(torch.zeros(int(total.sum()), dtype=torch.int64), total, prompts),
        groups=torch.tensor(groups),
        ages=torch.zeros(n, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=dtype),
        failed=torch.zeros(n, dtype=torch.bool),
        truncated=torch.tensor(truncated),
        turn_rewards=None,
        mask=mask,
        old_logprobs=(old := draw_(0.7, -1.5)),
        rollout_logprobs=old + draw_(0.3, 0.0),
        ref_logprobs=old + draw_(0.3, 0.0),
        ref_kl=draw_(0.2, 0.5),
        values=draw_(0.6, 0.2),
        sampling_logprobs=old + draw_(0.3, 0.0),
        scored=mask.clone(),
    )


def with_turn_rewards(e: Experience, seed: int) -> Experience:
    """The same with rewards of turns at some of the generated tokens, as parts of the responses' rewards."""
    g = torch.Generator().manual_seed(seed)
    ends = e.mask & (torch.rand(e.mask.shape, generator=g) < 0.3)
    rewards = torch.where(ends, 0.4 * torch.randn(e.mask.shape, generator=g, dtype=torch.float64), 0.0)
    return dataclasses.replace(e, turn_rewards=rewards.to(e.rewards.dtype))


def with_failures(e: Experience, failed: list[bool]) -> Experience:
    """The same where these samples have no reward: what was one is poison."""
    rows = torch.tensor(failed)
    lost = torch.where(rows, torch.nan, e.rewards)
    return dataclasses.replace(
        e, failed=rows, rewards=lost, mask=e.mask & ~rows[:, None], scored=e.scored & ~rows[:, None]
    )


LISTED = {"old": "old_logprobs", "ref": "ref_logprobs", "rollout": "rollout_logprobs", "sampling": "sampling_logprobs"}
"""The reference's names of fields that have another one there"""
OF_EXPERIENCES = (
    "groups",
    "rewards",
    "reward_parts",
    "turn_rewards",
    "truncated",
    "mask",
    "old",
    "ref",
    "ref_kl",
    "values",
)
OF_SAMPLES = (
    *("mask", "loss_mask", "positive", "advantages", "old"),
    *("rollout", "sampling", "ref", "old_values", "returns"),
)


def list_fields(source, names) -> dict:
    tensors = {name: getattr(source, LISTED.get(name, name)) for name in names}
    return {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}


def as_lists(e: Experience) -> SimpleNamespace:
    return SimpleNamespace(lengths=e.sequences.response_lengths.tolist(), **list_fields(e, OF_EXPERIENCES))


def samples_as_lists(s: TrainingSamples) -> SimpleNamespace:
    return SimpleNamespace(**list_fields(s, OF_SAMPLES))


def response_positions(s: TrainingSamples, rows: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: positions inside the responses of these rows."""
    return torch.arange(s.mask.shape[1]) < s.sequences.response_lengths[rows][:, None]


def build_targets(s: TrainingSamples, rows: torch.Tensor, **replaced) -> TokenTargets:
    """One micro-batch of these rows, every response position, generated or not."""
    at = response_positions(s, rows)
    index = at.nonzero()[:, 0]
    padded = {field.name: getattr(s, field.name, None) for field in dataclasses.fields(TokenTargets)}
    values = {name: x[rows][at] for name, x in padded.items() if x is not None and x.ndim == 2}
    values = dict.fromkeys(padded) | values
    values |= {"rows": index, "num_rows": len(rows), "row_lengths": s.mask[rows].sum(1)}
    values["positive"] = s.positive[rows][index]
    return TokenTargets(**(values | replaced))


def perturbed(e, seed):
    """log-probs, entropy and KL over the vocabulary after some updates, [B, T], poison outside the mask."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(e.mask.shape, generator=g, dtype=torch.float64) * 0.4
    lp = (e.old_logprobs.double() + noise).detach().requires_grad_()
    entropy = torch.where(e.mask, noise.abs() + 0.5, torch.nan).requires_grad_()
    full_kl = torch.where(e.mask, noise.square() + 0.1, torch.nan).requires_grad_()
    return lp, entropy, full_kl


def whole(e, config):
    samples, _ = compute_targets(e, config, 0.0, response_length=LIMIT)
    rows = torch.arange(len(e.mask))
    return samples, rows, build_targets(samples, rows)


def at_responses(samples, rows, x):
    """The response positions of these rows of x [B, T], flat."""
    return x[rows][response_positions(samples, rows)]


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(found: torch.Tensor, expected: object, tol: float = 1e-9) -> None:
    """Found are the expected numbers, which may be lists, up to `tol`."""
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)


def one_row(advantages, ratios, positive=False, **optional):
    """One response whose log-probs are log(0.5 * ratio) and whose old ones are log 0.5."""
    n = len(advantages)
    old, unused = torch.full((n,), math.log(0.5), dtype=torch.float64), ("ref_logprobs", "old_values", "returns")
    targets = TokenTargets(
        rows=torch.zeros(n, dtype=torch.int64),
        num_rows=1,
        row_lengths=torch.tensor([n]),
        mask=torch.ones(n, dtype=torch.bool),
        loss_mask=torch.ones(n, dtype=torch.bool),
        positive=torch.full((n,), positive),
        advantages=f64(advantages),
        old_logprobs=old,
        **(dict.fromkeys(("rollout_logprobs", "sampling_logprobs"), old) | dict.fromkeys(unused) | optional),
    )
    counts = LossCounts(n, 1, n if positive else 0, n, 1, sum(a < 0 for a in advantages))
    return old + f64(ratios).log(), targets, counts


def loss_of(logprobs, targets, counts, config, entropy=None):
    return policy_loss(logprobs, entropy, targets, config, counts, LIMIT)


def with_gaps(gaps, ages, lengths):
    """An experience whose log-prob gaps (old - rollout) are these, one list per response."""
    n = len(gaps)
    e = make_experience(list(range(n)), lengths, [0.0] * n, [False] * n, 0, holes=False)
    padded = torch.nn.utils.rnn.pad_sequence([f64(row) for row in gaps], batch_first=True)
    old = torch.full_like(padded, -2.0)
    return dataclasses.replace(e, old_logprobs=old, rollout_logprobs=old - padded, ages=torch.tensor(ages))


def find_problems(algo: AlgoConfig, responses_per_prompt: int = 1, optimizer_steps: int = 1) -> list[str]:
    """What is wrong with the values of the group `algo`."""
    return [
        *check_keys(Place(config := Config(algo=algo), config, "")),
        *check_algo(algo, responses_per_prompt, optimizer_steps),
    ]


def start_kl(config: KLConfig) -> KlController:
    return KlController(config.coef, config)


def compute_critic_metrics(values, returns, outcomes, mask, advantages=None, groups=None, gamma=1.0):
    """`CriticSummary` of a batch. advantages: None: returns - values; groups: None: one response each."""
    tensors = (values, returns, outcomes, returns - values if advantages is None else advantages)
    summary = CriticSummary(count_generated(mask), torch.arange(len(mask)) if groups is None else groups, gamma)
    for block in split_blocks(mask):
        summary.add(block, *(block.flatten(tensor).double() for tensor in tensors))
    return summary.compute_metrics()


# The presets

CONF = Path(__file__).parents[3] / "conf" / "algo"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))


@functools.cache
def _load(*overrides: str) -> Config:
    return load_config(list(overrides))


def load_preset(name: str, *overrides: str) -> tuple[AlgoConfig, TrainConfig]:
    config = copy.deepcopy(_load(f"algo={name}", *overrides))
    return config.algo, config.train
