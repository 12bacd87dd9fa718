"""Runs over the fakes (tests/fakes) whose critic alone reads data.critic_prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.backend import FakeBackend
from fakes.disturbed import RUN, Disturbance, check_disturbed
from fakes.run import Said, World, load
from fakes.run import pretrain as run_pretraining
from safetensors.torch import load_file

from megarl.report.metrics import load_metrics
from megarl.rollout.journal import Journal
from megarl.rollout.rollout_file import load_rollouts
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


class Seen:
    """What each role is given, from `FakeBackend`'s own calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.sequences: dict[tuple[str, str], list[Sequences]] = {}
        self.samples: list[TrainingSamples] = []
        for verb in ("logprobs", "values", "update"):
            self._note(monkeypatch, verb, getattr(FakeBackend, verb))

    def _note(self, monkeypatch: pytest.MonkeyPatch, verb: str, stock: Any) -> None:
        def call(backend: FakeBackend, given: Sequences | TrainingSamples, *args: Any) -> Any:
            sequences = given if isinstance(given, Sequences) else given.sequences
            self.sequences.setdefault((backend.role, verb), []).append(sequences)
            if isinstance(given, TrainingSamples):
                self.samples.append(given)
            return stock(backend, given, *args)

        monkeypatch.setattr(FakeBackend, verb, call)


def pretrain(tmp_path: Path, overrides: Sequence[str]) -> tuple[dict[str, torch.Tensor], float]:
    """The critic's weights after value pretraining, and its last explained variance."""
    with World(reward=reward_number).open_trainer(tmp_path, [*GUESS, *VAPO, *overrides]) as trainer:
        curve = run_pretraining(trainer)
        return trainer.components.critic.copy_weights(), curve[-1]


def test_a_critic_that_reads_the_answer_explains_what_the_prompts_do_not_tell(tmp_path: Path) -> None:
    assert pretrain(tmp_path / "with", [TEXT])[1] > 0.3
    assert pretrain(tmp_path / "without", [])[1] < 0.1


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

    monkeypatch.setattr(Journal, "save", note)
    seen, world = Seen(monkeypatch), World()
    world.run_job(tmp_path, overrides)
    assert mark not in {token for prompt in prompts for token in prompt}
    for role, verb in (("policy", "logprobs"), ("policy", "update"), ("reference", "logprobs")):
        assert {prompt for each in seen.sequences[role, verb] for prompt, _ in split(each)} <= prompts
    asked = {prompt for _, asked in world.components[0].engine.asked for prompt in asked}
    assert asked <= prompts
    assert {prompt.token_ids for prompt in journaled} <= prompts
    assert "|" not in {text for prompt in journaled for text in prompt.text}
    assert all(samples.critic_sequences is None for samples in seen.samples)

    text = inputs.critic_prompt
    assert text is not None
    expected = {text.extend(prompt) for prompt in inputs.data.train}
    for verb in ("values", "update"):
        found = {prompt for each in seen.sequences["critic", verb] for prompt, _ in split(each)}
        assert found <= expected
        assert len(found) > 3
        assert all(prompt[1] == mark for prompt in found)
    last = [split(seen.sequences[role, "update"][-1]) for role in ("policy", "critic")]
    assert [response for _, response in last[0]] == [response for _, response in last[1]]


def test_a_run_on_saved_rollouts_gives_the_text_to_the_critic_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ("algo=ppo", "algo.mismatch.correction=tis", *GUESS)
    World().run_job(tmp_path / "one", [*plain, "logger.save_rollouts=true", "train.num_iterations=1"])
    path = tmp_path / "one" / "rollouts.jsonl"
    kept = [text for text in plain if not text.startswith(("data=", "data.", "reward="))]
    overrides = [*kept, "data.prompt_length=8", TEXT, f"rollout.file={path}", "train.num_iterations=2"]
    critic_prompt = load(overrides)[1].critic_prompt
    assert critic_prompt is not None
    prompts = [sample.prompt for rollout in load_rollouts(path) for sample in rollout.samples]
    seen = Seen(monkeypatch)
    World().run_job(tmp_path / "two", overrides)
    for role, verbs, expected in (
        ("policy", ("logprobs", "update"), {prompt.token_ids for prompt in prompts}),
        ("critic", ("values", "update"), set(map(critic_prompt.extend, prompts))),
    ):
        for verb in verbs:
            assert {prompt for each in seen.sequences[role, verb] for prompt, _ in split(each)} == expected


def test_a_run_that_fails_resumes_bit_for_bit_with_the_same_text(tmp_path: Path, said: Said) -> None:
    plain = (*RUN, *GUESS, "algo.dynamic_sampling.enabled=true")
    overrides = (*plain, TEXT, "logger.terminal=true")
    failing = Disturbance(lambda: FloatingPointError("nan"), "critic", "update", 6)
    check_disturbed(tmp_path, overrides, failing)
    assert "before the first prompt the critic alone reads '" in said()
    World().run_job(tmp_path / "without", plain)
    curves = [load_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "without")]
    assert curves[0][3]["critic/loss"] != curves[1][3]["critic/loss"]
    # Value pretraining leaves the policy as it is: it has sampled the same with and without the text.
    rollouts = [load_rollouts(tmp_path / name / "rollouts.jsonl")[:3] for name in ("whole", "without")]
    assert rollouts[0] == rollouts[1]
