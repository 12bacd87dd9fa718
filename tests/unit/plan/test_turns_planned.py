"""GPUs that roles and servers share in turns: what each phase takes, and the presets that rely on it."""

import pytest

from megarl.config.load import list_options, load_config
from megarl.plan.assumptions import GIB
from megarl.plan.job import JobPlan, build_plan, find_models

NODE = ("algo=vapo", "model=qwen3_8b", "cluster=h100x8")
SERVER = 4 * GIB
PROCESS = 2.5 * GIB
ON_ONE_NODE = ("qwen3_8b", "qwen2_5_7b", "llama3_8b", "qwen2_7b")
GPU = (
    "cluster.hardware={{gpu: X, memory_gib: {}, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s: 32,"
    " network_gb_s: 3, host_memory_gib: 64}}"
)


def plan(*overrides: str) -> JobPlan:
    config = load_config(overrides)
    return build_plan(config, find_models(config))


@pytest.mark.parametrize("algo", list_options("algo"))
@pytest.mark.parametrize("model", ON_ONE_NODE)
def test_every_algorithm_fits_one_node_with_a_model_of_8b(model: str, algo: str) -> None:
    found = plan(f"algo={algo}", f"model={model}")
    assert not found.problems
    assert found.num_gpus == 8
    # Room for what no formula sees: fragments, NCCL's buffers of many groups.
    assert max(max(gpus.phases.values()) for gpus in found.gpus) < 76 * GIB


@pytest.mark.parametrize("model", ON_ONE_NODE)
def test_a_node_of_h200_has_room_for_more(model: str) -> None:
    found = plan("algo=vapo", f"model={model}", "cluster=h200x8")
    assert not found.problems
    assert found.server.kv_tokens > 1.5 * plan("algo=vapo", f"model={model}").server.kv_tokens


@pytest.mark.parametrize("algo", list_options("algo"))
@pytest.mark.parametrize("model", ["qwen3_0_6b", "qwen2_5_0_5b"])
def test_every_algorithm_trains_a_small_model_on_one_gpu_of_24_gb(model: str, algo: str) -> None:
    found = plan(f"algo={algo}", f"model={model}", "cluster=gpu", GPU.format(23.5))
    assert not found.problems
    assert found.num_gpus == 1


def test_two_nodes_have_the_roles_on_one_and_the_servers_on_the_other() -> None:
    found = plan(*NODE[:2], "cluster=h100x16", "cluster.placement=split", "rollout.transport=split")
    assert not found.problems
    assert found.places == {
        "policy": tuple(range(8)),
        "critic": tuple(range(8)),
        "servers": tuple(range(8, 16)),
    }


def test_one_role_computes_at_a_time_beside_what_the_server_keeps() -> None:
    found = plan(*NODE)
    (policy,), (critic,) = found.stages["policy"], found.stages["critic"]
    (gpus,) = found.gpus
    assert policy.resident == critic.resident == 0
    assert gpus.phases["generation"] == pytest.approx(2 * PROCESS + found.server.total)
    largest = max(policy.update, policy.building, critic.update)
    assert gpus.phases["update"] == pytest.approx(1.05 * largest + 2 * PROCESS + SERVER)
    assert gpus.phases["log-probs, values"] == pytest.approx(
        1.05 * max(policy.forward, critic.forward) + 2 * PROCESS + SERVER
    )
    # The policy's weights beside the server's, whose KV cache comes back after the sync.
    messages = 2 * 64 * 2**20
    sending = 1.05 * (policy.weights + messages) + 2 * PROCESS
    assert gpus.phases["sync"] == pytest.approx(sending + found.server.weights + SERVER + messages)


def test_with_the_kv_cache_alone_given_back_the_servers_weights_stay() -> None:
    everything, cache = plan(*NODE), plan(*NODE, "rollout.offload=kv_cache")
    nothing = plan(*NODE, "rollout.offload=null")
    (first,), (second,), (third,) = everything.gpus, cache.gpus, nothing.gpus
    assert second.phases["update"] - first.phases["update"] == everything.server.weights
    assert third.phases["update"] - second.phases["update"] == everything.server.kv_cache
    assert first.phases["generation"] == second.phases["generation"] == third.phases["generation"]


def test_roles_that_share_gpus_without_leaving_them_compute_side_by_side() -> None:
    kept = plan(*NODE, "policy.offload=null", "critic.offload=null", "rollout.sglang.mem_fraction_static=0.3")
    (policy,), (critic,) = kept.stages["policy"], kept.stages["critic"]
    peaks = 1.05 * (policy.peak + critic.peak) + 2 * PROCESS
    assert kept.gpus[0].phases["update"] == pytest.approx(peaks + SERVER)
