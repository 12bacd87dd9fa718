"""data.critic_prompt with the real workers: the policy does not depend on it, and the critic does."""

import json
from dataclasses import replace

import pytest
import torch
from data_cases import build_char_tokenizer
from layout_runs import Run, build_spec, run_specs
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.task import DataConfig
from megarl.mcore.spec import Role
from megarl.rollout.tensors import build_tensors
from megarl.task.render import CriticPrompt
from megarl.types import FinishReason, Prompt, Response, Rollout, RolloutTensors, Sample, Score

pytestmark = pytest.mark.slow

TEXT = "answer: {answer}"


def build_sequences(answers: str, text: str | None) -> RolloutTensors:
    """The prompts and responses of `build_samples`, with these answers in turn."""
    sequences, samples = build_samples().sequences, []
    for row, tokens in enumerate(sequences.tokens.split(sequences.lengths.tolist())):
        prompt, response = tokens.split([int(sequences.prompt_lengths[row]), int(sequences.response_lengths[row])])
        n = len(response)
        answer = answers[row % len(answers)] * (1 + row)
        generated = Response(response.tolist(), "", (-4.0,) * n, (True,) * n, (0,) * n, FinishReason.stop)
        samples.append(Sample(Prompt(f"p{row}", "", tuple(prompt.tolist()), answer), generated, Score(1.0, True), row))
    prompt = CriticPrompt(DataConfig(critic_prompt=text), build_char_tokenizer()) if text else None
    return build_tensors(Rollout(tuple(samples), 0), prompt)


WITHOUT, ONES, TWOS = build_sequences("12", None), build_sequences("12", TEXT), build_sequences("21", TEXT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("privileged")
    write_checkpoint(root / "qwen3", vocab_size=64, num_hidden_layers=2)
    policy, critic = (
        build_spec(Role.policy, root / "qwen3"),
        build_spec(Role.critic, root / "qwen3", critic_prompt=TEXT),
    )
    without, ones = (
        replace(build_samples(), sequences=x.sequences, critic_sequences=x.critic_sequences) for x in (WITHOUT, ONES)
    )
    both, own = (ONES.critic_input, TWOS.critic_input), (WITHOUT.critic_input,)
    specs = {
        "policy": (policy, {"samples": without.for_policy()}),
        # The worker itself does not look at what the trainer keeps from it.
        "policy-given": (policy, {"samples": ones}),
        "critic": (critic, {"samples": ones.for_critic(), "sequences": both}),
        "critic-without": (replace(critic, critic_prompt=None), {"samples": without.for_critic(), "sequences": own}),
    }
    return run_specs(root / "runs", specs, "scores gradient:gradient update:2 weights:weights evaluate")


def test_the_policys_logprobs_loss_gradient_and_weights_are_bit_identical_with_and_without_it(
    runs: dict[str, Run],
) -> None:
    found, expected = runs["policy-given"], runs["policy"]
    assert torch.equal(found["scores"][0], expected["scores"][0])
    assert found.metrics == expected.metrics
    assert found.list_metrics("grad_norm")[0] > 0.1
    for kind in ("gradient", "weights"):
        tensors = expected.read(kind)
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in found.read(kind).items())


def test_the_policys_sequences_are_the_same_and_the_critics_have_the_same_responses() -> None:
    assert WITHOUT.critic_sequences is None
    for tensors in (ONES, TWOS):
        assert torch.equal(tensors.sequences.tokens, WITHOUT.sequences.tokens)
        assert torch.equal(tensors.critic_input.response_lengths, WITHOUT.sequences.response_lengths)
        rows = tensors.critic_input.tokens.split(tensors.critic_input.lengths.tolist())
        own = WITHOUT.sequences.tokens.split(WITHOUT.sequences.lengths.tolist())
        assert all(torch.equal(row[-len(plain) :], plain) for row, plain in zip(rows, own, strict=True))
    # "answer: " and the answer of 1 to 12 characters
    added = ONES.critic_input.prompt_lengths - WITHOUT.sequences.prompt_lengths
    assert added.tolist() == [8 + n for n in range(1, 13)]


def test_the_critics_values_depend_on_the_text(runs: dict[str, Run]) -> None:
    ones, twos = runs["critic"]["evaluate"]
    lengths = build_samples().sequences.response_lengths
    exists = torch.arange(ones.shape[1]) < lengths[:, None]
    assert ones.shape == twos.shape == exists.shape
    assert bool((ones != twos)[exists].all())
    assert not ones[~exists].any()
    assert bool((runs["critic-without"]["evaluate"][0] != ones)[exists].all())


def test_an_exported_critic_records_the_text_and_a_policy_does_not(runs: dict[str, Run]) -> None:
    configs = {name: json.loads((run.directory / "weights" / "config.json").read_text()) for name, run in runs.items()}
    assert configs["critic"]["megarl_critic_prompt"] == TEXT
    assert configs["critic-without"]["megarl_critic_prompt"] is None
    assert "megarl_critic_prompt" not in configs["policy-given"]
