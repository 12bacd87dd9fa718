"""Demonstrations: how they are read and what of them is learned, and the loop over the fakes."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import build_byte_tokenizer, build_char_tokenizer, jsonl_config
from fakes.disturbed import Disturbance, Killed
from fakes.run import World, load_untimed

from megarl.algo.algorithm import build_given_samples
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.mcore.spec import Role
from megarl.report.record import load_metrics
from megarl.rollout.collector import build_tensors
from megarl.rollout.demonstrations import Demonstrations, build_demonstrations, build_group
from megarl.rollout.source import join_groups
from megarl.task.data import build_data
from megarl.task.render import Renderer

ENDED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<bos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template whose answers end with a special token, and a line break that no policy writes"""
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}!{% endif %}"
    "{{ m.content }}<bos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that writes the last answer otherwise than those before it, as some leave out earlier thinking"""


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts)]


CHATS = [{"messages": chat(f"what is {i}?", f"it is {i}", "and then?", f"{i + 1} is")} for i in range(9)]


def read(path: Path, records: list[dict[str, Any]], tokenizer: Any, longest: int = 200, **keys: Any) -> Demonstrations:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    config = jsonl_config(path, **{"num_heldout": 1, "prompt_length": 150, **keys})
    return build_demonstrations(build_data(config, tokenizer, 1), Renderer(config, tokenizer), longest)


def build_chat_tokenizer(template: str) -> Any:
    tokenizer = build_byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    return tokenizer


def test_every_turn_of_the_assistant_is_learned_up_to_the_token_that_ends_it(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer(ENDED)
    found = read(tmp_path / "c.jsonl", CHATS, tokenizer)
    for each in (*found.train, *found.heldout):
        text = tokenizer.decode(each.tokens.tolist())
        number = next(i for i in range(9) if f"what is {i}?" in text)
        whole = tokenizer.apply_chat_template(CHATS[number]["messages"], tokenize=False)
        assert tokenizer(whole, add_special_tokens=False)["input_ids"] == each.tokens.tolist()
        assert tokenizer.decode(each.tokens[each.learned].tolist()) == f"it is {number}<bos>{number + 1} is<bos>"
    assert (len(found.train), len(found.heldout)) == (8, 1)
    assert any("tokens are learned; of the first 'it is" in note for note in found.notes)


def test_system_and_instruction_are_read_and_a_text_with_an_answer_is_a_chat_of_one_turn(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer(ENDED)
    rows = [{"prompt": f"what is {i}?", "answer": f"it is {i}"} for i in range(9)]
    keys = {"system": "be brief", "instruction": "{question} now"}
    (each,) = read(tmp_path / "t.jsonl", rows, tokenizer, **keys).heldout
    text = tokenizer.decode(each.tokens.tolist())
    assert text.startswith("<|system|>be brief<bos>\n<|user|>what is ")
    assert "? now<bos>\n<|assistant|>it is " in text
    assert tokenizer.decode(each.tokens[each.learned].tolist()) in {f"it is {i}<bos>" for i in range(9)}


def test_without_a_template_the_answer_follows_the_prompt_and_ends_the_text(tmp_path: Path) -> None:
    tokenizer, rows = build_char_tokenizer(), [{"prompt": f"{i}=", "answer": f"a{i}"} for i in range(9)]
    found = read(tmp_path / "t.jsonl", rows, tokenizer)
    texts = {tokenizer.decode(each.tokens.tolist()) for each in (*found.train, *found.heldout)}
    assert texts == {f"{i}=a{i}<eos>" for i in range(9)}
    assert all(each.learned.tolist() == [False, False, True, True, True] for each in found.train)
    with pytest.raises(ConfigError, match=r"c\.jsonl:\d: found several answers; without a chat template nothing parts"):
        read(tmp_path / "c.jsonl", CHATS, tokenizer)


def test_a_template_that_writes_an_answer_otherwise_once_the_chat_goes_on_is_refused(tmp_path: Path) -> None:
    message = r"c\.jsonl:\d: the chat template writes answer 1 of 2 otherwise once the chat goes on"
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "c.jsonl", CHATS, build_chat_tokenizer(FORGETFUL))
    single = [{"messages": chat(f"what is {i}?", f"it is {i}")} for i in range(9)]
    (each,) = read(tmp_path / "s.jsonl", single, build_chat_tokenizer(FORGETFUL)).heldout
    assert build_chat_tokenizer(FORGETFUL).decode(each.tokens[each.learned].tolist()).startswith("!it is ")


def test_long_ones_are_dropped_and_counted_and_none_left_is_refused(tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer()
    rows = [{"prompt": f"{i}=", "answer": "a" * (i + 1)} for i in range(9)]
    found = read(tmp_path / "t.jsonl", rows, tokenizer, longest=8, num_heldout=3)
    assert all(len(each.tokens) <= 8 for each in (*found.train, *found.heldout))
    assert any("demonstrations dropped, of more than 8 tokens" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"no training demonstration is left of 8: of at most .*\(3 tokens\)"):
        read(tmp_path / "t.jsonl", rows, tokenizer, longest=3)


def test_the_samples_are_correct_and_have_a_loss_at_the_assistants_tokens_alone(tmp_path: Path) -> None:
    given = read(tmp_path / "c.jsonl", CHATS, build_chat_tokenizer(ENDED)).train
    samples = build_given_samples(build_tensors(join_groups([build_group(each) for each in given], 0)))
    assert samples.positive.all()
    assert torch.equal(samples.loss_mask, samples.mask)
    assert int(samples.mask.sum()) == sum(int(each.learned.sum()) for each in given)
    rows = samples.sequences.tokens.split(samples.sequences.lengths.tolist())
    prompts = samples.sequences.prompt_lengths.tolist()
    for row, tokens, prompt, each in zip(samples.mask, rows, prompts, given, strict=True):
        assert tokens.tolist() == each.tokens.tolist()
        assert row[: len(tokens) - prompt].tolist() == each.learned[prompt:].tolist()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo=grpo", "algo.advantage: found group with rollout.from_data=true.* must be none"),
        ("algo.rl_loss_coef=1", "algo.rl_loss_coef: found 1.* must be 0"),
        ("algo.positive_lm_coef=0", "algo.rl_loss_coef: 0 found with both topr .* algo.positive_lm_coef=0"),
        ("algo.kl.in_loss=true", "algo.kl.in_loss: found true .* must be false"),
        ("train.responses_per_prompt=2", "train.responses_per_prompt: found 2 .* must be 1"),
        ("data.response_prefix=x", "data.response_prefix: found x .* must be null"),
        ("rollout.num_servers=2", "rollout.num_servers: has no effect with rollout.from_data=true"),
        ("reward.wrong=-1", "reward.wrong: has no effect with rollout.from_data=true"),
        ("environment=guess", "environment: found one with turns with rollout.from_data=true"),
    ],
)
def test_what_demonstrations_do_not_have_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["experiment=sft", "data.path=c.jsonl", override])


def test_generated_problems_are_nothing_to_imitate() -> None:
    with pytest.raises(
        ConfigError, match=r"data: found function with rollout\.from_data=true.* must be jsonl, parquet"
    ):
        load_config(["algo=distill", "rollout.from_data=true"])


def test_the_model_brings_a_run_of_rl_the_form_of_the_prompts_and_neither_data_nor_reward(tmp_path: Path) -> None:
    World().run_job(
        tmp_path / "run", [*GIVEN, f"data.path={write_answers(tmp_path / 'a.jsonl')}", "data.instruction='{question}.'"]
    )
    (tmp_path / "run" / "policy").mkdir(exist_ok=True)
    again = load_config(
        ["model=checkpoint", f"model.path={tmp_path}/run/policy", "cluster=laptop", "data.path=b.jsonl"]
    )
    assert (again.data.instruction, again.data.path, again.rollout.from_data) == ("{question}.", "b.jsonl", False)
    assert type(again.reward).__name__ == "MathRewardConfig"


def write_answers(path: Path, num: int = 200) -> Path:
    """The answer is the prompt's first letter, some times."""
    chosen, lines = random.Random(1), []
    for _ in range(num):
        letter = chosen.choice("abcdef")
        prompt = letter + "".join(chosen.choices("abcdef", k=4)) + "="
        lines.append(json.dumps({"prompt": prompt, "answer": letter * chosen.randrange(1, 5)}))
    path.write_text("\n".join(lines))
    return path


GIVEN = (
    *("experiment=sft", "data.prompt_length=16", "train.prompts_per_iteration=24", "train.num_iterations=6"),
    *("train.responses_per_prompt=1", "train.num_minibatches=3", "policy.optimizer.lr=0.1", "train.eval_every=2"),
    *("policy.optimizer.warmup_ratio=0", "policy.optimizer.min_lr=0.01"),
)


def test_the_loop_trains_nothing_but_the_policy_and_measures_the_heldout_logprob(tmp_path: Path) -> None:
    world, path = World(), write_answers(tmp_path / "a.jsonl")
    summary = world.run_job(tmp_path / "run", [*GIVEN, f"data.path={path}"])
    assert {role for role, _ in world.log} == {"policy"}
    lines = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(7))
    found = {line["iteration"]: line["heldout/logprob"] for line in lines if "heldout/logprob" in line}
    assert list(found) == [0, 2, 4, 6]
    assert found[6] > found[2] > found[0]
    assert summary.results == {"iterations": 6, "heldout/logprob": found[6]}
    assert lines[-1]["saved/epoch"] == pytest.approx(144 / 180, rel=0.1)
    for line in lines[1:]:
        assert line["policy/loss"] == pytest.approx(line["policy/positive_lm"])
        assert not {"policy/ratio_mean", "policy/ratio_max", "policy/approx_kl", "reward/mean"} & line.keys()
    log = (tmp_path / "run" / "train.log").read_text()
    assert "demonstrations to train on, " in log
    assert "policy loss = 1 * mean over the tokens of responses with reward >= 0.9[ -log pi ]\n" in log
    assert f"done: iterations=6 heldout/logprob={summary.heldout_reward:.4f}" in log
    assert len(world.components[0].roles[Role.policy].orders) == 6


def test_a_killed_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    given = [*GIVEN, f"data.path={write_answers(tmp_path / 'a.jsonl')}", "checkpoint.save_every=2"]
    World().run_job(tmp_path / "whole", given)
    with pytest.raises(Killed):
        World(Disturbance(Killed, "policy", "update", 4).watch).run_job(tmp_path / "run", given)
    World().run_job(tmp_path / "run", given)
    assert load_untimed(tmp_path / "run") == load_untimed(tmp_path / "whole")


def test_an_iteration_of_more_demonstrations_than_there_are_is_refused(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "p.jsonl", 20)
    with pytest.raises(ConfigError, match=r"found 24, which is 24 demonstrations of an iteration; the data have 18"):
        World().run_job(tmp_path / "run", [*GIVEN, f"data.path={path}"])
