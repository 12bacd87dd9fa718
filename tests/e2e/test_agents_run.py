"""By the command: an agent that changes its history is trained on the tokens that were served."""

import json
from collections import Counter
from pathlib import Path

import psutil
import pytest
from whole_runs import train

from megarl.report.record import load_metrics

pytestmark = pytest.mark.slow

AGENT = """
import openai

def run(task):
    client, question = openai.OpenAI(), {"role": "user", "content": task["question"]}
    one = client.chat.completions.create(model="policy", messages=[question], max_tokens=6)
    said = [question, {"role": "assistant", "content": one.choices[0].message.content}]
    again = {"role": "user", "content": task["question"]}
    client.chat.completions.create(model="policy", messages=[*said, again], max_tokens=6)
    return client.chat.completions.create(model="policy", messages=[again], seed=2).choices[0].message.content
"""


def find_hosts() -> list[int]:
    return [
        each.pid for each in psutil.process_iter(["cmdline"]) if "megarl.task.agents" in (each.info["cmdline"] or ())
    ]


def test_an_agents_segments_are_trained_as_they_were_served_and_its_processes_end(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    run_dir, before = tmp_path / "run", find_hosts()
    train(
        *("algo=vapo", "model=tiny", "algo.value_pretrain.steps=1"),
        *("environment=agent", f"environment.path={tmp_path}/agent.py:run", "rollout.response_length=32"),
        *("train.samples_per_iteration=32", "train.responses_per_prompt=4", "train.num_minibatches=2"),
        *("train.num_iterations=2", "train.eval_every=2", "train.num_eval_prompts=8"),
        *("algo.kl.in_loss=true", "algo.kl.loss_coef=0.01", "logger.save_rollouts=true", f"hydra.run.dir={run_dir}"),
    )
    lines = [line for line in load_metrics(run_dir / "metrics.jsonl") if line["iteration"] >= 1]
    assert [line["iteration"] for line in lines] == [1, 2]
    records = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(record["iteration"] for record in records) == {0: 32, 1: 32, 2: 32}
    for line in lines:
        assert line["environment/requests"] == 3
        assert line["environment/segments"] == 2
        # The trainer scores each segment as the server has sampled it.
        assert line["mismatch/logprob_gap_max"] < 1e-3
    for record in records:
        turns = record["response"]["turns"]
        assert [turn.get("segment", 0) for turn in turns] == [0, 0, 1]
        assert record["response"]["segment_prompts"] == [record["prompt"]["token_ids"]]
    assert set(find_hosts()) <= set(before)
