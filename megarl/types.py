"""The data of one iteration: one frozen dataclass per stage, each complete when it is created.

Shapes: B samples (one response each), T tokens of the longest response. Tensors are on the CPU. Padded tensors are
[B, T]; position t of row i is response token t of sample i, and entries past the response are zero (False in masks).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


@dataclass(frozen=True)
class RoutedExperts:
    """The experts to which the layers of the rollout engine sent the tokens of a prompt and its response."""

    data: bytes
    """Numbers of experts [N, num_layers, top_k], in one byte each up to 255 experts, else in two; N: all tokens but the
    last, which no layer was given. What stands there for a layer without experts means nothing."""
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.num_experts < 256 else torch.int16

    def to_tensor(self) -> Tensor:
        """uint8 or int16 [N, num_layers, top_k]"""
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(-1, self.num_layers, self.top_k)


@dataclass(frozen=True)
class WeightVersions:
    """The version of the weights that generated each token of a response, as runs of equal versions."""

    versions: tuple[int, ...]
    """Version of each run"""
    ends: tuple[int, ...]
    """Number of the token after each run's last one, increasing; the last is the number of tokens"""

    @classmethod
    def of(cls, per_token: Iterable[int]) -> "WeightVersions":
        """From one version per token."""
        found = np.fromiter(per_token, dtype=np.int64)
        if not found.size:
            return cls((), ())
        ends = np.append(np.flatnonzero(np.diff(found)) + 1, found.size)
        return cls(tuple(found[ends - 1].tolist()), tuple(ends.tolist()))

    def __len__(self) -> int:
        """The number of tokens."""
        return self.ends[-1] if self.ends else 0

    def expand(self) -> NDArray[np.int64]:
        """int64 [T], one version per token."""
        return np.repeat(np.array(self.versions, dtype=np.int64), np.diff((0, *self.ends)))

    def list_runs(self) -> list[tuple[int, int, int]]:
        """(version, number of the first token, number of the token after the last one) of each run."""
        return list(zip(self.versions, (0, *self.ends[:-1]), self.ends, strict=True))

    def find_used(self, mask: NDArray[np.bool_]) -> tuple[int, ...]:
        """The versions, in order, of runs with a token in `mask`, bool [T]."""
        return tuple(version for version, start, end in self.list_runs() if mask[start:end].any())


class FinishReason(Enum):
    stop = "stop"
    """The policy ended its response itself (end-of-sequence token)"""
    length = "length"
    """The response was cut at the length limit"""
    max_turns = "max_turns"
    """The environment would have gone on, but environment.max_turns was reached"""


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool"""
    content: str
    others: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What a chat template reads besides, JSON: tool_calls and reasoning_content of an assistant, tool_call_id and name
    of a tool"""

    def to_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"role": self.role, "content": self.content, **self.others}


@dataclass(frozen=True)
class Prompt:
    """A question, tokenized and ready to be sent to a server."""

    id: str
    """Unique and stable within its source: the same task has the same id in every run"""
    text: str
    """The text that `token_ids` encodes, chat template included"""
    token_ids: tuple[int, ...]
    answer: str
    """The reference answer, in the form that the verifier expects"""
    metadata: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[Message, ...] = field(default=(), compare=False)
    """What `text` renders, for environments that continue the conversation; empty in recorded rollouts"""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The record of the data that it was made from, as it was read, for reward functions; empty for generated problems
    and in recorded rollouts"""
    references: tuple[str, ...] = field(default=(), compare=False)
    """All reference answers where there are several, of which `answer` is the first; empty in recorded rollouts"""
    source: str = ""
    """With data=mix: the name of its source"""

    @property
    def answers(self) -> tuple[str, ...]:
        """The reference answers, any of which is right; none where the data have no answer."""
        return self.references or ((self.answer,) if self.answer else ())


@dataclass(frozen=True)
class Turn:
    """One action of the policy, and the environment's observation after it."""

    start: int
    """Number of the response token with which the action begins"""
    end: int
    """Number of the token after the action's last one; the observation goes from here to the next turn's start, or to
    the end of the response"""
    text: str
    """Text of the action, special tokens left out"""
    reward: float = 0.0
    """The environment's reward for this turn; it stands at the action's last token"""
    details: Mapping[str, float] = field(default_factory=dict)
    """Named numbers of the environment, for example {"tool_calls": 1.0}"""
    segment: int = 0
    """Number of the segment that its tokens, and those between the last turn and it, continue"""


@dataclass(frozen=True, eq=False)
class Response:
    """What follows a prompt: one turn of the policy, or several with an environment's observations between them.

    The arrays have one entry per token. Sequences given for them are converted; arrays are not copied.
    """

    token_ids: NDArray[np.int32]
    text: str
    """Text of the last turn's action, special tokens left out: what verifiers read"""
    rollout_logprobs: NDArray[np.float32]
    """log pi(token) by the rollout engine, of the temperature-scaled distribution; 0 where not generated"""
    generated: NDArray[np.bool_]
    """Whether the policy generated this token, m in the formulas; False for the output of a tool or an environment"""
    weight_versions: WeightVersions
    finish_reason: FinishReason
    """Of the last turn"""
    routed_experts: RoutedExperts | None = None
    """None without rollout.router_replay"""
    turns: tuple[Turn, ...] = ()
    """In order, covering all tokens; where none is given, the whole response is one turn"""
    segment_prompts: tuple[NDArray[np.int32], ...] = ()
    """What stands before each segment after the first, which the prompt precedes. A segment is a text that grows turn
    by turn; an agent begins another where it changes what was said, or asks for something else. Turns of several may
    alternate: the tokens of a response are in the order of time."""

    def __init__(
        self,
        token_ids: ArrayLike,
        text: str,
        rollout_logprobs: ArrayLike,
        generated: ArrayLike,
        weight_versions: WeightVersions | Iterable[int],
        finish_reason: FinishReason,
        routed_experts: RoutedExperts | None = None,
        turns: Sequence[Turn] = (),
        segment_prompts: Sequence[ArrayLike] = (),
    ):
        """Raises ValueError where the arrays have different lengths, or a turn is of no segment."""
        if not isinstance(weight_versions, WeightVersions):
            weight_versions = WeightVersions.of(weight_versions)
        ids = np.asarray(token_ids, dtype=np.int32)
        vars(self).update(  # past the frozen __setattr__
            token_ids=ids,
            text=text,
            rollout_logprobs=np.asarray(rollout_logprobs, dtype=np.float32),
            generated=np.asarray(generated, dtype=np.bool_),
            weight_versions=weight_versions,
            finish_reason=finish_reason,
            routed_experts=routed_experts,
            turns=tuple(turns) or (Turn(0, len(ids), text),),
            segment_prompts=tuple(np.asarray(each, dtype=np.int32) for each in segment_prompts),
        )
        for name in ("rollout_logprobs", "generated", "weight_versions"):
            if len(getattr(self, name)) != len(ids):
                raise ValueError(f"a response of {len(ids)} tokens has {len(getattr(self, name))} {name}")
        if {turn.segment for turn in self.turns} != set(range(len(self.segment_prompts) + 1)):
            found = sorted({turn.segment for turn in self.turns})
            raise ValueError(f"turns are of the segments {found}; there are {len(self.segment_prompts) + 1}")

    def find_segments(self) -> list[NDArray[np.int64]]:
        """The numbers of the tokens of each segment, increasing."""
        ends = [*(turn.end for turn in self.turns[:-1]), len(self)]
        numbers = np.repeat([turn.segment for turn in self.turns], np.diff([0, *ends]))
        return [np.flatnonzero(numbers == segment) for segment in range(len(self.segment_prompts) + 1)]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Response):
            return NotImplemented
        arrays = ("token_ids", "rollout_logprobs", "generated")
        others = ("text", "weight_versions", "finish_reason", "routed_experts", "turns")
        same = [np.array_equal(getattr(self, name), getattr(other, name)) for name in arrays]
        same.append(len(self.segment_prompts) == len(other.segment_prompts))
        same += map(np.array_equal, self.segment_prompts, other.segment_prompts)
        return all(same) and all(getattr(self, name) == getattr(other, name) for name in others)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Score:
    """The verifier's result for one response."""

    reward: float
    """The score, 0 (wrong) to 1 (right) for the verifiers here; reward.wrong scales what is learned from it"""
    correct: bool
    details: Mapping[str, float] = field(default_factory=dict)
    """Named parts, logged as means under reward/, for example {"format": 1.0}"""
    answer: str | None = None
    """The answer that the verifier read in the response, normalized so that equal answers usually have equal texts;
    None where there is none or the verifier reads none. Majority votes count it."""
    failure: str | None = None
    """Why there is no reward (the verifier raised, hung or died); the sample is then not learned from"""
    token_rewards: tuple[float, ...] = ()
    """The part of `reward` that stands at each token of the response, 0 where it was not generated; empty: none does"""


def check_score(score: float, wrong: float) -> None:
    """Raises ValueError where reward.wrong is not 0 and the score is outside [0, 1]."""
    if wrong != 0 and not 0 <= score <= 1:
        raise ValueError(
            f"reward.wrong: found {wrong:g} with a score of {score:g}; it maps the scores 0 to 1 to rewards from"
            f" {wrong:g} to 1, so that every score must be in [0, 1]; reward.wrong=0 takes the scores as they are"
        )


RewardFunction = Callable[[Prompt, Response], Score]
"""A verifier."""


@dataclass(frozen=True)
class Sample:
    """A scored response."""

    prompt: Prompt
    response: Response
    score: Score
    group: int
    """Number of the group, from 0 within the iteration; samples of one prompt share it"""
    age: int = 0
    """Iterations since the response was sampled; above 0 in replay, and with rollout.file, whose responses count as
    sampled before the first iteration"""
    first_old_logprobs: NDArray[np.float32] | None = field(default=None, compare=False)
    """With age above 0: old_logprobs of the iteration that first learned from the response, float32 [T]; None where
    they were not kept"""
    masked: bool = False
    """Its tokens have no policy loss (algo.dynamic_sampling.rest=mask)"""
    group_number: int | None = None
    """With rollout.max_staleness > 0: number of the group among all that the run has started, from 0. An iteration's
    fresh groups have numbers that no other iteration's have."""


@dataclass(frozen=True)
class Rollout:
    """All samples of one iteration, groups contiguous."""

    samples: tuple[Sample, ...]
    weight_version: int
    """Version of the trainer's weights when it takes the rollout; its tokens may be up to rollout.max_staleness
    versions behind"""


@dataclass(frozen=True)
class Sequences:
    """Sequences of prompt and response tokens, concatenated without padding: the input of a forward pass."""

    tokens: Tensor
    """int64 [sum of lengths]"""
    lengths: Tensor
    """int64 [B], prompt + response"""
    prompt_lengths: Tensor
    """int64 [B]"""
    routed_experts: Tensor | None = None
    """uint8 or int16 [sum of lengths, layers, experts of a token]: 1 + the number of an expert, to be used in place of
    those that the router would choose; 0: it chooses. None: it always does."""
    held: Tensor | None = None
    """bool [B]: rows whose tokens are here; those of the others are 0, and other ranks compute them. None: all are"""
    segments: tuple[tuple[tuple[Tensor, Tensor], ...], ...] | None = None
    """[B] rows, each () or, for a response of several segments, of each the numbers of its response tokens (int64 [t])
    and the tokens that stand before them (int64 [p]): what is computed in the row's place. None: all rows are ()"""

    @property
    def num_samples(self) -> int:
        return int(self.lengths.numel())

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B]"""
        return self.lengths - self.prompt_lengths

    def select(self, rows: Tensor) -> "Sequences":
        """The given rows (int64 [K]), in that order."""

        def pick(packed: Tensor) -> Tensor:
            pieces = torch.split(packed, self.lengths.tolist())
            chosen = [pieces[i] for i in rows.tolist()]
            return torch.cat(chosen) if chosen else packed[:0]

        experts = None if self.routed_experts is None else pick(self.routed_experts)
        held = None if self.held is None else self.held[rows]
        segments = None if self.segments is None else tuple(self.segments[row] for row in rows.tolist())
        return Sequences(pick(self.tokens), self.lengths[rows], self.prompt_lengths[rows], experts, held, segments)

    def measure(self, rows: Tensor) -> "Sequences":
        """The given rows (int64 [K]), in that order, without their tokens."""
        return Sequences(self.tokens[:0], self.lengths[rows], self.prompt_lengths[rows])


@dataclass(frozen=True, kw_only=True)
class RolloutTensors:
    """The content of a rollout, without what the roles say of it."""

    sequences: Sequences
    groups: Tensor
    """int64 [B]"""
    ages: Tensor
    """int64 [B]: iterations since the response was sampled; 0: this iteration, above: replayed or saved"""
    rewards: Tensor
    """float32 [B]: the verifier's scores, before reward.wrong scales them"""
    reward_parts: Tensor | None = None
    """float32 [B, P]: those of `Score.details` that algo.reward_norm.parts names, in its order, 0 where there is none;
    None: it names none"""
    failed: Tensor
    """bool [B]: there is no reward (`Score.failure`): the row's mask has no True, and no statistic counts it"""
    truncated: Tensor
    """bool [B]: the response was cut at the length limit"""
    reward_scales: Tensor | None = None
    """float64 [B], with data=mix: what the source's rewards are multiplied by; None: all by 1"""
    length_limits: Tensor | None = None
    """int64 [B], with data=mix: maximum tokens of the response; None: rollout.response_length for all"""
    turn_rewards: Tensor | None
    """float32 [B, T]: the environment's rewards of the turns before the last, at their actions' last tokens, and
    `Score.token_rewards`, in the scale of `rewards`, which include them; None where there are none"""
    mask: Tensor
    """bool [B, T]: the token was generated by the policy, and the response has a reward; m in the formulas"""
    rollout_logprobs: Tensor
    """float32 [B, T]; 0 where not generated"""
    first_old_logprobs: Tensor | None = None
    """float32 [B, T]: `Sample.first_old_logprobs`; 0 where there are none. None: no sample has any"""
    scored: Tensor
    """bool [B, T]: the training engine scores the token with the weights that sampled it, in this iteration (age 0) or
    in the one that first learned from it, whose log-probs are in first_old_logprobs"""
    too_stale: Tensor | None = None
    """bool [B, T]: the token is older than rollout.max_staleness allows and has no loss; None: no token is"""
    masked: Tensor | None = None
    """bool [B]: the response has no policy loss (`Sample.masked`); None: each has one"""
    critic_sequences: Sequences | None = None
    """What the critic reads, with data.critic_prompt: longer prompts before the same responses; None: `sequences`"""

    @property
    def critic_input(self) -> Sequences:
        """What the critic reads."""
        return self.critic_sequences or self.sequences

    def find_sampling_logprobs(self, old_logprobs: Tensor) -> Tensor:
        """log mu, float32 [B, T]: by the training engine where `scored`, else by the rollout engine; what stands where
        the policy did not generate has no meaning.

        old_logprobs: float32 [B, T] of this iteration. May be returned itself.
        """
        fresh = self.ages == 0
        if bool(fresh.all()) and torch.equal(self.scored, self.mask):
            return old_logprobs
        found = self.rollout_logprobs.clone()
        for row, is_fresh in enumerate(fresh.tolist()):
            trainers = old_logprobs if is_fresh else self.first_old_logprobs
            if trainers is not None:
                np.copyto(found[row].numpy(), trainers[row].numpy(), where=self.scored[row].numpy())
        return found

    def build_experience(
        self,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None = None,
        ref_kl: Tensor | None = None,
        values: Tensor | None = None,
    ) -> "Experience":
        """The rollout with what the models say of it, float32 [B, T] each."""
        return Experience(
            **vars(self),
            old_logprobs=old_logprobs,
            sampling_logprobs=self.find_sampling_logprobs(old_logprobs),
            ref_logprobs=ref_logprobs,
            ref_kl=ref_kl,
            values=values,
        )


@dataclass(frozen=True, kw_only=True)
class Experience(RolloutTensors):
    """A rollout with the log-probs and values of the models; input of the pure math in `algo`."""

    old_logprobs: Tensor
    """float32 [B, T]: computed by the training engine before the update; rollout_logprobs where nothing reads them
    (`megarl.algo.objective.reads_old_logprobs`), and before an update that computes them itself"""
    sampling_logprobs: Tensor
    """float32 [B, T], log mu: of the policy that sampled the token, by the training engine where `scored`, else by the
    rollout engine"""
    ref_logprobs: Tensor | None
    """float32 [B, T]; None where no KL term on sampled tokens is configured"""
    ref_kl: Tensor | None
    """float32 [B, T]: KL(old policy, reference) over the whole vocabulary; None without kl.reward_estimator=full"""
    values: Tensor | None
    """float32 [B, T]: V of the state in which token t is chosen; None without a critic"""

    def select(self, rows: Tensor) -> "Experience":
        """The given rows (int64 [K]), in that order; T stays."""
        return Experience(**_select_rows(self, rows))


@dataclass(frozen=True)
class TrainingSamples:
    """The input of an update: targets for every token of B samples."""

    sequences: Sequences
    mask: Tensor
    """bool [B, T]"""
    loss_mask: Tensor
    """bool [B, T]: tokens with a policy loss, a subset of `mask`"""
    positive: Tensor
    """bool [B]: the response is correct by the verifier's score (positive-example LM loss)"""
    advantages: Tensor
    """float32 [B, T]"""
    rollout_logprobs: Tensor
    """float32 [B, T]"""
    old_logprobs: Tensor | None
    """float32 [B, T]; None: those that the update, of one optimizer step, computes itself"""
    sampling_logprobs: Tensor | None
    """float32 [B, T], log mu; None without the topr terms"""
    ref_logprobs: Tensor | None
    """float32 [B, T]"""
    old_values: Tensor | None
    """float32 [B, T]"""
    returns: Tensor | None
    """float32 [B, T]"""
    critic_mask: Tensor | None = None
    """bool [B, T]: tokens with a critic loss, a subset of `mask`; None: all of it"""
    critic_sequences: Sequences | None = None
    """As in `Experience`; None also in what a role is given"""

    def select(self, rows: Tensor) -> "TrainingSamples":
        """The given rows (int64 [K]), in that order; T stays."""
        return TrainingSamples(**_select_rows(self, rows))

    def for_policy(self) -> "TrainingSamples":
        """What the policy is given: nothing of what the critic alone reads."""
        return replace(self, critic_sequences=None, critic_mask=None, old_values=None, returns=None)

    def for_critic(self) -> "TrainingSamples":
        """What the critic is given: its own sequences."""
        return replace(self, sequences=self.critic_sequences or self.sequences, critic_sequences=None)


def _select_rows(batch: Experience | TrainingSamples, rows: Tensor) -> dict[str, Any]:
    """These rows of every field, by its name."""
    picked: dict[str, Any] = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Sequences):
            value = value.select(rows)
        elif value is not None:
            value = value[rows]
        picked[f.name] = value
    return picked


Metrics = dict[str, float]
"""Metric values by name, for example {"reward/mean": 0.5}; docs/metrics.md has the names"""
