"""Functions for a process of their own: the scorers of other packages, and regular expressions."""

import json
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from megarl.reward.evaluation_guard import guard_module, guard_sympy

Scorer = Callable[..., dict[str, Any]]


def build_math_scorer() -> Scorer:
    """(gold, text, mode, thinking) -> {"correct", "read", "answer"}; see megarl.reward.answers.grading."""
    from megarl.reward.answers.grading import grade

    guard_sympy()

    def score(gold: str, text: str, mode: str, thinking: bool) -> dict[str, Any]:
        verdict = grade(gold, text, mode, thinking=thinking)
        return {"correct": verdict.is_right, "read": verdict.is_read, "answer": verdict.answer}

    return score


def build_reasoning_gym_scorer() -> Scorer:
    """(task, entry, config, text) -> {"score"}."""
    from reasoning_gym.factory import DATASETS, create_dataset

    guard_sympy()
    datasets: dict[str, Any] = {}

    def score(task: str, entry: dict[str, Any], config: dict[str, Any], text: str) -> dict[str, Any]:
        if task not in DATASETS:
            raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
        options = {"seed": 0, "size": 1, **config}
        key = json.dumps([task, options], sort_keys=True)
        if key not in datasets:
            guard_module(sys.modules[DATASETS[task][0].__module__])
            datasets[key] = create_dataset(task, **options)
        return {"score": float(datasets[key].score_answer(answer=text, entry=entry))}

    return score


def build_pattern_searcher(pattern: str, where: str) -> Callable[..., str | None]:
    """(text) -> what the pattern finds, None for nothing.

    where: "whole": the text but for white space at its ends; "anywhere": its first match; "last": the last one, of
    which the first group counts where the pattern has one.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def search(text: str) -> str | None:
        if where == "last":
            last = deque(compiled.finditer(text), maxlen=1)
            return last[0].group(1 if compiled.groups else 0) if last else None
        match = compiled.fullmatch(text.strip()) if where == "whole" else compiled.search(text)
        return None if match is None else match.group()

    return search
