"""tools/plan.py from the command line, and the check at the start of every job."""

import subprocess
import sys
from pathlib import Path

import pytest
from plan_jobs import PRESET, QWEN32B

from megarl.config.load import load_config
from megarl.plan.command import main
from megarl.plan.job import PlannedModels, find_models
from megarl.plan.search import check_plan

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "plan.py"
TINY = ("algo=vapo", "model=tiny", "rollout.kv_cache_tokens=32768")


@pytest.fixture(scope="module")
def models() -> PlannedModels:
    return find_models(load_config(TINY))


def test_a_job_that_fits_ends_with_0_and_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QWEN32B) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("fits: 64 GPUs; on Slurm with sbatch --signal=B:USR1@4900")
    for text in (
        "4,096,062,464",
        "524.3 GB in all",
        "Host memory",
        "MFU 0.33 of the policy",
        "890,473",
        "tp 8 cp 2 sp",
        "update",
    ):
        assert text in out
    assert "Value pretraining: up to 50 steps of 6,652.7 s" in out
    assert "sbatch --signal=B:USR1@4900 suffices" in " ".join(out.split())
    assert "FP8" not in out
    assert "Experts" not in out


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            ("model=qwen32b", "cluster=h100x256"),
            (
                "fits, but: 64 of 256 GPUs; the others are idle",
                "192 of 256 GPUs are idle: with policy.parallel.num_processes=256",
                "cluster.num_nodes=8 is enough for it as it is",
            ),
        ),
        (("model=qwen32b", "cluster=h100x64", "policy.fp8=hybrid"), ("FP8 copies", "weight and its transpose")),
        (("model=qwen3_235b_a22b", "cluster=h100x256"), ("Experts: the routes are balanced", "fits: 256 GPUs")),
        (("model=qwen32b", "cluster=h100x64", "rollout.transport=disk"), ("a file system of 5 GB/s a node",)),
    ],
)
def test_what_is_taken_as_given_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    assert main(["algo=vapo", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(text in out for text in texts)


def test_a_placement_that_contradicts_its_transport_and_does_not_fit_either_gets_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = ("policy.offload=null", "critic.offload=null", "rollout.offload=null", "rollout.transport=split")
    sizes = [f"{role}.parallel={{num_processes: 4, tp: 2, sp: true, cp: 1}}" for role in ("policy", "critic")]
    assert main(["algo=vapo", "model=qwen3_8b", "cluster=h100x8", *kept, *sizes]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: rollout.transport: found split with cluster.placement=colocated")
    assert second.startswith("error: cluster.placement: found colocated, in which the job does not fit either")
    assert (
        "cluster.placement=apart cluster.num_nodes=2 cluster.listen_host=auto  (then it fits, with 16 GPUs)" in second
    )


def test_one_that_does_not_fit_ends_with_1_and_the_nearest_change() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), *QWEN32B, "policy.recompute=none"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "does not fit:\n  GPU 0 (policy stage 0): update takes" in done.stdout
    assert "nearest change: policy.recompute=full" in done.stdout.splitlines()[-1]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algo=vapo", "model=qwen32b", "cluster=h100x65"), "cluster: found 'h100x65'; the choices are"),
        (("algo=vapo", "model=qwen32b", "cluster=laptop"), "cluster.hardware.gpu: found null"),
        ((*PRESET, "cluster.gpus_per_node=0"), "cluster.gpus_per_node: found 0"),
        ((*QWEN32B, "policy.paralel.tp=3"), "policy.paralel.tp: no such key; did you mean policy.parallel.tp?"),
        ((*QWEN32B, "rollout.tp=3"), "rollout.tp: found 3"),
        ((*QWEN32B, "rollout.router_replay=true"), "rollout.router_replay: found true, but the model has no experts"),
        ((*QWEN32B, "model.path=nobody/nothing"), "model.path: 'nobody/nothing' found"),
        ((*QWEN32B, "cluster.hardware.hbm_gb_s=0"), "cluster.hardware.hbm_gb_s: found 0.0; it must be above 0"),
        (
            ("qwen32b",),
            "qwen32b: found without a value; each argument must be key=value, or group=option",
        ),
        (
            (*PRESET, "train.num_iterations=0", "algo.value_pretrain.rollouts=r.jsonl"),
            "train.num_iterations: 0 found with algo.value_pretrain.rollouts; a plan is of policy and servers",
        ),
        (("--gpus",), "--gpus: no such option; usage:"),
        ((*PRESET, "--mean-response=none"), "--mean-response: found 'none'; it must be a number of tokens, 1 or more"),
    ],
)
def test_a_wrong_configuration_ends_with_2_and_names_the_key(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_mean_length_of_responses_changes_seconds_and_not_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PRESET) == 0
    half = capsys.readouterr().out
    assert main([*PRESET, "--mean-response", "4000"]) == 0
    out = capsys.readouterr().out
    assert "8,192 responses of 4,000 tokens on average" in out
    before, after = (text.partition("An iteration")[0] for text in (half, out))
    assert before == after


def test_a_search_prints_lines_to_paste_on_policy_and_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("policy.parallel.cp=1", "policy.parallel.tp=2", "rollout.tp=1", "cluster.placement=split")
    assert main(["--search", "algo=dapo", "model=qwen3_8b", *fixed]) == 0
    on_policy, ahead = capsys.readouterr().out.split("The fastest with rollout.max_staleness=1")
    assert on_policy.startswith("\nThe fastest plans, on-policy\n  1. ")
    assert "rollout.max_staleness" not in on_policy
    assert "     rollout.max_staleness=1 algo.mismatch.correction=tis policy.parallel" in ahead


def test_rolls_names_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN32B, "rollout_batch_size=256"]) == 0
    out = capsys.readouterr().out
    assert "rollout_batch_size=256 -> train.prompts_per_iteration=256" in out
    assert "256 prompts x 16 responses" in out


def test_the_start_of_a_job_on_unknown_hardware_has_nothing_against_it(models: PlannedModels) -> None:
    assert check_plan(load_config(TINY), models) == []


def test_the_start_of_a_job_on_a_cluster_says_what_does_not_fit(models: PlannedModels) -> None:
    fits = [*TINY, "cluster=h100x8"]
    assert check_plan(load_config(fits), models) == []
    *problems, advice = check_plan(load_config([*fits, "cluster.hardware.memory_gib=2.4"]), models)
    assert any("GPU 0 (policy stage 0)" in problem for problem in problems)
    assert advice.startswith("cluster.hardware: the job does not fit H100 SXM5 80 GB")
    many = check_plan(load_config([*fits, "rollout.num_servers=7"]), models)
    assert "the job asks for 9 GPUs (policy 1, critic 1, servers 7 x 1" in many[0]
    assert "it fits with rollout.num_servers=6;" in many[-1]
