"""SGLang's parsers of reasoning and of tool calls, as a function in a process of its own.

Importing them takes seconds and stand-ins on the path, and some search with expressions that can take exponentially
long on what a model writes.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megarl.rollout.server import STANDINS

Answer = dict[str, Any]


def load_parser(
    tools: Sequence[Mapping[str, Any]], parser: str | None, template: str | None, tokens: list[str]
) -> Callable[..., Answer]:
    """The function text -> {"parser", "calls": [[name, arguments as JSON], ...], "num_malformed"}.

    tools: their schemas. parser: SGLang's name; None: as `find_parser` finds it for the chat template `template` and
    the tokenizer's added `tokens`. Raises ValueError for a parser that SGLang does not have, or where none is found.
    """
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "true"  # A call of an unknown tool is answered, too.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # This process sees no GPU.
    sys.path.insert(0, str(STANDINS))
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from sglang.srt.parser.template_detection import detect_reasoning_parser, detect_reasoning_pattern

    vocabulary = SimpleNamespace(get_vocab=lambda: dict.fromkeys(tokens, 0))
    forced, toggle = detect_reasoning_pattern(template)
    reasoning = detect_reasoning_parser(template, vocabulary, toggle, forced)
    name = parser or find_parser(template, vocabulary, forced, toggle)
    known = FunctionCallParser.ToolCallParserEnum
    if name not in known:
        found = f"found {name!r}; it must be" if name else "found null, and the chat template does not tell it; name"
        raise ValueError(f"{found} one of SGLang's parsers: {', '.join(sorted(known))}")
    described = [Tool.model_validate(tool) for tool in tools]

    def read(text: str) -> Answer:
        if reasoning is not None:
            _, text = ReasoningParser(reasoning, stream_reasoning=False).parse_non_stream(text)
        found = FunctionCallParser(described, name)
        calls: list[list[str]] = []
        num_malformed = 0
        if text and found.has_tool_call(text):
            parsed = found.parse_non_stream(text)[1]
            calls = [[call.name, call.parameters] for call in parsed if call.name]
            num_begun = max(len(parsed), count_markers(text, found.detector.bot_token))
            num_malformed = num_begun - len(calls)
        return {"parser": name, "calls": calls, "num_malformed": num_malformed}

    return read


def find_parser(template: str | None, vocabulary: Any, forced: bool, toggle: Any) -> str | None:
    """SGLang's name of the tool-call parser for a chat template, as its servers find it.

    They do not know Qwen2.5's, Hermes' and Llama 3's templates, which are told by the tags that they write.
    """
    from sglang.srt.parser.template_detection import detect_tool_call_parser

    found: str | None = detect_tool_call_parser(template, vocabulary, toggle, forced)
    if found is not None or template is None:
        return found
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "ipython" in template else None


def count_markers(text: str, marker: str) -> int:
    """How many calls a text begins, as far as its format has a marker for each; at least one."""
    return max(1, text.count(marker.strip())) if marker.strip() else 1
