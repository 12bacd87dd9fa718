"""The verifiers of other packages, which run in processes of their own: math and reasoning-gym."""

import ast
import inspect
import sys
import threading
import time

import pytest
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.schema.task import MathRewardConfig, ReasoningGymRewardConfig
from megarl.examples.reasoning_gym.scorer import SCORERS_WITH_EVAL
from megarl.task.function import check_source


@pytest.fixture(scope="module")
def math_reward():
    return build_reward(MathRewardConfig(timeout_s=2.0))


@pytest.fixture(scope="module")
def gym_reward():
    return build_reward(ReasoningGymRewardConfig(timeout_s=20.0))


def test_an_answer_that_takes_too_long_is_wrong_within_the_time_limit_off_the_main_thread(math_reward):
    results = []
    prompt, endless = build_prompt("\\sum_{k=1}^{n} k^2"), "\\boxed{\\sum_{k=1}^{99999999} k^{k}}"

    def score():
        started = time.monotonic()
        results.append(math_reward(prompt, build_response(endless)))
        results.append(time.monotonic() - started)

    math_reward(build_prompt("1"), build_response("1"))
    thread = threading.Thread(target=score)
    thread.start()
    thread.join(timeout=60)
    result, seconds = results
    assert (result.reward, result.details) == (0.0, {"format": 0.0, "timeout": 1.0})
    assert seconds < 15
    assert math_reward(build_prompt("72"), build_response("72")).correct, "the next response is scored again"


def build_gym_prompt(task: str, seed: int = 3):
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, seed=seed, size=1)[0]
    return build_prompt(entry["answer"] or "", reasoning_gym={"task": task, "entry": entry})


@pytest.mark.parametrize(
    "task", ["chain_sum", "countdown", "simple_integration", "polynomial_multiplication", "n_queens"]
)
def test_reasoning_gyms_own_answers_are_correct_and_others_are_not(gym_reward, task):
    prompt = build_gym_prompt(task)
    right = gym_reward(prompt, build_response(f" {prompt.answer}\n"))
    wrong = gym_reward(prompt, build_response("banana"))
    assert (right.reward, right.correct) == (1.0, True)
    assert wrong.reward < 0.5
    assert not wrong.correct
    assert right.details.keys() == wrong.details.keys()


EVALUATED = ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication", "spiral_matrix", "n_queens"]
EVALUATED += ["intermediate_integration", "binary_matrix", "string_insertion"]


@pytest.mark.parametrize("task", EVALUATED)
def test_code_in_an_answer_does_not_run(gym_reward, task, tmp_path):
    prompt, target = build_gym_prompt(task), tmp_path / "ran"
    for code in (
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"[open({str(target)!r}, 'w')]",
        f"Symbol('x').__class__.__base__.__subclasses__() or lambdify(1, 'open({str(target)!r}, \"w\")')()",
        f'S(\'open("{target}", "w")\')',
    ):
        assert gym_reward(prompt, build_response(code)).reward < 0.5
    assert not target.exists()


def test_every_scorer_that_calls_eval_on_an_answer_is_known():
    """A new version of reasoning-gym with another eval() in a scorer fails here."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    found = set()
    for dataset, _ in DATASETS.values():
        module = sys.modules[dataset.__module__]
        tree = ast.parse(inspect.getsource(module))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                names = [
                    n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
                ]
                if {"eval", "exec"} & set(names):
                    found.add(module.__name__.rsplit(".", 1)[-1])
    # number_sorting evaluates the task's own answer, never the model's.
    assert found - {"number_sorting"} == SCORERS_WITH_EVAL, reasoning_gym.__file__


@pytest.mark.parametrize(
    "source",
    [
        "Symbol ('x').__class__",
        "lambdify (Integer (1 ),'1')",
        "Function ('open')('/etc/passwd')",
        "(lambda :1 )()",
        "[Symbol ('x')for x in ()]",
        "'text'",
        "S ('1')",
        "Symbol ('x')[Integer (0 )]",
        "f'{1}'",
        "1 +",
    ],
)
def test_source_beyond_mathematics_is_refused(source):
    with pytest.raises(ValueError, match=r"not |part of an answer"):
        check_source(source)


def test_a_prompt_of_another_source_is_an_error_that_names_it(gym_reward):
    with pytest.raises(ValueError, match=r"prompt 'p1'.*data=reasoning_gym"):
        gym_reward(build_prompt("1"), build_response("1"))
