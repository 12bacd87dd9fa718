"""From scored samples to the result of a set, its row in the table and its JSON."""

import json
from dataclasses import replace

import pytest

from megarl.report.evaluation import Votes, format_response, format_table, summarize_set, write_evaluation
from megarl.types import FinishReason, Prompt, Response, Sample, Score, Turn


def build_sample(problem: str, answer: str | None, *, correct: bool = False, length: int = 2, cut: bool = False):
    prompt = Prompt(problem, f"{problem}?", (1,), "7")
    reason = FinishReason.length if cut else FinishReason.stop
    response = Response((1,) * length, str(answer), (0.0,) * length, (True,) * length, (0,) * length, reason)
    return Sample(prompt, response, Score(float(correct), correct, {}, answer), 0)


SAMPLES = [
    build_sample("p", "7", correct=True),
    build_sample("p", "7.0", correct=True),
    build_sample("p", "8"),
    build_sample("p", None, length=6, cut=True),
    build_sample("q", "1"),
    build_sample("q", "1"),
    build_sample("q", "2"),
    build_sample("q", "7", correct=True),
]


def test_a_set_is_summarized_by_the_means_of_its_problems_and_written_whole(tmp_path):
    result = summarize_set("s", SAMPLES, (2, 4), reads_answers=True)
    values = {name: estimate.value for name, estimate in result.estimates.items()}
    expected = {"avg@4": (0.5 + 0.25) / 2, "pass@2": (5 / 6 + 0.5) / 2, "pass@4": 1.0, "maj@4": 0.5}
    assert values == pytest.approx(expected)
    assert (result.mean_reward, result.mean_response_tokens) == (3 / 8, 20 / 8)
    assert (result.truncated_frac, result.unread_frac) == (1 / 8, 1 / 8)
    # Correct answers vote together, however they are written, and silent ones do not.
    assert result.problems == {"p": Votes(2, (1,), 1), "q": Votes(1, (2, 1))}
    write_evaluation(tmp_path / "evaluation.json", [result], {"checkpoint": "/model"})
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (found["checkpoint"], found["sets"]["s"]["num_problems"]) == ("/model", 2)
    assert found["sets"]["s"]["estimates"]["avg@4"]["value"] == 0.375
    assert found["sets"]["s"]["problems"]["p"] == {"num_correct": 2, "wrong": [1], "num_silent": 1}
    with pytest.raises(ValueError, match=r"s: found problems with \[3, 4\] samples"):
        summarize_set("s", SAMPLES[:-1], (), reads_answers=True)


def read_table(results):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in format_table(results).splitlines()]


def test_the_table_has_a_row_per_set_and_a_dash_where_a_set_has_no_number():
    results = [
        summarize_set("math", SAMPLES, (2,), reads_answers=True),
        summarize_set("own", SAMPLES, (2,), reads_answers=False),
    ]
    rows = read_table(results)
    assert rows[0] == ["set", "problems", "avg@4", "pass@2", "maj@4", "reward", "tokens", "truncated", "no answer"]
    assert rows[2][:2] == ["math", "2"]
    assert rows[2][2].startswith("37.5 [")
    assert rows[2][5:] == ["0.375", "2", "12.5", "12.5"]
    # The second verifier reads no answers.
    assert rows[3][4] == rows[3][8] == "-"
    assert len({len(line) for line in format_table(results).splitlines()}) == 1


def test_a_response_without_a_reward_counts_as_wrong_without_a_vote_and_is_shown():
    lost = replace(SAMPLES[0], score=Score(0.0, False, failure="TimeoutError: 5 s"))
    result = summarize_set("s", [lost, *SAMPLES[1:]], (2,), reads_answers=True)
    assert (result.failed_frac, result.unread_frac, result.mean_reward) == (1 / 8, 1 / 8, 2 / 8)
    assert result.problems["p"] == Votes(1, (1,), 2)
    assert result.estimates["avg@4"].value == (0.25 + 0.25) / 2
    rows = read_table([result])
    assert (rows[0][-1], rows[2][-1]) == ("no reward", "12.5")
    assert json.loads(format_response("s", 0, lost))["failure"] == "TimeoutError: 5 s"


def test_a_conversation_is_shown_by_its_turns_and_measured_by_its_generated_tokens():
    generated = [True, True, False, False, True, False]
    turns = [Turn(0, 2, "Is it 5?", 0.25), Turn(4, 5, "3")]
    response = Response([7, 8, 9, 10, 11, 12], "3", [0.0] * 6, generated, [0] * 6, FinishReason.max_turns, turns=turns)
    sample = replace(SAMPLES[0], response=response)
    result = summarize_set("s", [sample], (), reads_answers=False)
    assert (result.mean_response_tokens, result.mean_turns, result.truncated_frac) == (3.0, 2.0, 0.0)
    rows = read_table([result])
    assert rows[2][rows[0].index("turns")] == "2.0"
    assert "no reward" not in rows[0]
    found = json.loads(format_response("s", 0, sample, lambda tokens: f"<{tokens}>"))
    assert found["num_tokens"] == 3
    assert found["turns"] == [
        {"action": "Is it 5?", "observation": "<[9, 10]>", "reward": 0.25},
        {"action": "3", "observation": "<[12]>", "reward": 0.0},
    ]
    assert "turns" not in json.loads(format_response("s", 0, SAMPLES[0]))
