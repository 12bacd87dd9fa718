"""What the scoring processes of reward=reasoning_gym run; torch is not imported here, which takes seconds."""

import ast
import json
import sys
from collections.abc import Callable
from typing import Any

from megarl.task.math_grading import guard_sympy

SCORERS_WITH_EVAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""reasoning-gym modules (last part of the name) that call eval() on an answer, to read a list."""


def build_scorer() -> Callable[..., dict[str, Any]]:
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
            module = sys.modules[DATASETS[task][0].__module__]
            if module.__name__.rsplit(".", 1)[-1] in SCORERS_WITH_EVAL:
                module.eval = ast.literal_eval  # type: ignore[attr-defined]
            datasets[key] = create_dataset(task, **options)
        return {"score": float(datasets[key].score_answer(answer=text, entry=entry))}

    return score
