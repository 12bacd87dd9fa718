"""The loop's three interfaces (megarl/interfaces.py) in one process, over the tiny model in plain torch.

Everything else is the product's: the loop, the collector, targets, losses, value pretraining and the asynchronous
groups. The servers' place is taken by a copy of the policy, which generates all that is asked of it before the next
publish; with max_staleness = n every sample is therefore exactly n updates old once n iterations are over.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from claims_bench.model import TinyModel
from megarl.algo.losses import LossOutput, TokenTargets, count_minibatch, critic_loss, policy_loss
from megarl.config.schema.roles import LrDecay, Trainable
from megarl.interfaces import UNPUBLISHED, Done, TurnRequest
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.rollout.engine import compute_sampling_seed
from megarl.rollout.event_loop import OnEventLoop
from megarl.types import FinishReason, Metrics, Response, Sequences, TrainingSamples

QUIET_S = 0.05
"""After so long without a new request all that were asked for are generated as one batch."""


@dataclass(frozen=True)
class Padded:
    """Sequences as rows of equal length, and where their response tokens are."""

    tokens: Tensor
    """int64 [B, L]"""
    rows: Tensor
    """int64 [R]"""
    columns: Tensor
    """int64 [R], in the response"""
    places: Tensor
    """int64 [R], in the row"""

    def take(self, out: Tensor) -> Tensor:
        """What the model says of each response token, before it: [R, ...] of [B, L, ...]."""
        return out[self.rows, self.places - 1]


def pad_sequences(sequences: Sequences) -> Padded:
    rows = torch.nn.utils.rnn.pad_sequence(list(torch.split(sequences.tokens, sequences.lengths.tolist())), True)
    lengths = sequences.response_lengths
    numbers = torch.repeat_interleave(torch.arange(sequences.num_samples), lengths)
    columns = torch.arange(numbers.numel()) - (lengths.cumsum(0) - lengths)[numbers]
    return Padded(rows, numbers, columns, sequences.prompt_lengths[numbers] + columns)


class Backend:
    """One role: a `TrainBackend` with the product's losses and torch's AdamW. Rates are constant."""

    def __init__(self, spec: WorkerSpec):
        assert spec.optimizer is not None, "a reference is not here"
        assert spec.optimizer.decay is LrDecay.constant
        assert not spec.optimizer.warmup_steps
        assert spec.value_range is None
        assert spec.trainable is Trainable.all
        self.spec, self.role = spec, spec.role.value
        self.model = TinyModel(Path(spec.checkpoint), with_value_head=spec.role is Role.critic)
        config = spec.optimizer
        betas = (config.beta1, config.beta2)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), config.lr, betas, config.eps, config.weight_decay, fused=True
        )

    @torch.no_grad()
    def logprobs(self, sequences: Sequences, temperature: float) -> Done[Tensor]:
        return Done(self._pad(sequences, lambda padded: self._compute_logprobs(padded, temperature)))

    @torch.no_grad()
    def values(self, sequences: Sequences) -> Done[Tensor]:
        return Done(self._pad(sequences, lambda padded: padded.take(self.model(padded.tokens))))

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> Done[list[Metrics]]:
        return Done([self._step(samples.select(rows)) for rows in minibatches])

    def _pad(self, sequences: Sequences, compute: Callable[[Padded], Tensor]) -> Tensor:
        padded = pad_sequences(sequences)
        out = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
        out[padded.rows, padded.columns] = compute(padded)
        return out

    def _compute_logprobs(self, padded: Padded, temperature: float) -> Tensor:
        log_p = (padded.take(self.model(padded.tokens)) / temperature).log_softmax(-1)
        return log_p.gather(1, padded.tokens[padded.rows, padded.places][:, None])[:, 0]

    def _compute_loss(self, samples: TrainingSamples) -> LossOutput:
        padded, counts = pad_sequences(samples.sequences), count_minibatch(samples)
        targets = build_targets(samples, padded)
        if self.spec.role is Role.critic:
            return critic_loss(padded.take(self.model(padded.tokens)), targets, self.spec.algo, counts)
        logprobs = self._compute_logprobs(padded, self.spec.temperature)
        return policy_loss(logprobs, None, targets, self.spec.algo, counts, self.spec.response_length)

    def _step(self, samples: TrainingSamples) -> Metrics:
        assert self.spec.optimizer is not None
        self.optimizer.zero_grad()
        output = self._compute_loss(samples)
        output.loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip_grad))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"{self.role}: the gradient norm is {grad_norm}")
        self.optimizer.step()
        metrics = {name: float(value) for name, value in (output.sums | output.maxima).items()}
        return {f"{self.role}/grad_norm": grad_norm, **metrics}


def build_targets(samples: TrainingSamples, padded: Padded) -> TokenTargets:
    """The targets of the R response tokens."""
    flat: dict[str, Any] = {}
    for name in TokenTargets.__dataclass_fields__:
        value = getattr(samples, name, None)
        if value is not None and value.dim() == 2:
            value = value[padded.rows, padded.columns]
        flat[name] = value
    rows = {"rows": padded.rows, "num_rows": samples.sequences.num_samples, "row_lengths": samples.mask.sum(1)}
    return TokenTargets(**(flat | rows | {"positive": samples.positive[padded.rows]}))


class Engine(OnEventLoop):
    """A `RolloutEngine` that generates as one batch what is asked for at the same time."""

    num_servers, num_slots, depends_on_batch = 1, 1 << 16, True

    def __init__(self, checkpoint: Path, seed: int, tokenizer: Any):
        super().__init__()
        self.model, self.version = TinyModel(checkpoint), UNPUBLISHED
        self._seed, self._tokenizer = seed, tokenizer
        self._waiting: list[tuple[TurnRequest, asyncio.Future[Response]]] = []
        self._draining: asyncio.Task[None] | None = None

    async def generate_turns(self, requests: Sequence[TurnRequest], take: Callable[[int, Response], None]) -> None:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Response]] = [loop.create_future() for _ in requests]
        self._waiting += zip(requests, futures, strict=True)
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(at_once=len(requests) > 1))
        for index, future in enumerate(futures):
            take(index, await future)

    async def _drain(self, at_once: bool) -> None:
        try:
            seen = -1
            while not at_once and seen != len(self._waiting):
                seen = len(self._waiting)
                await asyncio.sleep(QUIET_S)
            batch, self._waiting = self._waiting, []
            shapes = {(len(r.token_ids), r.max_new_tokens, r.temperature) for r, _ in batch}
            for shape in sorted(shapes):
                alike = [(r, f) for r, f in batch if (len(r.token_ids), r.max_new_tokens, r.temperature) == shape]
                responses = self._generate([request for request, _ in alike])
                for (_, future), response in zip(alike, responses, strict=True):
                    if not future.done():
                        future.set_result(response)
        finally:
            self._draining = None

    def is_idle(self) -> bool:
        return self._draining is None and not self._waiting

    @torch.no_grad()
    def _generate(self, requests: Sequence[TurnRequest]) -> list[Response]:
        first = requests[0]
        name = compute_sampling_seed(f"{self._seed}/{first.name}")
        generator = torch.Generator().manual_seed(name)
        tokens = torch.stack([torch.from_numpy(request.token_ids).long() for request in requests])
        cache = self.model.build_cache(len(requests), tokens.shape[1] + first.max_new_tokens)
        is_open = torch.ones(len(requests), dtype=torch.bool)
        eos = self._tokenizer.eos_token_id
        chosen: list[Tensor] = []
        logprobs: list[Tensor] = []
        step = tokens
        while len(chosen) < first.max_new_tokens and bool(is_open.any()):
            log_p = (self.model(step, cache)[:, -1] / (first.temperature or 1.0)).log_softmax(-1)
            step = (
                torch.multinomial(log_p.exp(), 1, generator=generator) if first.temperature else log_p.argmax(-1, True)
            )
            chosen.append(step)
            logprobs.append(log_p.gather(1, step))
            is_open &= step[:, 0] != eos
        all_tokens, all_logprobs = torch.cat(chosen, 1), torch.cat(logprobs, 1)
        found = []
        for ids, lps in zip(all_tokens.tolist(), all_logprobs.tolist(), strict=True):
            length = ids.index(eos) + 1 if eos in ids else len(ids)
            finish = FinishReason.stop if eos in ids else FinishReason.length
            text = self._tokenizer.decode(ids[:length], skip_special_tokens=True)
            found.append(Response(ids[:length], text, lps[:length], (True,) * length, (self.version,) * length, finish))
        return found

    async def drop_cached_prefixes(self) -> None: ...

    def check_health(self) -> None: ...


class Sync:
    """A `WeightSync`: copies the weights once the engine has generated all that it was asked for."""

    def __init__(self, policy: Backend, engine: Engine):
        self._policy, self._engine = policy, engine

    def publish(self, version: int) -> Metrics:
        async def copy() -> None:
            while not self._engine.is_idle():
                await asyncio.sleep(QUIET_S / 5)
            self._engine.model.load_state_dict(self._policy.model.state_dict())
            self._engine.version = version

        self._engine.run(copy())
        return {}

    def reconnect(self) -> None: ...
