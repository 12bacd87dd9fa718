"""Episodes of several turns over a scripted policy: their tokens, limits, rewards, failures, and two environments;
their tokens are those of whole conversations in templates like the published ones, written for these tests.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from data_cases import QWEN, build_byte_tokenizer, build_char_tokenizer, load_published
from tokenizers import AddedToken

from megarl.api import compose
from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig, MultiTurnEnvironmentConfig
from megarl.environment import Action, Environment, EpisodeSetting, Observation, Step
from megarl.interfaces import Sampling, TurnRequest
from megarl.models.checkpoint import build_character_tokenizer
from megarl.rollout.conversation import (
    Conversation,
    Episode,
    EpisodeRequest,
    EpisodeRunner,
    ObservationEncoder,
    find_turn_end,
)
from megarl.rollout.episodes import build_conversation, check_conversation
from megarl.task.data import build_data
from megarl.task.environments import build_tool_prompt
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response, WeightVersions

TOKENIZER = build_char_tokenizer()
PROMPT = Prompt("p", "1+1", tuple(TOKENIZER.encode("1+1", add_special_tokens=False)), "2")
EOS = TOKENIZER.eos_token_id


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Policy:
    """Says these texts, one a turn, each ended by the end-of-sequence token where it fits."""

    def __init__(self, *texts: str, tokenizer=TOKENIZER):
        self.texts, self.tokenizer = iter(texts), tokenizer
        self.requests: list[TurnRequest] = []

    async def send(self, request: TurnRequest) -> Response:
        self.requests.append(request)
        eos = self.tokenizer.eos_token_id
        ids = [*self.tokenizer.encode(next(self.texts), add_special_tokens=False), *([] if eos is None else [eos])]
        finish = FinishReason.stop if len(ids) <= request.max_new_tokens else FinishReason.length
        ids = ids[: request.max_new_tokens]
        number = len(self.requests)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
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


def play(policy: Policy, conversation: Conversation | None, prompt: Prompt, response_length: int) -> Episode:
    request = EpisodeRequest(prompt, "k/0/0", 7, Sampling(1.0), 0)
    return asyncio.run(EpisodeRunner(response_length, conversation).run(request, policy.send))


def run(policy: Policy, make: Callable[[], Environment], response_length: int = 100, **limits) -> Episode:
    encoder = ObservationEncoder(Renderer(DataConfig(), TOKENIZER))
    conversation = Conversation(make, MultiTurnEnvironmentConfig(**limits), encoder)
    return play(policy, conversation, PROMPT, response_length)


def read(response: Response) -> tuple[str, str]:
    """Actions and observations."""
    own = response.generated
    return TOKENIZER.decode(response.token_ids[own]), TOKENIZER.decode(response.token_ids[~own])


def test_a_conversation_is_one_response_with_holes_whose_turns_are_sent_all_tokens_before_them():
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
    assert [(a.text, a.raw_text) for a in environment.actions] == [("3", "3<eos>"), ("2", "2<eos>")]
    assert environment.settings == [EpisodeSetting(PROMPT, 7)]
    assert environment.num_closed == 1
    whole = [*PROMPT.token_ids, *response.token_ids.tolist()]
    assert [r.token_ids.tolist() for r in policy.requests] == [whole[: 3 + turn.start] for turn in response.turns]
    assert [r.name for r in policy.requests] == ["k/0/0", "k/0/0/1"]


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


def test_an_environment_may_replace_the_prompt():
    policy = Policy("2")
    prompt = run(policy, lambda: Scripted(Step(done=True), begin="2+2")).prompt
    assert (prompt.id, prompt.text, prompt.token_ids, prompt.answer) == ("p", "2+2", tuple(encode("2+2")), "2")
    assert policy.requests[0].token_ids.tolist() == encode("2+2")


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ("no", "no"),
        ([Message("tool", "n"), Message("tool", "o")], "no"),
        (encode("no"), "no"),
        # An observation cannot write special tokens.
        ("a<eos>b", "a< eos>b"),
    ],
)
def test_observations_are_texts_messages_or_token_ids(observation, expected):
    class Slow(Environment):
        async def step(self, action: Action) -> Step:
            await asyncio.sleep(0.001)
            return Step(observation, done=action.turn == 1)

    response = run(Policy("3", "2"), Slow).response
    assert read(response)[1] == expected
    assert EOS not in response.token_ids[~response.generated].tolist()


class Hanging(Environment):
    def step(self, action: Action) -> Step:
        time.sleep(5)
        return Step()


def fail_to_make() -> Environment:
    raise OSError("no game is free")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Scripted(KeyError("board")), "Environment.step raised KeyError: 'board'"),
        (Hanging, "Environment.step took longer than environment.step_deadline_s=0.2 s"),
        (lambda: Scripted("no"), "Environment.step returned a str; a Step was expected"),
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


def test_what_the_engine_raises_and_a_turn_that_was_sent_other_tokens_are_no_failures_of_the_environment():
    class Broken(Policy):
        async def send(self, request: TurnRequest) -> Response:
            raise RuntimeError("the server was lost")

    class Meddling(Policy):
        async def send(self, request: TurnRequest) -> Response:
            turn = await super().send(request)
            request.token_ids[-1] = 0
            return turn

    environment = Scripted()
    with pytest.raises(RuntimeError, match="the server was lost"):
        run(Broken(), lambda: environment)
    assert environment.num_closed == 1
    with pytest.raises(AssertionError, match="was sent other tokens than are learned from"):
        run(Meddling("3", "2"), lambda: Scripted(Step("no"), Step(done=True)))


def test_a_single_turn_is_the_engines_response_itself():
    policy = Policy("12")
    response = play(policy, None, PROMPT, 50).response
    assert TOKENIZER.decode(response.token_ids) == "12<eos>"
    assert [(r.token_ids.tolist(), r.max_new_tokens) for r in policy.requests] == [(list(PROMPT.token_ids), 50)]


def test_data_that_an_environment_cannot_read_are_found_before_anything_starts():
    config = compose("experiment=guess")
    tokenizer = build_character_tokenizer(config.model.random.alphabet, 64)
    prompts = build_data(config.data, tokenizer, seed=1).train
    conversation = build_conversation(config, tokenizer)
    check_conversation(None, prompts)
    check_conversation(conversation, prompts)
    with pytest.raises(ConfigError, match=r"environment=\.\.\. with data=.*'p'.*'b12' found; environment=guess needs"):
        check_conversation(conversation, [*prompts[:1], Prompt("p", "b...=", (1,), "b12")])


def test_calls_of_tools_are_answered_until_an_action_has_none():
    """SGLang's parser, the tools' processes and the chat template."""
    tools = ["environment=tools", "environment.tools=[calculator,python]", "environment.parser=hermes"]
    data = ["data=calculator", "data.options.num_examples=0", "data.num_heldout=1", "data.prompt_length=200"]
    config = compose(*tools, "environment.call_reward=0.2", *data, "reward=addition")
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = QWEN
    six = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
    code = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
    described = build_tool_prompt(config.environment, config.data, tokenizer)
    prompt = build_data(config.data, tokenizer, 1, described).heldout[0]
    policy = Policy(six + code, '<tool_call>{"name": "calculator"', "42", tokenizer=tokenizer)
    episode = play(policy, build_conversation(config, tokenizer), prompt, 10_000)
    assert episode.failure is None
    assert episode.prompt.text.startswith("[system] calculator(expression)python(code)[end][user]")
    response = episode.response
    holes = [slice(a.end, b.start) for a, b in pairwise(response.turns)]
    first, second = (tokenizer.decode(response.token_ids[hole]) for hole in holes)
    assert first == "[end][user](6)(42\n)[end][assistant]"
    assert second.startswith("[end][user](error: 1 of the calls could not be read")
    assert (response.text, response.finish_reason) == ("42", FinishReason.stop)
    found = [(turn.details["tool_calls"], turn.details["tool_errors"], turn.reward) for turn in response.turns]
    assert found == [(2.0, 0.0, 0.2), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    assert not any(response.generated[hole].any() for hole in holes)


ENDED = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}<|endoftext|>{% endif %}"""
SYSTEM_IN_FIRST = """<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ (system if loop.first else '') + m.content }} [/INST]
{%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
FIRST_RESULT = """{% set ns = namespace(first=true) %}{% for m in messages %}{% if m.role == 'tool' %}
{%- if ns.first %}<|results|>{% set ns.first = false %}{% endif %}<|result|>{{ m.content }}
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

TEMPLATES = {
    "qwen3": (load_published("qwen3"), "<|im_end|>"),
    "llama-3.1": (load_published("llama3_1"), "<|eot_id|>"),
    "phi-3": (ENDED, "<|end|>"),
    "mistral": (SYSTEM_IN_FIRST, "</s>"),
}
"""By the models that have such: the template, and the token that ends an answer"""
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]", "<|results|>", "<|result|>"),
)
TAKES_SPACE = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
"""As those of Phi-3, which take the space behind them"""


def build(template: str) -> ObservationEncoder:
    tokenizer = build_byte_tokenizer()
    phi = template == ENDED
    added = [
        *(AddedToken(t, special=True) for t in SPECIAL),
        *(AddedToken(t, special=True, rstrip=phi) for t in TAKES_SPACE),
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = template
    return ObservationEncoder(Renderer(DataConfig(), tokenizer))


def play_template(
    encoder: ObservationEncoder, answers: list[str], *observations: Observation
) -> tuple[list[int], list[int]]:
    """Token ids of an episode turn by turn, and of all its messages rendered at once.

    answers: with their end.
    """
    renderer = encoder._renderer
    messages = [Message("system", "Be brief."), Message("user", "1 + 1?")]
    encoder.check(Prompt("p", "", (1,), "", messages=tuple(messages)))
    ids = list(renderer.tokenize([renderer.render_messages(messages)])[0])
    last = find_turn_end(renderer)
    for answer, observation in zip(answers, observations, strict=True):
        said = renderer.tokenize([answer])[0]
        ids += [*said, *encoder.encode(observation, said[-1])]
        new = [Message("user", observation)] if isinstance(observation, str) else observation
        content = encoder.decode(said[:-1] if said[-1] == last else said)
        messages += [Message("assistant", content), *(Message(m.role, renderer.defuse(m.content)) for m in new)]
    return ids, list(renderer.tokenize([renderer.render_messages(messages)])[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_has_the_tokens_of_the_whole_conversation_with_texts_and_results_of_tools(name: str) -> None:
    template, end = TEMPLATES[name]
    said = [f"{text}{end}" for text in ("3", "no <|im_start|>user\n\n4", "")]
    ids, whole = play_template(build(template), said, "Wrong.", "a<|im_end|>b</s>", "  \nAgain\n")
    assert ids == whole
    if name == "mistral":  # whose roles alternate
        return
    one, two = [Message("tool", "2<|im_end|>")], [Message("tool", "3"), Message("tool", "4")]
    # The thinking of turns that tools answer is kept by templates, in the form that the models write.
    thought = "<think>\nhm\n</think>\n\n" if name == "qwen3" else ""
    answers = [f"{thought}call{end}", f"calls{end}", f"{thought}call{end}"]
    ids, whole = play_template(build(template), answers, one, two, one)
    assert ids == whole


@pytest.mark.parametrize("stop", ["<|endoftext|>", "\n", "."])
@pytest.mark.parametrize("name", ["qwen3", "phi-3"])
def test_behind_another_stop_token_the_template_ends_the_answer_as_well(name: str, stop: str) -> None:
    ids, whole = play_template(build(TEMPLATES[name][0]), [f"3{stop}"], "Wrong.")
    assert ids == whole


def test_thinking_of_earlier_turns_stays_where_the_template_leaves_it_out_and_the_run_says_so() -> None:
    encoder = build(load_published("qwen3"))
    ids, whole = play_template(encoder, ["<think>\nhm\n</think>\n\n3<|im_end|>"], "Wrong.")
    assert encoder.decode(ids).replace("<think>\nhm\n</think>\n\n", "") == encoder.decode(whole)
    assert "leaves out the thinking of earlier turns; training keeps it" in "".join(encoder.describe())
    assert list(build(load_published("llama3_1")).describe()) == []


@pytest.mark.parametrize(
    ("template", "observation", "why"),
    [
        (FIRST_RESULT, [Message("tool", "2")], "with messages of tool: behind answer 2 of 4 messages"),
        (SYSTEM_IN_FIRST, [Message("user", "a"), Message("user", "b")], "refuses messages of .*: roles must alternate"),
    ],
)
def test_a_template_that_cannot_go_on_turn_by_turn_is_refused_with_its_reason(
    template: str, observation: Observation, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data\.chat_template: .*{why}"):
        play_template(build(template), ["3<|end|>"], observation)
