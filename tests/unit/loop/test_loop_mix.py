"""A run of data=mix over the fakes: what its metrics and files say of each source, and what is learned from."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from fakes.run import World, load, load_untimed

from megarl.config.schema.mix import list_sources
from megarl.rollout.collector import build_tensors
from megarl.rollout.episodes import SourceRunners, build_runner
from megarl.rollout.rollout_file import Limits, find_groups, from_record
from megarl.types import Prompt, Response, Rollout, Score

RUN = (
    *("algo=dapo", "algo.overlong.buffer_frac=0.5", "data=mix", "train.num_iterations=2"),
    *("logger.save_rollouts=true", "train.eval_every=2", "data.prompt_length=32"),
    "data.sources.long={kind: letter_count, share: 2, num_heldout: 4, options: {letters: abc, max_dots: 4}}",
    "data.sources.short={kind: letter_count, share: 1, num_heldout: 4, options: {letters: def, max_dots: 3}}",
    "data.sources.short.response_length=6",
    "data.sources.short.reward_scale=-2",
)


def reward_by_source(prompt: Prompt, response: Response) -> Score:
    return Score(len(response.token_ids) / (6 if prompt.source == "short" else 16), len(response.token_ids) > 4)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mix") / "run"
    World(reward=reward_by_source).run_job(path, RUN)
    return path


def load_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_metrics_of_a_source_are_those_of_its_responses(run_dir: Path) -> None:
    by_source: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in load_lines(run_dir / "rollouts.jsonl"):
        by_source[line["iteration"], line["prompt"]["source"]].append(line)
    metrics = {line["iteration"]: line for line in load_untimed(run_dir)}
    assert {name for _, name in by_source} == {"long", "short"}
    for (iteration, name), lines in by_source.items():
        found = {k.removeprefix(f"source/{name}/"): v for k, v in metrics[iteration].items() if f"/{name}/" in k}
        assert found["samples"] == len(lines)
        assert found["reward"] == pytest.approx(fmean(line["score"]["reward"] for line in lines))
        assert found["correct"] == pytest.approx(fmean(line["score"]["correct"] for line in lines))
        assert found["response_length"] == pytest.approx(fmean(len(x["response"]["token_ids"]) for x in lines))
        assert max(len(line["response"]["token_ids"]) for line in lines) <= (6 if name == "short" else 16)
    assert metrics[2]["source/long/epochs"] > metrics[1]["source/long/epochs"] > 0
    # Two of three prompts; dynamic sampling asks for more than 2 x 6.
    numbers = [sum(metrics[i][f"source/{name}/samples"] for i in (1, 2)) for name in ("long", "short")]
    assert abs(numbers[0] - 2 * numbers[1]) <= 8


def test_each_source_is_evaluated_on_its_own_heldout_prompts(run_dir: Path) -> None:
    last = load_untimed(run_dir)[-1]
    mean = fmean(last[f"eval/{name}/reward_mean"] for name in ("long", "short"))
    assert last["reward/heldout"] == pytest.approx(mean)  # of four prompts each
    assert {each["prompt"]["source"] for each in load_lines(run_dir / "tokens.jsonl")} == {"long", "short"}
    saved = find_groups(run_dir / "rollouts.jsonl", Limits(vocab_size=1000, max_length=1000, response_length=16))
    assert {prompt.source for prompt in saved.prompts} == {"long", "short"}


def test_what_is_learned_from_has_the_scales_and_limits_of_the_sources(run_dir: Path) -> None:
    config, inputs = load(RUN)
    lines = load_lines(run_dir / "rollouts.jsonl")[:24]
    samples = tuple(from_record(line) for line in lines)
    tensors = build_tensors(Rollout(samples, 0), sources=list_sources(config))
    is_short = [sample.prompt.source == "short" for sample in samples]
    assert tensors.reward_scales is not None
    assert tensors.length_limits is not None
    assert tensors.reward_scales.tolist() == [-2.0 if each else 1.0 for each in is_short]
    assert tensors.length_limits.tolist() == [6 if each else 16 for each in is_short]
    assert tensors.rewards.tolist() == pytest.approx([line["score"]["reward"] for line in lines])
    assert isinstance(build_runner(config, inputs.conversations), SourceRunners)
    plain = build_tensors(Rollout(samples, 0))
    assert plain.reward_scales is plain.length_limits is None
