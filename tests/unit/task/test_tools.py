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
from megarl.task.environments import build_tool_prompt
from megarl.task.problems import ask
from megarl.task.render import Renderer
from megarl.task.tools import FoundCalls, Toolbox, ToolPrompt, ToolsEnvironment, describe_tool
from megarl.types import FinishReason, Message

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


@pytest.fixture(scope="module")
def calculator_toolbox() -> Iterator[Toolbox]:
    made = Toolbox(ToolsEnvironmentConfig(num_processes=1))
    yield made
    made.close()


def ask_calculator(text: str) -> tuple[str, str]:
    return "calculator", f'{{"expression": "{text}"}}'


def play(calculator_toolbox: Toolbox, *actions: FoundCalls, finish: FinishReason = FinishReason.stop, **keys: object):
    """The steps of an episode whose actions have these calls."""
    config = ToolsEnvironmentConfig(**keys)  # type: ignore[arg-type]
    prompt = ToolPrompt(calculator_toolbox.schemas, None)
    environment = ToolsEnvironment(config, calculator_toolbox, prompt, lambda text: actions[int(text)])
    return [environment.step(Action("", str(turn), (1,), turn, finish)) for turn in range(len(actions))]


def test_each_call_of_an_action_is_answered_in_order(calculator_toolbox: Toolbox) -> None:
    (step,) = play(
        calculator_toolbox, FoundCalls((ask_calculator("2*3"), ask_calculator("1/0"), ask_calculator("2+3")))
    )
    assert not step.done
    assert step.observation == (
        Message("tool", "6"),
        Message("tool", "error: calculator: ZeroDivisionError: division by zero"),
        Message("tool", "5"),
    )
    assert step.details == {"tool_calls": 3.0, "tool_errors": 1.0}


def test_malformed_calls_and_calls_beyond_the_limit_are_answered_with_an_error(calculator_toolbox: Toolbox) -> None:
    (step,) = play(
        calculator_toolbox,
        FoundCalls((ask_calculator("1"), ask_calculator("2"), ask_calculator("3")), num_malformed=1),
        max_calls=1,
    )
    assert [message.content.partition(";")[0] for message in step.observation] == [
        "1",
        "error: 2 calls were not run",
        "error: 1 of the calls could not be read",
    ]
    assert step.details == {"tool_calls": 4.0, "tool_errors": 3.0}


def test_an_action_that_a_limit_cut_is_not_answered(calculator_toolbox: Toolbox) -> None:
    (step,) = play(calculator_toolbox, FoundCalls((ask_calculator("1"),)), finish=FinishReason.length)
    assert step.done
    assert step.details == {"tool_calls": 0.0, "tool_errors": 0.0}


def test_the_reward_of_a_call_is_given_once_and_for_calls_without_errors_only(calculator_toolbox: Toolbox) -> None:
    good, bad = FoundCalls((ask_calculator("1"),)), FoundCalls((ask_calculator("1"), ask_calculator("x")))
    steps = play(calculator_toolbox, bad, good, good, FoundCalls(()), call_reward=0.25)
    assert [step.reward for step in steps] == [0.0, 0.25, 0.0, 0.0]
    assert all(step.reward == 0.0 for step in play(calculator_toolbox, good, good))


IGNORANT = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
REFUSING = (
    """
{%- if tools %}{{ raise_exception('no tools') }}{% endif %}"""
    + IGNORANT
)
FORGETFUL = """
{%- if tools %}[system]{{ tools[0].function.name }}[end]{% endif %}
{%- for m in messages if m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def build(template, data=None, **keys):
    """(renderer, tool prompt) of a byte tokenizer with this template."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    data = data or DataConfig()
    prompt = build_tool_prompt(ToolsEnvironmentConfig(**keys), data, tokenizer)
    assert prompt is not None
    return Renderer(data, tokenizer, prompt), prompt


def encode(renderer: Renderer, prompt: ToolPrompt, *results: str) -> str:
    """The text of the observation that gives these results."""
    encoder = ObservationEncoder(renderer)
    return encoder.decode(encoder.encode(prompt.answer(results), 0))


def test_a_template_that_knows_tools_describes_them() -> None:
    renderer, prompt = build(QWEN)
    assert prompt.text is None
    assert renderer.render(ask("2*3?", "6")) == "[system]calculator(expression)[end][user]2*3?[end][assistant]"
    with_system, _ = build(QWEN, DataConfig(system="Be brief."))
    assert with_system.render(ask("2*3?", "6")).startswith("[system]Be brief. calculator(expression)[end][user]")


@pytest.mark.parametrize("template", [IGNORANT, REFUSING, FORGETFUL])
def test_a_template_without_tools_gets_a_text_in_the_system_message_and_results_from_the_user(template: str) -> None:
    renderer, prompt = build(template)
    text = renderer.render(ask("2*3?", "6"))
    assert text.startswith("[system]You may call these functions")
    assert '"name": "calculator"' in text
    assert "between <tool_call> and </tool_call>" in text
    assert text.endswith("[end][user]2*3?[end][assistant]")
    assert encode(renderer, prompt, "6", "7") == "[end][user]6\n7[end][assistant]"


def test_a_description_of_your_own_replaces_the_templates() -> None:
    renderer, prompt = build(QWEN, description="Write [calculator(...)].")
    assert renderer.render(ask("2*3?", "6")) == "[system]Write [calculator(...)].[end][user]2*3?[end][assistant]"
    assert encode(renderer, prompt, "6") == "[end][user]6[end][assistant]"
    with_system, _ = build(QWEN, DataConfig(system="Be brief."), description="Tools: {tools}")
    assert with_system.render(ask("2*3?", "6")).startswith('[system]Be brief.\n\nTools: {"type": "function", ')
