"""data=reasoning_gym and reward=reasoning_gym: problems of the package reasoning-gym, scored by its own scorers."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.task import ReasoningGymDataConfig, ReasoningGymRewardConfig
from megarl.task.data import Problem, ProblemSplits, ask, check_names
from megarl.task.reward import ProcessReward
from megarl.types import Prompt, Response, Score

TRIES_PER_PROBLEM = 10
"""Problems generated at most for each one wanted: small tasks repeat themselves."""
HELDOUT_SEED_OFFSET = 1_000_000_000
"""The package seeds problem i with seed + i; this keeps the ranges of the two sides apart."""


def load_reasoning_gym(config: ReasoningGymDataConfig, seed: int) -> ProblemSplits:
    """`size` and `num_heldout` problems of different questions.

    metadata["reasoning_gym"] is JSON of {"task": name, "entry": problem, "config": data.options}, for the scorer.
    Raises ConfigError.
    """
    from reasoning_gym import factory  # takes a second, which other sources need not wait

    task, options = config.task, config.options
    # "composite" mixes other datasets, and its entries do not say how to score them alone.
    known = sorted(name for name in factory.DATASETS if name != "composite")
    check_names("data.task=", [task], known, "such task of reasoning-gym")
    fields = {f.name for f in dataclasses.fields(factory.DATASETS[task][1])} - {"seed", "size"}
    check_names("data.options.", options, sorted(fields), f"such option of {task}")
    seen: set[str] = set()

    def generate(number: int, key: str, first_seed: int) -> list[Problem]:
        """Of questions that are not in `seen`, which grows by them."""
        if number < 1:
            raise ConfigError([f"data.{key}: found {number}; it must be 1 or more"])
        tries, problems = number * TRIES_PER_PROBLEM, list[Problem]()
        try:
            dataset = factory.create_dataset(task, seed=first_seed, size=tries, **options)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError([f"data.options: {task} refuses {options}: {error}"]) from error
        for entry in (dataset[i] for i in range(tries)):
            stored = json.dumps({"task": task, "entry": entry, "config": options}, default=str)
            answer = "" if entry["answer"] is None else str(entry["answer"])  # Some tasks have only a scorer.
            problem = ask(entry["question"], answer, {"reasoning_gym": stored})
            if problem.question_key in seen:
                continue
            seen.add(problem.question_key)
            problems.append(problem)
            if len(problems) == 1:
                _check_scorer(task, entry, dataset.score_answer)
            if len(problems) == number:
                return problems
        found = f"{tries} tries of reasoning-gym's {task} with these data.options gave only {len(problems)}"
        raise ConfigError([f"data.{key}: found {number}; {found} new questions; that many are possible"])

    first_seed = seed * 1_000_003 % HELDOUT_SEED_OFFSET
    num_heldout = 256 if config.num_heldout is None else config.num_heldout
    heldout = generate(num_heldout, "num_heldout", first_seed + HELDOUT_SEED_OFFSET)
    return ProblemSplits(generate(config.size, "size", first_seed), heldout)


def _check_scorer(task: str, entry: dict[str, Any], score: Callable[..., float]) -> None:
    """Raises ConfigError where the task's own answer loses its score on the way through JSON."""
    answer, stored, reason = entry["answer"], json.loads(json.dumps(entry, default=str)), ""
    try:
        is_same = answer is None or score(answer, stored) >= score(answer, entry)
    except Exception as error:  # the scorers are other people's and raise anything
        is_same, reason = False, f": {type(error).__name__}: {error}"
    if not is_same:
        raise ConfigError([f"data.task: {task} cannot be scored from stored problems{reason}; choose another"])


class ReasoningGymReward(ProcessReward):
    """The score, 0 to 1, that the prompt's task gives the response (white space at its ends removed).

    prompt.metadata["reasoning_gym"] is JSON: {"task": its name, "entry": the generated item, "config": the
    task's options (may be absent)}. Correct from reward.correct_at on. details: "timeout" is 1 where time or memory ran
    out, which scores 0.
    """

    path = "megarl.examples.reasoning_gym.scorer:build_scorer"
    given_up = Score(0.0, False, {"timeout": 1.0})

    def __init__(self, config: ReasoningGymRewardConfig):
        """Raises ConfigError without reasoning-gym."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(["reward: reasoning_gym found, but it is not installed; `make install` brings it"])
        super().__init__(config)
        self._correct_at = config.correct_at

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        """Raises ValueError, naming the prompt, where it was not made by reasoning-gym."""
        try:
            stored = json.loads(prompt.metadata["reasoning_gym"])
            asked = {"task": stored["task"], "entry": stored["entry"], "config": stored.get("config") or {}}
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            found = f"no reasoning-gym task in its metadata ({type(error).__name__}: {error})"
            needed = "reward=reasoning_gym goes with data=reasoning_gym"
            raise ValueError(f"prompt {prompt.id!r}: {found}; {needed}") from error
        return {**asked, "text": response.text.strip()}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        reward = float(answer["score"])
        return Score(reward, reward >= self._correct_at, {"timeout": 0.0})
