"""The other end of `ScoringProcess`: python -m megarl.reward.scoring_worker KIND SECONDS.

Reads one JSON question a line and writes one JSON answer a line, until its input ends.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from megarl.reward.evaluation_guard import guard_module, guard_sympy

MEMORY_BYTES = 8 * 2**30
"""Address space of the process, in bytes; a power of powers runs into it instead of into the machine's."""
Scorer = Callable[[dict[str, Any]], dict[str, Any]]


def build_math_scorer() -> Scorer:
    """{"gold", "text", "mode", "thinking"} -> {"correct", "read", "answer"}; see megarl.reward.answers.grading."""
    from megarl.reward.answers.grading import grade

    guard_sympy()

    def score(question: dict[str, Any]) -> dict[str, Any]:
        verdict = grade(question["gold"], question["text"], question["mode"], thinking=question["thinking"])
        return {"correct": verdict.is_right, "read": verdict.is_read, "answer": verdict.answer}

    return score


def build_reasoning_gym_scorer() -> Scorer:
    """{"task", "entry", "config", "text"} -> {"score"}."""
    from reasoning_gym.factory import DATASETS, create_dataset

    guard_sympy()
    datasets: dict[str, Any] = {}

    def score(question: dict[str, Any]) -> dict[str, Any]:
        task = question["task"]
        if task not in DATASETS:
            raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
        options = {"seed": 0, "size": 1, **question["config"]}
        key = json.dumps([task, options], sort_keys=True)
        if key not in datasets:
            guard_module(sys.modules[DATASETS[task][0].__module__])
            datasets[key] = create_dataset(task, **options)
        return {"score": float(datasets[key].score_answer(answer=question["text"], entry=question["entry"]))}

    return score


BUILDERS: dict[str, Callable[[], Scorer]] = {
    "math": build_math_scorer,
    "reasoning_gym": build_reasoning_gym_scorer,
}


def main() -> None:
    """Serve until standard input ends. A question that runs out of time ends the process, without an answer."""
    kind, seconds = sys.argv[1], float(sys.argv[2])
    # What the packages print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # No handler: the kernel ends the process, also where Python would not come to run one.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        scorer = BUILDERS[kind]()
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}"})
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    write({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = scorer(json.loads(line))
        except MemoryError:
            return
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(answer)


if __name__ == "__main__":
    main()
