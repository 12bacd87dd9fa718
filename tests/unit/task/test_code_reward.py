"""The verifier code: programs of responses against tests."""

import asyncio
import contextlib
import json

import pytest
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.schema.task import CodeRewardConfig
from megarl.task.reward import CodeReward, RewardFailedError, find_code
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
        (PAIRS, "print(sum(map(int, input().split())), '  \\n')", 1.0),
        (PAIRS, "print(1 + int(input().split()[1]))", 0.5),
        (PAIRS, "print('3'); print(1 / 0)", 0.0),
        (PAIRS, "import sys; print(3); sys.exit(1)", 0.0),
        (PAIRS, "syntax error", 0.0),
        (PAIRS, "while True: pass", 0.0),
        # Statements pass where they are reached and raise nothing.
        (ASSERTS, f"{ADD}\nif __name__ == '__main__':\n    raise SystemExit", 1.0),
        (ASSERTS, "def add(a, b):\n    return 0", 0.5),
        (ASSERTS, "raise SystemExit(0)", 0.0),
        (ASSERTS, "import os\nos._exit(0)", 0.0),
        (ASSERTS, "def add(a, b):\n    import sys\n    sys.exit(0)", 0.0),
        (ASSERTS, "print('passed 0'); print('passed 1'); print(0); print(1)", 0.0),
        (ASSERTS, f"import os\nos.close(1)\n{ADD}", 0.0),
    ],
)
def test_a_program_is_scored_by_the_tests_that_it_passes_or_with_partial_by_all(tests, source, passed):
    hangs = "while" in source
    for partial in (True, False):
        config = CodeRewardConfig(timeout_s=1.0 if hangs else 20.0, num_workers=1, partial=partial)
        score = CodeReward(config).run_tests(build_prompt(tests), fence(source))
        assert (score.reward, score.correct) == (passed if partial else float(passed == 1), passed == 1)
        if partial:
            assert score.details == {"block": 1.0, "passed": passed, "timeout": float(hangs)}


BLOCKS = {
    **{fence("a", language): "a\n" for language in ("python", "", "Python3")},
    fence("a") + fence("b"): "b\n",
    **dict.fromkeys((fence("a") + fence("output", "text"), fence("a") + "```python\nb", "~~~py\na\n~~~"), "a\n"),
    "````python\n```\n````\n": "```\n",
    **dict.fromkeys(("```python\na", "no code")),
}


@pytest.mark.parametrize(("text", "code"), BLOCKS.items())
def test_the_last_closed_block_of_python_counts(text, code):
    assert find_code(text) == code


def test_a_prompt_without_tests_is_found_before_the_run():
    with contextlib.closing(build_scorer(CodeRewardConfig())) as scorer:
        for answer, reason in {
            **dict.fromkeys(("Paris", "[]"), "it has no tests"),
            "{": "Expecting property name",
            '{"inputs": ["1"], "outputs": []}': "1 inputs and 0 outputs",
            "[1]": "a text was expected",
        }.items():
            with pytest.raises(ConfigError, match=rf"reward=\.\.\. with data=\.\.\..*prompt 'p1'.*{reason}"):
                scorer.check([build_prompt(answer)])


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
