"""tools/bench: experiments.py with its verdicts, tasks, table and page; speed.py with its subjects, turns, tables, what
is counted, and which cells there are.
"""

import argparse
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tool_loading import TOOLS, load_tool

sys.path.insert(0, str(TOOLS / "bench"))

import beside_trl
import experiment_page as page
import experiment_tasks as tasks
import speed
from experiment_page import Verdict

from megarl.algo.advantages import compute_group_relative
from megarl.config.load import load_config
from megarl.config.schema.algo import AdvantageStd, StdOf
from megarl.models.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.types import FinishReason, Prompt, Response, Sample, Score

TOOL = load_tool("bench/experiments.py")
SUITE = TOOL.load_suite()
EXPERIMENTS = TOOL.load_experiments() | SUITE
RUN = page.Run(
    *("decoupled_64", "decoupled", 1, "real", 2.0),
    samples=(64, 128, 192, 256),
    right=(0.1, 0.2, 0.6, 0.8),
    reward=(0.1, 0.2, 0.6, 0.8),
    noise_share=(0.0,) * 4,
    heldout=((0, 0.1), (256, 0.5)),
)


def test_the_interval_of_five_seeds_is_students():
    found = page.compute_difference([0.1, 0.2, 0.3, 0.4, 0.5])
    # std = sqrt(0.025), over sqrt(5) = 0.0707; times 2.776 = 0.1963
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.1037, 0.4963), abs=1e-4)
    with pytest.raises(ValueError, match="found 1 seeds; an interval needs 2 or more"):
        page.compute_difference([0.5])


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        ([0.5, 0.6, 0.5, 0.6, 0.5], 0.2, Verdict.holds),
        ([0.01, -0.01, 0.0, 0.02, -0.02], 0.2, Verdict.does_not_hold),
        ([0.9, -0.5, 0.8, -0.1, 0.7], 0.2, Verdict.cannot_tell),
        ([0.10, 0.11, 0.12, 0.11, 0.10], 0.2, Verdict.does_not_hold),  # real, and smaller than what counts
        ([0.18, 0.1, 0.2, 0.15, 0.25], 0.2, Verdict.cannot_tell),  # above 0, and the margin inside the interval
        ([0.01, -0.01, 0.0, 0.02, -0.02], -0.05, Verdict.holds),  # not worse by as much as 0.05
        ([0.01, -0.21, 0.0, 0.02, -0.02], -0.05, Verdict.cannot_tell),
        # Twenty seeds are enough for one of two words.
        ([0.18, 0.1, 0.2, 0.15, 0.25] * 4, 0.2, Verdict.does_not_hold),
        ([0.9, -0.5, 0.8, -0.1, 0.7] * 4, 0.2, Verdict.holds),
    ],
)
def test_a_verdict_follows_from_the_interval_and_the_margin(differences, margin, verdict):
    assert page.judge(page.compute_difference(differences), margin) is verdict


def make_runs(experiment, arms):
    """Runs whose share of right answers is, in all iterations, that of the arm plus a hundredth of the seed."""
    return {
        (arm, seed): replace(RUN, arm=arm, seed=seed, right=(share + seed / 100,) * 4)
        for arm, share in arms.items()
        for seed in experiment.seeds
    }


def test_a_prediction_compares_the_same_seeds_of_two_arms_and_needs_all_of_them():
    experiment = EXPERIMENTS["decoupled_64"]
    found = make_runs(experiment, {"decoupled": 0.8, "ppo": 0.3})
    outcome = page.judge_prediction(experiment.predictions[0], found, experiment.seeds)
    assert outcome.verdict is Verdict.holds
    assert (outcome.difference.low, outcome.difference.high) == pytest.approx((0.5, 0.5))
    del found["ppo", 3]
    assert page.judge_prediction(experiment.predictions[0], found, experiment.seeds).verdict is Verdict.not_run


def test_the_area_is_the_mean_over_the_responses_generated():
    # Two evaluations are no curve: 0.1, 0.2, 0.6, 0.8 of 64 each; the first iteration stands for those before.
    assert page.measure(RUN, "area") == pytest.approx(0.425)
    late = replace(RUN, samples=(192, 256, 320, 384))
    assert page.measure(late, "area") == pytest.approx((3 * 0.1 + 0.2 + 0.6 + 0.8) / 6)
    evaluated = replace(RUN, heldout=((0, 0.0), (64, 0.5), (256, 1.0)))
    assert page.measure(evaluated, "area") == pytest.approx((64 * 0.25 + 192 * 0.75) / 256)


def test_the_suite_compares_with_the_best_of_several_arms():
    experiment = SUITE["suite/luck"]
    arms = {"cv_ppo": 0.8, "rloo": 0.3, "grpo": 0.6, "dr_grpo": 0.1, "dapo": 0.2}
    runs = make_runs(experiment, arms)
    outcome = page.judge_prediction(experiment.predictions[0], runs, experiment.seeds)
    assert outcome.difference.mean == pytest.approx(0.2)
    row = page.list_suite(SUITE, {name: runs if each is experiment else {} for name, each in SUITE.items()})[1]
    assert row[1:] == ["0.82", "`grpo` 0.62", "", "0.20 (0.20 to 0.20), 3", "met", "0.1: met"]
    drawn = page.draw_suite(SUITE, {name: runs if each is experiment else {} for name, each in SUITE.items()})
    assert drawn.count("<circle") == 2 * len(arms)


@pytest.mark.slow
def test_every_override_of_an_arm_is_in_a_configuration_and_no_two_arms_are_the_same(tmp_path, monkeypatch):
    """Composing all arms would take minutes: many experiments try the same algorithms on other tasks."""
    monkeypatch.syspath_prepend(TOOLS / "bench")
    for name_of_trainer in ("train_reward_model", "train_teacher"):
        monkeypatch.setattr(TOOL, name_of_trainer, lambda *_given: None)
    seen = set()
    for experiment in EXPERIMENTS.values():
        arms = [tuple(TOOL.build_overrides(arm, 1, tmp_path)) for arm in experiment.arms.values()]
        assert len(set(arms)) == len(arms)
        for overrides in arms:
            if not seen.issuperset(overrides):
                load_config(overrides)
                seen.update(overrides)


def test_a_biased_checkpoint_answers_with_the_chances_asked_for(tmp_path):
    from transformers import AutoModelForCausalLM

    source = resolve_checkpoint(load_config(TOOL.MODEL).model, default_cache_dir())
    tasks.write_biased_checkpoint(source, tmp_path / "biased", {"c": math.log(7)})
    tokenizer = load_tokenizer(tmp_path / "biased")
    tokens = torch.tensor([tokenizer.encode("ab"), tokenizer.encode("gh")])
    with torch.no_grad():
        chances = AutoModelForCausalLM.from_pretrained(tmp_path / "biased")(tokens).logits[:, -1].softmax(-1)
    assert chances[:, tokenizer.encode("c")[0]].tolist() == pytest.approx([0.5, 0.5], abs=0.15)
    assert float(chances[:, tokenizer.eos_token_id].max()) < 1e-4


def test_the_docs_have_what_the_finished_runs_give(tmp_path):
    found = TOOL.load_runs(TOOL.OUT / "finished.jsonl")
    TOOL.write_docs(EXPERIMENTS, {name: found.get(name, {}) for name in EXPERIMENTS}, tmp_path)
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*") if path.suffix != ".svg"]
    assert len(written) == 3
    assert [name for name in written if (tmp_path / name).read_text() != (TOOL.DOCS / name).read_text()] == []


def test_means_by_the_place_in_a_response():
    # Rows of 4 and 2 tokens in halves: (1 + 2 + 10) / 3 and (3 + 4 + 20) / 3; in eighths some have no token.
    numbers = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 9.0, 9.0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    assert TOOL.average_by_place(numbers, mask, 2) == pytest.approx([13 / 3, 9.0])
    assert TOOL.average_by_place(numbers, mask, 8) == pytest.approx([5.5, 0, 2, 0, 11.5, 0, 4, 0])


def test_the_whole_response_is_paid_by_its_right_letters_and_its_length_is_measured():
    score = tasks.score_whole(make_prompt(), make_response("abhh" * 16))
    assert (score.reward, score.details["right"]) == (0.25, 0.5)
    run = replace(RUN, length=(80.0, 60.0, 40.0, 20.0), tilt=(1.5, 0.0, 0.0, 0.0))
    found = [page.measure(run, name) for name in ("length at the end", "first quarter's advantage")]
    assert found == [20.0, 1.5]


def make_response(text):
    ids = [3 + tasks.LETTERS.index(letter) for letter in text]
    return Response(ids, text, (-1.0,) * len(ids), (True,) * len(ids), (0,) * len(ids), FinishReason.length)


def make_prompt(text="aa"):
    return Prompt("p", text, (3, 3), "c")


def test_the_measured_snr_is_the_closed_form_of_random_tokens():
    generator = np.random.default_rng(1)
    task, num_bits, share = tasks.TASKS["bits_16"], 16, 7 / 8
    texts = ["".join(generator.choice(list(tasks.LETTERS), num_bits)) for _ in range(4096)]
    samples = [Sample(make_prompt(), make_response(text), Score(0, False), i // 8) for i, text in enumerate(texts)]
    rewards = torch.tensor([task.score(s.prompt, s.response).reward for s in samples])
    advantages = compute_group_relative(rewards, torch.arange(4096) // 8, AdvantageStd.none, StdOf.raw)
    found = TOOL.measure_snr(samples, advantages[:, None].expand(-1, num_bits), task)
    # Of R - mean R, with c = 1 - 1/8: half the difference is c / 2n, and given the token its variance is
    # (c^2 (n - 1) + n (8 - 1) / 8^2) / 4n^2.
    expected = share / math.sqrt(share**2 * (num_bits - 1) + num_bits * 7 / 64)
    assert found == pytest.approx(expected, rel=0.05)


def test_ways_take_turns_and_warm_ups_do_not_count():
    called = []

    def call(name):
        called.append(name)
        return {"seconds": 7.0} if name == "b" else {"bytes": len(called)}

    found = speed.take_turns({name: lambda name=name: call(name) for name in "ab"}, repeats=2, warm_up=1)
    assert called == list("ababab")
    assert [numbers["bytes"] for numbers in found["a"]] == [3, 5]
    assert all(0 <= numbers["seconds"] < 1 for numbers in found["a"])
    assert found["b"] == [{"seconds": 7.0}] * 2, "a way may measure its seconds itself"


def test_the_last_line_is_the_ratio_and_all_numbers_are_in_the_file(tmp_path, monkeypatch, capsys):
    result = speed.Result([{"way": "one", "seconds": 1.23456}, {"way": "two"}], 0.5, 2, ["a note"])
    monkeypatch.setitem(sys.modules, "sync_plan", argparse.Namespace(
        __doc__="text", add_arguments=lambda parser: parser.add_argument("--layers"), run=lambda args: result
    ))  # fmt: skip
    monkeypatch.setattr("sys.argv", ["speed.py", "sync_plan", "--layers", "3", "--json", str(tmp_path / "found.json")])
    speed.main()
    assert capsys.readouterr().out.splitlines() == [
        "| way | seconds |",
        "| --- | --- |",
        "| one | 1.235 |",
        "| two |  |",
        "a note",
        "ratio: 0.50 goal: 2",
    ]
    content = json.loads((tmp_path / "found.json").read_text())
    assert (content["subject"], content["ratio"], content["rows"][0]["seconds"]) == ("sync_plan", 0.5, 1.23456)


def test_a_cell_is_a_configuration_of_one_optimizer_step(tmp_path):
    args = argparse.Namespace(model=tmp_path, threads=2)
    for name in ("4x8x32-float32", "16x16x128-bfloat16"):
        cell = beside_trl.parse_cell(name)
        config = load_config(beside_trl.list_overrides(cell, tmp_path / "prompts.jsonl", args))
        assert config.train.num_samples == cell.num_samples
        assert config.train.num_minibatches == 1
        assert config.policy.dtype.value == cell.dtype
