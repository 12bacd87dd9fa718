"""Blocks of rows: a result depends neither on how a batch is split nor on how far it is padded."""

import dataclasses

import pytest
import torch
from algo_cases import configure, make_experience, start_kl

from megarl.algo import statistics
from megarl.algo.algorithm import compute_targets
from megarl.config.load import list_options, load_config
from megarl.config.schema.algo import RatioLevel
from megarl.types import Experience

pytestmark = pytest.mark.filterwarnings("ignore:TOPR")

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
