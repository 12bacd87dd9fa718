"""A Rollout as tensors. B is the number of samples, T the length of the longest response."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.algo.blocks import allocate_zeros
from megarl.rollout.answers import build_routed_experts
from megarl.task.render import CriticPrompt
from megarl.types import FinishReason, Rollout, RolloutTensors, Sample, Sequences


def build_sequences(rollout: Rollout, critic_prompt: CriticPrompt | None = None) -> Sequences:
    """Prompt and response of every sample, concatenated.

    critic_prompt: for the critic, which reads its text before the prompt and routes its tokens itself; None: for all.
    """
    prompts = [critic_prompt.extend(s.prompt) if critic_prompt else s.prompt.token_ids for s in rollout.samples]
    pairs = [(p, s.response.token_ids) for p, s in zip(prompts, rollout.samples, strict=True)]
    tokens = np.empty(sum(len(ids) for pair in pairs for ids in pair), np.int64)
    end = 0
    for ids in (ids for pair in pairs for ids in pair):
        tokens[end : end + len(ids)] = ids
        end += len(ids)
    return Sequences(
        tokens=torch.from_numpy(tokens),
        lengths=torch.tensor([len(p) + len(r) for p, r in pairs], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(p) for p, _ in pairs], dtype=torch.int64),
        routed_experts=None if critic_prompt else build_routed_experts(rollout.samples),
    )


def build_tensors(
    rollout: Rollout, critic_prompt: CriticPrompt | None = None, max_staleness: int | None = None
) -> RolloutTensors:
    """All tensors of a rollout, on the CPU.

    critic_prompt: None without data.critic_prompt. max_staleness: of which tokens are too old; None: none is.
    """
    samples = rollout.samples
    longest = max((len(s.response) for s in samples), default=0)
    mask, scored, too_stale = (allocate_zeros((len(samples), longest), torch.bool) for _ in range(3))
    logprobs = allocate_zeros((len(samples), longest), torch.float32)
    has_first_old = any(sample.first_old_logprobs is not None for sample in samples)
    first_old = allocate_zeros((len(samples), longest), torch.float32) if has_first_old else None
    for row, sample in enumerate(samples):
        length, generated = len(sample.response), torch.from_numpy(sample.response.generated)
        # Each iteration raises the version by one: what was sampled n iterations ago was first scored, and learned
        # from, by the weights n versions ago.
        behind = rollout.weight_version - sample.age - torch.from_numpy(sample.response.weight_versions.expand())
        if max_staleness is not None:
            too_stale[row, :length] = generated & (behind > max_staleness)
        if first_old is not None and sample.first_old_logprobs is not None:
            first_old[row, :length] = torch.from_numpy(sample.first_old_logprobs)
        if sample.score.failure is None:
            own = mask[row, :length]
            own.copy_(generated)
            np.copyto(logprobs[row, :length].numpy(), sample.response.rollout_logprobs, where=own.numpy())
            if sample.age == 0 or sample.first_old_logprobs is not None:
                scored[row, :length] = own & (behind == 0)
    return RolloutTensors(
        sequences=build_sequences(rollout),
        groups=torch.tensor([s.group for s in samples], dtype=torch.int64),
        ages=torch.tensor([s.age for s in samples], dtype=torch.int64),
        rewards=torch.tensor([s.score.reward for s in samples], dtype=torch.float32),
        failed=torch.tensor([s.score.failure is not None for s in samples], dtype=torch.bool),
        truncated=torch.tensor([s.response.finish_reason is FinishReason.length for s in samples], dtype=torch.bool),
        turn_rewards=build_turn_rewards(samples, longest),
        mask=mask,
        rollout_logprobs=logprobs,
        first_old_logprobs=first_old,
        scored=scored,
        too_stale=too_stale if bool(too_stale.any()) else None,
        critic_sequences=build_sequences(rollout, critic_prompt) if critic_prompt else None,
    )


def build_turn_rewards(samples: Sequence[Sample], longest: int) -> Tensor | None:
    """The rewards of the turns before the last, at their actions' last tokens, float32 [B, longest]; None: there are
    none. What the last turn gave stands at the end, with the rest of `Score.reward`, as does the reward of a turn whose
    action has no token.
    """
    places = [
        (row, turn.end - 1, turn.reward)
        for row, sample in enumerate(samples)
        for turn in sample.response.turns[:-1]
        if turn.reward and turn.end > turn.start and sample.score.failure is None
    ]
    if not places:
        return None
    rows, columns, rewards = zip(*places, strict=True)
    turn_rewards = torch.zeros(len(samples), longest, dtype=torch.float32)
    turn_rewards[torch.tensor(rows), torch.tensor(columns)] = torch.tensor(rewards, dtype=torch.float32)
    return turn_rewards
