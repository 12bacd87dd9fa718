"""Conversations and failed samples as a person sees them."""

from dataclasses import replace

from megarl.report.text import MOST_TURNS, format_sample, format_samples
from megarl.types import FinishReason, Prompt, Response, Sample, Score, Turn


def make_sample(text: str, correct: bool = True) -> Sample:
    zeros = [0] * len(text)
    response = Response(zeros, text, zeros, [True] * len(text), zeros, FinishReason.stop)
    return Sample(Prompt("task-1", "2+2=", (1, 2), "4"), response, Score(float(correct), correct), 0)


def make_conversation(num_turns: int, reward: float = 0.0) -> Sample:
    """Turns of one token each, with an observation of two tokens after each."""
    generated = [True, False, False] * num_turns
    turns = [Turn(3 * i, 3 * i + 1, f"guess {i}", reward) for i in range(num_turns)]
    zeros = [0] * len(generated)
    response = Response(zeros, "", zeros, generated, zeros, FinishReason.max_turns, turns=turns)
    return replace(make_sample(""), response=response)


def test_a_conversation_has_a_line_for_each_action_and_each_observation() -> None:
    shown = format_sample(make_conversation(2, 0.5), lambda tokens: f"{len(tokens)}\nhigher").splitlines()
    assert shown[0].endswith("2 turns, 2 of 6 tokens generated, ended by max_turns")
    assert shown[1:] == [
        "  prompt        2+2=",
        "  action (0.5)  guess 0",
        r"  observation   2\nhigher",
        "  action (0.5)  guess 1",
        r"  observation   2\nhigher",
        "  expected      4",
    ]
    assert "  observation  [2 tokens]" in format_sample(make_conversation(1))


def test_the_middle_of_a_long_conversation_is_left_out_and_counted() -> None:
    shown = format_sample(make_conversation(20)).splitlines()
    assert len(shown) == 1 + 1 + 2 * MOST_TURNS + 1 + 1
    assert "  ...          [12 turns]" in shown


def test_a_sample_without_a_reward_says_why() -> None:
    sample = replace(make_sample("4"), score=Score(0.0, False, failure="TimeoutError: 5 s\n"))
    assert format_sample(sample).splitlines()[0] == (
        r"sample task-1: no reward, TimeoutError: 5 s\n, 1 tokens, ended by stop"
    )
    shown = format_samples([make_sample("4"), make_sample("4"), sample, make_sample("5", correct=False)], 2)
    assert "no reward" not in shown
