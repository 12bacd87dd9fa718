"""What fits and what does not, which change is the nearest, who shares a GPU and when; jobs on saved rollouts."""

import pytest
from plan_jobs import APART, PRESET, QWEN32B, plan

from megarl.config.load import list_options, load_config
from megarl.plan.job import build_plan, compute_host, find_change, find_models
from megarl.plan.memory import GIB, PHASES, compute_saved

ALGOS = list_options("algo")
KEPT = ("policy.offload=null", "critic.offload=null", "rollout.offload=null")
"""No process gives memory back to the others on its GPU"""
NODE = ("algo=vapo", "model=qwen3_8b", "cluster=h100x8")
FOUR_EACH = (
    *(*NODE, *KEPT),
    *(f"{role}.parallel={{num_processes: 4, tp: 2, sp: true, cp: 1}}" for role in ("policy", "critic")),
)
TOGETHER = ("cluster.placement=colocated",)
APART_ON_TWO_NODES = ["cluster.placement=apart", "cluster.num_nodes=2", "cluster.listen_host=auto"]
ONE_NODE = (*PRESET[:2], "cluster=h100x8", *APART)
COLOCATED = ("algo=vapo", "model=qwen3_8b", "cluster=h200x8", "rollout.sglang.mem_fraction_static=0.5")
SERVER, PROCESS = 4 * GIB, 2.5 * GIB
GPU = (
    "cluster.hardware={gpu: X, memory_gib: 23.5, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s: 32,"
    " network_gb_s: 3, host_memory_gib: 64}"
)


@pytest.mark.parametrize(
    ("models", "overrides", "num_gpus"),
    [
        (("qwen32b",), (), 64),
        (("qwen3_235b_a22b",), (), 256),
        (("qwen3_8b", "qwen2_5_7b", "llama3_8b", "qwen2_7b"), (), 8),
        (("qwen3_0_6b", "qwen2_5_0_5b"), ("cluster=gpu", GPU), 1),
    ],
)
def test_every_algorithm_fits_the_cluster_of_each_model(
    models: tuple[str, ...], overrides: tuple[str, ...], num_gpus: int
) -> None:
    for model in models:
        for algo in ALGOS:
            found = plan(f"algo={algo}", f"model={model}", *overrides)
            assert found.problems == ()
            assert found.num_gpus == num_gpus
            parts = found.seconds
            assert all(part > 0 for part in (parts.generation, parts.scoring, parts.update))
            assert all(set(gpus.phases) == set(PHASES) for gpus in found.gpus)
            # Room for what no formula sees: fragments, NCCL's buffers of many groups.
            assert found.left > (3 * GIB if num_gpus > 1 else 0)


TWO_NODES = ("cluster=h100x16", "cluster.placement=split", "rollout.transport=split")
ONE_H200_NODE = ("cluster=h200x8", "policy.parallel.num_processes=8", "critic.parallel.num_processes=8")


@pytest.mark.parametrize(
    ("model", "other"),
    [
        *((name, TWO_NODES) for name in ("qwen3_1_7b", "qwen3_4b", "llama3_2_1b")),
        *((f"r1_distill_qwen_{size}", TWO_NODES) for size in ("1_5b", "7b")),
        ("qwen3_30b_a3b", (*ONE_H200_NODE, "rollout.num_servers=4")),
        ("gpt_oss_20b", (*ONE_H200_NODE, "rollout.num_servers=8")),
    ],
)
def test_a_preset_fits_the_nodes_that_its_first_lines_name(model: str, other: tuple[str, ...]) -> None:
    own, others = (plan("algo=vapo", f"model={model}", *changes) for changes in ((), other))
    assert own.problems == others.problems == ()
    assert {own.num_gpus, others.num_gpus} == {8, 16}
    assert min(own.left, others.left) > 3 * GIB


def test_the_plan_of_qwen32b_in_numbers() -> None:
    found = plan(*QWEN32B)
    (policy,) = found.stages["policy"]
    parameters = 4_096_062_464
    assert (policy.weights, policy.gradients) == (2 * parameters, 4 * parameters)
    assert policy.optimizer == 12 * parameters // 2
    # Inputs of 64 layers, 16,384 tokens over 8 ranks.
    assert policy.activations == 64 * 2 * 16384 // 8 * 5120
    assert found.transfer.received == found.transfer.total // 32
    assert found.server.num_longest == 51
    places = {"policy": range(16), "critic": range(16, 32), "servers": range(32, 64)}
    assert found.places == {name: tuple(gpus) for name, gpus in places.items()}
    policy_gpu, _, server_gpu = found.gpus
    assert policy_gpu.phases["update"] == pytest.approx(1.05 * policy.update + PROCESS)
    assert server_gpu.phases["generation"] == pytest.approx(0.88 * 79.1 * GIB + SERVER)
    # Eight ranks of the policy on the first node: processes, and a checkpoint's copy of bfloat16 weights, and half of
    # their float32 copies and two moments, of which the second node's ranks (cp 2) have the other half.
    samples = 8192 * 17408 * 64
    assert found.host_bytes == 8 * (6 * GIB + 8 * policy.parameters.total) + 32768 * 2**20 + samples
    job = found.jobs["policy"]
    parts = [8 * policy.parameters.total] * 8 + [6 * policy.parameters.total] * 8
    assert [compute_saved(job, policy.parameters, rank) for rank in range(16)] == parts


@pytest.mark.parametrize(
    ("overrides", "texts", "nearest"),
    [
        (
            (*QWEN32B, "policy.recompute=none"),
            ["GPU 0 (policy stage 0): update takes", "of 79.1"],
            ["policy.recompute=full"],
        ),
        # Smaller micro-batches are nearer than another layout.
        (
            (*QWEN32B, "train.tokens_per_microbatch=262144"),
            ["GPU 0 (policy stage 0)"],
            ["train.tokens_per_microbatch=69632"],
        ),
        (
            ONE_NODE,
            ["policy 16 + critic 16 + servers 32 GPUs, placed apart, need 8 nodes of 8 GPUs", "with 8 in all"],
            ["cluster.num_nodes=8", "cluster.listen_host=auto"],
        ),
        ((*QWEN32B, "rollout.num_servers=10"), ["need 9 nodes"], ["rollout.num_servers=8"]),
        # Without room for a sequence it is raised; where it leaves nothing else, lowered.
        (
            (*QWEN32B, "rollout.sglang.mem_fraction_static=0.1"),
            ["mem_fraction_static: found 0.1", "one sequence may have 17408"],
            ["rollout.sglang.mem_fraction_static=0.3"],
        ),
        (
            (*QWEN32B, "rollout.sglang.mem_fraction_static=0.97"),
            ["which leaves 2.4 GiB of a GPU"],
            ["rollout.sglang.mem_fraction_static=0.94"],
        ),
        ((*QWEN32B, "cluster.placement=split"), ["GPU 0 (policy stage 0, critic"], ["cluster.placement=apart"]),
        # Apart takes the nodes that it needs.
        ((*FOUR_EACH, *TOGETHER, "rollout.transport=disk"), ["GPU 0 (policy"], APART_ON_TWO_NODES),
        ((*QWEN32B, "cluster.gpus_per_node=2", "cluster.num_nodes=64"), ["rollout.tp: found 4; a server is on"], None),
        ((*QWEN32B, "cluster.hardware.host_memory_gib=300"), ["GiB of host memory of 300"], None),
        # Optimizer states that do not fit need more GPUs or a finer cut.
        (
            (*QWEN32B, "policy.parallel={num_processes: 8, tp: 8, sp: true, cp: 1}", "cluster.hardware.memory_gib=70"),
            ["update takes"],
            ["policy.parallel.num_processes=16"],
        ),
        ((*COLOCATED[:3], *KEPT[2:], "policy.offload=all", "critic.offload=all"), ["GPU 0"], ["rollout.sglang.mem"]),
    ],
)
def test_what_does_not_fit_is_said_in_numbers_and_the_nearest_change_is_the_least_intrusive(
    overrides: tuple[str, ...], texts: list[str], nearest: list[str] | None
) -> None:
    config = load_config(overrides)
    models = find_models(config)
    before = build_plan(config, models)
    assert [text for text in texts if text not in "; ".join(before.problems)] == []
    if nearest is None:
        return
    change = find_change(config, models, before)
    assert [text[: len(start)] for text, start in zip(change.overrides, nearest, strict=False)] == nearest
    # The command line takes it.
    assert plan(*overrides, *change.overrides).problems == change.plan.problems == ()


def test_what_a_later_change_makes_superfluous_is_left_out() -> None:
    """Fewer servers give the first change its GPUs; nodes for the second give them too."""
    config = load_config((*FOUR_EACH, "cluster.placement=split", "rollout.transport=split"))
    models = find_models(config)
    found = build_plan(config, models)
    assert [problem.split()[0] for problem in found.problems] == ["cluster:", "GPU"]
    overrides = find_change(config, models, found).overrides
    assert len([text for text in overrides if text.startswith(("rollout.num_servers", "cluster.num_nodes"))]) == 1


def test_replayed_experts_take_host_memory_of_the_driver_and_the_servers() -> None:
    overrides = ("algo=grpo", "model=qwen3_235b_a22b", "cluster=h100x256", "rollout.router_replay=true")
    found, more = plan(*overrides), plan(*overrides, "train.samples_per_iteration=8192")
    config, off = load_config(overrides), load_config(overrides[:-1])
    longest = config.data.prompt_length + config.rollout.response_length
    # Eight experts of a token in 94 layers, twice in the driver; the first node has no server.
    assert more.host_bytes - found.host_bytes == 4096 * longest * (64 + 2 * 94 * 8)
    nowhere = {**found.places, "policy": (), "servers": tuple(range(8, 16))}
    few, some = (compute_host(config, found.jobs, found.stages, nowhere, tokens) for tokens in (10**9, 2 * 10**9))
    assert some - few == 8 * 10**9 * 94 * 8 * 4
    assert compute_host(off, found.jobs, found.stages, nowhere, 10**9) < few


def test_a_gpu_has_the_processes_that_the_placement_gives_it() -> None:
    sizes = ("policy.parallel={num_processes: 4, tp: 4, cp: 1}", "critic.parallel={num_processes: 2, tp: 2, cp: 1}")
    job = (*NODE, *sizes, "rollout.num_servers=2")
    apart = plan(*job, "cluster.placement=apart")
    assert [gpus.gpus for gpus in apart.gpus] == [(0, 1, 2, 3), (4, 5), (6, 7)]
    shared = plan(*job, "cluster.placement=split")
    found = [(gpus.gpus, list(gpus.stages), gpus.server is not None) for gpus in shared.gpus]
    assert found == [((0, 1), ["policy", "critic"], False), ((2, 3), ["policy"], False), ((4, 5), [], True)]
    two_nodes = plan(*NODE[:2], "cluster=h100x16", "cluster.placement=split", "rollout.transport=split")
    assert not two_nodes.problems
    assert {name: (gpus[0], gpus[-1]) for name, gpus in two_nodes.places.items()} == {
        "policy": (0, 7), "critic": (0, 7), "servers": (8, 15),
    }  # fmt: skip


def test_those_who_share_a_gpu_add_up_where_nothing_is_offloaded_and_take_turns_where_it_is() -> None:
    found = plan(*COLOCATED, *KEPT)
    ((policy,), (critic,)), (gpus,) = (found.stages[role] for role in ("policy", "critic")), found.gpus
    # torch's allocator keeps what the largest call took.
    held = 1.05 * (policy.peak + critic.peak) + 2 * PROCESS
    assert gpus.phases["generation"] == pytest.approx(held + found.server.total)
    offloaded = plan(*COLOCATED, *KEPT[2:], "policy.offload=all", "critic.offload=all")
    waiting = 2 * PROCESS + offloaded.server.total
    assert offloaded.gpus[0].phases["generation"] == pytest.approx(waiting, rel=1e-6)
    assert offloaded.gpus[0].phases["update"] == pytest.approx(waiting + 1.05 * policy.peak, rel=1e-3)
    # Where the server alone gives memory back, the roles compute side by side.
    kept = plan(*NODE, *KEPT[:2], "rollout.sglang.mem_fraction_static=0.3")
    ((policy,), (critic,)) = (kept.stages[role] for role in ("policy", "critic"))
    peaks = 1.05 * (policy.peak + critic.peak) + 2 * PROCESS
    assert kept.gpus[0].phases["update"] == pytest.approx(peaks + SERVER)


def test_one_role_computes_at_a_time_beside_what_the_server_keeps() -> None:
    found, cache, nothing = (plan(*NODE, *more) for more in ((), ("rollout.offload=kv_cache",), KEPT[2:]))
    ((policy,), (critic,)), (gpus,) = (found.stages[role] for role in ("policy", "critic")), found.gpus
    assert policy.resident == critic.resident == 0
    scored, largest = max(policy.forward, critic.forward), max(policy.update, policy.building, critic.update)
    # The policy's weights beside the server's, whose KV cache comes back after the sync.
    messages = 2 * 64 * 2**20
    sending = 1.05 * (policy.weights + messages) + found.server.weights + messages
    phases = {
        "generation": found.server.total, "update": 1.05 * largest + SERVER,
        "log-probs, values": 1.05 * scored + SERVER, "sync": sending + SERVER,
    }  # fmt: skip
    for phase, expected in phases.items():
        assert gpus.phases[phase] == pytest.approx(2 * PROCESS + expected)
    # With the KV cache alone given back the server's weights stay.
    first, second, third = (each.gpus[0].phases for each in (found, cache, nothing))
    assert second["update"] - first["update"] == found.server.weights
    assert third["update"] - second["update"] == found.server.kv_cache
    assert first["generation"] == second["generation"] == third["generation"]


def test_with_saved_rollouts_nothing_is_generated_or_sent() -> None:
    roles = ("policy.parallel.num_processes=4", "critic.parallel.num_processes=4")
    saved = ("model=qwen3_0_6b", "cluster=h100x8", "rollout.file=r.jsonl", "algo.mismatch.correction=tis")
    found = plan("algo=ppo", *saved, *roles)
    assert (found.problems, found.server, found.num_gpus, found.places["servers"]) == ((), None, 8, ())
    assert (found.seconds.generation, found.seconds.sync, found.transfer.total) == (0.0, 0.0, 0)
