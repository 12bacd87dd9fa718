"""Tools in the prompt: by the chat template, or by a text where it knows none; and the results of calls.

The templates are written for these tests after the structure of real ones: Qwen's puts all tool messages in a row into
one user's message, Llama 3.1's gives each the role ipython, and SmolLM2's takes any role but ignores `tools`.
"""

import pytest
from data_cases import QWEN, build_byte_tokenizer

from megarl.config.schema.data import DataConfig
from megarl.config.schema.environment import SingleTurnEnvironmentConfig, ToolsEnvironmentConfig
from megarl.rollout.conversation import ObservationEncoder
from megarl.task.environments import build_tool_prompt
from megarl.task.problems import ask
from megarl.task.render import Renderer
from megarl.task.tools import ToolPrompt
from megarl.types import Message

LLAMA = """
{%- for m in messages %}
{%- if loop.first %}[system]{{ m.content if m.role == 'system' }}{{ tools | tojson if tools }}[end]{% endif %}
{%- if m.role == 'tool' %}[ipython]{{ m.content | tojson }}[end]
{%- elif m.role != 'system' %}[{{ m.role }}]{{ m.content }}[end]{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
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


def test_results_go_back_as_the_template_writes_messages_of_role_tool() -> None:
    assert encode(*build(QWEN), "6") == "[end][user](6)[end][assistant]"
    assert encode(*build(QWEN), "6", "7") == "[end][user](6)(7)[end][assistant]"
    assert encode(*build(LLAMA), "6", "7") == '[end][ipython]"6"[end][ipython]"7"[end][assistant]'


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


def test_without_a_chat_template_the_description_stands_before_the_question() -> None:
    renderer, prompt = build(QWEN, DataConfig(chat_template=False), description="Call them.")
    assert renderer.render(ask("2*3?", "6")) == "Call them.\n\n2*3?"
    assert prompt.answer(["6"]) == (Message("user", "6"),)


def test_other_environments_have_no_tools_in_the_prompt() -> None:
    tokenizer = build_byte_tokenizer()
    assert build_tool_prompt(SingleTurnEnvironmentConfig(), DataConfig(), tokenizer) is None
