"""Problems of the package reasoning-gym."""

import dataclasses
import json
from typing import Any

from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.data import ReasoningGymDataConfig
from megarl.task.problems import Problem, ProblemSplits, ask

TRIES_PER_PROBLEM = 10
"""Problems generated at most for each one wanted: small tasks repeat themselves."""
HELDOUT_SEED_OFFSET = 1_000_000_000
"""The package seeds problem i with seed + i; this keeps the ranges of the two sides apart."""


class ReasoningGymSource:
    """metadata["reasoning_gym"] is JSON of {"task": name, "entry": problem, "config": data.options}, for the scorer."""

    def __init__(self, config: ReasoningGymDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """`size` and `num_heldout` problems of different questions. Raises ConfigError."""
        num_heldout = 256 if self.config.num_heldout is None else self.config.num_heldout
        seen: set[str] = set()
        first_seed = seed * 1_000_003 % HELDOUT_SEED_OFFSET
        heldout = self._generate(num_heldout, "num_heldout", first_seed + HELDOUT_SEED_OFFSET, seen)
        train = self._generate(self.config.size, "size", first_seed, seen)
        return ProblemSplits(train, heldout)

    def _generate(self, number: int, key: str, seed: int, seen: set[str]) -> list[Problem]:
        """`number` problems of questions that are not in `seen`, which grows by them."""
        if number < 1:
            raise ConfigError([f"data.{key}: found {number}; it must be 1 or more"])
        task, tries = self.config.task, number * TRIES_PER_PROBLEM
        dataset = create_dataset(task, seed, tries, self.config.options)
        problems: list[Problem] = []
        for i in range(tries):
            entry = dataset[i]
            problem = to_problem(task, entry, self.config.options)
            if problem.question_key in seen:
                continue
            seen.add(problem.question_key)
            problems.append(problem)
            if len(problems) == 1:
                check_scorer(task, entry, dataset)
            if len(problems) == number:
                return problems
        raise ConfigError(
            [
                f"data.{key}: found {number}; {tries} tries of reasoning-gym's {task} with these data.options"
                f" gave only {len(problems)} new questions; that many are possible"
            ]
        )


def create_dataset(task: str, seed: int, size: int, options: dict[str, Any]) -> Any:
    """reasoning-gym's dataset. Raises ConfigError for an unknown task or option and for a refused value."""
    from reasoning_gym import factory  # takes a second, which other sources need not wait

    # "composite" mixes other datasets, and its entries do not say how to score them alone.
    known = sorted(name for name in factory.DATASETS if name != "composite")
    if task not in known:
        nearest = find_nearest_key(task, known)
        hint = f"did you mean {nearest}?" if nearest else f"reasoning-gym has {', '.join(known)}"
        raise ConfigError([f"data.task: found {task!r}; {hint}"])
    fields = {f.name for f in dataclasses.fields(factory.DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            nearest = find_nearest_key(name, fields)
            hint = f"did you mean {nearest}?" if nearest else f"{task} has {', '.join(sorted(fields))}"
            raise ConfigError([f"data.options.{name}: no such option of {task}; {hint}"])
    try:
        return factory.create_dataset(task, seed=seed, size=size, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError([f"data.options: {task} refuses {options}: {error}"]) from error


def to_problem(task: str, entry: dict[str, Any], options: dict[str, Any]) -> Problem:
    """One of reasoning-gym's entries. The answer is "" for tasks that have only a scorer."""
    answer = entry["answer"]
    metadata = {"reasoning_gym": json.dumps({"task": task, "entry": entry, "config": options}, default=str)}
    return ask(entry["question"], "" if answer is None else str(answer), metadata)


def check_scorer(task: str, entry: dict[str, Any], dataset: Any) -> None:
    """Raises ConfigError where the task's own answer loses its score on the way through JSON."""
    if entry["answer"] is None:
        return
    stored = json.loads(json.dumps(entry, default=str))
    try:
        scores = [dataset.score_answer(entry["answer"], e) for e in (entry, stored)]
    except Exception as error:  # the scorers are other people's and raise anything
        scores, reason = [1.0, 0.0], f": {type(error).__name__}: {error}"
    else:
        reason = ""
    if scores[1] < scores[0]:
        raise ConfigError([f"data.task: {task} cannot be scored from stored problems{reason}; choose another"])
