"""The verifier code: programs of responses against tests."""

import asyncio
import json

import pytest
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.schema.task import CodeRewardConfig
from megarl.task.code import CodeReward, find_code
from megarl.task.reward import RewardFailedError
from megarl.task.scorer import build_scorer

PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])


@pytest.fixture(scope="module")
def reward():
    return CodeReward(CodeRewardConfig(timeout_s=20.0, num_workers=1))


@pytest.fixture(scope="module")
def partial():
    return CodeReward(CodeRewardConfig(timeout_s=20.0, num_workers=1, partial=True))


def fence(source, language="python"):
    return f"Here it is:\n```{language}\n{source}\n```\nDone."


@pytest.mark.parametrize(
    ("source", "passed"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(sum(map(int, input().split())), '  \\n')", 1.0),
        ("print(3)", 0.5),
        ("print(1 + int(input().split()[1]))", 0.5),
        ("print('3'); print(1 / 0)", 0.0),
        ("import sys; print(3); sys.exit(1)", 0.0),
        ("syntax error", 0.0),
    ],
)
def test_pairs_of_input_and_output_are_compared_line_by_line(partial, source, passed):
    score = partial.run_tests(build_prompt(PAIRS), fence(source))
    assert (score.reward, score.correct) == (passed, passed == 1)
    assert score.details == {"block": 1.0, "passed": passed, "timeout": 0.0}


@pytest.mark.parametrize(
    ("source", "passed"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    raise SystemExit", 1.0),
        ("def add(a, b):\n    return 0", 0.5),
        ("def add(a, b):\n    return a +", 0.0),
        ("raise SystemExit(0)", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("def add(a, b):\n    import sys\n    sys.exit(0)", 0.0),
        ("print('passed 0'); print('passed 1'); print(0); print(1)", 0.0),
        ("import os\nos.close(1)\ndef add(a, b):\n    return a + b", 0.0),
    ],
)
def test_statements_pass_where_they_are_reached_and_raise_nothing(partial, source, passed):
    assert partial.run_tests(build_prompt(ASSERTS), fence(source)).reward == passed


def test_without_partial_all_tests_must_pass(reward):
    scores = [
        reward.run_tests(build_prompt(PAIRS), fence(source))
        for source in ("print(3)", "a, b = input().split(); print(int(a) + int(b))")
    ]
    assert [(score.reward, score.correct) for score in scores] == [(0.0, False), (1.0, True)]


def test_a_program_that_does_not_end_fails_its_tests():
    score = CodeReward(CodeRewardConfig(timeout_s=1.0)).run_tests(build_prompt(PAIRS), fence("while True: pass"))
    assert (score.reward, score.details["timeout"], score.failure) == (0.0, 1.0, None)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (fence("a"), "a\n"),
        (fence("a", ""), "a\n"),
        (fence("a", "Python3"), "a\n"),
        (fence("a") + fence("b"), "b\n"),
        (fence("a") + fence("output", "text"), "a\n"),
        ("```python\na", None),
        (fence("a") + "```python\nb", "a\n"),
        ("````python\n```\n````\n", "```\n"),
        ("~~~py\na\n~~~", "a\n"),
        ("no code", None),
    ],
)
def test_the_last_closed_block_of_python_counts(text, code):
    assert find_code(text) == code


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("Paris", "it has no tests"),
        ("[]", "it has no tests"),
        ("{", "Expecting property name"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        ("[1]", "a text was expected"),
    ],
)
def test_a_prompt_without_tests_is_found_before_the_run(answer, reason):
    scorer = build_scorer(CodeRewardConfig())
    with pytest.raises(ConfigError, match=rf"reward=\.\.\. with data=\.\.\..*prompt 'p1'.*{reason}"):
        scorer.check([build_prompt(answer)])
    scorer.close()


def test_closing_ends_the_programs_that_run():
    reward = CodeReward(CodeRewardConfig(timeout_s=600.0, num_workers=1))

    async def run():
        task = asyncio.create_task(reward.score(build_prompt(PAIRS), build_response(fence("while True: pass"))))
        while not reward._running:
            await asyncio.sleep(0.01)
        reward.close()
        with pytest.raises(RewardFailedError):
            await asyncio.wait_for(task, 60)

    asyncio.run(run())
