"""train.eval_sets: further sets, each with its own sampling, evaluated with the held-out prompts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from data_cases import build_byte_tokenizer
from fakes.run import World
from metric_table import find_metric

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.interfaces import Sampling, Truncation
from megarl.report.record import load_metrics
from megarl.rollout.collector import EvalSet
from megarl.run.inputs import build_eval_sets


def test_each_set_is_sampled_in_its_own_way_where_an_evaluation_is_due(tmp_path: Path) -> None:
    plain, more = {}, {}
    for run_dir, sets, lines in ((tmp_path / "plain", False, plain), (tmp_path / "more", True, more)):
        with World().open_trainer(run_dir, ["algo=grpo", "train.num_iterations=2", "train.eval_every=2"]) as trainer:
            prompts = trainer.fleet.heldout[:3]
            if sets:
                trainer.components.collector._eval_sets = (
                    EvalSet("greedy", prompts, 1, Sampling(0.0, urgent=True)),
                    EvalSet("sampled", prompts, 4, Sampling(0.9, urgent=True)),
                )
            trainer.run()
        lines |= {line["iteration"]: line for line in load_metrics(run_dir / "metrics.jsonl")}
    names = ("reward_mean", "correct", "failed_frac", "length_mean", "truncated_frac")
    found = {name for line in more.values() for name in line if name.startswith("eval/")}
    assert found == {f"eval/{each}/{name}" for each in ("greedy", "sampled") for name in names}
    assert [number for number, line in more.items() if "eval/greedy/correct" in line] == [0, 2]
    assert all(find_metric(name).startswith("eval/{set}/") for name in found)
    # They change nothing of the training.
    assert [line.get("reward/mean") for line in more.values()] == [line.get("reward/mean") for line in plain.values()]


def test_sets_are_files_with_the_runs_prompts_and_are_refused_by_their_key(tmp_path: Path) -> None:
    path = tmp_path / "hard.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(9)))
    given = f"train.eval_sets={{hard: {{path: {path}, num_prompts: 4, num_samples: 3, temperature: 0.5, top_p: 0.9}}}}"
    config = load_config([given, "data=jsonl", "data.path=train.jsonl", "reward=exact", "data.prompt_length=99"])
    config = replace(config, data=replace(config.data, instruction="Compute {question}"))
    (found,) = build_eval_sets(config, build_byte_tokenizer(), None)
    assert (found.name, found.num_samples, len(found.prompts)) == ("hard", 3, 4)
    assert found.sampling == Sampling(0.5, urgent=True, truncation=Truncation(0.9, -1))
    assert found.prompts[0].text.startswith("Compute ")
    path.unlink()
    with pytest.raises(ConfigError, match=r"^train\.eval_sets\.hard\.path: .*hard\.jsonl does not exist"):
        build_eval_sets(config, build_byte_tokenizer(), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("={a: {pth: x}}", r"train\.eval_sets\.a\.pth"),
        ("={a: {num_prompts: 2}}", r"train\.eval_sets\.a\.path: .*missing"),
        ("={a: {path: x, num_samples: 2}}", "found 2; at train.eval_sets.a.temperature=0 all samples"),
        (".a.path=x", r"given whole, train\.eval_sets='\{NAME: \{path: FILE"),
    ],
)
def test_a_set_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([f"train.eval_sets{text}"])
