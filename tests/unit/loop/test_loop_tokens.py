"""Whole runs over the fakes that write tokens.jsonl."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.run import World

RUN = ("algo=vapo", "algo.value_pretrain.enabled=false", "train.num_iterations=2", "train.eval_every=1")


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "tokens.jsonl").read_text().splitlines()]


def test_a_run_writes_what_it_learned_from_and_how_its_update_changed_it(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, [*RUN, "logger.token_passes=true"]) as trainer:
        given = []
        build_targets = trainer.algorithm.build_targets

        def keep(experience: Any, *args: Any, **keys: Any) -> Any:
            samples, metrics = build_targets(experience, *args, **keys)
            given.append((experience, samples))
            return samples, metrics

        trainer.algorithm.build_targets = keep
        trainer.run()
        last = trainer.components.policy.logprobs(given[-1][0].sequences, 1.0).result()
    lines = load(tmp_path)
    assert [(line["iteration"], line["kind"]) for line in lines] == [
        *([(0, "heldout")] * 8 + [(1, "train")] * 8 + [(1, "heldout")] * 8 + [(2, "train")] * 8 + [(2, "heldout")] * 8)
    ]
    for line in lines:
        if line["kind"] == "heldout":
            continue
        experience, samples = given[line["iteration"] - 1]
        row, num = line["sample"], line["num_tokens"]
        expected = {
            "values": experience.values,
            "advantages": samples.advantages,
            "returns": samples.returns,
            "log_ratios": experience.old_logprobs - experience.rollout_logprobs,
        }
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.tensor(line[name]).float(), tensor[row, :num], rtol=1e-3, atol=1e-6)
        assert all(0 < entropy < 4 for entropy in line["entropies"])
        assert any(line["log_changes"])
        if line["iteration"] == 2:
            changes = (last - experience.old_logprobs)[row, :num]
            torch.testing.assert_close(torch.tensor(line["log_changes"]).float(), changes, rtol=1e-3, atol=1e-4)


def test_tokens_are_written_from_saved_rollouts_and_not_at_all_where_none_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["algo=ppo", "algo.mismatch.correction=tis", "train.responses_per_prompt=4", "train.num_iterations=1"]
    saving = [*given, "logger.save_rollouts=true", "logger.num_token_records=0"]
    World().run_job(monkeypatch, tmp_path / "one", saving)
    assert not (tmp_path / "one" / "tokens.jsonl").exists()
    World().run_job(monkeypatch, tmp_path / "two", [*given, f"rollout.file={tmp_path}/one/rollouts.jsonl"])
    lines = load(tmp_path / "two")
    assert lines
    assert all(line["age"] == 1 and any(line["advantages"]) for line in lines)
