"""A scripted policy calls tools: SGLang's parser, the tools' processes and the chat template, in whole episodes."""

import asyncio

import pytest
from data_cases import QWEN, build_byte_tokenizer

from megarl.api import compose
from megarl.interfaces import TurnRequest
from megarl.rollout.conversation import Conversation, build_conversation
from megarl.rollout.episodes import Episode, EpisodeRequest, EpisodeRunner, Sampling
from megarl.task.data import build_data
from megarl.task.environments import build_tool_prompt
from megarl.types import FinishReason, Response, Turn

CONFIG = compose(
    *(
        "environment=tools",
        "data=calculator",
        "data.options.num_examples=0",
        "data.num_heldout=1",
        "data.prompt_length=200",
    ),
    *(
        "reward=addition",
        "environment.tools=[calculator,python]",
        "environment.parser=hermes",
        "environment.call_reward=0.2",
    ),
)
TOKENIZER = build_byte_tokenizer()
TOKENIZER.chat_template = QWEN
SIX = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
PRINT = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    made = build_conversation(CONFIG, TOKENIZER)
    assert made is not None
    return made


def run(conversation: Conversation, *actions: str) -> Episode:
    """An episode in which the policy says these texts."""
    texts = iter(actions)
    tools = build_tool_prompt(CONFIG.environment, CONFIG.data, TOKENIZER)
    prompt = build_data(CONFIG.data, TOKENIZER, 1, tools).heldout[0]

    async def send(request: TurnRequest) -> Response:
        text = next(texts)
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        return Response(ids, text, [0.0] * len(ids), [True] * len(ids), [0] * len(ids), FinishReason.stop)

    request = EpisodeRequest(prompt, None, 1, Sampling(1.0), 0)
    return asyncio.run(EpisodeRunner(10_000, conversation).run(request, send))


def list_observations(response: Response) -> list[str]:
    starts = [turn.start for turn in response.turns[1:]]
    ends = [turn.end for turn in response.turns]
    return [TOKENIZER.decode(response.token_ids[a:b]) for a, b in zip(ends, starts, strict=False)]


def count(turns: tuple[Turn, ...]) -> list[tuple[float, float]]:
    return [(turn.details["tool_calls"], turn.details["tool_errors"]) for turn in turns]


def test_calls_are_answered_until_an_action_has_none(conversation: Conversation) -> None:
    episode = run(conversation, SIX + PRINT, '<tool_call>{"name": "calculator"', "42")
    assert episode.failure is None
    assert episode.prompt.text.startswith("[system] calculator(expression)python(code)[end][user]")
    response = episode.response
    first, second = list_observations(response)
    assert first == "[end][user](6)(42\n)[end][assistant]"
    assert second.startswith("[end][user](error: 1 of the calls could not be read")
    assert (response.text, response.finish_reason) == ("42", FinishReason.stop)
    assert count(response.turns) == [(2.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    assert [turn.reward for turn in response.turns] == [0.2, 0.0, 0.0]
    assert not response.generated[response.turns[0].end : response.turns[1].start].any()
