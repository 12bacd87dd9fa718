"""From the `environment` group to what makes an environment for each episode, and how its tools are described."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.config.errors import ConfigError
from megarl.config.schema.task import (
    ClassEnvironmentConfig,
    DataConfig,
    EnvironmentConfig,
    MultiTurnEnvironmentConfig,
    SingleTurnEnvironmentConfig,
    ToolsEnvironmentConfig,
    VerifiersEnvironmentConfig,
)
from megarl.config.user_code import describe_error
from megarl.environment import Environment
from megarl.task.process import load_callable
from megarl.task.tools import HERMES, TOOLS_PLACEHOLDER, ToolPrompt, describe_tool, find_tools
from megarl.task.verifiers import VerifiersEnvironment, load_verifiers_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EnvironmentFactory = Callable[[], Environment]


def build_environment(config: EnvironmentConfig) -> tuple[MultiTurnEnvironmentConfig, EnvironmentFactory] | None:
    """The limits of an episode and what makes its environment; None where the first turn is the whole episode. Makes
    one environment, to see that it can be made. Raises ConfigError naming the key that is wrong."""
    if isinstance(config, SingleTurnEnvironmentConfig):
        return None
    make: EnvironmentFactory
    if isinstance(config, VerifiersEnvironmentConfig):
        make = partial(VerifiersEnvironment, config.id, config.args)
    else:
        assert isinstance(config, ClassEnvironmentConfig)
        make = partial(load_callable(config.path, "environment.path"), **config.options)
    try:
        made = make()
    except ConfigError:
        raise
    except Exception as error:  # The user's own code.
        raise ConfigError([f"environment: making one raised {describe_error(error)}"]) from error
    if not isinstance(made, Environment):
        found = f"found a {type(made).__name__}; expected one derived from megarl.environment.Environment"
        raise ConfigError([f"environment: {found}"])
    return config, make


def build_tool_prompt(
    config: EnvironmentConfig, data: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ToolPrompt | None:
    """How the tools of this configuration are described; None where there are none. Raises ConfigError naming
    environment.tools, or environment.id."""
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
        text = text.replace(TOOLS_PLACEHOLDER, "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
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
