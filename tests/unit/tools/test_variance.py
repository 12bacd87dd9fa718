"""tools/variance.py: its numbers against torch's autograd on transformers' model, and what each of them claims."""

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tool_loading import load_tool

from megarl.config.load import load_config
from megarl.models.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.rollout.rollout_file import Limits, RolloutWriter, find_groups
from megarl.task.data import PromptSampler
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

TOOL = load_tool("variance.py")
NUM_GROUPS, SIZE, PROMPTS, LENGTH_ALPHA, LAMBDA_MIN = 12, 4, 2, 0.7, 0.3
WORDS = ("model=checkpoint", f"train.prompts_per_iteration={PROMPTS}", "policy.dtype=float32", "critic.dtype=float32")
WORDS += ("algo.lambda_policy=adaptive", f"algo.length_alpha={LENGTH_ALPHA}", f"algo.lambda_min={LAMBDA_MIN}")
WORDS += ("data.prompt_length=8", "rollout.response_length=8", "reward.wrong=0")
LETTERS, EOS = range(3, 9), 2
"""Of model=tiny: <pad>, <bos>, <eos>, then `abcdef.=`"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.cli", "variance", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a critic with a random head, and responses that the policy sampled; letters are paid, by chance."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    place, chosen = tmp_path_factory.mktemp("variance"), random.Random(1)
    source = resolve_checkpoint(load_config(["model=tiny"]).model, default_cache_dir())
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(critic.score.weight, std=0.03)
    for name, each in (("policy", model), ("critic", critic)):
        each.save_pretrained(place / name)
        load_tokenizer(source).save_pretrained(place / name)
    samples = []
    for group in range(NUM_GROUPS):
        letter = chosen.choice(LETTERS)
        prompt = Prompt(f"p{group}", f"{'abcdef'[letter - 3]}=", (letter, 10), "")
        for _ in range(SIZE):
            tokens: list[int] = []
            logprobs: list[float] = []
            while len(tokens) < 6 and (not tokens or tokens[-1] != EOS):
                with torch.no_grad():
                    odds = model(torch.tensor([[*prompt.token_ids, *tokens]])).logits[0, -1].log_softmax(-1)
                tokens.append(chosen.choices(range(len(odds)), odds.exp().tolist())[0])
                logprobs.append(float(odds[tokens[-1]]))
            reward = chosen.choice([0.25, 0.5, 1.0]) * sum(token in LETTERS for token in tokens) / len(tokens)
            made = Response(tokens, "", logprobs, [True] * len(tokens), [0] * len(tokens), FinishReason.stop)
            samples.append(Sample(prompt, made, Score(reward, reward == 1), group))
    writer = RolloutWriter(place / "rollouts.jsonl")
    writer.write(Rollout(tuple(samples), 0), 1)
    writer.close()
    return place


def find_batches(place: Path) -> list[list[list[dict]]]:
    """The groups of each batch, as the loop's own source draws them."""
    lines = [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]
    groups = find_groups(place / "rollouts.jsonl", Limits(11, 128, 8)).groups
    sampler, numbers = PromptSampler(groups, 1), {each.id: number for number, each in enumerate(groups)}
    return [
        [lines[SIZE * numbers[each.id] :][:SIZE] for each in sampler.next_batch(PROMPTS)]
        for _ in range(NUM_GROUPS // PROMPTS)
    ]


def leave_one_out(group: list[dict], size: int) -> list[float]:
    rewards = [each["score"]["reward"] for each in group]
    parts = [rewards[start : start + size] for start in range(0, SIZE, size)]
    return [r - (sum(part) - r) / (size - 1) for part in parts for r in part]


def follow(reward: float, values: list[float], lambda_: float) -> list[float]:
    """Generalised advantages of a response that is paid at its end, gamma 1."""
    found: list[float] = []
    for value, after in reversed(list(zip(values, [*values[1:], None], strict=True))):
        delta = reward - value if after is None else after - value
        found.insert(0, delta + (lambda_ * found[0] if found else 0.0))
    return found


def list_advantages(batch: list[list[dict]], values: list[list[float]], rho: float) -> dict[str, list[list[float]]]:
    """Of each token of each response, by baseline; lists alone, from the papers' formulas."""
    flat = [each for group in batch for each in group]
    rewards, lengths = [each["score"]["reward"] for each in flat], [len(v) for v in values]
    others = {size: [a for group in batch for a in leave_one_out(group, size)] for size in (2, 4)}
    mean = sum(rewards) / len(rewards)
    whole = {
        "none": rewards,
        "mean of the batch": [r - mean for r in rewards],
        "mean of the group (GRPO)": [0.75 * a for a in others[4]],
        "leave-one-out of 2 (RLOO)": others[2],
        "leave-one-out of 4 (RLOO)": others[4],
    }
    found = {name: [[a] * n for a, n in zip(each, lengths, strict=True)] for name, each in whole.items()}
    for name in (0.5, 0.95, 1, "adaptive"):
        lambdas = [min(1, max(LAMBDA_MIN, 1 - 1 / (LENGTH_ALPHA * n))) if name == "adaptive" else name for n in lengths]
        found[f"critic, lambda {name}"] = [follow(r, v, x) for r, v, x in zip(rewards, values, lambdas, strict=True)]
    by_value = zip(rewards, others[4], values, strict=True)
    found["tether"] = [[(1 - rho) * a + rho * (r - v) for v in row] for r, a, row in by_value]
    return found


def test_the_numbers_are_those_of_autograd_on_transformers_model(place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    words = (f"model.path={place}/policy", f"critic.init={place}/critic", f"rollout.file={place}/rollouts.jsonl")
    done = run(*WORDS, *words, "--json", place / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((place / "found.json").read_text())
    rows = {row["baseline"]: row for row in found["baselines"]}
    lines = done.stdout.splitlines()
    assert [line[: len(name)] for line, name in zip(lines[-len(rows) :], rows, strict=True)] == list(rows)
    assert lines[-len(rows) - 1].split("  ")[0] == "baseline"
    # Its weight is of a whole iteration; tests/unit/algo holds its formula.
    del rows["control_variate"]
    assert abs(found["kl"]) < 1e-6
    assert "warning" not in done.stdout

    model = AutoModelForCausalLM.from_pretrained(place / "policy", dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # it would have no gradient
    critic = AutoModelForSequenceClassification.from_pretrained(place / "critic", dtype=torch.float32)

    def read_values(each: dict) -> list[float]:
        prompt, response = each["prompt"]["token_ids"], each["response"]["token_ids"]
        with torch.no_grad():
            states = critic.model(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
        return critic.score(states)[len(prompt) - 1 : -1, 0].tolist()

    def find_gradient(batch: list[list[dict]], advantages: list[list[float]]) -> torch.Tensor:
        model.zero_grad()
        for each, own in zip([each for group in batch for each in group], advantages, strict=True):
            prompt, response = each["prompt"]["token_ids"], each["response"]["token_ids"]
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            (chosen @ torch.tensor(own) / sum(map(len, advantages))).backward()
        return torch.cat([param.grad.flatten() for param in model.parameters()]).double()

    batches, rho, gradients = find_batches(place), 0.0, {name: [] for name in rows}
    for number, batch in enumerate([*batches, *batches]):
        values = [read_values(each) for group in batch for each in group]
        advantages = list_advantages(batch, values, rho)
        by_group, by_value = (list_advantages(batch, values, x)["tether"] for x in (0.0, 1.0))
        pairs = [(a, a - b) for x, y in zip(by_group, by_value, strict=True) for a, b in zip(x, y, strict=True)]
        fitted = sum(a * d for a, d in pairs) / sum(d * d for _, d in pairs)
        rho = 0.95 * rho + 0.05 * min(1.0, max(0.0, fitted))
        for name in rows if number >= len(batches) else ():
            gradients[name].append(find_gradient(batch, advantages[name]))
    stacked = {name: torch.stack(each) for name, each in gradients.items()}
    num, reference = len(batches), stacked["leave-one-out of 4 (RLOO)"]

    def dot(x: torch.Tensor, y: torch.Tensor) -> float:
        """Of the means, over pairs of different batches."""
        products = x @ y.T
        return float(products.sum() - products.diagonal().sum()) / (num * (num - 1))

    for name, each in stacked.items():
        row, signal = rows[name], dot(each, each)
        assert row["variance"] == pytest.approx(float(each.var(0).sum()), rel=1e-4), name
        assert row["variance_interval"][0] <= row["variance"] <= row["variance_interval"][1]
        assert row["signal"] == pytest.approx(signal, rel=1e-3, abs=1e-4 * row["variance"]), name
        assert row["scale"] == pytest.approx(dot(each, reference) / dot(reference, reference), rel=1e-3), name
    pairs_alone = rows["leave-one-out of 2 (RLOO)"]["variance"]
    assert rows["mean of the group (GRPO)"]["variance"] < rows["leave-one-out of 4 (RLOO)"]["variance"] < pairs_alone


@pytest.mark.parametrize("variance", [4.0, 2.5, 1.6, 1.2])
def test_the_group_size_of_a_variance_is_found_between_the_measured_ones(variance: float) -> None:
    measured = {size: 1 + 3 / (size - 1) for size in (2, 4, 8, 16)}
    assert TOOL.find_group_size(variance, measured) == pytest.approx(1 + 3 / (variance - 1))


def test_a_variance_beyond_the_measured_ones_has_no_group_size() -> None:
    assert TOOL.find_group_size(4.1, {2: 4.0, 4: 2.0}) == 0
    assert TOOL.find_group_size(1.9, {2: 4.0, 4: 2.0}) == math.inf
    assert TOOL.find_group_size(3.0, {2: 4.0, 4: 2.0}) == 2.5
    # 4 did better than 8, by chance.
    assert TOOL.find_group_size(2.0, {2: 4.0, 4: 2.0, 8: 2.1}) == 4


def test_the_leave_one_out_variance_at_equal_responses_is_linear_in_1_over_k_minus_1() -> None:
    """All outcomes of a bandit of three arms: score of each arm's log-prob, reward, probability."""
    arms = [(-0.5, 0.2, 0.5), (0.3, 1.0, 0.3), (0.8, 0.1, 0.2)]
    center = sum(p * s for s, _, p in arms)

    def find_variance(size: int) -> float:
        first = second = 0.0
        for drawn in itertools.product(arms, repeat=size):
            weight, total = math.prod(p for _, _, p in drawn), sum(r for _, r, _ in drawn)
            gradient = sum((s - center) * (r - (total - r) / (size - 1)) for s, r, _ in drawn) / size
            first, second = first + weight * gradient, second + weight * gradient**2
        return size * (second - first**2)

    found = {size: find_variance(size) for size in (2, 3, 4, 5, 6)}
    assert TOOL.find_group_size(found[3], {2: found[2], 6: found[6]}) == pytest.approx(3)
    assert TOOL.find_group_size(found[4], {2: found[2], 6: found[6]}) == pytest.approx(4)
    assert found[2] > 1.1 * found[6]


def estimate(gradients: np.ndarray) -> dict:
    """Of a baseline's gradients [n, parameters]."""
    found = TOOL.Estimate()
    for number, gradient in enumerate(torch.tensor(gradients), start=1):
        found.add(gradient, number, found)
    return TOOL.summarise([TOOL.Baseline("first", {}, 4)], [found], 0)[0]


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    chance, held = np.random.default_rng(2), np.zeros(2)
    spread, mean = np.array([3.0, 2.0, 1.0, 1.0, 0.5, 0.5]), np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    truth = (spread**2).sum(), (spread**2).sum() / 3
    TOOL.NUM_DRAWS = 300
    for _ in range(200):
        first = estimate(mean + spread * chance.standard_normal((30, 6)))
        for i, name in enumerate(("variance", "ratio")):
            low, high = first[f"{name}_interval"]
            held[i] += low <= truth[i] <= high
    assert (held / 200 > 0.86).all(), held / 200


def test_without_a_critic_there_are_the_baselines_of_the_group(place: Path) -> None:
    done = run(*WORDS[:4], *WORDS[7:], f"model.path={place}/policy", f"rollout.file={place}/rollouts.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert names[-5:] == ["none", "mean of the batch", "mean of the group (GRPO)", *names[-2:]]
    assert names[-2:] == ["leave-one-out of 2 (RLOO)", "leave-one-out of 4 (RLOO)"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "rollout.file: null found"),
        (("rollout.file=/gone.jsonl",), "rollout.file: "),
        (("algo=grpo", "rollout.file={}"), "algo=grpo: has no effect"),
        (("train.prompts_per_iteration=6", "rollout.file={}"), "rollout.file: 12 groups are 2 batches by"),
        (("--jsn", "x", "rollout.file={}"), "--jsn: no such option"),
    ],
)
def test_bad_input_is_named(
    place: Path,
    words: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = (word.format(place / "rollouts.jsonl") for word in words)
    monkeypatch.setattr(sys, "argv", ["megarl variance", "model=tiny", *given])
    with pytest.raises(SystemExit) as ended:
        TOOL.main()
    assert ended.value.code == 2
    assert f"error: {problem}" in capsys.readouterr().err
