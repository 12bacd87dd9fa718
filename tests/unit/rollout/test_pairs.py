"""A reward model's pairs: how they are read, their loss, and the loop over the fakes."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import build_byte_tokenizer, build_char_tokenizer, jsonl_config
from fakes.disturbed import Disturbance, Killed
from fakes.run import World, load_untimed

from megarl.algo.algorithm import build_given_samples
from megarl.algo.losses import TokenTargets, count_minibatch, critic_loss
from megarl.algo.objective import format_objective
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig, ValueLoss
from megarl.mcore.spec import Role
from megarl.plan.command import check_hardware_is_known
from megarl.report.record import load_metrics
from megarl.rollout.collector import build_tensors
from megarl.rollout.pairs import Pair, Pairs, build_group, build_pairs
from megarl.rollout.source import join_groups
from megarl.task.data import build_data
from megarl.task.render import Renderer

ALGO = AlgoConfig(value_loss=ValueLoss.bradley_terry)
MANY = [{"prompt": f"what is {i}?", "chosen": f"it is {i}", "rejected": "no idea"} for i in range(9)]


def read(path: Path, records: list[dict[str, Any]], tokenizer: Any = None, longest: int = 99, **keys: Any) -> Pairs:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    keys = {"answer_field": "chosen", "num_heldout": 1, **keys}
    config, tokenizer = jsonl_config(path, **keys), tokenizer or build_char_tokenizer()
    return build_pairs(build_data(config, tokenizer, 1), Renderer(config, tokenizer), longest)


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts)]


def test_a_pair_is_the_prompt_with_each_response_and_the_token_that_ends_a_text(tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer()
    pairs = read(tmp_path / "p.jsonl", MANY, tokenizer)
    found = {tuple(tokenizer.decode(side.tolist()) for side in pair[1:]) for pair in (*pairs.train, *pairs.heldout)}
    assert found == {(f"what is {i}?it is {i}<eos>", f"what is {i}?no idea<eos>") for i in range(9)}
    assert (len(pairs.train), len(pairs.heldout)) == (8, 1)
    better, worse = build_group(pairs.train[0])
    assert better.prompt.token_ids == tuple(pairs.train[0].chosen)
    assert (len(better.response), better.score.reward, worse.score.reward) == (1, 1.0, 0.0)


def test_chats_are_rendered_by_the_template_whether_the_prompt_is_a_text_or_in_them(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer(chat=True)
    long = [{**r, **{name: chat(r["prompt"], r[name]) for name in ("chosen", "rejected")}} for r in MANY]
    bare = [{name: record[name] for name in ("chosen", "rejected")} for record in long]
    found = [
        read(tmp_path / "texts.jsonl", MANY, tokenizer),
        read(tmp_path / "chats.jsonl", long, tokenizer),
        read(tmp_path / "bare.jsonl", bare, tokenizer, answer_field=None, prompt_field="chosen"),
    ]
    sets = [{(tuple(p.chosen), tuple(p.rejected)) for p in (*each.train, *each.heldout)} for each in found]
    assert sets[0] == sets[1] == sets[2]
    whole = tokenizer.apply_chat_template(chat("what is 0?", "it is 0"), tokenize=False)
    assert tokenizer(whole, add_special_tokens=False)["input_ids"] in [list(chosen) for chosen, _ in sets[0]]


def test_pairs_are_read_as_the_hubs_sets_have_them(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer(chat=True)
    texts = [(r["prompt"], r["chosen"], r["rejected"]) for r in MANY]
    expected = read(tmp_path / "p.jsonl", MANY, tokenizer)
    hh = [{n: f"\n\nHuman: {p}\n\nAssistant: {x}" for n, x in (("chosen", c), ("rejected", r))} for p, c, r in texts]
    scored = [
        {"context": chat(p), "response1": c, "response2": r, "overall_preference": -i % 3 - 3}
        if i % 2
        else {"context": chat(p), "response1": r, "response2": c, "overall_preference": i % 3 + 1}
        for i, (p, c, r) in enumerate(texts)
    ]
    tie = {"context": chat("x?"), "response1": "a", "response2": "b", "overall_preference": 0}
    for records, keys in ((hh, {}), ([*scored, tie], {"answer_field": "response1", "num_heldout": 2})):
        found = read(tmp_path / "q.jsonl", records, tokenizer, **keys)
        sets = [{(tuple(p.chosen), tuple(p.rejected)) for p in (*each.train, *each.heldout)}
                for each in (found, expected)]  # fmt: skip
        assert sets[0] == sets[1]
    assert any("1 training pairs dropped, without a preference in overall_preference" in n or "1 held-out" in n
               for n in found.notes)  # fmt: skip


def test_pairs_of_different_prompts_and_blank_responses_are_dropped_and_counted(tmp_path: Path) -> None:
    differ = {"prompt": "a?", "chosen": chat("a?", "b"), "rejected": chat("c?", "b")}
    pairs = read(tmp_path / "p.jsonl", [*MANY, differ, {"prompt": "d?", "chosen": "b", "rejected": " "}], num_heldout=2)
    notes = " ".join(pairs.notes)
    assert len(pairs.train) + len(pairs.heldout) == 9
    assert "pairs dropped, whose chats differ before the last message" in notes
    assert "pairs dropped, of which one response is blank" in notes


def test_equal_and_long_pairs_are_dropped_and_counted(tmp_path: Path) -> None:
    same, long = (
        {**MANY[0], "prompt": "same?", "rejected": "it is 0"},
        {**MANY[0], "prompt": "long?", "chosen": "a" * 40},
    )
    pairs = read(tmp_path / "p.jsonl", [*MANY, same, long], longest=30, num_heldout=2)
    notes = " ".join(pairs.notes)
    assert len(pairs.train) + len(pairs.heldout) == 9
    assert "pairs dropped, of two equal responses" in notes
    assert "pairs dropped, of 30 tokens or more" in notes


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a?", "chosen": "b"}, r"p\.jsonl:10: rejected: found only prompt, chosen; expected a response"),
        ({"prompt": "a?", "chosen": "b", "rejected": 3}, r"p\.jsonl:10: rejected: found 3; expected a response"),
        ({"prompt": "a?", "rejected": "b"}, r"p\.jsonl:10: chosen: found only prompt, rejected"),
        (
            {"prompt": "a?", "chosen": chat("a?", "b", "c?", "d"), "rejected": chat("a?", "b", "c?", "e")},
            r"p\.jsonl:10: chosen: found 2 messages of the user before the response, and 1 .*data.prompt_field=chosen",
        ),
    ],
)
def test_a_record_without_two_responses_is_named(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "p.jsonl", [*MANY, record])


def test_pairs_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no training pair is left of 8: of two responses below .*\(5 tokens\)"):
        read(tmp_path / "p.jsonl", MANY, longest=5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.responses_per_prompt=4", "train.responses_per_prompt: found 4 .* must be 2"),
        ("train.samples_per_minibatch=5", "train.samples_per_minibatch: found minibatches of 5 .* even"),
        ("critic.value_range=[0,1]", "critic.value_range: .* must be null"),
        ("algo.value_pretrain.enabled=true", "algo.value_pretrain.enabled: found true .* must be false"),
        ("algo.kl.in_loss=true", "algo.kl.in_loss: found true .* must be false"),
        ("data.critic_prompt=x", "data.critic_prompt: found x .* must be null"),
        ("data.response_prefix=x", "data.response_prefix: found x .* must be null"),
        ("policy.dtype=float32", "policy.dtype: has no effect where the critic alone learns"),
    ],
)
def test_what_pairs_do_not_have_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["experiment=reward_model", "data.path=p.jsonl", override])


def test_without_the_experiment_the_message_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"data: found function with .*bradley_terry.* it must be jsonl, parquet or"):
        load_config(["algo.value_loss=bradley_terry"])
    with pytest.raises(ConfigError, match=r"algo\.value_loss: bradley_terry found; a plan is of policy and servers"):
        check_hardware_is_known(load_config(["experiment=reward_model", "data.path=p.jsonl"]))


def find_loss(scores: list[float], positive: list[bool], order: list[int], num_pairs: int) -> Any:
    """Of samples that stand in a micro-batch in this order; the scores' gradient in the samples' order."""
    own = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    samples = torch.tensor(order)
    ones, rows = torch.ones(len(order), dtype=torch.bool), torch.arange(len(order))
    zeros = torch.zeros(len(order))
    targets = TokenTargets(
        rows, len(order), torch.ones_like(rows), ones, ones, torch.tensor(positive)[samples], zeros, None, zeros,
        *(None,) * 4, samples=samples,
    )  # fmt: skip
    pair = Pair("p", *(np.array(tokens, dtype=np.int32) for tokens in ([3, 4], [5])))
    counts = count_minibatch(build_given_samples(build_tensors(join_groups([build_group(pair)] * num_pairs, 0))))
    out = critic_loss(own[samples], targets, ALGO, counts)
    out.loss.backward()
    return out, own.grad


def test_the_pair_loss_by_hand_whatever_the_order_of_the_samples() -> None:
    # Margins 2 - 1 = 1 and -1 - 0.5 = -1.5: losses log(1 + e^-1) and log(1 + e^1.5), the first pair is right.
    scores, positive = [2.0, 1.0, 0.5, -1.0], [True, False, False, True]
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(1.5))) / 2
    # d/dm -log sigmoid(m) = -sigmoid(-m)
    slopes = [1 / (1 + math.exp(1)) / 2, 1 / (1 + math.exp(-1.5)) / 2]
    for order in itertools.permutations(range(4)):
        out, gradient = find_loss(scores, positive, list(order), 2)
        assert float(out.loss.detach()) == pytest.approx(expected)
        assert gradient.tolist() == pytest.approx([-slopes[0], slopes[0], slopes[1], -slopes[1]])
        assert float(out.sums["critic/pair_accuracy"]) == 0.5
        assert float(out.sums["critic/pair_margin"]) == pytest.approx(-0.25)


def test_the_loss_of_a_minibatch_is_the_sum_over_its_micro_batches() -> None:
    scores, positive = [0.3, -0.2, 1.0, 4.0], [True, False, True, False]
    whole, gradient = find_loss(scores, positive, [2, 0, 1, 3], 2)
    parts = [find_loss(scores, positive, order, 2) for order in ([1, 0], [3, 2])]
    assert float(whole.loss.detach()) == pytest.approx(sum(float(out.loss.detach()) for out, _ in parts))
    assert torch.allclose(gradient, parts[0][1] + parts[1][1])
    assert all(float(x) == pytest.approx(sum(float(o.sums[k]) for o, _ in parts)) for k, x in whole.sums.items())


def test_a_tie_is_half_right() -> None:
    assert float(find_loss([1.0, 1.0], [True, False], [0, 1], 1)[0].sums["critic/pair_accuracy"]) == 0.5


def write_pairs(path: Path, num_pairs: int = 200) -> Path:
    """Which response is better says its last letter, before the token that ends it: a."""
    chosen = random.Random(1)

    def answer(last: str) -> str:
        return "".join(chosen.choices("abcdef", k=chosen.randrange(3))) + last

    records = [
        {"prompt": "".join(chosen.choices("abcdef", k=6)), "chosen": answer("a"), "rejected": answer("b")}
        for _ in range(num_pairs)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


GIVEN = (
    *("experiment=reward_model", "data.prompt_length=16", "train.prompts_per_iteration=12", "train.num_iterations=6"),
    *("train.responses_per_prompt=2", "train.num_minibatches=3", "critic.optimizer.lr=0.1", "train.eval_every=2"),
    *("critic.optimizer.min_lr=0.01", "critic.optimizer.decay=linear"),
)


def test_the_loop_trains_nothing_but_the_critic_and_measures_heldout_pairs(tmp_path: Path) -> None:
    world, path = World(), write_pairs(tmp_path / "p.jsonl")
    summary = world.run_job(tmp_path / "run", [*GIVEN, f"data.path={path}"])
    assert {role for role, _ in world.log} == {"critic"}
    lines = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(7))
    assert [line["iteration"] for line in lines if "heldout/pair_accuracy" in line] == [0, 2, 4, 6]
    assert lines[0]["heldout/loss"] == pytest.approx(math.log(2))
    assert lines[0]["heldout/pair_accuracy"] == 0.5
    assert all(line["critic/loss"] > 0 and "policy/loss" not in line for line in lines[1:])
    assert summary.results == {"iterations": 6, "heldout/pair_accuracy": lines[-1]["heldout/pair_accuracy"]}
    assert lines[-1]["saved/epoch"] == pytest.approx(72 / 180, rel=0.1)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "pairs to train on, " in log
    assert f"reward model: {tmp_path}/run/critic" in log
    assert f"done: iterations=6 heldout/pair_accuracy={summary.heldout_reward:.4f}" in log
    for order in world.components[0].roles[Role.critic].orders:
        assert all(order[i] + 1 == order[i + 1] and order[i] % 2 == 0 for i in range(0, len(order), 2))


def test_a_killed_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    given = [*GIVEN, f"data.path={write_pairs(tmp_path / 'p.jsonl')}", "checkpoint.save_every=2"]
    World().run_job(tmp_path / "whole", given)
    with pytest.raises(Killed):
        World(Disturbance(Killed, "critic", "update", 4).watch).run_job(tmp_path / "run", given)
    World().run_job(tmp_path / "run", given)
    assert load_untimed(tmp_path / "run") == load_untimed(tmp_path / "whole")


def test_an_iteration_of_more_pairs_than_there_are_is_refused(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "p.jsonl", 12)
    with pytest.raises(ConfigError, match=r"prompts_per_iteration: found 12, which is 12 pairs of an iteration; the"):
        World().run_job(tmp_path / "run", [*GIVEN, f"data.path={path}"])


def test_the_objective_is_that_of_the_pairs() -> None:
    expected = "mean over pairs[ -log sigmoid(V(better) - V(worse)) ] of V after the last token"
    assert format_objective(replace(ALGO, name="x"), 2) == f"algorithm   = x\ncritic loss = {expected}"
