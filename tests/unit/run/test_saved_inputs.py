"""rollout.file is read and compared with the configuration before anything starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.rollout.rollout_file import RolloutWriter, read_group
from megarl.run.inputs import load_inputs
from megarl.run.job import describe_saved
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

PROMPT = Prompt("p", "a.=", (3, 9, 10), "a")
GIVEN = (
    *("model=tiny", "algo=topr", "train.responses_per_prompt=2", "train.prompts_per_iteration=1"),
    *("train.num_minibatches=1", "reward.wrong=-1"),
)


def build_group(group: int, prompt: Prompt = PROMPT, size: int = 2, **score: object) -> list[Sample]:
    scores = [replace(Score(k / max(1, size - 1), k == size - 1), **score) for k in range(size)]
    response = Response((3, 4, 2), "ab", (-0.5, -1.5, -1.0), (True, True, True), (7, 7, 7), FinishReason.stop)
    return [Sample(prompt, response, score, group) for score in scores]


def save(path: Path, *rollouts: list[Sample]) -> Path:
    writer = RolloutWriter(path)
    for number, samples in enumerate(rollouts, start=1):
        writer.write(Rollout(tuple(samples), 7), number)
    writer.close()
    return path


def load(path: Path, *overrides: str):
    config = load_config([*GIVEN, f"rollout.file={path}", *overrides])
    return config, load_inputs(config)


def find_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    return "\n".join(caught.value.problems)


def test_groups_are_found_and_read_back_one_by_one(tmp_path):
    first, second = [*build_group(0), *build_group(1, replace(PROMPT, id="q"))], build_group(0, replace(PROMPT, id="r"))
    path = save(tmp_path / "r.jsonl", first, second)
    config, inputs = load(path)
    saved = inputs.saved_groups
    assert saved is not None
    assert (saved.num_rollouts, saved.num_samples, saved.num_failed, saved.has_turns) == (2, 6, 0, False)
    assert [group.where for group in saved.groups] == [f"{path}:{line}" for line in (1, 3, 5)]
    assert [read_group(path, group) for group in saved.groups] == [tuple(first[:2]), tuple(first[2:]), tuple(second)]
    assert inputs.data.train == ()
    assert list(describe_saved(config, saved)) == [
        f"rollout.file: 6 responses in 3 groups, of 2 rollouts in {path}; a pass over them takes 3 iterations",
        "the responses' temperature is not recorded (run.json beside the file); 1 is assumed",
    ]
    (tmp_path / "run.json").write_text(json.dumps({"overrides": [], "config": {"rollout.temperature": 0.7}}))
    (_, line) = describe_saved(config, saved)
    assert line.startswith("warning: the responses were sampled at temperature 0.7")
    config, inputs = load(path, "rollout.temperature=0.7")
    assert len(list(describe_saved(config, inputs.saved_groups))) == 1


def test_responses_without_a_reward_are_counted_and_a_file_of_nothing_else_refused(tmp_path):
    failed = build_group(0, failure="the verifier hung")
    path = save(tmp_path / "r.jsonl", [*failed, *build_group(1)])
    config, inputs = load(path)
    assert next(iter(describe_saved(config, inputs.saved_groups))).endswith(
        "; 2 have no reward and are not learned from"
    )
    assert "none of its 2 responses has a reward" in find_problem(save(tmp_path / "none.jsonl", failed))
    missing = tmp_path / "nowhere.jsonl"
    assert f"rollout.file: [Errno 2] No such file or directory: '{missing}'" in find_problem(missing)


def test_what_a_killed_run_left_unfinished_is_said_and_left_out(tmp_path):
    path = save(tmp_path / "r.jsonl", build_group(0), [*build_group(0), *build_group(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    config, inputs = load(path)
    assert len(inputs.saved_groups.groups) == 1
    warnings = [line for line in describe_saved(config, inputs.saved_groups) if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert f"{path}:6: a half-written last line" in warnings[0]


HINTED = build_group(0, replace(PROMPT, metadata={"hint": "a"}))
WITHOUT = build_group(1, replace(PROMPT, id="q", metadata={}))
CRITIC = ["algo=ppo", "algo.mismatch.correction=tis", "data.critic_prompt='{hint}{answer}.'"]
UNKNOWN, OTHERWISE = (build_group(0, replace(PROMPT, token_ids=tokens)) for tokens in ((3, 9, 11), (3, 10, 9)))


@pytest.mark.parametrize(
    ("samples", "overrides", "message"),
    [
        (build_group(0), ["train.responses_per_prompt=4"], "train.responses_per_prompt: found 4; {path}:1 begins a gr"),
        (build_group(0), ["train.prompts_per_iteration=2"], "train.prompts_per_iteration: found 2, which is 2 groups"),
        (build_group(0), ["data.prompt_length=2"], "{path}:1: found a prompt of 3 tokens; data.prompt_length is 2"),
        (build_group(0), ["rollout.response_length=2"], "{path}:1: found a response of 3 tokens"),
        (UNKNOWN, [], "{path}:1: found token id 11; the model's vocabulary has 11 tokens"),
        (OTHERWISE, [], "reads its text as [3, 9, 10]: the responses must be"),
        (build_group(0, replace(PROMPT, text="Z")), [], "prompt 'p'"),
        (build_group(0, reward=2.0), [], "{path}:1: reward.wrong: found -1 with a score of 2"),
        (
            [*HINTED, *WITHOUT],
            CRITIC,
            "{path}:3: data.critic_prompt: found {{hint}}; the fields of prompt q are answer",
        ),
    ],
)
def test_what_does_not_fit_the_configuration_is_named(tmp_path, samples, overrides, message):
    path = save(tmp_path / "r.jsonl", samples)
    assert message.format(path=path) in find_problem(path, *overrides)
