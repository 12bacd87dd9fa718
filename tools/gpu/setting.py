"""What the checks of tools/check_gpu.py compute with: the configuration, random weights, samples and worker specs."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.roles import (
    Dtype,
    ModelSource,
    OptimizerConfig,
    ParallelConfig,
    RandomModelConfig,
    TrainedRoleConfig,
)
from megarl.config.schema.root import Config
from megarl.mcore.spec import ROLE_KEYS, Role, WorkerSpec
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import SPECIAL_TOKENS
from megarl.models.families import FAMILIES, build_random_fields, list_weights, parse_architecture
from megarl.plan.job import PUBLISHED, find_architecture, find_in_cache
from megarl.types import Sequences, TrainingSamples

CPU, CUDA = "cpu", "cuda"
LARGE = {
    # 1.4 billion weights: Qwen3-1.7B with 22 of its 28 layers, of which 80 GB hold all activations of 16,384 tokens.
    CUDA: (
        RandomModelConfig(
            num_layers=22, hidden_size=2048, ffn_size=6144, num_heads=16, num_kv_heads=8, max_length=40960,
            tie_embeddings=True, init_std=0.02,
        ),
        151936,
    ),
    CPU: (
        RandomModelConfig(
            num_layers=5, hidden_size=160, ffn_size=560, num_heads=5, num_kv_heads=5, max_length=512, init_std=0.02
        ),
        2403,
    ),
}  # fmt: skip
"""Model whose memory and speed are measured, where the command line names none, and size of its vocabulary"""
DEFAULTS: dict[str, list[str]] = {
    CUDA: [
        *("policy.dtype=bfloat16", "critic.dtype=bfloat16", "rollout.dtype=bfloat16"),
        *("data.prompt_length=1024", "rollout.response_length=15360", "train.tokens_per_microbatch=16384"),
    ],
    CPU: [
        *("policy.dtype=float32", "critic.dtype=float32", "rollout.dtype=float32", "rollout.kv_cache_tokens=4096"),
        *("data.prompt_length=4", "rollout.response_length=156", "train.tokens_per_microbatch=640"),
    ],
}
"""Overrides that come before those of the command line"""
SMALL = RandomModelConfig(
    num_layers=4, hidden_size=256, ffn_size=512, num_heads=4, num_kv_heads=2, max_length=512, init_std=0.05
)
SMALL_VOCAB = 256
"""Of the model that CPU and GPU both compute: layers of the family of the large one"""
MAX_SMALL_TOKENS = 60
"""Tokens of a micro-batch of the small model: a minibatch is several of them"""
NUM_MICROBATCHES = 4
"""Of an update of the large model"""
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Setting:
    device: str
    """cpu or cuda"""
    overrides: tuple[str, ...]
    """of the command line"""
    scratch: Path

    @cached_property
    def config(self) -> Config:
        """Raises ConfigError, also for lengths that the model does not have."""
        given = list(self.overrides)
        defaults = ["algo=ppo", *DEFAULTS[self.device]]
        if not any(text.startswith(("model=", "model.random")) for text in given):
            defaults[1:1] = ["model=checkpoint", f"model.path={self._write_description()}"]
        # Of a group that both choose, Hydra takes one alone.
        groups = {text.split("=")[0] for text in given}
        config = load_config([*(text for text in defaults if text.split("=")[0] not in groups), *given])
        arch = parse_architecture(find_description(config), Path("model"))
        longest = config.data.prompt_length + config.rollout.response_length
        if longest > arch.max_length:
            raise ConfigError(
                [
                    f"rollout.response_length: found {config.rollout.response_length}; with data.prompt_length"
                    f" {config.data.prompt_length} it is {longest} tokens; the model has {arch.max_length} positions"
                ]
            )
        return config

    def _write_description(self) -> Path:
        directory = self.scratch / "default-model"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(describe_random(*LARGE[self.device])))
        return directory

    @cached_property
    def large(self) -> dict[str, Any]:
        return find_description(self.config)

    @property
    def small(self) -> dict[str, Any]:
        family = str(self.large["model_type"])
        return describe_random(replace(SMALL, family=family), SMALL_VOCAB)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


def describe_random(random: RandomModelConfig, vocab_size: int) -> dict[str, Any]:
    family = FAMILIES[random.family]
    fields: dict[str, Any] = {"model_type": family.name, "architectures": [f"{family.hf_class}ForCausalLM"]}
    fields |= {"eos_token_id": 2, "pad_token_id": None}
    return fields | build_random_fields(random, vocab_size)


def find_description(config: Config) -> dict[str, Any]:
    """The config.json of the configured model, from a local file or as published; nothing is downloaded.

    Raises ConfigError naming model.path.
    """
    if config.model.source is ModelSource.random:
        return describe_random(config.model.random, len(config.model.random.alphabet) + len(SPECIAL_TOKENS))
    name = str(config.model.path)
    find_architecture(name, "model.path")
    directory = Path(name).expanduser()
    if not (directory / "config.json").is_file():
        if name in PUBLISHED:
            return dict(PUBLISHED[name])
        directory = find_in_cache(name) or directory
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def write_checkpoint(description: dict[str, Any], directory: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """A Hugging Face checkpoint of random weights, the same on every machine for one kind of device.

    Written tensor by tensor, and without transformers.
    """
    from megarl.mcore.checkpoints import MAX_FILE_BYTES, write_safetensors

    arch = parse_architecture(description, directory)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(description, indent=2))
    std = float(description.get("initializer_range", 0.02))
    tensors = _make_tensors(arch, std, dtype, device)
    write_safetensors(directory, tensors, MAX_FILE_BYTES)
    return directory


def _make_tensors(arch: Architecture, std: float, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    generator = torch.Generator(device).manual_seed(1)
    for name, shape in list_tensors(arch):
        values = torch.randn(shape, generator=generator, device=device)
        # Norms and biases away from 1 and 0, where a swapped or missing one would not show.
        is_norm = len(shape) == 1 and name.endswith("norm.weight")
        yield name, ((1 + 0.1 * values) if is_norm else std * values).to(dtype).cpu()


def list_tensors(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of a decoder's tensors."""
    yield "model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size)
    for layer in range(arch.num_layers):
        for weight in list_weights(arch, layer):
            numbers = range(arch.experts.num_experts) if weight.per_expert and arch.experts else range(1)
            for number in numbers:
                for name, shape in zip(weight.hf_names, weight.shapes, strict=True):
                    yield f"model.layers.{layer}.{name.format(number)}", shape
    yield "model.norm.weight", (arch.hidden_size,)
    if not arch.tied:
        yield "lm_head.weight", (arch.vocab_size, arch.hidden_size)


def build_spec(setting: Setting, role: Role, checkpoint: Path, **changes: Any) -> WorkerSpec:
    """The role's worker in one process; keys of the configuration, and `changes` of them."""
    config = setting.config
    node: TrainedRoleConfig = config.critic if role is Role.critic else config.policy
    fields: dict[str, Any] = {name: getattr(node, name) for name in ROLE_KEYS.values()} | {
        "fp8": None,
        "parallel": ParallelConfig(),
        "optimizer": node.optimizer.resolve_schedule(1, config.train.num_iterations),
        "dtype": node.dtype,
        "tokens_per_microbatch": config.train.tokens_per_microbatch,
    }
    return WorkerSpec(
        role=role,
        checkpoint=str(checkpoint),
        algo=config.algo,
        temperature=config.rollout.temperature,
        response_length=config.rollout.response_length,
        seed=config.seed,
        megatron=config.model.megatron,
        num_threads=config.cluster.cpu_threads_per_worker or 1,
        deadline_s=DEADLINE_S,
        **(fields | changes),
    )


def build_small_spec(setting: Setting, role: Role, checkpoint: Path, dtype: Dtype, **changes: Any) -> WorkerSpec:
    """An epsilon of Adam that is large: its first steps would otherwise turn rounding of tiny gradients into whole
    steps.
    """
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.1, clip_grad=1.0)
    fields = {"optimizer": optimizer, "dtype": dtype, "tokens_per_microbatch": MAX_SMALL_TOKENS, **changes}
    return build_spec(setting, role, checkpoint, **fields)


def make_samples(prompts: Sequence[int], responses: Sequence[int], vocab_size: int, seed: int = 0) -> TrainingSamples:
    """Random tokens and targets of rows with these numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths, lengths = torch.tensor(prompts), torch.tensor(prompts) + torch.tensor(responses)
    tokens = torch.randint(0, vocab_size, (int(lengths.sum()),), generator=generator)
    mask = torch.arange(max(responses)) < torch.tensor(responses)[:, None]

    def normal(scale: float, center: float = 0.0) -> Tensor:
        return (center + scale * torch.randn(mask.shape, generator=generator)) * mask

    # Ratios near 1, so that little is clipped.
    old_logprobs = normal(0.3, -math.log(vocab_size))
    return TrainingSamples(
        sequences=Sequences(tokens, lengths, prompt_lengths),
        mask=mask,
        loss_mask=mask,
        positive=torch.rand(len(mask), generator=generator) > 0.5,
        advantages=normal(1.0),
        rollout_logprobs=old_logprobs,
        old_logprobs=old_logprobs,
        sampling_logprobs=old_logprobs,
        ref_logprobs=old_logprobs,
        old_values=normal(0.5),
        returns=normal(1.0),
    )


def make_small_samples() -> TrainingSamples:
    """Ragged rows of up to 28 tokens, in several micro-batches."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(1, longest, (12,), generator=generator).tolist() for longest in (8, 21))
    return make_samples(prompts, responses, SMALL_VOCAB)


def make_large_samples(setting: Setting) -> TrainingSamples:
    """Rows as long as they may be, which fill `NUM_MICROBATCHES` micro-batches."""
    config = setting.config
    prompt, response = config.data.prompt_length, config.rollout.response_length
    number = NUM_MICROBATCHES * max(1, config.train.tokens_per_microbatch // (prompt + response))
    vocab_size = parse_architecture(setting.large, Path("model")).vocab_size
    return make_samples([prompt] * number, [response] * number, vocab_size)
