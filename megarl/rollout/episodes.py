"""From the configuration to what runs the episodes of a run."""

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError
from megarl.config.schema.mix import split_config
from megarl.config.schema.root import Config
from megarl.config.schema.task import (
    AgentEnvironmentConfig,
    MultiTurnEnvironmentConfig,
    ToolsEnvironmentConfig,
    VerifiersEnvironmentConfig,
)
from megarl.interfaces import Sampling, TurnRequest
from megarl.rollout.agent import AgentConversation
from megarl.rollout.conversation import (
    Conversation,
    Episode,
    EpisodeRequest,
    EpisodeRunner,
    ObservationEncoder,
    Runner,
    Send,
    start_call_finder,
)
from megarl.task.environments import (
    VERIFIERS,
    EnvironmentFactory,
    Toolbox,
    ToolsEnvironment,
    build_environment,
    build_tool_prompt,
)
from megarl.task.process import load_callable
from megarl.task.render import Renderer
from megarl.task.sandbox import warn_of_gaps
from megarl.types import Prompt, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyConversation = Conversation | AgentConversation


def build_conversation(
    config: Config, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None
) -> AnyConversation | None:
    """What answers the policy in this configuration; None for environment=single_turn. Starts the tools' processes.

    vocab_size: rows of the model's embedding. Raises ConfigError naming environment.KEY or data.KEY.
    """
    environment = config.environment
    if isinstance(environment, AgentEnvironmentConfig):
        return AgentConversation(environment, config.data, tokenizer, vocab_size)
    prompt = build_tool_prompt(environment, config.data, tokenizer)
    found: tuple[MultiTurnEnvironmentConfig, EnvironmentFactory] | None
    if prompt is None:
        found = build_environment(environment)
    else:
        assert isinstance(environment, ToolsEnvironmentConfig | VerifiersEnvironmentConfig)
        find_calls = start_call_finder(prompt, environment.parser, tokenizer)
        if isinstance(environment, VerifiersEnvironmentConfig):
            play = load_callable(VERIFIERS + "VerifiersEnvironment")
            found = environment, partial(play, environment.id, environment.args, prompt, find_calls)
        else:
            if "python" in environment.tools:
                warn_of_gaps("environment.tools=[python]")
            found = environment, partial(ToolsEnvironment, environment, Toolbox(environment), prompt, find_calls)
    if found is None:
        return None
    limits, make = found
    return Conversation(make, limits, ObservationEncoder(Renderer(config.data, tokenizer, prompt, vocab_size)))


class SourceRunners:
    """Runs each episode as its prompt's source has it."""

    def __init__(self, runners: Mapping[str, Runner]):
        self._runners = runners
        self.keeps_step = all(runner.keeps_step for runner in runners.values())

    async def run(self, request: EpisodeRequest, send: Send) -> Episode:
        return await self._runners[request.prompt.source].run(request, send)

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.close()


def build_episode_runner(conversation: AnyConversation | None, response_length: int) -> Runner:
    if isinstance(conversation, AgentConversation):
        return conversation.build_runner(response_length)
    return EpisodeRunner(response_length, conversation)


def build_runner(config: Config, conversations: Mapping[str, AnyConversation | None]) -> Runner:
    """What runs the episodes of a run. conversations: by source, under "" without data=mix."""
    configs = split_config(config)
    runners = {
        name: build_episode_runner(each, configs[name].rollout.response_length) for name, each in conversations.items()
    }
    return runners[""] if "" in runners else SourceRunners(runners)


class _Begun(Exception):
    """Ends an episode before its first turn."""


def check_conversation(conversation: AnyConversation | None, prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Begin an episode with each prompt, which shows whether the environment can read the data, and ask the chat
    template for its next turns.

    Meant for the first prompt of each split, before anything is started; not from a coroutine. Raises ConfigError
    naming environment=... and data=... where an episode cannot begin, and data.chat_template where it cannot go on.
    Returns what the user is to know of how they go on.
    """
    if conversation is None:
        return ()

    async def send(turn: TurnRequest) -> Response:
        raise _Begun

    async def begin(prompt: Prompt) -> str | None:
        if isinstance(conversation, AgentConversation):
            return None
        try:
            episode = await EpisodeRunner(1, conversation).run(EpisodeRequest(prompt, None, 0, Sampling(1.0), 0), send)
        except _Begun:
            return None
        return episode.failure

    # A thread of its own: the caller's may have an event loop that runs, as in a notebook.
    with ThreadPoolExecutor(1) as thread:
        if isinstance(conversation, AgentConversation):
            thread.submit(asyncio.run, conversation.check_agent()).result()
        for prompt in prompts:
            if conversation.config.max_turns > 1:
                conversation.encoder.check(prompt)
            failure = thread.submit(asyncio.run, begin(prompt)).result()
            if failure is not None:
                raise ConfigError(
                    [f"environment=... with data=...: an episode with a first prompt cannot begin: {failure}"]
                )
    return tuple(conversation.encoder.describe()) if conversation.config.max_turns > 1 else ()
