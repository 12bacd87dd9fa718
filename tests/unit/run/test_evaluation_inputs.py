"""What an evaluation of a run's model asks: the run's own held-out prompts, and how many it was trained on."""

import json
import shutil
from pathlib import Path

import pytest

from megarl.config.brought import RUN_FILE
from megarl.config.evaluation_sets import expand_sets, load_configs
from megarl.config.load import load_config
from megarl.run.evaluation import EvaluationInputs, list_settings, load_evaluation_inputs
from megarl.run.inputs import load_inputs
from megarl.run.resume import save_run
from megarl.types import Prompt

RUN = (
    *("algo=grpo", "data=jsonl", "data.path=mine.jsonl", "data.num_heldout=6", "reward=exact", "seed=3"),
    *("data.prompt_length=4", "train.num_eval_prompts=4"),
)


@pytest.fixture
def heldout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Prompt, ...]:
    """Those of a run of 30 questions, of which 10 are too long; its model is in run/policy."""
    monkeypatch.chdir(tmp_path)
    questions = [
        first + second + end for first in "abcde" for second in "abcdef" for end in ["." * (second in "ef") * 4]
    ]
    write_questions(tmp_path / "mine.jsonl", questions)
    config = load_config(RUN)
    inputs = load_inputs(config)
    save_run(tmp_path / "run", config, RUN)
    shutil.copytree(inputs.checkpoint, tmp_path / "run" / "policy")
    return inputs.data.heldout[: config.train.num_eval_prompts]


def write_questions(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"question": question, "answer": "a"}) + "\n" for question in questions))


def load(*overrides: str) -> tuple[EvaluationInputs, list[Prompt], dict[str, int] | None]:
    """What is asked, its prompts, and the recorded numbers of those that were trained on."""
    configs = load_configs(expand_sets(["model=checkpoint", "model.path=run/policy", *overrides]))
    inputs = load_evaluation_inputs(configs)
    return inputs, list(inputs.sets[0].prompts), list_settings(configs, inputs)["num_trained_on"]


def test_the_runs_own_data_are_asked_as_training_asks_its_heldout_prompts(heldout: tuple[Prompt, ...]) -> None:
    inputs, prompts, trained = load()
    assert prompts == list(heldout)
    assert len(prompts) == 4
    assert trained == {"jsonl": 0}
    assert inputs.lines[0].startswith("jsonl: none of the 4 questions is among those that the model was trained on (")
    part = load("evaluate.num_problems=2")[1]
    assert len(part) == 2
    assert all(prompt in heldout for prompt in part)
    assert len(load("train.num_eval_prompts=6")[1]) == 6


def test_questions_that_were_trained_on_are_counted(heldout: tuple[Prompt, ...], tmp_path: Path) -> None:
    whole = ("evaluate.heldout=false", "data.prompt_length=8")
    inputs, prompts, trained = load(*whole)
    # 20 short ones, 6 of them held out.
    assert (len(prompts), trained) == (30, {"jsonl": 14})
    assert inputs.lines[0].startswith("warning: jsonl: 14 of the 30 questions are among those that the model was")
    # Another seed splits the same data in another way.
    assert 0 < load("seed=4", "evaluate.heldout=true")[2]["jsonl"] <= 4
    write_questions(tmp_path / "other.jsonl", ["fa", "fb"])
    assert load("data.path=other.jsonl")[2] == {"jsonl": 0}


def test_a_model_of_a_run_that_began_with_a_runs_model_was_trained_on_both(
    heldout: tuple[Prompt, ...], tmp_path: Path
) -> None:
    write_questions(tmp_path / "second.jsonl", ["fa", "fb", "fc", "fd"])
    own = ["model=checkpoint", "model.path=run/policy", "data.path=second.jsonl", "data.num_heldout=1", "algo=grpo"]
    save_run(tmp_path / "next", load_config(own), own)
    shutil.copytree(tmp_path / "run" / "policy", tmp_path / "next" / "policy")
    whole = ("evaluate.heldout=false", "data.prompt_length=8", "data.path=mine.jsonl")
    assert load("model.path=next/policy", *whole)[2] == {"jsonl": 14}


def test_data_that_cannot_be_read_are_said_and_do_not_end_the_evaluation(
    heldout: tuple[Prompt, ...], tmp_path: Path
) -> None:
    write_questions(tmp_path / "other.jsonl", ["fa", "fb"])
    (tmp_path / "mine.jsonl").unlink()
    inputs, prompts, trained = load("data.path=other.jsonl")
    assert (len(prompts), trained) == (2, None)
    assert inputs.lines[0].startswith(f"what the model was trained on is not known: {tmp_path / 'run' / RUN_FILE}: ")
    assert "mine.jsonl" in inputs.lines[0]
