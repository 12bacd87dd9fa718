"""Tools in their processes: descriptions, results, and what a tool or a call does wrong."""

import json
from collections.abc import Iterator

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema.environment import ToolsEnvironmentConfig
from megarl.task.tools import Toolbox, describe_tool

NAMES = ("echo", "fail", "hang", "fill", "die", "wait", "list_modules")


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    own = [f"toolbox_cases:{name}" for name in NAMES]
    config = ToolsEnvironmentConfig(
        tools=["calculator", "python", *own], num_processes=1, call_timeout_s=1.0, memory_gb=0.5, result_length=20
    )
    made = Toolbox(config)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("calculator", {"expression": "347 * 892"}, "309524"),
        ("echo", {"text": "ab", "times": 2}, "abab"),
        ("echo", {"text": "é"}, "é"),
        ("wait", {"seconds": 0.5}, '{"waited": 0.5}'),
        ("echo", {"text": "x", "times": 25}, "x" * 20 + "\n... (5 more characters)"),
    ],
)
def test_a_call_is_answered_with_the_tools_result(
    toolbox: Toolbox, name: str, arguments: object, expected: str
) -> None:
    result = toolbox.call(name, json.dumps(arguments))
    assert (result.text, result.failed) == (expected, False)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("calculator", '{"expression": "1 / 0"}', "error: calculator: ZeroDivisionError: division by zero"),
        ("fail", '{"reason": "no"}', "error: fail: ValueError: no"),
        ("hang", "{}", "error: hang: it took longer than 1 s"),
        ("fill", "{}", "error: fill: it needed more than 0.5 GiB of memory"),
        ("die", "{}", "error: die: its process ended"),
        ("calculate", "{}", "error: there is no tool 'calculate'; there is calculator, python, echo, fail, hang,"),
        ("calculator", '{"expression": 3}', "error: calculator: wrong arguments: 3 is not of type 'string'"),
        ("calculator", "{}", "error: calculator: wrong arguments: 'expression' is a required property"),
        ("calculator", '{"expression": "1", "x": 2}', "error: calculator: TypeError: "),
        ("calculator", "[1]", "error: calculator: wrong arguments: [1] is not of type 'object'"),
        ("calculator", '{"expression": ', "error: calculator: the arguments are not JSON: "),
        ("calculator", "[" * 100_000, "error: calculator: the arguments are not JSON: nested too deeply"),
    ],
)
def test_what_goes_wrong_is_said_to_the_policy(toolbox: Toolbox, name: str, arguments: str, expected: str) -> None:
    result = toolbox.call(name, arguments)
    assert result.failed
    assert result.text.startswith(expected)
    # The next call is answered, whatever the last one did to its process.
    assert toolbox.call("echo", '{"text": "next"}').text == "next"


def test_the_processes_of_light_tools_import_no_torch(toolbox: Toolbox) -> None:
    config = ToolsEnvironmentConfig(tools=["toolbox_cases:list_modules"], num_processes=1, result_length=10**6)
    box = Toolbox(config)
    modules = box.call("list_modules", "{}").text
    box.close()
    assert '"json"' in modules
    assert '"torch"' not in modules


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    function = describe_tool("toolbox_cases:echo")["function"]
    assert (function["name"], function["description"]) == ("echo", "Repeat a text.")
    assert function["parameters"]["properties"] == {
        "text": {"type": "string", "description": "What is repeated."},
        "times": {"type": "integer", "description": "How often."},
    }
    assert function["parameters"]["required"] == ["text"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "found none"),
        (["calculater"], "found 'calculater'; it must be one of calculator, python or a function of your own"),
        (["no_such_module:tool"], "importing no_such_module failed"),
        (["toolbox_cases:missing"], "toolbox_cases has no missing"),
        (["toolbox_cases:NUMBER"], "of type int; a function was expected"),
        (["toolbox_cases:undescribed"], "toolbox_cases:undescribed cannot be described"),
        (["calculator", "calculator"], "two tools have the same name"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_before_anything_starts(tools: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tools: .*" + message.replace("'", ".")):
        Toolbox(ToolsEnvironmentConfig(tools=tools))


def test_a_python_program_runs_in_the_sandbox(toolbox: Toolbox) -> None:
    config = ToolsEnvironmentConfig(tools=["python"], num_processes=1, call_timeout_s=100.0)
    box = Toolbox(config)
    assert box.call("python", json.dumps({"code": "print(6 * 7)"})).text == "42\n"
    assert box.call("python", json.dumps({"code": "print(1)\n1 / 0"})).text == (
        "1\nerror: ZeroDivisionError: division by zero"
    )
    box.close()
