"""tools/bench/claims.py: the closed forms and rewards of its tasks."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from tool_loading import TOOLS

sys.path.insert(0, str(TOOLS / "bench"))

from claims_bench import runs, specs, tasks

from megarl.algo.advantages.gae import compute_gae
from megarl.algo.advantages.group import compute_group_relative
from megarl.config.schema.algo_choices import AdvantageStd, StdOf
from megarl.types import FinishReason, Prompt, Response, Sample, Score

CLAIMS = specs.load_claims()


def make_response(text, tokens=None):
    ids = tokens or [3 + tasks.LETTERS.index(letter) for letter in text]
    return Response(ids, text, (-1.0,) * len(ids), (True,) * len(ids), (0,) * len(ids), FinishReason.length)


def make_prompt(text="aa"):
    return Prompt("p", text, (3, 3), "c")


def all_bits(num_bits):
    """Every response of `num_bits` fair bits, equally likely: float64 [2^n, n]."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=num_bits)), dtype=torch.float64)


def snr(advantages, bits):
    good, bad = advantages[bits == 1], advantages[bits == 0]
    return float((good.mean() - bad.mean()) / 2 / torch.sqrt((good.var(correction=0) + bad.var(correction=0)) / 2))


def test_the_snr_of_gae_has_its_closed_form():
    bits, n, lam = all_bits(8), 8, 0.95
    before = torch.cat([torch.zeros(256, 1), bits.cumsum(1)[:, :-1]], 1)
    values = (before + (n - torch.arange(n)) / 2) / n
    rewards = torch.zeros(256, n, dtype=torch.float64)
    rewards[:, -1] = bits.mean(1)
    advantages = compute_gae(rewards, values, torch.ones(256, n, dtype=torch.bool), 1.0, lam)
    for position in range(n - 1):
        assert snr(advantages[:, position], bits[:, position]) == pytest.approx(tasks.compute_gae_snr(n, position, lam))
    assert tasks.compute_gae_snr(n, n - 1, lam) == math.inf
    assert tasks.compute_gae_snr(10_000, 0, lam) == pytest.approx(math.sqrt(1 / lam**2 - 1))


def test_the_snr_of_a_group_has_its_closed_form():
    # Both responses of a group take all values: 2^(4 + 4) groups of two responses of four bits.
    bits = all_bits(8).view(256, 2, 4)
    advantages = compute_group_relative(
        bits.mean(2).flatten(), torch.arange(256).repeat_interleave(2), AdvantageStd.none, StdOf.raw
    )
    found = snr(advantages, bits.reshape(512, 4)[:, 0])
    assert found == pytest.approx(tasks.compute_group_snr(4, 2))
    assert tasks.compute_group_snr(256, 8) == pytest.approx(1 / math.sqrt(256), rel=0.1)


def test_the_measured_snr_is_the_closed_form_of_random_tokens():
    generator = np.random.default_rng(1)
    task, num_bits = tasks.TASKS["bits_16"], 16
    texts = ["".join(generator.choice(list(tasks.LETTERS), num_bits)) for _ in range(4096)]
    samples = [Sample(make_prompt(), make_response(text), Score(0, False), i // 8) for i, text in enumerate(texts)]
    rewards = torch.tensor([task.score(s.prompt, s.response).reward for s in samples])
    advantages = compute_group_relative(rewards, torch.arange(4096) // 8, AdvantageStd.none, StdOf.raw)
    found = runs.measure_snr(samples, advantages[:, None].expand(-1, num_bits), task)
    assert found == pytest.approx(tasks.compute_group_snr(num_bits, 8), rel=0.05)


def test_the_tasks_pay_what_they_say():
    assert tasks.list_bits(make_prompt(), make_response("adeh")) == [True, True, False, False]
    assert tasks.score_bits_16(make_prompt(), make_response("aade")).reward == 3 / 16
    assert tasks.score_first(make_prompt(), make_response("cab")).reward == 1
    assert tasks.score_first(make_prompt(), make_response("ac")).reward == 0
    assert tasks.score_rare(make_prompt(), make_response("a")).reward == 1
    assert tasks.score_groups(make_prompt("ga"), make_response("ca")).details == {"right": 1.0, "counted": 1.0}
    assert tasks.score_groups(make_prompt("aa"), make_response("ca")).details["counted"] == 0.0


@pytest.mark.parametrize(
    ("score", "prompt", "first", "chance"),
    [
        (tasks.score_key, "aa", "c", tasks.RIGHT_PAYS),
        (tasks.score_key, "aa", "a", tasks.WRONG_PAYS),
        (tasks.score_groups, "aa", "a", 1 - tasks.SLIP),
    ],
)
def test_a_payment_by_chance_has_its_chance_and_repeats(score, prompt, first, chance):
    texts = [first + "".join(rest) for rest in itertools.product(tasks.LETTERS, repeat=4)]
    paid = [score(make_prompt(prompt), make_response(text)).reward for text in texts]
    assert sum(paid) / len(paid) == pytest.approx(chance, abs=0.03)
    assert score(make_prompt(prompt), make_response(texts[0])).reward == paid[0]


def test_near_solved_groups_have_their_share_of_the_advantages():
    from types import SimpleNamespace

    rewards = torch.tensor([1.0] * 7 + [0.0] + [1.0] * 4 + [0.0] * 4 + [1.0] * 8)
    groups = torch.arange(24) // 8
    experience = SimpleNamespace(rewards=rewards, groups=groups, mask=torch.ones(24, 2, dtype=torch.bool))
    advantages = torch.tensor([1.0] * 8 + [3.0] * 8 + [0.0] * 8)[:, None].expand(-1, 2)
    assert runs.measure_noise_share(experience, advantages) == pytest.approx(0.25)
