"""How tools are described to the policy, and how it is given their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.config.schema.data import DataConfig
from megarl.config.schema.environment import (
    EnvironmentConfig,
    ToolsEnvironmentConfig,
    VerifiersEnvironmentConfig,
)
from megarl.toolbox.toolbox import describe_tool, find_tools
from megarl.types import Message
from megarl.verifiers_package import load_verifiers_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "{tools}"
HERMES = """You may call these functions, described by JSON schemas:
{tools}
To call one, write {"name": its name, "arguments": its arguments as a JSON object} between <tool_call> and \
</tool_call>. You are given the result. An answer without a call is your final answer."""
"""For chat templates that know no tools; the format is that of Hermes and of Qwen's models (SGLang's parser hermes)."""


@dataclass(frozen=True)
class ToolPrompt:
    """The tools as the prompts have them."""

    schemas: tuple[Mapping[str, Any], ...]
    text: str | None
    """What describes them in the system message; None: the chat template does, by `tools=`"""

    def add_to(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with `text` at the end of the system message, which is added where there is none."""
        if self.text is None:
            return tuple(messages)
        if messages and messages[0].role == "system":
            first, *others = messages
            content = "\n\n".join(part for part in (first.content, self.text) if part)
            return (Message("system", content), *others)
        return (Message("system", self.text), *messages)

    def answer(self, results: Sequence[str]) -> tuple[Message, ...]:
        """The messages that give the policy the results of an action's calls, in order.

        Of role tool where the chat template describes tools; else one user's message, for many templates take neither
        another role nor two messages of one role in a row.
        """
        if self.text is None:
            return tuple(Message("tool", result) for result in results)
        return (Message("user", "\n".join(results)),)


def build_tool_prompt(
    config: EnvironmentConfig, data: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ToolPrompt | None:
    """How the tools of this configuration are described; None where there are none.

    Raises ConfigError naming environment.tools, or environment.id.
    """
    schemas: tuple[Mapping[str, Any], ...] = ()
    text = None
    if isinstance(config, ToolsEnvironmentConfig):
        schemas, text = tuple(describe_tool(path) for path in find_tools(config.tools)), config.description
    elif isinstance(config, VerifiersEnvironmentConfig):
        schemas = tuple(load_verifiers_environment(config.id, config.args).oai_tools or ())
    if not schemas:
        return None
    if text is None and not (data.chat_template and knows_tools(tokenizer)):
        text = HERMES
    if text is not None:
        text = text.replace(PLACEHOLDER, "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
    return ToolPrompt(schemas, text)


def knows_tools(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template describes tools and takes messages of role tool. Many ignore what they do not know."""
    name = "megarl_probe"
    parameters = {"type": "object", "properties": {}}
    schema = {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": parameters}}
    asked, answered = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
    result = {"role": "tool", "content": "RESULT"}
    if not tokenizer.chat_template:
        return False
    try:
        text = str(tokenizer.apply_chat_template([asked, answered, result], tools=[schema], tokenize=False))
    except Exception:  # A template is a program of the checkpoint's author.
        return False
    return name in text and "RESULT" in text
