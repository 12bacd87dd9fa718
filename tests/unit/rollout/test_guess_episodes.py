"""Episodes of environment=guess through the runner and the tiny tokenizer, with a policy that is given."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

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


def test_data_that_the_environment_cannot_read_are_found_before_anything_starts():
    conversation = build_conversation(CONFIG, TOKENIZER)
    check_conversation(None, PROMPTS)
    check_conversation(conversation, PROMPTS)
    with pytest.raises(ConfigError, match=r"environment=\.\.\. with data=.*'p'.*'b12' found; environment=guess needs"):
        check_conversation(conversation, [*PROMPTS[:1], Prompt("p", "b...=", (1,), "b12")])
