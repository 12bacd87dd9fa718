"""The presets of models for GPUs: complete jobs, whose layouts the models allow and whose memory fits.

The config.json in checkpoints.yaml are those that the models were published with.
"""

import json
from pathlib import Path

import pytest
import yaml

from megarl.algo.registry import needs_critic
from megarl.config.load import load_config
from megarl.config.schema.algo import needs_reference
from megarl.config.schema.roles import ParallelConfig, Recompute, TrainedRoleConfig
from megarl.config.schema.root import Config
from megarl.mcore.spec import (
    Role,
    build_role_fields,
    check_layout,
    check_role_fields,
    read_architecture,
)
from megarl.models.architecture import Architecture
from megarl.plan.memory import place_job
from megarl.run.inputs import build_specs

PUBLISHED = yaml.safe_load(Path(__file__).with_name("checkpoints.yaml").read_text())
COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
ON_ONE_NODE = dict.fromkeys(("qwen2_7b", "qwen2_5_7b", "qwen3_8b", "llama3_8b"), 8)
ON_ONE_GPU = dict.fromkeys(("qwen3_0_6b", "qwen2_5_0_5b"), 1)
GPUS = {**ON_ONE_GPU, **ON_ONE_NODE, "qwen32b": 64, "qwen3_235b_a22b": 256}
BILLIONS = {
    "qwen3_0_6b": 0.60,
    "qwen2_5_0_5b": 0.49,
    "qwen2_7b": 7.62,
    "qwen2_5_7b": 7.62,
    "qwen3_8b": 8.19,
    "llama3_8b": 8.03,
    "qwen32b": 32.76,
    "qwen3_235b_a22b": 235.09,
}
"""Weights, as published."""
H100 = 80e9


@pytest.fixture
def folder(model: str, tmp_path: Path) -> Path:
    """The published checkpoint without its weights."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model] | COMMON))
    return tmp_path


@pytest.fixture
def arch(folder: Path) -> Architecture:
    return read_architecture(folder)


def count_weights(arch: Architecture) -> tuple[float, float]:
    """(weights of experts, of everything else)"""
    width = arch.head_size * (2 * arch.num_heads + 2 * arch.num_kv_heads)
    bias = arch.head_size * (arch.num_heads + 2 * arch.num_kv_heads) if arch.qkv_bias else 0
    norms = 2 * arch.hidden_size + (2 * arch.head_size if arch.qk_norm else 0)
    layer, experts = width * arch.hidden_size + bias + norms, 0
    if arch.experts:
        layer += arch.experts.num_experts * arch.hidden_size
        experts = arch.experts.num_experts * 3 * arch.hidden_size * arch.experts.ffn_size
    else:
        layer += 3 * arch.hidden_size * arch.ffn_size
    others = (1 if arch.tied else 2) * arch.vocab_size * arch.hidden_size + arch.hidden_size
    return experts * arch.num_layers, layer * arch.num_layers + others


def estimate_bytes(
    arch: Architecture, parallel: ParallelConfig, trained: bool, tokens: int, vocab: int, recomputes: bool = True
) -> float:
    """Of the fullest GPU: weights, gradients, optimizer, what layers keep (their inputs where they are recomputed),
    logits and their gradient.
    """
    experts, others = count_weights(arch)
    embedding = arch.vocab_size * arch.hidden_size / parallel.tp
    split = parallel.tp * parallel.pp
    dense = (others / parallel.tp - 2 * embedding) / parallel.pp + embedding * (2 if parallel.pp == 1 else 1)
    sparse = experts / (parallel.pp * parallel.ep * parallel.etp)
    if not trained:
        return 2 * (dense + sparse) + 2 * tokens * vocab / parallel.tp
    replicas = parallel.num_processes / split
    sparse_replicas = parallel.num_processes / (parallel.pp * parallel.ep * parallel.etp)
    states = dense * (6 + 12 / replicas) + sparse * (6 + 12 / sparse_replicas)
    # The first of pp stages has pp micro-batches under way.
    # A layer that is not recomputed keeps about ten tensors of the hidden size and five of the MLP's.
    kept = arch.hidden_size if recomputes else 10 * arch.hidden_size + 5 * arch.ffn_size
    inputs = arch.num_layers / parallel.pp * parallel.pp * tokens * kept * 2 / parallel.tp
    return states + inputs + 4 * tokens * vocab / parallel.tp


def recomputes(node: object) -> bool:
    return not isinstance(node, TrainedRoleConfig) or node.recompute is Recompute.full


def list_roles(config: Config) -> dict[Role, object]:
    roles = {Role.policy: config.policy}
    if needs_critic(config.algo):
        roles[Role.critic] = config.critic
    if needs_reference(config.algo):
        roles[Role.reference] = config.reference
    return roles


@pytest.mark.parametrize("model", BILLIONS)
def test_the_checkpoints_have_the_published_number_of_weights(model: str, arch: Architecture) -> None:
    assert sum(count_weights(arch)) / 1e9 == pytest.approx(BILLIONS[model], abs=0.01)


@pytest.mark.parametrize("model", GPUS)
def test_vapo_with_a_preset_is_a_complete_job_that_fills_its_cluster(model: str) -> None:
    config = load_config(["algo=vapo", f"model={model}"])
    roles = [config.policy, config.critic]
    assert len(set().union(*place_job(config).values())) == GPUS[model]
    assert config.cluster.num_nodes * config.cluster.gpus_per_node == GPUS[model]
    assert [role.optimizer.lr for role in roles] == [1e-6, 1e-5 if model in ON_ONE_GPU else 2e-6]
    assert config.model.path
    assert config.data.path
    assert type(config.reward).__name__ == "MathRewardConfig"


@pytest.mark.parametrize("algo", ["vapo", "grpo", "reinforce_pp"])
@pytest.mark.parametrize("model", GPUS)
def test_the_model_allows_the_layout_of_every_role(model: str, algo: str, folder: Path, arch: Architecture) -> None:
    config = load_config([f"algo={algo}", f"model={model}"])
    for role, spec in build_specs(config, folder).items():
        assert not check_layout(arch, spec.parallel, role.value, spec.megatron)
        assert not list(check_role_fields(arch, spec))
    assert config.data.prompt_length + config.rollout.response_length <= arch.max_length
    assert len(set().union(*place_job(config).values())) <= GPUS[model]


@pytest.mark.parametrize("algo", ["vapo", "grpo"])
@pytest.mark.parametrize("model", GPUS)
def test_megatron_takes_the_configuration_of_every_role(
    model: str, algo: str, folder: Path, arch: Architecture
) -> None:
    from megarl.mcore.model import build_config

    config = load_config([f"algo={algo}", f"model={model}"])
    for spec in build_specs(config, folder).values():
        built = build_config(arch, spec.parallel, spec.dtype, spec.megatron, build_role_fields(spec))
        assert built.num_layers == arch.num_layers
        node = getattr(config, spec.role.value)
        wanted = node.recompute if spec.optimizer is not None else Recompute.none
        assert (built.recompute_granularity or "none") == wanted.name


@pytest.mark.parametrize("algo", ["vapo", "grpo"])
@pytest.mark.parametrize("model", GPUS)
def test_no_gpu_needs_more_than_its_memory(model: str, algo: str, arch: Architecture) -> None:
    config = load_config([f"algo={algo}", f"model={model}"])
    tokens = max(config.train.tokens_per_microbatch, config.data.prompt_length + config.rollout.response_length)
    for role, node in list_roles(config).items():
        trained = isinstance(node, TrainedRoleConfig)
        share = -(-tokens // node.parallel.cp)
        vocab = 0 if role is Role.critic else arch.vocab_size
        # A tenth is left to what the estimate does not see: CUDA, NCCL, one layer's activations, fragments.
        assert estimate_bytes(arch, node.parallel, trained, share, vocab, recomputes(node)) < 0.9 * H100
    weights = 2 * sum(count_weights(arch)) / config.rollout.tp
    kv_heads = max(1, arch.num_kv_heads / config.rollout.tp)
    token = 2 * 2 * arch.num_layers * kv_heads * arch.head_size
    memory = config.rollout.sglang["mem_fraction_static"] * H100 - weights
    assert memory / token > 10 * (config.data.prompt_length + config.rollout.response_length)


@pytest.mark.parametrize("model", ["qwen32b"])
def test_a_layout_that_cannot_hold_the_model_is_seen_by_the_estimate(arch: Architecture) -> None:
    layout = ParallelConfig(num_processes=8, tp=8, sp=True)
    assert estimate_bytes(arch, layout, True, 16384, arch.vocab_size) > 0.9 * H100


@pytest.mark.parametrize("cluster", ["gpu", "h100x8", "h100x16", "h100x64", "h100x256", "h200x8"])
def test_any_checkpoint_on_gpus_has_the_deadlines_of_gpus_and_a_preset_or_the_user_overrides_them(cluster: str) -> None:
    rollout = load_config(["model=checkpoint", "model.path=/x", f"cluster={cluster}"]).rollout
    assert (rollout.startup_deadline_s, rollout.request_deadline_s, rollout.sync_deadline_s) == (1800, 7200, 1200)
    given = ["model=checkpoint", "model.path=/x", f"cluster={cluster}", "rollout.request_deadline_s=99"]
    assert load_config(given).rollout.request_deadline_s == 99
    assert load_config(["model=qwen3_235b_a22b", f"cluster={cluster}"]).rollout.startup_deadline_s == 3600
