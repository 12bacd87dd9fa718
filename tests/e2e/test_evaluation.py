"""An evaluation on a real server: every problem asked, every response written, the counts those of the responses."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from servers import API_KEY

from megarl.config.load import load_config
from megarl.config.schema.root import EvaluateConfig
from megarl.interfaces import DeadlineError
from megarl.report.evaluation import RESPONSES_FILE
from megarl.report.text import Progress
from megarl.rollout.engine import SGLangEngine
from megarl.run.inputs import EvaluationSet
from megarl.run.job import evaluate_sets
from megarl.types import FinishReason, Prompt

pytestmark = [pytest.mark.server, pytest.mark.slow]


REWARDS = """
from megarl.types import Score

def read_first_letter(prompt, response):
    "Letters before n are right, other letters wrong, anything else is no answer."
    first = response.text[:1]
    answer = first if first.isalpha() else None
    correct = answer is not None and answer < "n"
    return Score(float(correct), correct, {}, answer)

def accept(prompt, response):
    return Score(1.0, True)
"""
PROMPTS = tuple(Prompt(f"p{i}", "", (3 + i, 4 + i), "") for i in range(10))


@pytest.fixture
def evaluate(server, tiny_checkpoint, rollout_config, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    base = load_config(["reward=function", "reward.path=unset.py:score"])

    def build_set(name: str, prompts: tuple[Prompt, ...], reward: str, **parts: Any) -> EvaluationSet:
        config = replace(base, **parts, reward=replace(base.reward, path=f"{tmp_path}/rewards.py:{reward}"))
        return EvaluationSet(name, prompts, config)

    def run(config: EvaluateConfig, **keys: float):
        # 16 responses a call: the first set takes several.
        rollout = replace(rollout_config, max_running_requests=16, **keys)
        engine = SGLangEngine(
            [server.url], tiny_checkpoint, rollout, top_p=config.top_p, top_k=config.top_k, api_key=API_KEY
        )
        patient = SGLangEngine([server.url], tiny_checkpoint, rollout_config, api_key=API_KEY)
        version, stream = patient.clients[0].load_weight_version(), StringIO()
        patient.close()
        progress, parts = Progress(stream), {"rollout": rollout, "evaluate": config, "seed": 0}
        letters = build_set("letters", PROMPTS[:7], "read_first_letter", **parts)
        sets = (letters, build_set("few", PROMPTS[7:], "accept", **parts))
        try:
            results = evaluate_sets(engine, sets, tmp_path, progress, weight_version=version)
        finally:
            progress.close()
            engine.close()
        lines = (tmp_path / RESPONSES_FILE).read_text().splitlines()
        return results, [json.loads(line) for line in lines], stream.getvalue()

    return run


def test_sampled_responses_are_counted_as_they_were_written(evaluate):
    (letters, few), responses, printed = evaluate(EvaluateConfig(num_samples=4, temperature=1.0))
    assert Counter((each["set"], each["problem"]) for each in responses) == dict.fromkeys(
        [*(("letters", f"p{i}") for i in range(7)), *(("few", f"p{i}") for i in range(7, 10))], 4
    )
    own = [each for each in responses if each["set"] == "letters"]
    assert letters.estimates["avg@4"].value == pytest.approx(sum(each["correct"] for each in own) / len(own))
    solved = {each["problem"] for each in own if each["correct"]}
    assert letters.estimates["pass@4"].value == pytest.approx(len(solved) / 7)
    assert letters.unread_frac == sum(each["answer"] is None for each in own) / len(own)
    assert letters.mean_response_tokens == sum(each["num_tokens"] for each in own) / len(own)
    assert letters.truncated_frac == sum(each["finish_reason"] == FinishReason.length.value for each in own) / len(own)
    assert list(letters.estimates) == ["avg@4", "pass@2", "pass@4", "maj@4"]
    assert list(few.estimates) == ["avg@4", "pass@2", "pass@4"]
    assert few.estimates["avg@4"].value == 1.0
    assert [line.split(" of ")[0] for line in printed.splitlines()] == ["letters: 4", "letters: 7", "few: 3"]


def test_a_greedy_evaluation_and_one_from_the_likeliest_token_alone_agree(evaluate):
    """top_k=1 leaves sampling nothing to choose from, so it reaches the server."""
    greedy = evaluate(EvaluateConfig())[1]
    narrow = evaluate(EvaluateConfig(temperature=1.0, top_k=1))[1]
    assert len(greedy) == 10
    assert [each["response"] for each in greedy] == [each["response"] for each in narrow]
    nucleus = evaluate(EvaluateConfig(temperature=1.0, top_p=1e-6))[1]
    assert [each["response"] for each in greedy] == [each["response"] for each in nucleus]


def test_a_call_that_takes_too_long_says_which_key_gives_it_more_time(evaluate):
    with pytest.raises(DeadlineError, match=r"rollout\.request_deadline_s is for 7 responses here: raise it"):
        evaluate(EvaluateConfig(), request_deadline_s=0.001)
