"""data.critic_prompt with the real workers: the policy does not depend on it, the critic does, in every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import build_char_tokenizer
from layout_runs import build_spec, launch_each, train_on
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.task import DataConfig
from megarl.mcore.spec import Role
from megarl.rollout.tensors import build_tensors
from megarl.task.render import CriticPrompt
from megarl.types import FinishReason, Prompt, Response, Rollout, RolloutTensors, Sample, Score, TrainingSamples

pytestmark = pytest.mark.slow

LAYOUTS = ("tp2_sp", "pp2", "dp2", "cp2")
TEXT = "answer: {answer}"


def build_rollout(answers: str) -> Rollout:
    """The prompts and responses of `build_samples`, with these answers in turn."""
    sequences = build_samples().sequences
    samples = []
    for row, tokens in enumerate(sequences.tokens.split(sequences.lengths.tolist())):
        prompt, response = tokens.split([int(sequences.prompt_lengths[row]), int(sequences.response_lengths[row])])
        n = len(response)
        samples.append(
            Sample(
                Prompt(f"p{row}", "", tuple(prompt.tolist()), answers[row % len(answers)] * (1 + row)),
                Response(response.tolist(), "", (-4.0,) * n, (True,) * n, (0,) * n, FinishReason.stop),
                Score(1.0, True),
                row,
            )
        )
    return Rollout(tuple(samples), 0)


def read(answers: str, text: str | None) -> RolloutTensors:
    prompt = CriticPrompt(DataConfig(critic_prompt=text), build_char_tokenizer()) if text else None
    return build_tensors(build_rollout(answers), prompt)


def build(tensors: RolloutTensors) -> TrainingSamples:
    """Samples with given advantages and returns."""
    return replace(build_samples(), sequences=tensors.sequences, critic_sequences=tensors.critic_sequences)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("privileged") / "qwen3"
    write_checkpoint(path, vocab_size=64, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> dict[str, Any]:
    """In one process."""
    policy = build_spec(Role.policy, checkpoint)
    without, ones, twos = (read(*given) for given in (("12", None), ("12", TEXT), ("21", TEXT)))
    samples = {"without": build(without), "ones": build(ones), "twos": build(twos)}
    runs = {f"policy-{name}": (policy, each.for_policy(), {}) for name, each in samples.items()}
    # The worker itself does not look at what the trainer keeps from it.
    runs["policy-given"] = (policy, samples["ones"], {})
    critic, given = build_critic(checkpoint, "one"), {"ones": ones.critic_input, "twos": twos.critic_input}
    runs["critic"] = (critic, samples["ones"].for_critic(), given)
    plain = replace(critic, critic_prompt=None)
    runs["critic-without"] = (plain, samples["without"].for_critic(), {"given": without.critic_input})
    return launch_each(1, train_on, runs)


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> dict[str, Any]:
    """In two processes, several micro-batches."""
    tensors = read("12", TEXT)
    samples, given = build(tensors).for_critic(), {"ones": tensors.critic_input}
    return launch_each(2, train_on, {layout: (build_critic(checkpoint, layout), samples, given) for layout in LAYOUTS})


def build_critic(checkpoint: Path, layout: str) -> Any:
    tokens = 10_000 if layout == "one" else 60
    return build_spec(Role.critic, checkpoint, layout, tokens_per_microbatch=tokens, critic_prompt=TEXT)


@pytest.mark.parametrize("name", ["policy-ones", "policy-twos", "policy-given"])
def test_the_policys_logprobs_loss_gradient_and_weights_are_bit_identical_with_and_without_it(
    name: str, one: dict[str, Any]
) -> None:
    found, expected = one[name], one["policy-without"]
    assert torch.equal(found["before"], expected["before"])
    assert found["metrics"] == expected["metrics"]
    assert found["metrics"][0]["policy/grad_norm"] > 0.1
    for kind in ("gradient", "weights"):
        assert found[kind].keys() == expected[kind].keys()
        assert all(torch.equal(tensor, expected[kind][key]) for key, tensor in found[kind].items())


def test_the_policys_sequences_are_the_same_and_the_critics_have_the_same_responses() -> None:
    without, ones, twos = (read(*given) for given in (("12", None), ("12", TEXT), ("21", TEXT)))
    assert without.critic_sequences is None
    for tensors in (ones, twos):
        assert torch.equal(tensors.sequences.tokens, without.sequences.tokens)
        assert torch.equal(tensors.critic_input.response_lengths, without.sequences.response_lengths)
        rows = tensors.critic_input.tokens.split(tensors.critic_input.lengths.tolist())
        own = without.sequences.tokens.split(without.sequences.lengths.tolist())
        assert all(torch.equal(row[-len(plain) :], plain) for row, plain in zip(rows, own, strict=True))
    # "answer: " and the answer of 1 to 12 characters
    added = ones.critic_input.prompt_lengths - without.sequences.prompt_lengths
    assert added.tolist() == [8 + n for n in range(1, 13)]


def test_the_critics_values_depend_on_the_text(one: dict[str, Any]) -> None:
    values = one["critic"]["values"]
    lengths = build_samples().sequences.response_lengths
    exists = torch.arange(values["ones"].shape[1]) < lengths[:, None]
    assert values["ones"].shape == values["twos"].shape == exists.shape
    assert bool((values["ones"] != values["twos"])[exists].all())
    assert bool((values["ones"][~exists] == 0).all())
    assert bool((one["critic-without"]["values"]["given"] != values["ones"])[exists].all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_critic_computes_and_learns_the_same_in_every_layout(
    layout: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    found, expected = two[layout], one["critic"]
    torch.testing.assert_close(found["values"]["ones"], expected["values"]["ones"], rtol=0, atol=2e-5)
    for step, reference in zip(found["metrics"], expected["metrics"], strict=True):
        assert step["critic/loss"] == pytest.approx(reference["critic/loss"], rel=2e-5)
        assert step["critic/grad_norm"] == pytest.approx(reference["critic/grad_norm"], rel=2e-5)
    for key, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], tensor, rtol=0, atol=2e-6)


def test_an_exported_critic_records_the_text_and_a_policy_does_not(one: dict[str, Any]) -> None:
    assert one["critic"]["text"] == TEXT
    assert one["critic-without"]["has_text"]
    assert one["critic-without"]["text"] is None
    assert not one["policy-ones"]["has_text"]
