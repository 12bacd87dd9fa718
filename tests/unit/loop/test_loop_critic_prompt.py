"""Runs over the fakes (tests/fakes) whose critic alone reads data.critic_prompt."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.backend import FakeBackend
from fakes.disturbed import RUN
from fakes.run import Said, World, load
from fakes.run import pretrain as run_pretraining
from safetensors.torch import load_file

from megarl.rollout.rollout_file import Journal
from megarl.types import Prompt, Response, Score, Sequences, TrainingSamples

GUESS = ("data=guess", "reward=exact", "data.prompt_length=8", "model.random.alphabet=abcdef1234567-|")
TEXT = "data.critic_prompt='{answer}|'"
"""Its first token is the number that every prompt (1-7) hides; no prompt has its last one"""
VAPO = ("algo=vapo", "algo.value_pretrain.patience=null", "algo.value_pretrain.steps=8", "critic.optimizer.lr=0.2")


def reward_number(prompt: Prompt, _response: Response) -> Score:
    """Nobody who has not read the number can say what it will be."""
    return Score(float(prompt.answer in "123"), prompt.answer in "123")


def split(sequences: Sequences) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, response) of each row."""
    rows = sequences.tokens.split(sequences.lengths.tolist())
    return [
        (tuple(row[:n].tolist()), tuple(row[n:].tolist()))
        for row, n in zip(rows, sequences.prompt_lengths.tolist(), strict=True)
    ]


def pretrain(tmp_path: Path, overrides: Sequence[str]) -> tuple[dict[str, torch.Tensor], float]:
    """The critic's weights after value pretraining, and its last explained variance."""
    with World(reward=reward_number).open_trainer(tmp_path, [*GUESS, *VAPO, *overrides]) as trainer:
        curve = run_pretraining(trainer)
        return trainer.roles.critic.copy_weights(), curve[-1]


def test_a_critic_that_reads_the_answer_explains_what_the_prompts_do_not_tell(tmp_path: Path, said: Said) -> None:
    assert pretrain(tmp_path / "with", [TEXT, "logger.terminal=true"])[1] > 0.3
    assert "explains nothing" not in said()
    assert pretrain(tmp_path / "without", ["algo.value_pretrain.steps=2", "logger.terminal=true"])[1] < 0.1
    assert "the critic explains nothing after value pretraining" in said()


def test_from_saved_rollouts_the_critic_reads_the_same_text_as_from_fresh_ones(tmp_path: Path) -> None:
    expected, _ = pretrain(tmp_path, [TEXT, "logger.save_rollouts=true"])
    reads_reward = ("reward=", "reward.")
    given = [*(text for text in GUESS if not text.startswith(reads_reward)), *VAPO, TEXT, "train.num_iterations=0"]
    given.append(f"algo.value_pretrain.rollouts={tmp_path}/rollouts.jsonl")
    World().run_job(tmp_path / "offline", given)
    found = load_file(tmp_path / "offline" / "critic" / "model.safetensors")
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


STALE = ("rollout.max_staleness=2", "algo.dynamic_sampling.enabled=true", "algo.mismatch.correction=tis")


@pytest.mark.parametrize("further", [(), STALE])
def test_policy_reference_servers_and_journal_never_hold_a_token_of_it(
    further: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*RUN, *GUESS, TEXT, "algo.kl.in_loss=true", "train.num_iterations=2", *further]
    _, inputs = load(overrides)
    prompts = {prompt.token_ids for prompt in inputs.data.train}
    mark = inputs.tokenizer.convert_tokens_to_ids("|")
    journaled: list[Prompt] = []
    save = Journal.save

    def note(journal: Journal, key: str, samples: Any) -> None:
        journaled.extend(sample.prompt for sample in samples)
        save(journal, key, samples)

    seen: dict[tuple[str, str], list[Sequences]] = {}

    def watch_given(verb: str, stock: Any) -> Callable[..., Any]:
        def call(backend: FakeBackend, given: Sequences | TrainingSamples, *args: Any) -> Any:
            sequences = given if isinstance(given, Sequences) else given.sequences
            assert sequences is given or given.critic_sequences is None
            seen.setdefault((backend.role, verb), []).append(sequences)
            return stock(backend, given, *args)

        return call

    monkeypatch.setattr(Journal, "save", note)
    for verb in ("logprobs", "values", "update"):
        monkeypatch.setattr(FakeBackend, verb, watch_given(verb, getattr(FakeBackend, verb)))
    world = World()
    world.run_job(tmp_path, overrides)
    assert mark not in {token for prompt in prompts for token in prompt}
    for role, verb in (("policy", "logprobs"), ("policy", "update"), ("reference", "logprobs")):
        assert {prompt for each in seen[role, verb] for prompt, _ in split(each)} <= prompts
    asked = {prompt for _, asked in world.components[0].engine.asked for prompt in asked}
    assert asked <= prompts
    assert {prompt.token_ids for prompt in journaled} <= prompts
    assert "|" not in {text for prompt in journaled for text in prompt.text}
    text = inputs.critic_prompt
    assert text is not None
    expected = {text.extend(prompt) for prompt in inputs.data.train}
    for verb in ("values", "update"):
        found = {prompt for each in seen["critic", verb] for prompt, _ in split(each)}
        assert found <= expected
        assert len(found) > 3
        assert all(prompt[1] == mark for prompt in found)
    last = [split(seen[role, "update"][-1]) for role in ("policy", "critic")]
    assert [response for _, response in last[0]] == [response for _, response in last[1]]
