"""Saved rollouts with the real training processes and no server: of the policy, and in value pretraining."""

import contextlib
import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from generation import load_rollouts
from whole_runs import find_marked, find_scratch, start, wait_end

from megarl.cluster.actors import WorkerGroup
from megarl.cluster.opened import open_ray
from megarl.config.load import load_config
from megarl.config.placement import DeviceSlot
from megarl.mcore.spec import Role
from megarl.report.record import load_metrics
from megarl.rollout.collector import build_sequences
from megarl.rollout.rollout_file import RolloutWriter
from megarl.run.inputs import load_models, load_specs
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

EOS, LETTERS, DOT, EQUALS = 2, range(3, 9), 9, 10
"""Of model=tiny: <pad>, <bos>, <eos>, then `abcdef.=`"""
NUM_ROLLOUTS = 8


def build_sample(name: str, group: int, letter: int, tokens: list[int], right: bool) -> Sample:
    """A response to a prompt that asks for a letter."""
    num, text = len(tokens), "abcdef"[letter - 3]
    response = Response(tokens, "?", [-2.0] * num, [True] * num, [0] * num, FinishReason.stop)
    return Sample(Prompt(name, f"{text}.=", (letter, DOT, EQUALS), text), response, Score(float(right), right), group)


def write(path: Path, rollouts: Iterable[list[Sample]]) -> Path:
    with contextlib.closing(RolloutWriter(path)) as writer:
        for samples in rollouts:
            writer.write(Rollout(tuple(samples), 0), 1)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To each prompt four right responses, the prompt's letter three times, and four of random letters."""
    chosen, samples = random.Random(1), []
    for group in range(24):
        letter = LETTERS[group % len(LETTERS)]
        for right in [True] * 4 + [False] * 4:
            tokens = [letter] * 3 if right else chosen.choices(LETTERS, k=3)
            samples.append(build_sample(f"p{group}", group, letter, [*tokens, EOS], right))
    return write(tmp_path_factory.mktemp("saved") / "rollouts.jsonl", [samples])


def test_a_run_without_servers_learns_and_says_that_nothing_was_evaluated(saved, short_path):
    run_dir = short_path / "run"
    run = start(
        *("model=tiny", "algo=topr", f"rollout.file={saved}", f"hydra.run.dir={run_dir}", "reward.wrong=0"),
        *("train.num_iterations=4", "train.prompts_per_iteration=12", "train.responses_per_prompt=8"),
        *("algo.topr.ratio_level=geometric", "train.num_minibatches=4"),
    )
    code, output = wait_end(run)
    assert code == 0, output
    assert output.strip().splitlines()[-1] == f"done: iterations=4 reward/heldout=none run_dir={run_dir}"
    assert (
        f"rollout.file: 192 responses in 24 groups, of 1 rollouts in {saved}; a pass over them takes 2"
        in (run_dir / "train.log").read_text()
    )
    lines = load_metrics(run_dir / "metrics.jsonl")
    assert lines[-1]["saved/epoch"] == 2
    assert lines[-1]["replay/logprob_above"] > lines[1]["replay/logprob_above"] + 0.5
    logs = {re.sub(r"-\d+\.log", "", file.name) for file in (run_dir / "logs").iterdir()}
    assert logs == {"driver.log", "policy"}
    assert (run_dir / "policy" / "model.safetensors").is_file()
    assert find_marked(run_dir) == []
    assert find_scratch(run, short_path) == []


def build_rollout(seed: int) -> list[Sample]:
    """Random responses whose reward is whether the prompt's letter is a, b or c."""
    chosen, samples = random.Random(seed), []
    for group in range(64):
        letter = chosen.choice(LETTERS)
        tokens = [chosen.randrange(EOS, 11) for _ in range(chosen.randrange(1, 12))]
        samples.append(build_sample(f"{seed}/{group}", group, letter, tokens, letter < 6))
    return samples


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("saved") / "rollouts.jsonl", map(build_rollout, range(NUM_ROLLOUTS)))


def read_curve(run_dir: Path) -> list[float]:
    """Explained variance of each iteration."""
    lines = load_metrics(run_dir / "metrics.jsonl")
    return [line["critic/explained_variance"] for line in lines if "critic/loss" in line]


@contextlib.contextmanager
def open_critic(config, log_dir: Path):
    spec = load_specs(config, load_models(config))[Role.critic]
    with open_ray(config.cluster, 1) as cluster:
        group = WorkerGroup(spec, log_dir, cluster, (DeviceSlot(),), config.cluster.worker_start_deadline_s)
        group.start().result()
        yield group


def compute_scores(directory: Path, sequences: list[torch.Tensor]) -> list[float]:
    """What transformers' sequence classifier says of each sequence, taken alone."""
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == 1
    with torch.no_grad():
        return [model(tokens[None]).logits.item() for tokens in sequences]


@pytest.mark.slow
def test_a_critic_learns_offline_by_the_command_and_gives_the_same_values_here_and_in_transformers(
    rollouts, short_path
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = short_path / "run"
    overrides = ["model=tiny", f"algo.value_pretrain.rollouts={rollouts}"]
    more = ["algo.value_pretrain.steps=9", "algo.value_pretrain.stop_at_explained_variance=0.5"]
    run = start(*overrides, *more, "train.num_iterations=0", f"hydra.run.dir={run_dir}", TMPDIR=str(short_path))
    code, output = wait_end(run)
    assert code == 0, output
    explained = read_curve(run_dir)
    # A new value head says 0 everywhere: nothing explained. Each value is of responses not yet learned from.
    assert abs(explained[0]) < 1e-6
    assert max(explained[:-1]) < 0.5 <= explained[-1]
    log = (run_dir / "train.log").read_text()
    assert "critic: starts from the policy's weights, with a new value head" in log
    assert f"out of the {NUM_ROLLOUTS} (512 responses) in {rollouts}" in log
    assert "explained variance has reached" in log
    assert "iteration -8/0  ev " in output
    assert output.strip().splitlines()[-1] == f"done: iterations=0 reward/heldout=none run_dir={run_dir}"
    assert {f.name for f in (run_dir / "logs").iterdir()} == {"critic-0.log", "driver.log"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in (run_dir / "critic").iterdir()}
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("critic/explained_variance")] == pytest.approx(explained)
    assert find_marked(short_path) == []
    assert find_scratch(run, short_path) == []

    again = load_config([*overrides, "algo=vapo", "logger.terminal=false", f"critic.init={run_dir}/critic"])
    sequences = build_sequences(load_rollouts(rollouts)[0])
    with open_critic(again, short_path / "logs") as critic:
        values = critic.values(sequences).result()

    # V of the state in which token t is chosen is the classifier's score of everything before t.
    rows = sequences.tokens.split(sequences.lengths.tolist())
    places = [(row, t) for row in range(4) for t in range(0, int(sequences.response_lengths[row]), 3)]
    prefixes = [rows[row][: int(sequences.prompt_lengths[row]) + t] for row, t in places]
    expected = torch.tensor([values[place].item() for place in places])
    assert expected.std() > 0.1
    found = torch.tensor(compute_scores(run_dir / "critic", prefixes))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
