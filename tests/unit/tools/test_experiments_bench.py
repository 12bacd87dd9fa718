"""tools/bench/experiments.py: its verdicts, its tasks, its table and its page."""

import asyncio
import itertools
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tool_loading import TOOLS, load_tool

sys.path.insert(0, str(TOOLS / "bench"))

import experiment_page as page
import experiment_tasks as tasks
from experiment_page import Verdict

from megarl.algo.advantages import compute_group_relative
from megarl.config.load import load_config
from megarl.config.schema.algo import AdvantageStd, StdOf
from megarl.environment import Action, EpisodeSetting
from megarl.models.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.types import FinishReason, Prompt, Response, Sample, Score, Turn

TOOL = load_tool("bench/experiments.py")
EXPERIMENTS = TOOL.load_experiments()
RUN = page.Run(
    *("decoupled", "decoupled", 1, "real", 2.0),
    samples=(64, 128, 192, 256),
    right=(0.1, 0.2, 0.6, 0.8),
    reward=(0.1, 0.2, 0.6, 0.8),
    surprise=(2.0, 1.5, 1.0, 0.5),
    noise_share=(0.0,) * 4,
    heldout=((0, 0.1), (256, 0.5)),
)


def test_the_interval_of_five_seeds_is_students():
    found = page.compute_difference([0.1, 0.2, 0.3, 0.4, 0.5])
    # std = sqrt(0.025), over sqrt(5) = 0.0707; times 2.776 = 0.1963
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.1037, 0.4963), abs=1e-4)
    with pytest.raises(ValueError, match="found 1 seeds; an interval needs 2 to 10"):
        page.compute_difference([0.5])


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        ([0.5, 0.6, 0.5, 0.6, 0.5], 0.2, Verdict.holds),
        ([0.01, -0.01, 0.0, 0.02, -0.02], 0.2, Verdict.does_not_hold),
        ([-0.5, -0.6, -0.5, -0.6, -0.5], 0.2, Verdict.does_not_hold),
        ([0.9, -0.5, 0.8, -0.1, 0.7], 0.2, Verdict.cannot_tell),
        ([0.10, 0.11, 0.12, 0.11, 0.10], 0.2, Verdict.does_not_hold),  # real, and smaller than what counts
        ([0.18, 0.1, 0.2, 0.15, 0.25], 0.2, Verdict.cannot_tell),  # above 0, and the margin inside the interval
        ([1.0] * 5, 0.2, Verdict.holds),
        ([0.01, -0.01, 0.0, 0.02, -0.02], -0.05, Verdict.holds),  # not worse by as much as 0.05
        ([0.01, -0.21, 0.0, 0.02, -0.02], -0.05, Verdict.cannot_tell),
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
    experiment = EXPERIMENTS["decoupled"]
    found = make_runs(experiment, {"decoupled": 0.8, "ppo": 0.3})
    outcome = page.judge_prediction(experiment.predictions[0], found, experiment.seeds)
    assert outcome.verdict is Verdict.holds
    assert (outcome.difference.low, outcome.difference.high) == pytest.approx((0.5, 0.5))
    del found["ppo", 3]
    assert page.judge_prediction(experiment.predictions[0], found, experiment.seeds).verdict is Verdict.not_run


def test_of_several_arms_the_least_counts():
    experiment = EXPERIMENTS["guess"]
    found = make_runs(experiment, {"vapo": 0.9, "grpo": 0.9, "sao": 0.6, "bpco": 0.9})
    outcome = page.judge_prediction(experiment.predictions[0], found, experiment.seeds)
    assert outcome.difference.mean == pytest.approx(0.62 - 0.4286)
    assert "least of 4 arms - 0.4286" in page.format_predictions(experiment.predictions, [outcome])


def test_an_experiment_holds_where_all_deciding_predictions_do():
    experiment = EXPERIMENTS["decoupled"]
    arms = {"decoupled": 0.8, "coupled": 0.3, "one": 0.3, "cold": 0.3, "ppo": 0.3}
    outcomes = page.judge_all(experiment, make_runs(experiment, {**arms, "group": 0.8}))
    assert [o.verdict for o in outcomes] == [Verdict.holds] * 4 + [Verdict.does_not_hold]
    assert page.judge_experiment(experiment, outcomes) is Verdict.holds
    worse = page.judge_all(experiment, make_runs(experiment, arms | {"group": 0.3, "cold": 0.8}))
    assert page.judge_experiment(experiment, worse) is Verdict.does_not_hold
    assert page.judge_experiment(experiment, page.judge_all(experiment, {})) is Verdict.not_run


def test_the_measures_of_a_run():
    found = {name: measure(RUN) for name, measure in page.MEASURES.items() if "SNR" not in name}
    assert found == pytest.approx(
        {
            "right at the end": 0.8,
            "right at the start": 0.1,
            "right over all": 0.425,
            "iterations to half": 3,
            "fall from the best": 0.0,
            "surprise at the end": 0.5,
            "share in near-solved groups": 0.0,
            "held-out at the end": 0.5,
            "rise of the held-out reward": 0.4,
        }
    )
    assert page.MEASURES["log10 of SNR"](replace(RUN, snr=(0.1, 0.5))) == -1
    assert page.count_to_half((0.1, 0.2)) == 3
    assert page.find_best((0.2, 0.9, 0.4)) == 0.9


def test_the_table_names_measures_tasks_and_verdicts_that_exist():
    for experiment in EXPERIMENTS.values():
        assert {arm.task for arm in experiment.arms.values()} <= {None, *tasks.TASKS}
        for prediction in experiment.predictions:
            assert prediction.number in page.MEASURES
            assert prediction.expected in [verdict.value for verdict in Verdict]


def test_a_table_with_an_unknown_key_or_arm_is_refused(tmp_path):
    text = "a: {title: a, source: b, task: c, seeds: [1], keys: [], arms: {one: {}}, predictions: [], KEY}"
    prediction = "{high: two, low: one, text: t, number: n, margin: 0, expected: holds, why: w}"
    wrong = {
        "a: found seed; the keys are": text.replace("KEY", "seed: 1"),
        "a: a prediction about two; the arms are one": text.replace("[], KEY", f"[{prediction}]"),
    }
    for message, node in wrong.items():
        (tmp_path / "table.yaml").write_text(node)
        with pytest.raises(ValueError, match=message):
            TOOL.load_experiments(tmp_path / "table.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_is_a_configuration(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS / "bench")
    made = {}
    for arm in EXPERIMENTS[name].arms.values():
        key = tuple(TOOL.build_overrides(arm, 1, tmp_path))
        made[key] = load_config(key)
    assert len(made) == len(EXPERIMENTS[name].arms)


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


def test_a_saved_run_is_loaded_as_it_was(tmp_path):
    TOOL.save_run(tmp_path / "finished.jsonl", RUN)
    TOOL.save_run(tmp_path / "finished.jsonl", replace(RUN, seed=2, snr=(0.5,)))
    found = TOOL.load_runs(tmp_path / "finished.jsonl")
    assert found["decoupled"] == {("decoupled", 1): RUN, ("decoupled", 2): replace(RUN, seed=2, snr=(0.5,))}


def test_a_name_of_nothing_is_refused_with_the_choices():
    assert TOOL.choose(EXPERIMENTS, ["decoupled:cold"]) == [(EXPERIMENTS["decoupled"], "cold")]
    assert len(TOOL.choose(EXPERIMENTS, ["guess"])) == 4
    for name, message in {"gess": "'gess' is none of decoupled", "guess:ppo": "guess: 'ppo' is none of vapo"}.items():
        with pytest.raises(SystemExit, match=message):
            TOOL.choose(EXPERIMENTS, [name])


def test_the_page_has_a_verdict_for_each_experiment_and_says_what_was_not_run():
    runs = {name: {} for name in EXPERIMENTS}
    runs["decoupled"] = make_runs(EXPERIMENTS["decoupled"], {"decoupled": 0.8, "ppo": 0.3})
    text = page.fill_page(f"head\n{page.BEGIN}@before@{page.END}\ntail\n", page.format_page(EXPERIMENTS, runs))
    assert text.startswith("head\n")
    assert text.endswith("tail\n")
    assert "@before@" not in text
    assert text.count("not run") > 2 * len(EXPERIMENTS) - 1
    assert "0.500, 0.500 to 0.500 | holds |" in text
    table = text[text.index("### lite-ppo") :].splitlines()
    (row,) = [line for line in table if r"the sum of \|advantage\| |" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
    with pytest.raises(ValueError, match="not enough values"):
        page.fill_page("empty", "")


def test_the_page_is_what_the_finished_runs_give():
    found = TOOL.load_runs(TOOL.OUT / "finished.jsonl")
    runs = {name: found.get(name, {}) for name in EXPERIMENTS}
    text = TOOL.PAGE.read_text()
    assert page.fill_page(text, page.format_page(EXPERIMENTS, runs)) == text


def test_the_picture_is_one_svg_with_a_line_for_each_seed_and_the_mean():
    svg = page.draw({("one", 1): RUN, ("one", 2): replace(RUN, seed=2)}, {"one": "the one"})
    assert svg.startswith("<svg xmlns=")
    assert svg.count("</svg>") == 1
    assert svg.count('class="curve') == 3
    assert "the one" in svg
    assert page.list_points(RUN)[0] == (64, 0.1)
    assert page.list_points(replace(RUN, samples=()))[0] == (1, 0.1)
    assert page.list_points(replace(RUN, samples=(), right=()))[1] == (256, 0.5)


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


def test_near_solved_groups_have_their_share_of_the_advantages():
    rewards = torch.tensor([1.0] * 7 + [0.0] + [1.0] * 4 + [0.0] * 4 + [1.0] * 8)
    experience = SimpleNamespace(rewards=rewards, groups=torch.arange(24) // 8, mask=torch.ones(24, 2).bool())
    advantages = torch.tensor([1.0] * 8 + [3.0] * 8 + [0.0] * 8)[:, None].expand(-1, 2)
    assert TOOL.measure_noise_share(experience, advantages) == pytest.approx(0.25)


def test_the_tasks_pay_what_they_say():
    assert tasks.list_bits(make_prompt(), make_response("adeh")) == [True, True, False, False]
    assert tasks.score_bits_16(make_prompt(), make_response("aade")).reward == 3 / 16
    assert tasks.score_first(make_prompt(), make_response("cab")).reward == 1
    assert tasks.score_first(make_prompt(), make_response("ac")).reward == 0
    assert tasks.score_rare(make_prompt(), make_response("a")).reward == 1
    assert tasks.score_groups(make_prompt("ga"), make_response("ca")).details == {"right": 1.0, "counted": 1.0}
    assert tasks.score_groups(make_prompt("aa"), make_response("ca")).details["counted"] == 0.0


@pytest.mark.parametrize(
    ("score", "prompt", "first", "chance"),
    [
        (tasks.score_key, "aa", "c", tasks.RIGHT_PAYS),
        (tasks.score_key, "aa", "a", tasks.WRONG_PAYS),
        (tasks.score_groups, "aa", "a", 1 - tasks.SLIP),
    ],
)
def test_a_payment_by_chance_has_its_chance_and_repeats(score, prompt, first, chance):
    texts = [first + "".join(rest) for rest in itertools.product(tasks.LETTERS, repeat=4)]
    paid = [score(make_prompt(prompt), make_response(text)).reward for text in texts]
    assert sum(paid) / len(paid) == pytest.approx(chance, abs=0.03)
    assert score(make_prompt(prompt), make_response(texts[0])).reward == paid[0]


def test_the_game_pays_right_choices_and_the_luck_of_the_throws():
    def step(text, seed):
        game = tasks.Dice(2)
        game.reset(EpisodeSetting(Prompt("p", "text", (1,), ""), seed))
        return asyncio.run(game.step(Action(text, text, (1,), 0, FinishReason.stop)))

    assert [step(text, 1).details["right"] for text in ("a", "dh", "e", "")] == [1, 1, 0, 0]
    assert {step("a", seed).details["lucky"] for seed in range(20)} == {0, 1}
    assert step("a", 3).observation == step("h", 3).observation
    details = [{"right": right, "lucky": 1.0} for right in (1.0, 0.0)]
    turns = [Turn(0, 1, "a", details=details[0]), Turn(2, 3, "e", details=details[1])]
    response = Response([1, 2, 3], "", [0.0] * 3, (True, False, True), (1,) * 3, FinishReason.stop, turns=tuple(turns))
    score = tasks.score_dice(None, response)
    assert score.reward == pytest.approx((1 + 4 * 2) / (4 * math.sqrt(2)))
    assert score.details["right"] == 0.5
