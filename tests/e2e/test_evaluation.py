"""An evaluation on a real server: every problem asked, every response written, the counts those of the responses."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
from servers import API_KEY

from megarl.config.schema.run import EvaluateConfig
from megarl.interfaces import DeadlineError
from megarl.report.evaluation import RESPONSES_FILE_NAME
from megarl.report.text import Progress
from megarl.rollout.engine import SGLangEngine
from megarl.run.evaluation import EvaluationSet, evaluate_sets
from megarl.task.scorer import Scorer
from megarl.types import FinishReason, Prompt, Response, Score

pytestmark = [pytest.mark.server, pytest.mark.slow]


def read_first_letter(prompt: Prompt, response: Response) -> Score:
    """Letters before n are right, other letters wrong, anything else is no answer."""
    first = response.text[:1]
    answer = first if first.isalpha() else None
    correct = answer is not None and answer < "n"
    return Score(float(correct), correct, {}, answer)


def build_sets(response_length: int) -> tuple[EvaluationSet, ...]:
    prompts = [Prompt(f"p{i}", "", (3 + i, 4 + i), "") for i in range(10)]
    return (
        EvaluationSet("letters", tuple(prompts[:7]), lambda: Scorer(read_first_letter), True, response_length),
        EvaluationSet("few", tuple(prompts[7:]), lambda: Scorer(lambda p, r: Score(1.0, True)), False, response_length),
    )


@pytest.fixture
def evaluate(server, tiny_checkpoint, rollout_config, tmp_path):
    def run(config: EvaluateConfig, **keys: float):
        rollout = replace(rollout_config, **keys)
        engine = SGLangEngine(
            [server.url], tiny_checkpoint, rollout, top_p=config.top_p, top_k=config.top_k, api_key=API_KEY
        )
        patient = SGLangEngine([server.url], tiny_checkpoint, rollout_config, api_key=API_KEY)
        version, stream = patient.clients[0].load_weight_version(), StringIO()
        patient.close()
        progress, sets = Progress(stream), build_sets(rollout.response_length)
        try:
            # 16 responses a call: the first set takes several.
            results = evaluate_sets(
                engine,
                sets,
                config,
                tmp_path,
                progress,
                num_slots=16,
                weight_version=version,
            )
        finally:
            progress.close()
            engine.close()
        lines = (tmp_path / RESPONSES_FILE_NAME).read_text().splitlines()
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
