"""A reward model by the command, from pairs to the critic that PPO starts from."""

import json
import random
from pathlib import Path

import pytest
import torch
from test_saved_rollouts import compute_scores
from whole_runs import train

from megarl.config.load import load_config
from megarl.mcore.spec import Role
from megarl.report.record import load_metrics
from megarl.run.inputs import describe_start, load_models, load_specs

pytestmark = pytest.mark.slow


def write_pairs(path: Path, num_pairs: int) -> Path:
    """Responses of letters, of which the better one ends with the letter that the other one begins with."""
    chosen, lines = random.Random(str(path.name)), []
    for _ in range(num_pairs):
        own, other = chosen.sample("abcdef", 2)
        body = ["".join(chosen.choices("abcdef", k=chosen.randrange(8))) for _ in range(2)]
        record = {"prompt": f"{own}{chosen.choice('abcdef')}{chosen.choice('abcdef')}.="}
        lines.append(json.dumps(record | {"chosen": f"{body[0]}.=", "rejected": f"{body[1]}.{other}"}))
    path.write_text("\n".join(lines))
    return path


def test_accuracy_on_heldout_pairs_rises_and_the_model_is_scored_by_transformers_and_starts_a_critic(short_path: Path):
    files = [write_pairs(short_path / name, number) for name, number in (("train.jsonl", 600), ("heldout.jsonl", 90))]
    sizes = ("train.samples_per_iteration=128", "train.num_minibatches=4", "train.num_iterations=8")
    output = train(
        *("model=tiny", "experiment=reward_model", f"data.path={files[0]}", f"data.heldout_path={files[1]}", *sizes),
        *("data.prompt_length=8", "rollout.response_length=16", f"hydra.run.dir={short_path}/rm"),
        *("critic.optimizer.lr=2e-3", "critic.optimizer.min_lr=2e-4", "train.eval_every=4"),
    )
    lines = load_metrics(short_path / "rm" / "metrics.jsonl")
    accuracies = [line["heldout/pair_accuracy"] for line in lines if "heldout/pair_accuracy" in line]
    assert accuracies[0] == 0.5
    assert accuracies[-1] > 0.9
    end = f"done: iterations=8 heldout/pair_accuracy={accuracies[-1]:.4f} run_dir={short_path}/rm"
    assert output.strip().splitlines()[-1] == end

    # Its score is that of the last token, the one that ends a text.
    letters, records = " ".join(["<pad>", "<bos>", "<eos>", *"abcdef.="]).split(), files[1].read_text().splitlines()
    texts = [(it["prompt"] + it[name]) for it in map(json.loads, records) for name in ("chosen", "rejected")]
    rows = [torch.tensor([*map(letters.index, text), letters.index("<eos>")]) for text in texts]
    scores = torch.tensor(compute_scores(short_path / "rm" / "critic", rows)).view(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).double().mean().item() == pytest.approx(accuracies[-1], abs=0.02)

    # That a run computes with it what transformers does: test_saved_rollouts.py
    config = load_config(["model=tiny", "algo=vc_ppo", f"critic.init={short_path}/rm/critic"])
    critic = load_specs(config, load_models(config))[Role.critic]
    assert describe_start(config, critic, None).startswith(
        f"critic: starts from {short_path}/rm/critic, its value head included"
    )
