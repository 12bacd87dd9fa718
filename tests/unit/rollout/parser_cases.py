"""Runs in a process of its own, for test_tool_calls: SGLang's parsers, imported once."""

from typing import Any

from megarl.rollout.conversation import load_parser
from megarl.task.tools import describe_tool


def read_all(cases: list[list[Any]]) -> list[Any]:
    """What each case (parser, template, tokens, text) is read as; an error's text where it raises ValueError."""
    tools = [describe_tool("megarl.examples.toys.calculator:calculator")]
    answers: list[Any] = []
    for parser, template, tokens, text in cases:
        try:
            answers.append(load_parser(tools, parser, template, tokens)(text))
        except ValueError as error:
            answers.append(str(error))
    return answers
