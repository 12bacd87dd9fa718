"""Tools: described, called in processes with limits, in the prompt, and as an environment.

The chat templates are written for these tests after the structure of real ones: Qwen's puts all tool messages in a row
into one user's message, Llama 3.1's gives each the role ipython, and SmolLM2's takes any role but ignores `tools`.
"""

import json
from collections.abc import Iterator

import pytest
from data_cases import QWEN, build_byte_tokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig, ToolsEnvironmentConfig
from megarl.environment import Action
from megarl.rollout.conversation import ObservationEncoder
from megarl.task.data import ask
from megarl.task.environments import FoundCalls, Toolbox, ToolPrompt, ToolsEnvironment, build_tool_prompt, describe_tool
from megarl.task.render import Renderer
from megarl.types import FinishReason

OWN = [f"toolbox_cases:{name}" for name in ("echo", "fail", "hang", "fill", "die", "wait")]
LIMITS = {"call_timeout_s": 1.0, "memory_gb": 0.5, "result_length": 20}


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    made = Toolbox(ToolsEnvironmentConfig(tools=["calculator", *OWN], num_processes=1, **LIMITS))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("calculator", {"expression": "347 * 892"}, "309524"),
        ("echo", {"text": "ab", "times": 2}, "abab"),
        ("wait", {"seconds": 0.5}, '{"waited": 0.5}'),
        ("echo", {"text": "x", "times": 25}, "x" * 20 + "\n... (5 more characters)"),
        ("calculator", {"expression": "1 / 0"}, "error: calculator: ZeroDivisionError: division by zero"),
        ("fail", {"reason": "no"}, "error: fail: ValueError: no"),
        ("hang", {}, "error: hang: it took longer than 1 s"),
        ("fill", {}, "error: fill: it needed more than 0.5 GiB of memory"),
        ("die", {}, "error: die: its process ended"),
        ("calculate", {}, "error: there is no tool 'calculate'; there is calculator, echo, fail, hang,"),
        ("calculator", {"expression": 3}, "error: calculator: wrong arguments: 3 is not of type 'string'"),
        ("calculator", {"expression": "1", "x": 2}, "error: calculator: TypeError: "),
        ("calculator", [1], "error: calculator: wrong arguments: [1] is not of type 'object'"),
        ("calculator", '{"expression": ', "error: calculator: the arguments are not JSON: "),
        ("calculator", "[" * 100_000, "error: calculator: the arguments are not JSON: nested too deeply"),
    ],
)
def test_a_call_is_answered_with_the_result_or_with_what_went_wrong(toolbox, name, arguments, expected) -> None:
    result = toolbox.call(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
    assert result.failed == expected.startswith("error")
    assert result.text.startswith(expected) if result.failed else result.text == expected
    # The next call is answered, whatever the last one did to its process.
    assert toolbox.call("echo", '{"text": "next"}').text == "next"


def test_a_python_program_runs_in_the_sandbox() -> None:
    box = Toolbox(ToolsEnvironmentConfig(tools=["python"], num_processes=1, call_timeout_s=100.0))
    text = box.call("python", json.dumps({"code": "print(6 * 7)\n1 / 0"})).text
    assert text == "42\nerror: ZeroDivisionError: division by zero"
    box.close()


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    function = describe_tool("toolbox_cases:echo")["function"]
    assert (function["name"], function["description"]) == ("echo", "Repeat a text.")
    assert function["parameters"]["properties"] == {
        "text": {"type": "string", "description": "What is repeated."},
        "times": {"type": "integer", "description": "How often."},
    }
    assert function["parameters"]["required"] == ["text"]


def test_tools_that_cannot_be_used_are_refused_before_anything_starts() -> None:
    for tools, message in (
        ([], "found none"),
        (["calculater"], "found .calculater.; it must be one of calculator, python or a function of your own"),
        (["no_such_module:tool"], "importing no_such_module failed"),
        (["toolbox_cases:NUMBER"], "a int; a callable was expected"),
        (["toolbox_cases:undescribed"], "toolbox_cases:undescribed cannot be described"),
        (["calculator", "calculator"], "two tools have the same name"),
    ):
        with pytest.raises(ConfigError, match=r"environment\.tools: .*" + message):
            Toolbox(ToolsEnvironmentConfig(tools=tools))


def build_calls(*texts: str, num_malformed: int = 0) -> FoundCalls:
    return FoundCalls(tuple(("calculator", f'{{"expression": "{text}"}}') for text in texts), num_malformed)


ZERO = "error: calculator: ZeroDivisionError: division by zero"
CUT, BAD = "error: 2 calls were not run", "error: 1 of the calls could not be read"
GOOD, WRONG, FINAL = build_calls("1"), build_calls("1", "x"), FoundCalls(())
X = "error: calculator: ValueError: 'x' cannot be calculated"


@pytest.mark.parametrize(
    ("actions", "config", "finish", "expected"),
    [
        ([build_calls("2*3", "1/0", "2+3")], {}, "stop", [(["6", ZERO, "5"], 3, 1, 0)]),
        ([build_calls("1", "2", "3", num_malformed=1)], {"max_calls": 1}, "stop", [(["1", CUT, BAD], 4, 3, 0)]),
        ([GOOD], {}, "length", [(None, 0, 0, 0)]),
        # The reward is given once, and for calls without errors alone.
        (
            [WRONG, GOOD, GOOD, FINAL], {"call_reward": 0.25}, "stop",
            [(["1", X], 2, 1, 0), (["1"], 1, 0, 0.25), (["1"], 1, 0, 0), (None, 0, 0, 0)],
        ),
        ([GOOD, GOOD], {}, "stop", [(["1"], 1, 0, 0)] * 2),
    ],
)  # fmt: skip
def test_the_calls_of_an_action_are_answered_in_order_and_one_without_calls_is_final(
    toolbox, actions, config, finish, expected
):
    environment = ToolsEnvironment(
        ToolsEnvironmentConfig(**config), toolbox, ToolPrompt(toolbox.schemas, None), lambda text: actions[int(text)]
    )
    for turn, (texts, num_calls, num_errors, reward) in enumerate(expected):
        step = environment.step(Action("", str(turn), (1,), turn, FinishReason[finish]))
        assert (step.done, step.reward) == (texts is None, reward)
        assert step.details == {"tool_calls": num_calls, "tool_errors": num_errors}
        if texts is not None:
            assert [(m.role, m.content.partition(";")[0]) for m in step.observation] == [("tool", it) for it in texts]


IGNORANT = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
REFUSING = "{%- if tools %}{{ raise_exception('no tools') }}{% endif %}" + IGNORANT
FORGETFUL = """
{%- if tools %}[system]{{ tools[0].function.name }}[end]{% endif %}
{%- for m in messages if m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
ALTERNATING = (
    "{% if messages | selectattr('role', 'eq', 'tool') | list | length > 1 %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + QWEN
)
"""As Ministral 3's, which takes a result behind calls alone"""
ASKED = "[end][user]2*3?[end][assistant]"


@pytest.mark.parametrize(
    ("template", "system", "description", "begin"),
    [
        (QWEN, None, None, f"[system]calculator(expression){ASKED}"),
        (QWEN, "Be brief.", None, "[system]Be brief. calculator(expression)[end]"),
        *[
            (template, None, None, "[system]You may call these functions")
            for template in (IGNORANT, REFUSING, FORGETFUL, ALTERNATING)
        ],
        (QWEN, None, "Say it.", f"[system]Say it.{ASKED}"),
        (QWEN, "Be brief.", "Tools: {tools}", '[system]Be brief.\n\nTools: {"type": "function", '),
    ],
)
def test_the_template_describes_the_tools_or_a_text_in_the_system_message(template, system, description, begin):
    """Their results are messages of role tool in the first case, and of the user in the second."""
    tokenizer, data = build_byte_tokenizer(), DataConfig(system=system)
    tokenizer.chat_template = template
    keys = {} if description is None else {"description": description}
    prompt = build_tool_prompt(ToolsEnvironmentConfig(**keys), data, tokenizer)
    assert prompt is not None
    renderer = Renderer(data, tokenizer, prompt)
    text = renderer.render(ask("2*3?", "6"))
    assert text.startswith(begin)
    assert text.endswith(ASKED)
    if "You may" in begin:
        assert '"name": "calculator"' in text
        assert "between <tool_call> and </tool_call>" in text
    assert (prompt.text is None) == ("calculator(" in begin)
    if prompt.text is not None:
        encoder = ObservationEncoder(renderer)
        assert encoder.decode(encoder.encode(prompt.answer(["6", "7"]), 0)) == "[end][user]6\n7[end][assistant]"
