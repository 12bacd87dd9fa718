"""A `TrainBackend` in this process: a language model of two tables (what comes next depends on the token before and on
the prompt's first token), trained by torch through megarl.algo's own losses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megarl.algo.losses import LossOutput, TokenTargets, count_minibatch, critic_loss, policy_loss
from megarl.config.schema.algo import needs_entropy, needs_full_kl
from megarl.config.schema.roles import LrDecay, OptimizerConfig
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.types import Metrics, Sequences, TrainingSamples

T = TypeVar("T")
STATE = "state.pt"
EOS = 2
"""Token that ends a response, in every tokenizer of these tests"""


@dataclass(frozen=True)
class Done(Generic[T]):
    """A `Pending` that has succeeded."""

    value: T

    def wait(self, timeout_s: float) -> bool:
        return True

    def result(self) -> T:
        return self.value


class Failed(Done[Any]):
    """A `Pending` whose value is the error that it ended with."""

    def wait(self, timeout_s: float) -> bool:
        raise self.value

    def result(self) -> Any:
        raise self.value


@dataclass(frozen=True)
class ResponseTokens:
    """The R response tokens of all rows, flat, and the state in which each is chosen."""

    rows: Tensor
    columns: Tensor
    before: Tensor
    """int64 [R]: the token before it"""
    first: Tensor
    """int64 [R]: the first of its prompt"""
    chosen: Tensor

    def pad(self, flat: Tensor, num_rows: int) -> Tensor:
        """float32 [B, T], 0 past the response."""
        longest = int(self.columns.max()) + 1 if self.columns.numel() else 0
        padded = torch.zeros(num_rows, longest, dtype=torch.float32)
        padded[self.rows, self.columns] = flat.detach().float()
        return padded


def list_response_tokens(sequences: Sequences) -> ResponseTokens:
    lengths = sequences.response_lengths
    rows = torch.repeat_interleave(torch.arange(sequences.num_samples), lengths)
    columns = torch.arange(rows.numel()) - (lengths.cumsum(0) - lengths)[rows]
    starts = sequences.lengths.cumsum(0) - sequences.lengths
    places = starts[rows] + sequences.prompt_lengths[rows] + columns
    tokens = sequences.tokens
    return ResponseTokens(rows, columns, tokens[places - 1], tokens[starts[rows]], tokens[places])


class TableModel(torch.nn.Module):
    """[R, width]: a row of the first table plus one of the second; width: the vocabulary, or 1 of a critic."""

    def __init__(self, vocab_size: int, width: int, std: float, seed: int = 1):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.before = torch.nn.Parameter(std * torch.randn(vocab_size, width, generator=generator))
        self.first = torch.nn.Parameter(std * torch.randn(vocab_size, width, generator=generator))

    def forward(self, before: Tensor, first: Tensor) -> Tensor:
        return self.before[before] + self.first[first]


def build_policy(vocab_size: int, seed: int = 1) -> TableModel:
    """The same weights each time, as from one checkpoint; about one response in five ends at each token."""
    model = TableModel(vocab_size, vocab_size, 0.5, seed)
    with torch.no_grad():
        model.before[:, EOS] += torch.tensor(0.25 * vocab_size).log()
    return model


def build_critic(vocab_size: int) -> TableModel:
    """A new value head: 0 everywhere."""
    return TableModel(vocab_size, 1, std=0.0)


class FakeBackend:
    """One role. `watch` is told of each verb before it is done, and may raise for it."""

    def __init__(self, spec: WorkerSpec, watch: Callable[[str, str], None] = lambda _role, _verb: None):
        self.spec, self.role, self._watch = spec, spec.role.value, watch
        self.vocab_size = read_architecture(Path(spec.checkpoint)).vocab_size
        is_teacher = spec.role is Role.reference and spec.algo.kl.in_advantage
        self.model = build_policy(self.vocab_size, seed=2 if is_teacher else 1)
        if spec.role is Role.critic:
            self.model = build_critic(self.vocab_size)
        self.reference = build_policy(self.vocab_size) if needs_full_kl(spec.algo) else None
        self.optimizer = None
        if spec.optimizer is not None:
            config, betas = spec.optimizer, (spec.optimizer.beta1, spec.optimizer.beta2)
            more = {"eps": config.eps, "weight_decay": config.weight_decay}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=betas, **more)
        self.num_steps = 0
        self.orders: list[list[int]] = []
        """The rows of each update, in the order of its steps"""
        self._updated: tuple[Tensor, Tensor] | None = None
        self._saving: tuple[Path, dict[str, Any]] | None = None

    def _call(self, verb: str, work: Callable[[], T]) -> Done[Any]:
        """What a call to another process gives: an Exception comes when it is waited for."""
        try:
            self._watch(self.role, verb)
            return Done(work())
        except Exception as error:
            return Failed(error)

    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> Done[Tensor]:
        def compute(tokens: ResponseTokens) -> Tensor:
            return self._log_softmax(self.model, tokens, temperature).gather(1, tokens.chosen[:, None])[:, 0]

        return self._evaluate("logprobs", sequences, compute)

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Done[Tensor]:
        return self.logprobs(sequences, temperature)

    def values(self, sequences: Sequences) -> Done[Tensor]:
        return self._evaluate("values", sequences, self._head)

    def _head(self, tokens: ResponseTokens) -> Tensor:
        out: Tensor = self.model(tokens.before, tokens.first)
        return out[:, 0]

    def reference_kl(self, sequences: Sequences, temperature: float) -> Done[Tensor]:
        return self._evaluate("reference_kl", sequences, lambda tokens: self._full_kl(tokens, temperature))

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> Done[list[Metrics]]:
        self.orders.append([row for rows in minibatches for row in rows.tolist()])

        def work() -> list[Metrics]:
            metrics = [self._step(samples.select(rows)) for rows in minibatches]
            if samples.old_logprobs is None and self.spec.role is Role.policy:
                (rows,) = minibatches
                self._updated = rows, self._last_logprobs
            return metrics

        return self._call("update", work)

    def updated_logprobs(self, sequences: Sequences) -> Done[Tensor]:
        def take() -> Tensor:
            assert self._updated is not None
            rows, found = self._updated
            assert torch.equal(rows.sort().values, torch.arange(sequences.num_samples))
            self._updated, merged = None, torch.zeros_like(found)
            merged[rows] = found
            return merged

        return self._call("updated_logprobs", take)

    def export_weights(self, directory: Path) -> Done[None]:
        def write() -> None:
            from safetensors.torch import save_file

            directory.mkdir(parents=True, exist_ok=True)
            save_file(self.copy_weights(), directory / "model.safetensors")

        return self._call("export_weights", write)

    def call_senders(self, verb: str, arguments: Any, deadline_s: float) -> Done[list[Any]]:
        raise AssertionError("the fake WeightSync copies weights itself")

    def begin_save(self, directory: Path) -> Done[None]:
        def begin() -> None:
            assert self._saving is None
            assert self.optimizer is not None
            # A copy: updates go on while it is written.
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "steps": self.num_steps,
            }
            self._saving = directory, torch.utils._pytree.tree_map(clone, state)

        return self._call("begin_save", begin)

    def finish_save(self) -> Done[None]:
        def finish() -> None:
            assert self._saving is not None
            (directory, state), self._saving = self._saving, None
            directory.mkdir(parents=True)
            torch.save(state, directory / STATE)

        return self._call("finish_save", finish)

    def load(self, directory: Path) -> Done[None]:
        def load() -> None:
            state = torch.load(directory / STATE, weights_only=True)
            self.model.load_state_dict(state["model"])
            assert self.optimizer is not None
            self.optimizer.load_state_dict(state["optimizer"])
            self.num_steps = state["steps"]

        return self._call("load", load)

    def copy_weights(self) -> dict[str, Tensor]:
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}

    def _evaluate(self, verb: str, sequences: Sequences, compute: Callable[[ResponseTokens], Tensor]) -> Done[Tensor]:
        @torch.no_grad()
        def work() -> Tensor:
            tokens = list_response_tokens(sequences)
            return tokens.pad(compute(tokens), sequences.num_samples)

        return self._call(verb, work)

    def _log_softmax(self, model: TableModel, tokens: ResponseTokens, temperature: float) -> Tensor:
        return (model(tokens.before, tokens.first) / temperature).log_softmax(-1)

    def _full_kl(self, tokens: ResponseTokens, temperature: float) -> Tensor:
        assert self.reference is not None
        own = self._log_softmax(self.model, tokens, temperature)
        with torch.no_grad():
            ref = self._log_softmax(self.reference, tokens, temperature)
        return (own.exp() * (own - ref)).sum(-1)

    def _compute_loss(self, samples: TrainingSamples) -> LossOutput:
        tokens, algo, counts = list_response_tokens(samples.sequences), self.spec.algo, count_minibatch(samples)
        targets = build_targets(samples, tokens)
        if self.spec.role is Role.critic:
            return critic_loss(self._head(tokens), targets, algo, counts, self.spec.value_range)
        log_p = self._log_softmax(self.model, tokens, self.spec.temperature)
        entropy = -(log_p.exp() * log_p).sum(-1) if needs_entropy(algo) else None
        full_kl = self._full_kl(tokens, self.spec.temperature) if needs_full_kl(algo) and algo.kl.in_loss else None
        logprobs = log_p.gather(1, tokens.chosen[:, None])[:, 0]
        return policy_loss(logprobs, entropy, targets, algo, counts, self.spec.response_length, full_kl)

    def _step(self, samples: TrainingSamples) -> Metrics:
        assert self.optimizer is not None
        assert self.spec.optimizer is not None
        self.optimizer.zero_grad()
        output = self._compute_loss(samples)
        if output.old_logprobs is not None:
            tokens = list_response_tokens(samples.sequences)
            self._last_logprobs = tokens.pad(output.old_logprobs, samples.sequences.num_samples)
        output.loss.backward()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip_grad))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"{self.role}: the gradient norm is {grad_norm}")
        self.num_steps += 1
        rate = compute_lr(self.spec.optimizer, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        metrics = {name: float(value) for name, value in (output.sums | output.maxima).items()}
        return {
            f"{self.role}/grad_norm": grad_norm,
            f"{self.role}/lr": rate,
            **metrics,
            f"{self.role}/real_tokens_frac": 1.0,
            f"{self.role}/model_tflop_sum": 6e-12
            * sum(x.numel() for x in self.model.parameters())
            * len(samples.sequences.tokens),
        }


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def compute_lr(config: OptimizerConfig, step: int) -> float:
    """Megarl's schedules without warm-up, step counted from 1."""
    assert config.warmup_steps == 0
    if config.decay is LrDecay.constant:
        return config.lr
    assert config.decay is LrDecay.linear
    assert config.decay_steps is not None
    left = 1 - min(step, config.decay_steps) / config.decay_steps
    lowest = min(config.min_lr, config.lr)
    return lowest + (config.lr - lowest) * left


def build_targets(samples: TrainingSamples, tokens: ResponseTokens) -> TokenTargets:
    found: dict[str, Any] = {each.name: getattr(samples, each.name, None) for each in fields(TokenTargets)}
    found |= {name: x[tokens.rows, tokens.columns] for name, x in found.items() if x is not None and x.ndim == 2}
    found |= {
        "rows": tokens.rows,
        "samples": tokens.rows,
        "num_rows": len(samples.mask),
        "row_lengths": samples.mask.sum(1),
    }
    return TokenTargets(**found | {"positive": samples.positive[tokens.rows]})
