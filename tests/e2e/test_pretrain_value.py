"""Value pretraining from saved rollouts: the critic's real workers, and the command; no server is needed."""

import contextlib
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_command import find_marked, find_scratch

from megarl.cluster.opened import open_ray
from megarl.cluster.workers import WorkerGroup
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import DeviceSlot
from megarl.mcore.worker_spec import Role
from megarl.models.checkpoint import load_tokenizer
from megarl.report.metrics import load_metrics
from megarl.report.report import build_report
from megarl.rollout.rollout_file import RolloutWriter, load_rollouts
from megarl.rollout.tensors import build_sequences
from megarl.run.inputs import build_critic_prompt, load_models, load_saved_rollouts, load_specs
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score
from megarl.value_pretraining.job import pretrain_offline

pytestmark = pytest.mark.slow

NUM_ROLLOUTS = 8
VOCAB = 11
"""Of model=tiny: <pad>, <bos>, <eos>, then `abcdef.=`."""


def build_rollout(seed: int) -> Rollout:
    """Random responses whose reward is whether the prompt's letter is a, b or c."""
    chosen = random.Random(seed)
    samples = []
    for group in range(64):
        letter = chosen.randrange(3, 9)
        prompt = Prompt(f"{seed}/{group}", "?", (letter, 9, 10), "?")
        tokens = tuple(chosen.randrange(2, VOCAB) for _ in range(chosen.randrange(1, 12)))
        n = len(tokens)
        response = Response(tokens, "?", (-2.0,) * n, (True,) * n, (0,) * n, FinishReason.stop)
        samples.append(Sample(prompt, response, Score(float(letter < 6), letter < 6), group))
    return Rollout(tuple(samples), 0)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "rollouts.jsonl"
    with contextlib.closing(RolloutWriter(path)) as writer:
        for seed in range(NUM_ROLLOUTS):
            writer.write(build_rollout(seed), 0)
    return path


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


def test_a_critic_learns_offline_and_its_checkpoint_gives_the_same_values_here_and_in_transformers(rollouts, tmp_path):
    overrides = ["model=tiny", "algo=vapo", f"algo.value_pretrain.rollouts={rollouts}", "logger.terminal=false"]
    config = load_config([*overrides, f"algo.value_pretrain.steps={NUM_ROLLOUTS}"])
    sequences = build_sequences(load_rollouts(rollouts)[0])
    with (
        open_critic(config, tmp_path / "logs") as critic,
        contextlib.closing(build_report(config.logger, tmp_path, 1)) as report,
    ):
        summary = pretrain_offline(config, critic, report, load_saved_rollouts(config, load_models(config)))
        values = critic.values(sequences).result()
        critic.export_weights(tmp_path / "critic").result()
    curve = [line["pretrain/explained_variance"] for line in load_metrics(tmp_path / "value_pretrain.jsonl")]
    assert summary.num_rollouts == len(curve) == NUM_ROLLOUTS
    assert summary.explained_variance == curve[-1]
    # A new value head says 0 everywhere: nothing explained. Each value is of responses not yet learned from.
    assert abs(curve[0]) < 1e-6
    assert min(curve[-2:]) > 0.5

    again = load_config([*overrides, f"critic.init={tmp_path}/critic"])
    with open_critic(again, tmp_path / "logs") as critic:
        assert torch.equal(critic.values(sequences).result(), values)

    # V of the state in which token t is chosen is the classifier's score of everything before t.
    rows = sequences.tokens.split(sequences.lengths.tolist())
    places = [(row, t) for row in range(4) for t in range(0, int(sequences.response_lengths[row]), 3)]
    prefixes = [rows[row][: int(sequences.prompt_lengths[row]) + t] for row, t in places]
    expected = torch.tensor([values[place].item() for place in places])
    assert expected.std() > 0.1
    found = torch.tensor(compute_scores(tmp_path / "critic", prefixes))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def hide_letters(rollout: Rollout) -> Rollout:
    """The same rewards, after prompts that are all alike: only the answer tells them."""
    samples = [
        replace(s, prompt=replace(s.prompt, token_ids=(9, 10), answer="abcdef"[s.prompt.token_ids[0] - 3]))
        for s in rollout.samples
    ]
    return replace(rollout, samples=tuple(samples))


def test_a_critic_that_reads_the_answer_explains_rewards_that_the_prompts_do_not_tell(tmp_path):
    path, explained = tmp_path / "rollouts.jsonl", {}
    with contextlib.closing(RolloutWriter(path)) as writer:
        for seed in range(NUM_ROLLOUTS):
            writer.write(hide_letters(build_rollout(seed)), 0)
    overrides = ["model=tiny", "algo=vapo", f"algo.value_pretrain.rollouts={path}", "logger.terminal=false"]
    for text in (["data.critic_prompt='{answer}='"], []):
        config = load_config([*overrides, f"algo.value_pretrain.steps={NUM_ROLLOUTS}", *text])
        models = load_models(config)
        critic_prompt = build_critic_prompt(config, models, load_tokenizer(models.checkpoint))
        saved = load_saved_rollouts(config, models, critic_prompt)
        with (
            open_critic(config, tmp_path / "logs") as critic,
            contextlib.closing(build_report(config.logger, tmp_path / str(len(text)), 1)) as report,
        ):
            summary = pretrain_offline(config, critic, report, saved, critic_prompt=critic_prompt)
            critic.export_weights(tmp_path / f"critic-{len(text)}").result()
        explained[bool(text)] = summary.explained_variance
    assert explained[True] > 0.5
    assert explained[False] < 0.1
    load_models(load_config([*overrides, f"critic.init={tmp_path}/critic-0"]))
    with pytest.raises(ConfigError, match=r"critic\.init: .*data\.critic_prompt '\{answer\}=', now None"):
        load_models(load_config([*overrides, f"critic.init={tmp_path}/critic-1"]))


def start(run_dir: Path, rollouts: Path, *overrides: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "megarl.pretrain_value", "model=tiny", f"hydra.run.dir={run_dir}"),
            *(f"algo.value_pretrain.rollouts={rollouts}", "algo.value_pretrain.steps=9"),
            *("algo.value_pretrain.stop_at_explained_variance=0.2", *overrides),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_command_pretrains_offline_and_ends_with_the_done_line_leaving_nothing(rollouts, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    run = start(run_dir, rollouts)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    curve = load_metrics(run_dir / "value_pretrain.jsonl")
    explained = [line["pretrain/explained_variance"] for line in curve]
    assert max(explained[:-1]) < 0.2 <= explained[-1]
    log = (run_dir / "train.log").read_text()
    assert "critic: starts from the policy's weights, with a new value head" in log
    assert f"out of the {NUM_ROLLOUTS} (512 responses) in {rollouts}" in log
    assert "explained variance has reached" in log
    last = output.strip().splitlines()[-1]
    assert last == f"done: iterations={len(curve)} explained_variance={explained[-1]:.4f} run_dir={run_dir}"
    assert {f.name for f in (run_dir / "logs").iterdir()} == {"critic-0.log", "driver.log"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in (run_dir / "critic").iterdir()}
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    for name in ("pretrain/explained_variance", "pretrain/loss"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in curve])
    assert find_marked(tmp_path) == []
    assert find_scratch(run, tmp_path) == []
    assert "value pretraining 1/9  pretrain/explained_variance" in output
