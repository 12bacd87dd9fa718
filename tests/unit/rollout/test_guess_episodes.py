"""Episodes of environment=guess through the runner and the tiny tokenizer, with a policy that is given."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.interfaces import TurnRequest
from megarl.models.checkpoint import build_character_tokenizer
from megarl.rollout.conversation import build_conversation
from megarl.rollout.episodes import Episode, EpisodeRequest, EpisodeRunner, Sampling, check_conversation
from megarl.task.data import build_data
from megarl.types import FinishReason, Prompt, Response

CONFIG = load_config(["experiment=guess"])
TOKENIZER = build_character_tokenizer(CONFIG.model.random.alphabet, 64)
EOS = TOKENIZER.eos_token_id
PROMPTS = build_data(CONFIG.data, TOKENIZER, seed=1).train
BINARY_SEARCH = {"": "4", "<": "2", ">": "6", "<<": "1", "<>": "3", "><": "5", ">>": "7"}

Policy = Callable[[str], str]
"""From the answers so far, such as `<>`, to the text of an action"""


def run(policy: Policy, prompt: Prompt) -> tuple[Episode, list[TurnRequest]]:
    """The episode, and what the server was sent."""
    sent: list[TurnRequest] = []

    async def send(turn: TurnRequest) -> Response:
        sent.append(turn)
        answers = [after for token, after in pairwise(turn.token_ids.tolist()) if token == EOS]
        ids = [*TOKENIZER.encode(policy(TOKENIZER.decode(answers))), EOS][: turn.max_new_tokens]
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        reason = FinishReason.stop if ids[-1] == EOS else FinishReason.length
        return Response(ids, text, [-1.0] * len(ids), [True] * len(ids), [0] * len(ids), reason)

    runner = EpisodeRunner(CONFIG.rollout.response_length, build_conversation(CONFIG, TOKENIZER))
    return asyncio.run(runner.run(EpisodeRequest(prompt, None, 1, Sampling(1.0), 0), send)), sent


@pytest.mark.parametrize("number", range(1, 8))
def test_binary_search_is_rewarded_for_every_number(number):
    episode, _ = run(BINARY_SEARCH.__getitem__, PROMPTS[number - 1])
    assert episode.failure is None
    assert sum(turn.reward for turn in episode.response.turns) == 1.0
    assert (episode.response.turns[-1].text, episode.response.finish_reason) == (str(number), FinishReason.stop)


def test_each_turn_is_sent_the_tokens_before_it_that_are_learned_from():
    episode, sent = run(BINARY_SEARCH.__getitem__, PROMPTS[4])
    response = episode.response
    assert TOKENIZER.decode(response.token_ids.tolist()) == "4<eos>>6<eos><5<eos>"
    assert response.generated.tolist() == [True, True, False] * 2 + [True, True]
    assert [TOKENIZER.decode(turn.token_ids.tolist()) for turn in sent] == ["1-7", "1-74<eos>>", "1-74<eos>>6<eos><"]
    for turn, asked in zip(response.turns, sent, strict=True):
        before = [*episode.prompt.token_ids, *response.token_ids[: turn.start].tolist()]
        assert np.array_equal(asked.token_ids, before)
        assert asked.max_new_tokens == CONFIG.environment.turn_length == 4


def test_the_last_wrong_guess_ends_the_episode_and_not_the_limit_of_turns():
    response = run(lambda answers: "1", PROMPTS[6])[0].response
    assert [turn.reward for turn in response.turns] == [0.0, 0.0, 0.0]
    assert response.finish_reason is FinishReason.stop
    assert [turn.details["ruled_out"] for turn in response.turns] == [0.0, 1.0, 1.0]


def test_a_number_at_the_limit_of_the_length_is_no_guess():
    response = run(lambda answers: "--7-7", PROMPTS[6])[0].response
    assert (len(response), len(response.turns), response.turns[0].reward) == (4, 1, 0.0)
    assert response.finish_reason is FinishReason.length


def test_data_that_the_environment_cannot_read_are_found_before_anything_starts():
    conversation = build_conversation(CONFIG, TOKENIZER)
    check_conversation(None, PROMPTS)
    check_conversation(conversation, PROMPTS)
    with pytest.raises(ConfigError, match=r"environment=\.\.\. with data=.*'p'.*'b12' found; environment=guess needs"):
        check_conversation(conversation, [*PROMPTS[:1], Prompt("p", "b...=", (1,), "b12")])
