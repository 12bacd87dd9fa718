"""The verifier code: programs of responses against tests."""

import asyncio
import json

import pytest
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.schema.task import CodeRewardConfig
from megarl.task.reward import RewardFailedError
from megarl.task.sandbox import CodeReward, find_code
from megarl.task.scorer import build_scorer

PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])


def fence(source, language="python"):
    return f"Here it is:\n```{language}\n{source}\n```\nDone."


ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("tests", "source", "passed"),
    [
        # Pairs of input and output are compared line by line.
        (PAIRS, "print(sum(map(int, input().split())))", 1.0),
        (PAIRS, "print(sum(map(int, input().split())), '  \\n')", 1.0),
        (PAIRS, "print(3)", 0.5),
        (PAIRS, "print(1 + int(input().split()[1]))", 0.5),
        (PAIRS, "print('3'); print(1 / 0)", 0.0),
        (PAIRS, "import sys; print(3); sys.exit(1)", 0.0),
        (PAIRS, "syntax error", 0.0),
        # Statements pass where they are reached and raise nothing.
        (ASSERTS, ADD, 1.0),
        (ASSERTS, f"{ADD}\nif __name__ == '__main__':\n    raise SystemExit", 1.0),
        (ASSERTS, "def add(a, b):\n    return 0", 0.5),
        (ASSERTS, "def add(a, b):\n    return a +", 0.0),
        (ASSERTS, "raise SystemExit(0)", 0.0),
        (ASSERTS, "import os\nos._exit(0)", 0.0),
        (ASSERTS, "def add(a, b):\n    import sys\n    sys.exit(0)", 0.0),
        (ASSERTS, "print('passed 0'); print('passed 1'); print(0); print(1)", 0.0),
        (ASSERTS, f"import os\nos.close(1)\n{ADD}", 0.0),
    ],
)
def test_a_program_is_scored_by_the_tests_that_it_passes_or_with_partial_by_all(tests, source, passed):
    for partial in (True, False):
        config = CodeRewardConfig(timeout_s=20.0, num_workers=1, partial=partial)
        score = CodeReward(config).run_tests(build_prompt(tests), fence(source))
        assert (score.reward, score.correct) == (passed if partial else float(passed == 1), passed == 1)
        if partial:
            assert score.details == {"block": 1.0, "passed": passed, "timeout": 0.0}


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
