"""Episodes of several turns over a scripted engine: their tokens, limits, rewards and failures."""

import asyncio
import math
import re
import time
from collections.abc import Callable

import pytest
from data_cases import build_char_tokenizer

from megarl.config.schema.task import DataConfig, MultiTurnEnvironmentConfig
from megarl.environment import Action, Environment, EpisodeSetting, Observation, Step
from megarl.interfaces import TurnRequest
from megarl.rollout.conversation import Conversation, ObservationEncoder
from megarl.rollout.episodes import Episode, EpisodeRequest, EpisodeRunner, Sampling
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response, WeightVersions

TOKENIZER = build_char_tokenizer()
PROMPT = Prompt("p", "1+1", tuple(TOKENIZER.encode("1+1", add_special_tokens=False)), "2")
EOS = TOKENIZER.eos_token_id


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Policy:
    """Says these texts, one a turn, each ended by the end-of-sequence token where it fits."""

    def __init__(self, *texts: str):
        self.texts = iter(texts)
        self.requests: list[TurnRequest] = []

    async def send(self, request: TurnRequest) -> Response:
        self.requests.append(request)
        ids = [*encode(next(self.texts)), EOS]
        finish = FinishReason.stop if len(ids) <= request.max_new_tokens else FinishReason.length
        ids = ids[: request.max_new_tokens]
        number = len(self.requests)
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        return Response(ids, text, [-0.5 * number] * len(ids), [True] * len(ids), [number] * len(ids), finish)


class Scripted(Environment):
    """Answers with these steps, one a turn."""

    def __init__(self, *steps: Step | Exception, begin: Observation | None = None):
        self.steps, self.begin = iter(steps), begin
        self.actions: list[Action] = []
        self.settings: list[EpisodeSetting] = []
        self.num_closed = 0

    def reset(self, setting: EpisodeSetting) -> Observation | None:
        self.settings.append(setting)
        return self.begin

    def step(self, action: Action) -> Step:
        self.actions.append(action)
        step = next(self.steps)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.num_closed += 1


def run(
    policy: Policy, make: Callable[[], Environment], response_length: int = 100, name: str | None = "k/0/0", **limits
) -> Episode:
    encoder = ObservationEncoder(Renderer(DataConfig(), TOKENIZER))
    conversation = Conversation(make, MultiTurnEnvironmentConfig(**limits), encoder)
    request = EpisodeRequest(PROMPT, name, 7, Sampling(1.0), 0)
    return asyncio.run(EpisodeRunner(response_length, conversation).run(request, policy.send))


def read(response: Response) -> tuple[str, str]:
    """Actions and observations."""
    own = response.generated
    return TOKENIZER.decode(response.token_ids[own]), TOKENIZER.decode(response.token_ids[~own])


def test_a_conversation_is_one_response_with_holes():
    policy = Policy("3", "2")
    environment = Scripted(Step("no", reward=-0.1, details={"wrong": 1.0}), Step(reward=1.0, done=True))
    response = run(policy, lambda: environment).response
    assert read(response) == ("3<eos>2<eos>", "no")
    assert response.generated.tolist() == [True, True, False, False, True, True]
    assert response.rollout_logprobs.tolist() == [-0.5, -0.5, 0, 0, -1.0, -1.0]
    assert response.weight_versions == WeightVersions((1, 2), (4, 6))
    assert (response.text, response.finish_reason) == ("2", FinishReason.stop)
    assert [(t.start, t.end, t.text, t.reward) for t in response.turns] == [(0, 2, "3", -0.1), (4, 6, "2", 1.0)]
    assert response.turns[0].details == {"wrong": 1.0}
    assert [a.text for a in environment.actions] == ["3", "2"]
    assert [a.raw_text for a in environment.actions] == ["3<eos>", "2<eos>"]
    assert environment.settings == [EpisodeSetting(PROMPT, 7)]
    assert environment.num_closed == 1


def test_every_turn_is_sent_all_tokens_before_it_id_by_id_under_a_name_of_its_own():
    policy = Policy("3", "4", "2")
    response = run(policy, lambda: Scripted(Step("no"), Step("no"), Step(done=True))).response
    whole = [*PROMPT.token_ids, *response.token_ids.tolist()]
    for request, turn in zip(policy.requests, response.turns, strict=True):
        assert request.token_ids.tolist() == whole[: len(PROMPT.token_ids) + turn.start]
    assert [request.name for request in policy.requests] == ["k/0/0", "k/0/0/1", "k/0/0/2"]


@pytest.mark.parametrize(
    ("limits", "response_length", "expected", "finish"),
    [
        ({"max_turns": 2}, 100, "aaaa<eos>-bbb<eos>", FinishReason.max_turns),
        ({"turn_length": 3}, 100, "aaa", FinishReason.length),
        # Of the second action, two tokens fit.
        ({}, 8, "aaaa<eos>-bb", FinishReason.length),
        # No action fits after the observation, which is left out.
        ({}, 6, "aaaa<eos>", FinishReason.length),
    ],
)
def test_limits_of_turns_and_tokens_end_an_episode(limits, response_length, expected, finish):
    environment = Scripted(*[Step("-")] * 9)
    response = run(Policy("aaaa", "bbb", "ccc"), lambda: environment, response_length, **limits).response
    assert TOKENIZER.decode(response.token_ids) == expected
    assert response.finish_reason is finish
    assert response.finish_reason is not FinishReason.stop


def test_an_environment_may_replace_the_prompt():
    policy = Policy("2")
    episode = run(policy, lambda: Scripted(Step(done=True), begin="2+2"))
    assert episode.prompt.text == "2+2"
    assert episode.prompt.token_ids == tuple(encode("2+2"))
    assert (episode.prompt.id, episode.prompt.answer) == ("p", "2")
    assert policy.requests[0].token_ids.tolist() == encode("2+2")


@pytest.mark.parametrize("observation", ["no", [Message("tool", "n"), Message("tool", "o")], encode("no")])
def test_observations_are_texts_messages_or_token_ids(observation):
    response = run(Policy("3", "2"), lambda: Scripted(Step(observation), Step(done=True))).response
    assert read(response)[1] == "no"


def test_an_observation_cannot_write_special_tokens():
    response = run(Policy("3", "2"), lambda: Scripted(Step("a<eos>b"), Step(done=True))).response
    assert EOS not in response.token_ids[~response.generated].tolist()
    assert read(response)[1] == "a< eos>b"


def test_environments_may_be_coroutines():
    class Slow(Environment):
        async def step(self, action: Action) -> Step:
            await asyncio.sleep(0.001)
            return Step("no", done=action.turn == 1)

    assert len(run(Policy("3", "2"), Slow).response.turns) == 2


class Hanging(Environment):
    def step(self, action: Action) -> Step:
        time.sleep(5)
        return Step()


class NoStep(Environment):
    def step(self, action: Action) -> Step:
        return "no"  # type: ignore[return-value]


def fail_to_make() -> Environment:
    raise OSError("no game is free")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Scripted(KeyError("board")), "Environment.step raised KeyError: 'board'"),
        (Hanging, "Environment.step took longer than environment.step_deadline_s=0.2 s"),
        (NoStep, "Environment.step returned a str; a Step was expected"),
        (lambda: Scripted(Step(reward=math.nan)), "Environment.step gave the reward nan; it must be a finite number"),
        (fail_to_make, "making the environment raised OSError: no game is free"),
        (lambda: Scripted(Step("\u00e9")), "an observation could not be encoded: .* has no token for"),
        (lambda: Scripted(begin="\u00e9"), "an observation could not be encoded: .* has no token for"),
    ],
)
def test_what_an_environment_does_wrong_costs_its_episode_and_says_why(make, reason):
    episode = run(Policy("3", "2"), make, step_deadline_s=0.2)
    assert episode.failure is not None
    assert len(episode.response) > 0
    assert re.match(reason, episode.failure), episode.failure


def test_what_the_engine_raises_is_no_failure_of_the_environment():
    class Broken(Policy):
        async def send(self, request: TurnRequest) -> Response:
            raise RuntimeError("the server was lost")

    environment = Scripted()
    with pytest.raises(RuntimeError, match="the server was lost"):
        run(Broken(), lambda: environment)
    assert environment.num_closed == 1


def test_a_turn_that_was_sent_other_tokens_than_are_learned_from_is_an_error():
    class Meddling(Policy):
        async def send(self, request: TurnRequest) -> Response:
            turn = await super().send(request)
            request.token_ids[-1] = 0
            return turn

    with pytest.raises(AssertionError, match="was sent other tokens than are learned from"):
        run(Meddling("3", "2"), lambda: Scripted(Step("no"), Step(done=True)))


def test_a_single_turn_is_the_engines_response_itself():
    async def send(request: TurnRequest) -> Response:
        assert request.token_ids.tolist() == list(PROMPT.token_ids)
        assert request.max_new_tokens == 50
        return turn

    turn = Response((5, 6), "x", (-0.5, -0.5), (True, True), (0, 0), FinishReason.stop)
    request = EpisodeRequest(PROMPT, None, 7, Sampling(1.0), 0)
    assert asyncio.run(EpisodeRunner(50).run(request, send)).response is turn
