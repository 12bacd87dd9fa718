"""Environments with tools, and SGLang's parser of tool calls, which runs in a process of its own."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError
from megarl.config.schema.data import DataConfig
from megarl.config.schema.environment import ToolsEnvironmentConfig, VerifiersEnvironmentConfig
from megarl.environment.interface import Environment
from megarl.environment.tools import FoundCalls, ToolsEnvironment
from megarl.environment.verifiers import VerifiersEnvironment
from megarl.sandbox.function_process import CallError, FunctionProcess, StartError
from megarl.sandbox.program import warn_of_gaps
from megarl.toolbox.prompt import ToolPrompt, build_tool_prompt
from megarl.toolbox.toolbox import Toolbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FALLBACK = "hermes"
"""The format that the description asks for where the chat template knows no tools"""
TIMEOUT_S = 5.0
"""Of reading one action, which takes a millisecond; SGLang's expressions can take for ever"""
MEMORY_GB = 4.0


class ToolCallReader:
    """Reads tool calls with SGLang's parser, in one process. Thread-safe."""

    def __init__(self, prompt: ToolPrompt, parser: str | None, tokenizer: "PreTrainedTokenizerBase"):
        """Starts the process. parser: SGLang's name of it; None: the one for the tokenizer's chat template.

        Raises ConfigError naming environment.parser.
        """
        options = {
            "tools": list(prompt.schemas),
            "parser": parser if prompt.text is None else parser or FALLBACK,
            "template": tokenizer.chat_template,
            "tokens": sorted(tokenizer.get_added_vocab()),
        }
        self._end = str(tokenizer.eos_token or "")
        self._process = _share_process(json.dumps(options))
        try:
            self._process.start()
        except StartError as error:
            raise ConfigError([f"environment.parser: {error}"]) from error

    @property
    def name(self) -> str:
        """SGLang's name of the parser."""
        return str(self._process.call({"text": ""})["parser"])

    def find_calls(self, text: str) -> FoundCalls:
        """The calls in an action's text, special tokens included. What SGLang's parser cannot stand is malformed."""
        try:
            found = self._process.call({"text": text.removesuffix(self._end)})
        except CallError:
            return FoundCalls((), num_malformed=1)
        return FoundCalls(tuple((name, arguments) for name, arguments in found["calls"]), found["num_malformed"])


@functools.lru_cache(maxsize=4)
def _share_process(options: str) -> FunctionProcess:
    """One for all the sets of an evaluation: each would take seconds and hundreds of megabytes."""
    return FunctionProcess(
        "megarl.rollout.tool_call_parser:load_parser",
        timeout_s=TIMEOUT_S,
        memory_gb=MEMORY_GB,
        options=json.loads(options),
    )


@dataclass(frozen=True)
class Tools:
    """The tools of a run: how the prompts describe them, and what answers their calls."""

    prompt: ToolPrompt
    make_environment: Callable[[], Environment]


def build_tools(
    config: ToolsEnvironmentConfig | VerifiersEnvironmentConfig, data: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> Tools | None:
    """None where the environment has none. Starts the processes.

    Raises ConfigError naming environment.tools, environment.id or environment.parser.
    """
    prompt = build_tool_prompt(config, data, tokenizer)
    if prompt is None:
        return None
    reader = ToolCallReader(prompt, config.parser, tokenizer)
    if isinstance(config, VerifiersEnvironmentConfig):
        return Tools(prompt, partial(VerifiersEnvironment, config.id, config.args, prompt, reader.find_calls))
    if "python" in config.tools:
        warn_of_gaps("environment.tools=[python]")
    return Tools(prompt, partial(ToolsEnvironment, config, Toolbox(config), prompt, reader.find_calls))
