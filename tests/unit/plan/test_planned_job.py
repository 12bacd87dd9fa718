"""What fits and what does not, which change is the nearest, who shares a GPU and when; jobs on saved rollouts."""

import pytest
from plan_jobs import APART, PRESET, QWEN32B, plan

from megarl.config.load import list_options, load_config
from megarl.plan.assumptions import GIB
from megarl.plan.job import build_plan, compute_host, find_models
from megarl.plan.memory import PHASES, compute_saved
from megarl.plan.search import Change, find_change
from megarl.plan.tables import list_tables

ALGOS = list_options("algo")
KEPT = ("policy.offload=null", "critic.offload=null", "rollout.offload=null")
"""No process gives memory back to the others on its GPU"""
FOUR_EACH = (
    *("algo=vapo", "model=qwen3_8b", "cluster=h100x8", *KEPT),
    *(f"{role}.parallel={{num_processes: 4, tp: 2, sp: true, cp: 1}}" for role in ("policy", "critic")),
)
TOGETHER = ("cluster.placement=colocated",)
TWO_NODES = ("cluster.num_nodes=2", "cluster.listen_host=auto")
ONE_NODE = (*PRESET[:2], "cluster=h100x8", *APART)


def find(*overrides: str) -> Change:
    """The nearest change, which is one that the command line takes and that makes the job fit."""
    config = load_config(overrides)
    models = find_models(config)
    before = build_plan(config, models)
    assert before.problems
    change = find_change(config, models, before)
    assert change is not None
    assert not plan(*overrides, *change.overrides).problems
    return change


@pytest.mark.parametrize(
    "overrides",
    [
        PRESET,
        QWEN32B,
        *((f"algo={algo}", f"model={model}") for algo in ALGOS for model in ("qwen32b", "qwen3_235b_a22b")),
        ("algo=vapo", "model=llama3_8b"),
    ],
)
def test_the_presets_fit_their_clusters(overrides: tuple[str, ...]) -> None:
    found = plan(*overrides)
    assert not found.problems
    seconds = found.seconds
    assert all(part and part > 0 for part in (seconds.generation, seconds.scoring, seconds.update, seconds.sync))
    assert all(set(gpus.phases) == set(PHASES) for gpus in found.gpus)


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
    assert found.places == {
        "policy": tuple(range(16)),
        "critic": tuple(range(16, 32)),
        "servers": tuple(range(32, 64)),
    }
    policy_gpu, _, server_gpu = found.gpus
    assert policy_gpu.phases["update"] == pytest.approx(1.05 * policy.update + 2.5 * GIB)
    assert server_gpu.phases["generation"] == pytest.approx(0.88 * 79.1 * GIB + 4 * GIB)


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ((*QWEN32B, "policy.recompute=none"), ["GPU 0 (policy stage 0): update takes", "of 79.1"]),
        (ONE_NODE, ["policy 16 + critic 16 + servers 32 GPUs, placed apart, need 8 nodes of 8 GPUs", "with 8 in all"]),
        (
            (*QWEN32B, "rollout.sglang.mem_fraction_static=0.1"),
            ["mem_fraction_static: found 0.1", "one sequence may have 17408"],
        ),
        (
            (*QWEN32B, "cluster.gpus_per_node=2", "cluster.num_nodes=64"),
            ["rollout.tp: found 4; a server is on one node, which has 2 GPUs"],
        ),
        ((*QWEN32B, "cluster.hardware.host_memory_gib=300"), ["GiB of host memory of 300"]),
    ],
)
def test_what_does_not_fit_is_said_in_numbers(overrides: tuple[str, ...], texts: list[str]) -> None:
    problem = plan(*overrides).problems[0]
    assert all(text in problem for text in texts)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*QWEN32B, "policy.recompute=none"), ["policy.recompute=full"]),
        # Smaller micro-batches are nearer than another layout.
        ((*QWEN32B, "train.tokens_per_microbatch=262144"), ["train.tokens_per_microbatch=131072"]),
        (ONE_NODE, ["cluster.num_nodes=8", "cluster.listen_host=auto"]),
        ((*QWEN32B, "rollout.num_servers=10"), ["rollout.num_servers=8"]),
        # Without room for a sequence it is raised; where it leaves nothing else, lowered.
        ((*QWEN32B, "rollout.sglang.mem_fraction_static=0.1"), ["rollout.sglang.mem_fraction_static=0.3"]),
        ((*QWEN32B, "rollout.sglang.mem_fraction_static=0.97"), ["rollout.sglang.mem_fraction_static=0.94"]),
        ((*QWEN32B, "cluster.placement=split"), ["cluster.placement=apart"]),
        # Apart takes the nodes that it needs.
        ((*FOUR_EACH, *TOGETHER, "rollout.transport=colocated"), ["cluster.placement=apart", *TWO_NODES]),
        ((*FOUR_EACH, *TOGETHER, "rollout.transport=disk"), ["cluster.placement=apart", *TWO_NODES]),
    ],
)
def test_the_nearest_change_is_the_least_intrusive(overrides: tuple[str, ...], expected: list[str]) -> None:
    assert list(find(*overrides).overrides) == expected


def test_optimizer_states_that_do_not_fit_need_more_gpus_or_a_finer_cut() -> None:
    layout = "policy.parallel={num_processes: 8, tp: 8, sp: true, cp: 1}"
    change = find(*QWEN32B, layout, "cluster.hardware.memory_gib=70")
    assert any(override.startswith("policy.parallel.num_processes=16") for override in change.overrides)
    assert change.plan.num_gpus <= 64


def test_host_memory_is_counted() -> None:
    # Eight ranks of the policy on the first node: processes, and a checkpoint's copy of bfloat16 weights, their float32
    # copies and two moments, of which the second node's ranks (cp 2) send these their half.
    found = plan(*QWEN32B)
    (policy,) = found.stages["policy"]
    samples = 8192 * 17408 * 64
    expected = 8 * (6 * GIB + 14 * policy.parameters.total) + 32768 * 2**20 + samples
    assert found.host_bytes == expected
    job = found.jobs["policy"]
    assert [compute_saved(job, policy.parameters, rank) > 0 for rank in range(16)] == [True] * 8 + [False] * 8


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


def test_a_model_of_unknown_sizes_is_named() -> None:
    from megarl.config.errors import ConfigError

    config = load_config([*QWEN32B, "model.path=nobody/nothing"])
    with pytest.raises(ConfigError, match=r"model.path: 'nobody/nothing' found; no config.json"):
        find_models(config)


def test_a_gpu_has_the_processes_that_the_placement_gives_it() -> None:
    sizes = ("policy.parallel={num_processes: 4, tp: 4, cp: 1}", "critic.parallel={num_processes: 2, tp: 2, cp: 1}")
    job = ("algo=vapo", "model=qwen3_8b", "cluster=h100x8", *sizes, "rollout.num_servers=2")
    apart = plan(*job, "cluster.placement=apart")
    assert [gpus.gpus for gpus in apart.gpus] == [(0, 1, 2, 3), (4, 5), (6, 7)]
    shared = plan(*job, "cluster.placement=split")
    found = {gpus.gpus: list(gpus.stages) for gpus in shared.gpus}
    assert found == {(0, 1): ["policy", "critic"], (2, 3): ["policy"], (4, 5): []}
    assert [gpus.server is not None for gpus in shared.gpus] == [False, False, True]
    stages = ("policy.parallel={num_processes: 4, tp: 2, pp: 2}", "cluster.placement=colocated")
    (first, *_) = plan(*job, *stages).gpus
    assert (first.gpus, first.server is not None) == ((0, 1), True)


COLOCATED = ("algo=vapo", "model=qwen3_8b", "cluster=h200x8", *KEPT)


def test_those_who_share_a_gpu_add_up_in_every_phase() -> None:
    found = plan(*COLOCATED, "rollout.sglang.mem_fraction_static=0.5")
    (gpus,) = found.gpus
    assert list(gpus.stages) == ["policy", "critic"]
    assert gpus.server is not None
    (policy,), (critic,) = found.stages["policy"], found.stages["critic"]
    # Nothing is offloaded: torch's allocator keeps what the largest call took.
    held = 1.05 * (policy.peak + critic.peak) + 2 * 2.5 * GIB
    assert gpus.phases["generation"] == pytest.approx(held + found.server.total)
    offloaded = plan(*COLOCATED, "rollout.sglang.mem_fraction_static=0.5", "policy.offload=all", "critic.offload=all")
    waiting = 2 * 2.5 * GIB + offloaded.server.total
    assert offloaded.gpus[0].phases["generation"] == pytest.approx(waiting, rel=1e-6)
    # They take turns.
    assert offloaded.gpus[0].phases["update"] == pytest.approx(waiting + 1.05 * policy.peak, rel=1e-3)


def test_a_shared_gpu_that_is_too_full_gets_a_smaller_cache() -> None:
    overrides = (*COLOCATED, "policy.offload=all", "critic.offload=all")
    assert any("mem_fraction_static" in override for override in find(*overrides).overrides)


def test_what_a_later_change_makes_superfluous_is_left_out() -> None:
    """Fewer servers give the first round its GPUs; nodes for the second give them too."""
    overrides = (*FOUR_EACH, "cluster.placement=split", "rollout.transport=split")
    found = plan(*overrides)
    assert [problem.split()[0] for problem in found.problems] == ["cluster:", "GPU"]
    found_rounds = find(*overrides).overrides
    gpus = [text for text in found_rounds if text.startswith(("rollout.num_servers", "cluster.num_nodes"))]
    assert len(gpus) == 1


NODE = ("algo=vapo", "model=qwen3_8b", "cluster=h100x8")
SERVER = 4 * GIB
PROCESS = 2.5 * GIB
ON_ONE_NODE = ("qwen3_8b", "qwen2_5_7b", "llama3_8b", "qwen2_7b")
GPU = (
    "cluster.hardware={{gpu: X, memory_gib: {}, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s: 32,"
    " network_gb_s: 3, host_memory_gib: 64}}"
)


@pytest.mark.parametrize("algo", ALGOS)
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


@pytest.mark.parametrize("algo", ALGOS)
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


SAVED = ("model=qwen3_0_6b", "cluster=h100x8", "rollout.file=r.jsonl", "algo.mismatch.correction=tis")


def test_nothing_is_generated_or_sent() -> None:
    roles = ("policy.parallel.num_processes=4", "critic.parallel.num_processes=4")
    job = ("algo=ppo", *SAVED, *roles)
    found = plan(*job)
    assert found.problems == ()
    assert found.server is None
    assert (found.seconds.generation, found.seconds.sync, found.transfer.total) == (0.0, 0.0, 0)
    assert found.num_gpus == 8
    assert found.places["servers"] == ()
    texts = [str(table.title) if hasattr(table, "title") else table for table in list_tables(load_config(job), found)]
    assert not any("server:" in text for text in texts)
