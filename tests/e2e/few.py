"""The reward function of a source of test_faults.py."""

from megarl.types import Prompt, Response


def score(prompt: Prompt, response: Response) -> float:
    return len(set(response.text)) / 8
