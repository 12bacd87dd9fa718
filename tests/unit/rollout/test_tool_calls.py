"""Tool calls read by SGLang's own parsers, which one process imports for all of these tests (some seconds)."""

import json
from typing import Any

import pytest
from test_published_templates import build_tokenizer

from megarl.rollout.conversation import load_parser
from megarl.task.environments import describe_tool
from megarl.task.process import FunctionProcess

CALL = '{"name": "calculator", "arguments": {"expression": "2*3"}}'
HERMES = f"<tool_call>{CALL}</tool_call>"
PYTHONIC = '[calculator(expression="2*3")]'
READ = ["calculator", {"expression": "2*3"}]
CASES: dict[str, tuple[tuple[Any, ...], Any]] = {
    # (parser, chat template, added tokens, text) -> (name of the parser, calls, number of malformed ones)
    "two calls": (("hermes", None, [], f"So: {HERMES}\n{HERMES}<|im_end|>"), ("hermes", [READ, READ], 0)),
    "two pythonic calls": (
        ("pythonic", None, [], f"{PYTHONIC[:-1]}, {PYTHONIC[1:]}<|im_end|>"),
        ("pythonic", [READ, READ], 0),
    ),
    "llama3": (("llama3", None, [], CALL.replace("arguments", "parameters")), ("llama3", [READ], 0)),
    "no call": (("hermes", None, [], "The answer is 6."), ("hermes", [], 0)),
    "nothing": (("pythonic", None, [], ""), ("pythonic", [], 0)),
    "unknown tool": (("pythonic", None, [], "[calc(x=1)]"), ("pythonic", [["calc", {"x": 1}]], 0)),
    "cut off": (("hermes", None, [], '<tool_call>{"name": "calcul'), ("hermes", [], 1)),
    "no object": (("hermes", None, [], "<tool_call>3</tool_call>"), ("hermes", [], 1)),
    "one of two": (
        ("qwen25", None, [], f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n6}}\n</tool_call>"),
        ("qwen25", [READ], 1),
    ),
}
PUBLISHED = {
    "glm4moe": (
        "glm45",
        "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2*3</arg_value>\n</tool_call>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
        '{"expression": "2*3"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
    ),
    "llama3_1": ("llama3", '{"name": "calculator", "parameters": {"expression": "2*3"}}'),
    "qwen2_5": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
    "qwen3": ("qwen", f"<think>\n{HERMES}?\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>"),
}
"""By the published template that writes such a call: the parser that is found for it"""
for name, (parser, text) in PUBLISHED.items():
    tokenizer = build_tokenizer(name)
    given = (None, tokenizer.chat_template, sorted(tokenizer.get_added_vocab()), text)
    CASES[f"published {name}"] = (given, (parser, [READ], 0))


def read_all(cases: list[list[Any]]) -> list[Any]:
    """What each case (parser, template, tokens, text) is read as; an error's text where it raises ValueError."""
    tools = [describe_tool("megarl.examples.toys.calculator:calculator")]
    found: list[Any] = []
    for parser, template, tokens, text in cases:
        try:
            found.append(load_parser(parser, template, tokens)(text, tools))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    cases = [*(case for case, _ in CASES.values()), ("hermess", None, [], ""), (None, "{{ x }}", [], "")]
    process = FunctionProcess("test_tool_calls:read_all", timeout_s=300.0, memory_gb=8.0)
    found = process.call({"cases": cases})
    process.close()
    return dict(zip([*CASES, "wrong name", "unknown template"], found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_sglangs_parser_reads_the_calls(case: str, answers: dict[str, Any]) -> None:
    found = answers[case]
    calls = [[name, json.loads(arguments)] for name, arguments in found["calls"]]
    assert (found["parser"], calls, found["num_malformed"]) == CASES[case][1]


def test_a_parser_that_cannot_be_told_is_asked_for(answers: dict[str, Any]) -> None:
    assert answers["wrong name"].startswith("found 'hermess'; it must be one of SGLang's parsers: ")
    assert "found null, and the chat template does not tell it" in answers["unknown template"]
