"""data=mix: sources read from the configuration, the order of their prompts, and what each is scored by."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_cases import build_byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.checks import check_config, find_return_range
from megarl.config.errors import ConfigError
from megarl.config.load import load_config, load_configs
from megarl.config.schema.mix import list_sources, split_config
from megarl.config.schema.task import JsonlDataConfig, ShareBy
from megarl.task.data import build_data, join_splits, split_data
from megarl.task.mix import MixSampler, SourceReward, build_run_scorer, build_sampler
from megarl.task.reward import DirectReward
from megarl.types import FinishReason, Prompt, Response, Sample, Score

MIX = (
    *("data=mix", "reward=exact", "data.sources.sum.kind=addition", "data.sources.sum.reward.kind=addition"),
    "data.sources.copy.kind=letter_count",
)


def build_prompts(source: str, number: int) -> list[Prompt]:
    return [Prompt(f"{source}{i}", "", (1,), "", source=source) for i in range(number)]


def build_mix(shares: dict[str, float], by: ShareBy = ShareBy.samples, size: int = 5, seed: int = 1) -> MixSampler:
    return MixSampler({name: build_prompts(name, size) for name in shares}, shares, seed, by)


def respond(length: int) -> Response:
    return Response([7] * length, "x", [0.0] * length, [True] * length, [0] * length, FinishReason.stop)


def answer(prompts: Sequence[Prompt], lengths: dict[str, int]) -> list[Sample]:
    return [Sample(prompt, respond(lengths[prompt.source]), Score(0.0, False), 0) for prompt in prompts]


def test_a_source_has_its_own_choices_and_else_those_of_the_run() -> None:
    own = "data.sources.sum."
    config = load_config(
        [
            *(*MIX, "data.system=Be brief.", "rollout.response_length=40", "reward.wrong=-1", "data.prompt_length=200"),
            *(f"{own}reward_scale=2", f"{own}response_length=12", f"{own}environment.kind=guess", f"{own}share=3"),
            *(f"{own}instruction='{{question}} = ?'", "data.sources.copy.share=1"),
        ]
    )
    found = list_sources(config)
    sums, copy = found["sum"].config, found["copy"].config
    assert (found["sum"].share, found["sum"].reward_scale, sums.rollout.response_length) == (3, 2.0, 12)
    assert (found["copy"].share, found["copy"].reward_scale, copy.rollout.response_length) == (1, 1.0, 40)
    assert [type(each.reward).__name__ for each in (sums, copy)] == ["AdditionRewardConfig", "ExactRewardConfig"]
    assert (sums.reward.wrong, copy.reward.wrong) == (-1, -1)
    assert (sums.environment.max_turns, type(copy.environment).__name__) == (3, "SingleTurnEnvironmentConfig")
    # The preset addition says system: "" and an instruction; what is typed for the source wins.
    assert (sums.data.system, sums.data.instruction, copy.data.system) == ("", "{question} = ?", "Be brief.")
    assert (sums.data.prompt_length, copy.data.prompt_length) == (200, 200)
    assert split_config(load_config(["data=guess"])).keys() == {""}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["data.sources={}"], "data.sources: found none; data=mix needs some"),
        (["data.sources.sum.kind=adition"], "data.sources.sum.kind: found 'adition'; the choices are addition"),
        (["data.sources.sum.kind=mix"], "data.sources.sum.kind is one of function"),
        (["data.sources.sum.share=1"], "data.sources.copy.share: found none, and sum has one"),
        (["data.sources.sum.share=0"], "data.sources.sum.share: found 0; it must be a finite number above 0"),
        (["data.sources.sum.reward_scale=0"], "data.sources.sum.reward_scale: found 0"),
        (["data.sources.sum.response_length=99"], r"sum.response_length: found 99; .* rollout.response_length \(72\)"),
        (["data.sources.sum.prompt_length=999"], r"sum.prompt_length: found 999; .* data.prompt_length \(512\)"),
        (["data.sources.sum.chat_template=false"], "data.sources.sum.chat_template: all sources have the same"),
        (["data.sources.sum.reward.wrong=-1"], "data.sources.sum.reward.wrong: all sources have the same"),
        (["data.sources.sum.reward.kind=right"], "data.sources.sum.reward.kind: found 'right'; the choices are"),
        (["data.sources.sum.rewrd=1"], "data.sources.sum.rewrd: .*kind=function has share, reward"),
        (
            ["data.sources.copy.reward={kind: numeric, tolerance: -1}"],
            "data.sources.copy.reward.tolerance: found -1.0; it must be 0 or more",
        ),
        (
            ["data.sources.copy.reward={kind: weighted, parts: {a: {kind: exact, weight: x}}}"],
            "data.sources.copy.reward.parts.a.weight: found 'x'",
        ),
        (
            ["data.sources.copy.reward={kind: environment}"],
            "data.sources.copy.reward: found environment with environment=single_turn",
        ),
        (["train.eval_sets={hard: {path: x.jsonl}}"], "train.eval_sets.hard.source: found null; .* sum, copy"),
        (["train.eval_sets={sum: {path: x.jsonl, source: sum}}"], "train.eval_sets.sum: a source has this name"),
    ],
)
def test_a_wrong_source_is_named_by_its_key(typed: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config([*MIX, *typed] if typed != ["data.sources={}"] else ["data=mix"])


def test_returns_are_within_the_scaled_scores_of_all_sources() -> None:
    config = load_config([*MIX, "data.sources.sum.reward_scale=3", "reward.wrong=-1"])
    assert find_return_range(config) == (-3.0, 3.0)
    assert find_return_range(load_config([*MIX, "data.sources.copy.reward={kind: function, path: a:b}"])) is None
    assert not check_config(config)


def test_an_evaluation_has_a_set_for_each_source_with_its_reward() -> None:
    configs = load_configs({"mix": list(MIX)})
    assert {name: type(each.reward).__name__ for name, each in configs.items()} == {
        "sum": "AdditionRewardConfig",
        "copy": "ExactRewardConfig",
    }


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 300))
def test_at_every_point_each_source_has_its_share_of_the_prompts(weights: list[int], number: int) -> None:
    shares = {f"s{i}": float(weight) for i, weight in enumerate(weights)}
    drawn = Counter(prompt.source for prompt in build_mix(shares).next_batch(number))
    for name, share in shares.items():
        assert abs(drawn[name] - number * share / sum(weights)) < len(weights)


def test_shares_are_exact_over_their_period_and_each_source_has_epochs_of_its_own() -> None:
    sampler = build_mix({"a": 0.7, "b": 0.2, "c": 0.1})
    for _ in range(10):
        assert Counter(prompt.source for prompt in sampler.next_batch(10)) == {"a": 7, "b": 2, "c": 1}
    assert sampler.count_epochs() == {"source/a/epochs": 14.0, "source/b/epochs": 4.0, "source/c/epochs": 2.0}
    batch = [prompt.id for prompt in build_mix({"a": 1.0, "b": 1.0}).next_batch(20)]
    for name in "ab":
        own = [each for each in batch if each.startswith(name)]
        assert len(set(own[:5])) == len(set(own[5:])) == 5
        assert own[:5] != own[5:]
    assert [p.id for p in build_mix({"a": 1.0, "b": 1.0}, seed=2).next_batch(20)] != batch


def test_shares_of_tokens_follow_the_lengths_of_the_responses() -> None:
    sampler, lengths = build_mix({"a": 1.0, "b": 1.0}, ShareBy.tokens), {"a": 10, "b": 30}
    first = sampler.next_batch(20)
    assert Counter(prompt.source for prompt in first) == {"a": 10, "b": 10}
    sampler.note(answer(first, lengths))
    # As many tokens of both: three responses of 10 tokens to one of 30.
    assert Counter(prompt.source for prompt in sampler.next_batch(40)) == {"a": 30, "b": 10}


@pytest.mark.parametrize("by", list(ShareBy))
@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(0, 10))
def test_a_saved_sampler_draws_the_same_prompts_again_whatever_lengths_come_between(
    by: ShareBy, sizes: list[int], place: int
) -> None:
    sampler = build_mix({"a": 1.0, "b": 2.0}, by)
    drawn: list[str] = []
    states: list[tuple[int, Any]] = []
    for number, size in enumerate(sizes):
        states.append((len(drawn), sampler.state()))
        batch = sampler.next_batch(size)
        drawn += [prompt.id for prompt in batch]
        sampler.note(answer(batch, {"a": 3 + number, "b": 20}))
    at, state = states[place % len(states)]
    # As a checkpoint keeps it, taken at the end, of where the oldest group under way began.
    again = build_mix({"a": 1.0, "b": 2.0}, by)
    again.restore(json.loads(json.dumps(sampler.complete(state))))
    assert [prompt.id for prompt in again.next_batch(len(drawn) - at)] == drawn[at:]
    assert [p.id for p in again.next_batch(9)] == [p.id for p in sampler.next_batch(9)]


def test_a_state_of_other_shares_sources_or_prompts_is_refused() -> None:
    state = build_mix({"a": 1.0, "b": 1.0}).complete(build_mix({"a": 1.0, "b": 1.0}).state())
    for other in (
        build_mix({"a": 1.0, "b": 2.0}),
        build_mix({"a": 1.0, "c": 1.0}),
        build_mix({"a": 1.0, "b": 1.0}, size=6),
        build_mix({"a": 1.0, "b": 1.0}, ShareBy.tokens),
        build_mix({"a": 1.0, "b": 1.0}, seed=3),
    ):
        with pytest.raises(ValueError, match="the sampler's state is of another run"):
            other.restore(state)


def test_without_shares_a_source_has_as_many_prompts_as_problems() -> None:
    config = load_config(list(MIX))
    sampler = build_sampler(config, [*build_prompts("sum", 30), *build_prompts("copy", 10)])
    assert Counter(prompt.source for prompt in sampler.next_batch(40)) == {"sum": 30, "copy": 10}


def test_each_response_is_scored_by_its_own_source() -> None:
    scorer = build_run_scorer(load_config(list(MIX)))
    prompt = Prompt("0", "", (1,), "x")
    response = Response([7], "X.", [0.0], [True], [0], FinishReason.stop)
    # Up to its case and a full stop the text is the answer; addition takes a number alone.
    scores = [asyncio.run(scorer.score(replace(prompt, source=name), response)) for name in ("copy", "sum")]
    assert [score.correct for score in scores] == [True, False]
    scorer.close()


def test_rewards_of_sources_keep_a_state_each() -> None:
    class Counting(DirectReward):
        number = 0

        def state(self) -> Any:
            return self.number

        def load_state(self, state: Any) -> None:
            self.number = state

    first, second = (Counting(lambda _prompt, _response: Score(0.0, False)) for _ in range(2))
    plain = DirectReward(lambda _prompt, _response: Score(0.0, False))
    first.number, second.number = 3, 4
    state = SourceReward({"a": first, "b": second, "c": plain}).state()
    first.number = second.number = 0
    SourceReward({"a": first, "b": second, "c": plain}).load_state(state)
    assert (first.number, second.number) == (3, 4)
    assert SourceReward({"c": plain}).state() is None


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_a_column_of_one_file_names_the_sources(tmp_path: Path) -> None:
    rows = [{"question": f"{tag}{i}", "answer": i, "tag": tag} for i in range(20) for tag in ("math", "aime", "code")]
    path = write(tmp_path / "all.jsonl", rows)
    config = load_config(
        [
            *("data=mix", "reward=exact", f"data.common={{kind: jsonl, path: '{path}'}}"),
            "data.sources={math: {select: {tag: [math, aime]}}, code: {select: {tag: code}, reward: {kind: code}}}",
        ]
    )
    parts = {name: each.data for name, each in split_config(config).items()}
    data = join_splits({name: split_data(each, build_byte_tokenizer(), 1) for name, each in parts.items()})
    counts = Counter((p.source, p.metadata["tag"]) for p in (*data.train, *data.heldout))
    assert counts == {("math", "math"): 20, ("math", "aime"): 20, ("code", "code"): 20}
    assert [p.source for p in data.heldout] == ["math"] * 4 + ["code"] * 2
    with pytest.raises(ConfigError, match=r"data.select.tag: found 'x'; none of 60 records.*'aime', 'code', 'math'"):
        build_data(JsonlDataConfig(path=path, select={"tag": "x"}), build_byte_tokenizer(), 1)


def test_no_source_trains_on_what_another_holds_out(tmp_path: Path) -> None:
    shared = [{"question": f"q{i}", "answer": i} for i in range(10)]
    paths = [write(tmp_path / name, rows) for name, rows in (("a", shared), ("b", [*shared, *shared[:2]]))]
    one = JsonlDataConfig(path=paths[0], num_heldout=5)
    two = JsonlDataConfig(path=paths[1], heldout_path=write(tmp_path / "c", [{"question": "z", "answer": 0}]))
    splits = {"a": split_data(one, build_byte_tokenizer(), 1), "b": split_data(two, build_byte_tokenizer(), 1)}
    data = join_splits(splits)
    held = {p.answer for p in data.heldout if p.source == "a"}
    assert (len(held), {p.answer for p in data.train if p.source == "b"} & held) == (5, set())
    splits["b"] = replace(splits["b"], heldout=splits["a"].train)
    with pytest.raises(ConfigError, match=r"data.sources.a: every training question is held out .* by one of the"):
        join_splits(splits)


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.jsonl", [{"question": f"q{i}{k}", "answer": i} for k in range(3)]) for i in "ab"]
    data = build_data(JsonlDataConfig(path=paths, num_heldout=1), build_byte_tokenizer(), 1)
    assert Counter(p.answer for p in (*data.train, *data.heldout)) == {"a": 3, "b": 3}
    with pytest.raises(ConfigError, match=r"data.path: .*none.jsonl does not exist"):
        build_data(JsonlDataConfig(path=[*paths, "none.jsonl"]), build_byte_tokenizer(), 1)
