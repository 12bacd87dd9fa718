"""The verifiers of other packages, which run in processes of their own: math and reasoning-gym."""

import ast
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.schema.task import MathRewardConfig, ReasoningGymRewardConfig
from megarl.examples.reasoning_gym.scorer import SCORERS_WITH_EVAL
from megarl.task.math_grading import check_source


@pytest.fixture(scope="module")
def math_reward():
    return build_reward(MathRewardConfig(timeout_s=2.0))


@pytest.fixture(scope="module")
def gym_reward():
    return build_reward(ReasoningGymRewardConfig(timeout_s=20.0))


def test_an_answer_that_takes_too_long_is_wrong_within_the_time_limit_off_the_main_thread(math_reward):
    prompt, endless = build_prompt("\\sum_{k=1}^{n} k^2"), "\\boxed{\\sum_{k=1}^{99999999} k^{k}}"
    assert math_reward(build_prompt("1"), build_response("1")).correct
    with ThreadPoolExecutor() as threads:
        result = threads.submit(math_reward, prompt, build_response(endless)).result(timeout=60)
    assert (result.reward, result.details) == (0.0, {"format": 0.0, "timeout": 1.0})
    assert math_reward(build_prompt("72"), build_response("72")).correct, "the next response is scored again"


EVALUATED = (
    *("countdown", "puzzle24", "simple_integration", "polynomial_multiplication", "spiral_matrix", "n_queens"),
    *("intermediate_integration", "binary_matrix", "string_insertion", "chain_sum"),
)


def build_gym_prompt(task: str, seed: int = 3):
    entry = reasoning_gym.create_dataset(task, seed=seed, size=1)[0]
    return build_prompt(entry["answer"] or "", reasoning_gym={"task": task, "entry": entry})


@pytest.mark.parametrize("task", EVALUATED)
def test_reasoning_gyms_own_answers_are_correct_others_are_not_and_code_in_one_does_not_run(gym_reward, task, tmp_path):
    prompt, target = build_gym_prompt(task), tmp_path / "ran"
    right = gym_reward(prompt, build_response(f" {prompt.answer}\n"))
    assert not prompt.answer or (right.reward, right.correct) == (1.0, True)
    for text in (
        "banana",
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"[open({str(target)!r}, 'w')]",
        f"Symbol('x').__class__.__base__.__subclasses__() or lambdify(1, 'open({str(target)!r}, \"w\")')()",
        f'S(\'open("{target}", "w")\')',
    ):
        wrong = gym_reward(prompt, build_response(text))
        assert wrong.reward < 0.5
        assert not wrong.correct
        assert right.details.keys() == wrong.details.keys()
    assert not target.exists()


def test_every_scorer_that_calls_eval_on_an_answer_is_known():
    """A new version of reasoning-gym with another eval() in a scorer fails here."""
    found = set()
    for dataset, _ in DATASETS.values():
        module = sys.modules[dataset.__module__]
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                names = {getattr(node.func, "id", None) for node in ast.walk(function) if isinstance(node, ast.Call)}
                found |= {module.__name__.rsplit(".", 1)[-1]} if {"eval", "exec"} & names else set()
    # number_sorting evaluates the task's own answer, never the model's.
    assert found - {"number_sorting"} == SCORERS_WITH_EVAL


BEYOND = [
    *("Symbol ('x').__class__", "lambdify (Integer (1 ),'1')", "Function ('open')('/etc/passwd')", "(lambda :1 )()"),
    *("[Symbol ('x')for x in ()]", "'text'", "S ('1')", "Symbol ('x')[Integer (0 )]", "f'{1}'", "1 +"),
]


@pytest.mark.parametrize("source", BEYOND)
def test_source_beyond_mathematics_is_refused(source):
    with pytest.raises(ValueError, match=r"not |part of an answer"):
        check_source(source)


def test_a_prompt_of_another_source_is_an_error_that_names_it(gym_reward):
    with pytest.raises(ValueError, match=r"prompt 'p1'.*data=reasoning_gym"):
        gym_reward(build_prompt("1"), build_response("1"))
