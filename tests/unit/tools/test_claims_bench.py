"""tools/bench/claims.py: its verdicts, its closed forms, its tasks, and the loop in one process."""

import asyncio
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tool_loading import TOOLS, load_tool

sys.path.insert(0, str(TOOLS / "bench"))

from claims_bench import page, runs, specs, tasks, verdicts
from claims_bench.in_process import Engine
from claims_bench.model import TinyModel, write_biased_checkpoint
from claims_bench.verdicts import Verdict

from megarl.config.load import load_config
from megarl.environment import Action, EpisodeSetting
from megarl.hf.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.types import FinishReason, Prompt, Response, Turn

TOOL = load_tool("bench/claims.py")
CLAIMS = specs.load_claims()
RUN = runs.Run(
    claim="decoupled",
    arm="decoupled",
    seed=1,
    loop="in_process",
    cpu_seconds=1.0,
    seconds=2.0,
    samples=(64, 128, 192, 256),
    right=(0.1, 0.2, 0.6, 0.8),
    reward=(0.1, 0.2, 0.6, 0.8),
    surprise=(2.0, 1.5, 1.0, 0.5),
    length=(256.0,) * 4,
    snr=(),
    noise_share=(0.0,) * 4,
    metrics={"policy/grad_norm": (None, 1.0)},
)


def judge(differences, margin):
    return verdicts.judge(verdicts.compute_difference(differences), margin)


def test_the_interval_of_five_seeds_is_students():
    found = verdicts.compute_difference([0.1, 0.2, 0.3, 0.4, 0.5])
    # std = sqrt(0.025), over sqrt(5) = 0.0707; times 2.776 = 0.1963
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.1037, 0.4963), abs=1e-4)


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
    assert judge(differences, margin) is verdict


def test_fewer_than_two_seeds_have_no_interval():
    with pytest.raises(ValueError, match="found 1 seeds; an interval needs 2 to 10"):
        verdicts.compute_difference([0.5])


def make_runs(claim, arms):
    """Runs whose share of right answers is, in all iterations, that of the arm plus a hundredth of the seed."""
    return {
        (arm, seed): replace(RUN, arm=arm, seed=seed, right=(share + seed / 100,) * 4)
        for arm, share in arms.items()
        for seed in claim.seeds
    }


def test_a_prediction_compares_the_same_seeds_of_two_arms():
    claim = CLAIMS["decoupled"]
    found = make_runs(claim, {"decoupled": 0.8, "ppo": 0.3})
    outcome = verdicts.judge_prediction(claim.predictions[0], found, claim.seeds)
    assert outcome.verdict is Verdict.holds
    assert (outcome.difference.low, outcome.difference.high) == pytest.approx((0.5, 0.5))


def test_a_prediction_without_all_seeds_is_not_run():
    claim = CLAIMS["decoupled"]
    found = make_runs(claim, {"decoupled": 0.8, "ppo": 0.3})
    del found["ppo", 3]
    assert verdicts.judge_prediction(claim.predictions[0], found, claim.seeds).verdict is Verdict.not_run


def test_a_claim_holds_where_all_deciding_predictions_do():
    claim = CLAIMS["decoupled"]
    arms = {"decoupled": 0.8, "coupled": 0.3, "one": 0.3, "cold": 0.3, "ppo": 0.3}
    found = make_runs(claim, {**arms, "group": 0.8})
    outcomes = page.judge_all(claim, found)
    assert [o.verdict for o in outcomes] == [Verdict.holds] * 4 + [Verdict.does_not_hold]
    assert verdicts.judge_claim(claim, outcomes) is Verdict.holds
    worse = page.judge_all(claim, make_runs(claim, arms | {"group": 0.3, "cold": 0.8}))
    assert verdicts.judge_claim(claim, worse) is Verdict.does_not_hold
    assert verdicts.judge_claim(claim, page.judge_all(claim, {})) is Verdict.not_run


def test_a_sign_that_ends_a_cell_is_escaped_in_a_text():
    claim = CLAIMS["lite_ppo"]
    table = page.format_predictions(claim.predictions, page.judge_all(claim, {})).splitlines()
    assert r"the sum of \|advantage\| |" in table[2]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {7}


def test_the_measures_of_a_run():
    assert {name: measure(RUN) for name, measure in verdicts.MEASURES.items() if "SNR" not in name} == pytest.approx(
        {
            "right at the end": 0.8,
            "right at the start": 0.1,
            "right over all": 0.425,
            "iterations to half": 3,
            "fall from the best": 0.0,
            "surprise at the end": 0.5,
            "share in near-solved groups": 0.0,
        }
    )
    assert verdicts.MEASURES["log10 of SNR"](replace(RUN, snr=(0.1, 0.5))) == -1
    assert verdicts.count_to_half((0.1, 0.2)) == 3
    assert verdicts.find_best((0.2, 0.9, 0.4)) == 0.9


def test_the_claims_name_measures_arms_and_tasks_that_exist():
    for claim in CLAIMS.values():
        assert claim.cross_checked in (None, *claim.arms)
        assert (claim.cross_checked is None) == (claim.loop == "real")
        assert {arm.task for arm in claim.arms.values()} <= {*tasks.TASKS, runs.SMOLLM2}
        for prediction in claim.predictions:
            assert prediction.number in verdicts.MEASURES
            assert prediction.expected in [verdict.value for verdict in Verdict]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_every_arm_of_a_claim_is_a_configuration(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS / "bench")
    made = {}
    for arm in CLAIMS[name].arms.values():
        key = tuple(runs.build_overrides(arm, 1, tmp_path))
        made[key] = load_config(key)
    assert len(made) == len(CLAIMS[name].arms)


@pytest.fixture(scope="module")
def source():
    return resolve_checkpoint(load_config(runs.MODEL).model, default_cache_dir())


def test_the_model_in_plain_torch_computes_what_transformers_does(source):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(1))
    model = TinyModel(source)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(tokens).logits
        found = model(tokens)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        cache = model.build_cache(3, 12)
        steps = [model(tokens[:, :4], cache), *(model(tokens[:, i : i + 1], cache) for i in range(4, 12))]
    torch.testing.assert_close(torch.cat(steps, 1), found, rtol=1e-4, atol=1e-4)


def test_a_biased_checkpoint_answers_with_the_chances_asked_for(source, tmp_path):
    write_biased_checkpoint(source, tmp_path / "biased", {"c": math.log(7)}, tasks.NEVER)
    tokenizer = load_tokenizer(tmp_path / "biased")
    tokens = torch.tensor([tokenizer.encode("ab"), tokenizer.encode("gh")])
    with torch.no_grad():
        chances = TinyModel(tmp_path / "biased")(tokens)[:, -1].softmax(-1)
    assert chances[:, tokenizer.encode("c")[0]].tolist() == pytest.approx([0.5, 0.5], abs=0.15)
    assert float(chances[:, tokenizer.eos_token_id].max()) < 1e-4


@pytest.mark.timeout(300)
def test_a_run_in_one_process_learns_and_is_kept_as_it_was(tmp_path):
    arm = specs.Arm(
        (
            *("algo=vc_ppo", "reward.wrong=0", "train.samples_per_iteration=32", "train.samples_per_minibatch=32"),
            *("train.num_iterations=3", "algo.value_pretrain.steps=1", "algo.value_pretrain.patience=null"),
        ),
        "bits_16",
    )
    claim = replace(CLAIMS["credit"], arms={"arm": arm}, deadline_s=300)
    run = runs.train_once(claim, "arm", 1, tmp_path)
    assert run.samples == (64, 96, 128)
    assert len(run.right) == len(run.snr) == 3
    assert run.length == (16.0,) * 3
    runs.save_run(tmp_path / "run.json", run)
    assert runs.load_run(tmp_path / "run.json") == run
    again = runs.train_once(claim, "arm", 1, tmp_path / "again")
    assert again.right == run.right


def test_samples_are_as_many_updates_old_as_asked_for(tmp_path):
    arm = specs.Arm(
        (
            *("algo=grpo", "algo.kl.in_loss=false", "algo.mismatch.correction=tis", "rollout.max_staleness=2"),
            *("train.samples_per_iteration=16", "train.samples_per_minibatch=16", "train.responses_per_prompt=4"),
            "train.num_iterations=5",
        ),
        "rare",
    )
    run = runs.train_once(replace(CLAIMS["dis"], arms={"arm": arm}), "arm", 1, tmp_path)
    assert run.metrics["rollout/staleness_mean"][1:] == (0.0, 1.0, 2.0, 2.0, 2.0)


def test_the_page_has_a_verdict_for_each_claim_and_says_what_was_not_run():
    claim = CLAIMS["decoupled"]
    found = make_runs(claim, {"decoupled": 0.8, "ppo": 0.3})
    text = page.fill_page(
        f"head\n{page.BEGIN}@before@{page.END}\ntail\n", page.format_page(CLAIMS, {"decoupled": found}, {})
    )
    assert text.startswith("head\n")
    assert text.endswith("tail\n")
    assert "@before@" not in text
    assert text.count("not run") > 2 * len(CLAIMS) - 1
    assert "0.500, 0.500 to 0.500 | holds |" in text
    assert "Cross-check of `decoupled` with the real loop: not run." in text
    with pytest.raises(ValueError, match="must both be there"):
        page.fill_page("empty", "")


def test_the_real_loop_confirms_an_arm_within_the_range_of_its_seeds():
    own = [replace(RUN, right=(share,)) for share in (0.6, 0.8)]
    assert verdicts.is_confirmed(replace(RUN, right=(0.52,)), own)
    assert not verdicts.is_confirmed(replace(RUN, right=(0.45,)), own)


def test_the_picture_is_one_svg_with_a_line_for_each_seed_and_the_mean():
    svg = page.draw_claim(["decoupled"], {("decoupled", 1): RUN, ("decoupled", 2): replace(RUN, seed=2)})
    assert svg.startswith("<svg xmlns=")
    assert svg.count("</svg>") == 1
    assert svg.count('class="curve') == 3


def test_the_engine_ends_a_response_with_the_end_of_sequence(source, tmp_path):
    from megarl.interfaces import TurnRequest

    write_biased_checkpoint(source, tmp_path / "biased", {"<eos>": 12.0}, tasks.NEVER)
    engine = Engine(tmp_path / "biased", 1, load_tokenizer(tmp_path / "biased"))
    try:
        found = []
        request = TurnRequest(np.array([3, 4], dtype=np.int32), 8, 1.0, 0, "one")
        engine.run(engine.generate_turns([request], lambda _index, response: found.append(response)))
    finally:
        engine.close()
    assert [len(response) for response in found] == [1]
    assert found[0].finish_reason is FinishReason.stop


def test_only_runs_without_a_file_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(TOOL, "FINISHED", tmp_path)
    claim = CLAIMS["decoupled"]
    runs.save_run(TOOL.find_path("decoupled", "one", 2), replace(RUN, arm="one", seed=2))
    missing = [(arm, seed) for _, arm, seed in TOOL.list_missing([claim], None)]
    assert len(missing) == len(claim.arms) * len(claim.seeds) - 1
    assert ("one", 2) not in missing
    assert list(TOOL.load_finished(claim)) == [("one", 2)]


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


def test_the_readmes_picture_is_drawn_only_of_all_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(TOOL, "FINISHED", tmp_path / "finished")
    monkeypatch.setattr(TOOL, "PICTURE", tmp_path / "picture.svg")
    with pytest.raises(SystemExit, match="0 of 15 runs of luck are there"):
        TOOL.draw_readme(CLAIMS)
    for arm in TOOL.README_ARMS:
        for seed in CLAIMS["luck"].seeds:
            runs.save_run(TOOL.find_path("luck", arm, seed), replace(RUN, arm=arm, seed=seed))
    TOOL.draw_readme(CLAIMS)
    assert "no critic (GRPO)" in (tmp_path / "picture.svg").read_text()
