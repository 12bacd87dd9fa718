"""environment=verifiers and data=verifiers, with the real package."""

import asyncio
import signal
import string
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="needs the extra: make install EXTRAS=verifiers")

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.task import VerifiersDataConfig, VerifiersEnvironmentConfig
from megarl.environment import Action, EpisodeSetting
from megarl.examples.verifiers.episodes import VerifiersEnvironment, load_rows
from megarl.interfaces import Sampling
from megarl.models.checkpoint import build_character_tokenizer
from megarl.rollout.conversation import EpisodeRequest, EpisodeRunner
from megarl.rollout.episodes import build_conversation, check_conversation
from megarl.task.data import Problem, build_data
from megarl.task.environments import FoundCalls, build_tool_prompt
from megarl.types import FinishReason, Message, Prompt, Response

COUNTDOWN = "vf-environments"
SHIPPED = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
CHAIN_SUM = {"gym": "chain_sum", "num_train_examples": 5, "num_eval_examples": 2}


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def load(env_id=COUNTDOWN, **args):
    return load_rows(VerifiersDataConfig(id=env_id, args=args), seed=1)


async def begin(problem, env_id=COUNTDOWN, args=None, *tools):
    """(the environment, what it says first)"""
    env = VerifiersEnvironment(env_id, args or {}, *tools)
    prompt = Prompt("p", "", (1,), problem.answer, problem.metadata, problem.messages)
    return env, await env.reset(EpisodeSetting(prompt, seed=1))


def act(text, turn=0, finish_reason=FinishReason.stop):
    return Action(text, text, (1,), turn, finish_reason)


CUT = "cut"


def play(problem, texts, env_id=COUNTDOWN, finish_reason=FinishReason.stop, **args):
    """What each step returned, until the environment is done; CUT stands for a limit of ours."""

    async def run():
        env, said = await begin(problem, env_id, args)
        assert said is None
        try:
            return [
                await (env.cut() if text == CUT else env.step(act(text, turn, finish_reason)))
                for turn, text in enumerate(texts)
            ]
        finally:
            await env.close()

    return asyncio.run(run())


def test_the_dataset_becomes_prompts_and_its_evaluation_rows_are_held_out():
    splits = load()
    system = Message("system", "one number at a time")
    assert [problem.messages for problem in splits.train][1] == (system, Message("user", "count down from 2"))
    assert [problem.answer for problem in splits.train] == ["1", "2", "3"]
    assert [problem.answer for problem in splits.heldout] == ["9"]
    assert splits.train[1].metadata == {"verifiers": '["train", 1]'}


def test_an_episode_runs_to_the_rubrics_reward():
    first, second, last = play(load().train[2], ["2", "1", "5"])
    assert (first.observation, first.reward, first.done) == ((Message("user", "now 2"),), 0.0, False)
    assert second.observation == (Message("user", "now 1"),)
    assert (last.done, last.reward) == (True, pytest.approx(2 * 2 / 3))
    assert last.details == {"share_right": pytest.approx(2 / 3), "num_turns": 3.0}


@pytest.mark.parametrize(
    ("row", "texts", "keys", "reward"),
    [
        (2, ["2"], {"max_turns": 1}, 2 / 3),  # The environment's own limit.
        (2, ["2", CUT], {}, 2 / 3),
        (2, ["2", CUT], {"finish_reason": FinishReason.length}, 2 / 3),
        (0, [""], {}, 0.0),  # The policy's, and not a server's fault.
    ],
)
def test_an_episode_that_ends_before_has_its_reward(row, texts, keys, reward):
    *before, last = play(load().train[row], texts, **keys)
    assert (last.done, last.reward) == (True, pytest.approx(reward))
    assert not any(step.done for step in before)


@pytest.mark.parametrize(
    ("env_id", "texts", "reason"),
    [
        (COUNTDOWN, ["crash"], "the environment failed: InfraError"),
        (COUNTDOWN, ["raise", "1", "0"], "share_right raised KeyError: 'no such word'"),
        ("vf_environments:mixed", ["raise", CUT], "share_right raised KeyError"),
        (COUNTDOWN, ["rewrite"], "has rewritten the conversation"),
    ],
)
def test_what_the_environment_or_its_rubric_raises_costs_the_sample(env_id, texts, reason):
    with pytest.raises(RuntimeError, match=reason):
        play(load(env_id).train[2 if env_id == COUNTDOWN else -1], texts, env_id)


def test_each_environment_of_a_group_is_rewarded_by_its_own_rubric():
    sums, *_, countdown = load("vf_environments:mixed").train
    (last,) = play(sums, ["5"], "vf_environments:mixed")
    assert (last.done, "check_answer_reward_func" in last.details) == (True, True)
    assert play(countdown, ["15"], "vf_environments:mixed")[0].observation == (Message("user", "now 15"),)


def test_a_broken_off_episode_ends_without_a_reward():
    async def run():
        env, _ = await begin(load().train[2])
        await env.close()
        assert env._episode.cancelled()
        await VerifiersEnvironment(id=COUNTDOWN, args={}).close()

    asyncio.run(run())


def test_tools_are_described_called_and_answered():
    env_id = "vf_environments:with_tools"
    config = VerifiersEnvironmentConfig(id=env_id)
    tokenizer = build_character_tokenizer(string.printable, 64)
    prompt = build_tool_prompt(config, VerifiersDataConfig(id=env_id), tokenizer)
    assert [schema["function"]["name"] for schema in prompt.schemas] == ["add_one"]
    assert '"description": "Add one' in prompt.text

    def find_calls(text):
        return FoundCalls((("add_one", '{"x": 1}'), ("no_tool", "{}")) if text == "call" else ())

    async def run():
        env, _ = await begin(load(env_id).train[0], env_id, {}, prompt, find_calls)
        steps = [await env.step(act("call")), await env.step(act("2", 1))]
        await env.close()
        return steps

    first, last = asyncio.run(run())
    assert first.observation == (Message("user", "2\n'no_tool'"),)
    assert (last.done, last.reward) == (True, 1.0)
    assert (last.details["total_tool_calls"], last.details["add_one_calls"]) == (2.0, 1.0)


def test_an_environment_that_the_package_brings_scores_right_and_wrong_answers():
    import reasoning_gym

    splits = load(SHIPPED, **CHAIN_SUM)
    assert (len(splits.train), len(splits.heldout)) == (5, 2)
    entry = reasoning_gym.create_dataset("chain_sum", size=7, seed=0)[5]
    problem = splits.heldout[0]
    assert problem.messages[-1].content == entry["question"]
    for answer, reward in [(entry["answer"], 1.0), ("no", 0.0)]:
        *_, last = play(problem, [f"<answer>{answer}</answer>"], SHIPPED, **CHAIN_SUM)
        assert (last.done, last.reward) == (True, pytest.approx(reward, abs=0.02))


CONFIG = ["environment=verifiers", f"environment.id={COUNTDOWN}", "data=verifiers", "reward=environment", "model=tiny"]


def run_episode(texts, *overrides):
    """An episode with a policy that writes these texts, and what a server was sent for each."""
    config = load_config([*CONFIG, "data.chat_template=false", "rollout.response_length=40", *overrides])
    tokenizer = build_character_tokenizer(string.printable, 256)
    data = build_data(config.data, tokenizer, seed=1)
    conversation = build_conversation(config, tokenizer)
    check_conversation(conversation, (data.train[0], data.heldout[0]))
    sent = []

    async def send(turn):
        ids = [*tokenizer.encode(texts[len(sent)]), tokenizer.eos_token_id][: turn.max_new_tokens]
        sent.append(tokenizer.decode(turn.token_ids.tolist()))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        reason = FinishReason.stop if ids[-1] == tokenizer.eos_token_id else FinishReason.length
        return Response(ids, text, [-1.0] * len(ids), [True] * len(ids), [0] * len(ids), reason)

    runner = EpisodeRunner(config.rollout.response_length, conversation)
    prompt = next(prompt for prompt in data.train if prompt.answer == "3")
    return asyncio.run(runner.run(EpisodeRequest(prompt, None, 1, Sampling(1.0), 0), send)), sent


def test_the_runner_plays_it_token_by_token():
    episode, sent = run_episode(["2", "1", "7"])
    begin = "one number at a time\n\ncount down from 3"
    assert sent == [begin, f"{begin}2<eos>now 2", f"{begin}2<eos>now 21<eos>now 1"]
    response = episode.response
    assert (episode.failure, response.finish_reason) == (None, FinishReason.stop)
    assert [turn.reward for turn in response.turns] == [0.0, 0.0, pytest.approx(4 / 3)]
    assert response.turns[-1].details["num_turns"] == 3.0


@pytest.mark.parametrize(
    ("texts", "override", "finish_reason"),
    [
        (["2", "1", "0"], "environment.max_turns=2", FinishReason.max_turns),
        (["2", "1", "0"], "rollout.response_length=14", FinishReason.length),  # No room for what the environment says.
        (["2", "1 ", "0"], "rollout.response_length=9", FinishReason.length),  # No room for the second action's end.
    ],
)
def test_an_episode_that_the_runner_cuts_is_rewarded_for_what_was_said(texts, override, finish_reason):
    response = run_episode(texts, override)[0].response
    assert response.finish_reason == finish_reason
    last = 4 / 3 if response.turns[-1].text == "1" else 2 / 3
    assert [turn.reward for turn in response.turns] == [0.0, pytest.approx(last)]


def test_the_runs_signal_handlers_stay():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    VerifiersEnvironment(id=COUNTDOWN, args={"starts": 2})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("env_id", "args", "problem"),
    [
        ("no-such-env", {}, r"environment\.id: found 'no_such_env:load_environment'; importing no_such_env failed"),
        (COUNTDOWN, {"stop": 3}, r"environment\.args: vf-environments with .*stop.* raised TypeError"),
        ("vf_environments:share_right", {"completion": [], "answer": "1"}, r"environment\.id: .* gives a float"),
        ("vf_environments:group_with_tools", {}, r"environment\.id: .* is a group with tools"),
        ("vf_environments:of_groups", {}, r"environment\.id: .* rewards a group of responses by best"),
    ],
)
def test_an_environment_that_does_not_fit_is_named(env_id, args, problem):
    with pytest.raises(ConfigError, match=problem):
        VerifiersEnvironment(id=env_id, args=args)


def test_a_prompt_of_other_data_is_refused():
    with pytest.raises(ValueError, match="goes with data=verifiers"):
        asyncio.run(begin(Problem((), "1")))
