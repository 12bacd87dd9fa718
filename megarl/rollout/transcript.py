"""An episode as it was served, token by token: what of it is learned from is what the servers were sent and gave."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megarl.types import FinishReason, Prompt, Response, Turn, WeightVersions


class Transcript:
    """Turns in the order of time, each the continuation of a segment. Segment 0 begins with the prompt."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt
        self.num_tokens = 0
        """Of the response"""
        self._segments = [[np.asarray(prompt.token_ids, dtype=np.int32)]]
        self._sent: list[NDArray[np.int32]] = []
        self._turns: list[Turn] = []
        self._actions: list[Response] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._generated: list[NDArray[np.bool_]] = []

    @property
    def turns(self) -> Sequence[Turn]:
        return self._turns

    def begin(self, token_ids: NDArray[np.int32]) -> int:
        """The number of a new segment with these tokens before its first turn."""
        self._segments.append([token_ids])
        return len(self._segments) - 1

    def join(self, segment: int = 0) -> NDArray[np.int32]:
        """int32 [N], all tokens of the segment so far, those before its first turn included."""
        return np.concatenate(self._segments[segment])

    def add_turn(
        self, sent: NDArray[np.int32], action: Response, segment: int = 0, details: Mapping[str, float] | None = None
    ) -> None:
        """sent: the tokens that were sent for the action, of which those beyond the segment's are an observation."""
        self._add(segment, sent[sum(map(len, self._segments[segment])) :], generated=False)
        start, end = self.num_tokens, self.num_tokens + len(action)
        self._sent.append(sent)
        self._actions.append(action)
        self._turns.append(Turn(start, end, action.text, details=dict(details or {}), segment=segment))
        self._add(segment, action.token_ids, generated=True)

    def note(self, reward: float, details: Mapping[str, float], turn: int = -1) -> None:
        """What the environment says of an action, by default of the last one."""
        numbers = {str(name): float(value) for name, value in details.items()}
        own = {**self._turns[turn].details, **numbers}
        self._turns[turn] = replace(self._turns[turn], reward=float(reward), details=own)

    def _add(self, segment: int, token_ids: NDArray[np.int32], generated: bool) -> None:
        if len(token_ids):
            self._segments[segment].append(token_ids)
            self._tokens.append(token_ids)
            self._generated.append(np.full(len(token_ids), generated))
            self.num_tokens += len(token_ids)

    def build_response(self, finish_reason: FinishReason, answer: str | None = None) -> Response:
        """Everything after the prompt. What the server was sent is what is learned from, id by id. answer: the text
        that verifiers read; None: the last action's."""
        if not self._actions:
            # Something must stand there, and nothing of it is learned from.
            return Response(self._segments[0][0][-1:], "", (0.0,), (False,), (0,), finish_reason)
        logprobs = np.zeros(self.num_tokens, dtype=np.float32)
        versions = np.zeros(self.num_tokens, dtype=np.int64)
        for turn, action in zip(self._turns, self._actions, strict=True):
            logprobs[turn.start : turn.end] = action.rollout_logprobs
            expanded = action.weight_versions.expand()
            versions[turn.start : turn.end] = expanded
            versions[turn.end :] = expanded[-1]
        response = Response(
            token_ids=np.concatenate(self._tokens),
            text=self._actions[-1].text if answer is None else answer,
            rollout_logprobs=logprobs,
            generated=np.concatenate(self._generated),
            weight_versions=WeightVersions.of(versions),
            finish_reason=finish_reason,
            # The last turn's answer has the experts of all tokens before it, too.
            routed_experts=self._actions[-1].routed_experts,
            turns=self._turns,
            segment_prompts=[parts[0] for parts in self._segments[1:]],
        )
        self._check(response)
        return response

    def _check(self, response: Response) -> None:
        """Raises AssertionError where a turn was sent other tokens than those that stand before it."""
        starts = [np.asarray(self.prompt.token_ids, dtype=np.int32), *response.segment_prompts]
        columns = response.find_segments()
        for turn, sent in zip(self._turns, self._sent, strict=True):
            own = columns[turn.segment]
            before = np.concatenate([starts[turn.segment], response.token_ids[own[own < turn.start]]])
            if not np.array_equal(sent, before):
                raise AssertionError(f"a turn of prompt {self.prompt.id!r} was sent other tokens than are learned from")
