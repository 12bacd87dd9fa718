"""tools/plan.py from the command line, the check at the start of every job, and the search for the fastest plan."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from plan_jobs import PRESET, QWEN32B, plan

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.roles import Recompute
from megarl.config.schema.root import Placement
from megarl.plan.command import main
from megarl.plan.job import NUM_BEST, Change, check_plan, find_models, search
from megarl.plan.memory import GIB
from megarl.plan.tables import list_found
from megarl.run.command import load_complete

ROOT = Path(__file__).resolve().parents[3]
TINY = ("algo=vapo", "model=tiny", "rollout.kv_cache_tokens=32768")
SEARCHED = ("policy.parallel.cp=1", "policy.parallel.tp=2", "rollout.tp=1", "cluster.placement=split")
PRETRAINING_ALONE = ("train.num_iterations=0", "algo.value_pretrain.rollouts=r.jsonl")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            QWEN32B,
            (
                *("fits: 64 GPUs; on Slurm with sbatch --signal=B:USR1@4900", "4,096,062,464", "524.3 GB in all"),
                *("Host memory", "MFU 0.33 of the policy", "890,473", "tp 8 cp 2 sp"),
                *("Value pretraining: up to 50 steps of 6,652.7 s", "USR1@4900 (an update takes 3,"),
            ),
        ),
        (
            ("algo=vapo", "model=qwen32b", "cluster=h100x256"),
            ("fits, but: 64 of 256 GPUs", "192 of 256 GPUs are idle", "cluster.num_nodes=8 is enough for it as it is"),
        ),
        ((*PRESET, "policy.fp8=hybrid"), ("FP8 copies", "weight and its transpose")),
        (
            ("algo=vapo", "model=qwen3_235b_a22b", "cluster=h100x256"),
            ("Experts: the routes are balanced", "fits: 256 GPUs"),
        ),
        ((*PRESET, "rollout.transport=disk"), ("a file system of 5 GB/s a node",)),
        # A name of ROLL's.
        ((*PRESET, "rollout_batch_size=512"), ("-> train.prompts_per_iteration=512", "512 prompts x 16 responses")),
        (
            (*PRESET, "--hours=12"),
            (
                "Total: up to 176.0 hours on 64 GPUs, 11,267 GPU-hours (value pretraining up to 26.6, 200 iter",
                "Disk: 844 GiB a checkpoint, 2,533 for 3: those that are kept, and one while it is written",
                "In Slurm jobs of 12 hours: up to 15 requeues; each trains until 3,000 s before its end fits: 64 GPUs;",
            ),
        ),
        (
            ("algo=grpo", "model=qwen3_8b", "--hours=200"),
            (
                "Total: 84.0 hours on 8 GPUs, 672 GPU-hours (200 iterations 84.0)",
                "hours: no requeue; each trains until 600 s",
            ),
        ),
        (("algo=sao", "model=qwen3_8b", "--hours=24"), ("Total: up to 11.4 hours", "of 24 hours: no requeue;")),
        (
            (*PRESET, "checkpoint.save_every=1", "checkpoint.keep_last=1", "algo.value_pretrain.patience=null"),
            ("Total: 176.0 hours", "(value pretraining 26.6, 200", "1,689 for 2: those"),
        ),
        ((*PRESET, "--mean-response", "4000"), ("8,192 responses of 4,000 tokens on average",)),
        (
            ("--search", "algo=dapo", "model=qwen3_8b", *SEARCHED),
            ("The fastest plans, on-policy 1. ", "rollout.max_staleness=1 algo.mismatch.correction=tis"),
        ),
    ],
)
def test_a_job_that_fits_ends_with_0_and_what_is_planned_and_taken_as_given(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    assert main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [text for text in texts if text not in out] == []


def test_one_that_does_not_fit_ends_with_1_and_the_nearest_change() -> None:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), *QWEN32B, "policy.recompute=none"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "does not fit:\n  GPU 0 (policy stage 0): update takes" in done.stdout
    assert "nearest change: policy.recompute=full" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algo=vapo", "model=qwen32b", "cluster=h100x65"), "cluster: found 'h100x65'; the choices are"),
        (("algo=vapo", "model=qwen32b", "cluster=laptop"), "cluster.hardware.gpu: found null"),
        ((*PRESET, "cluster.gpus_per_node=0"), "cluster.gpus_per_node: found 0"),
        ((*QWEN32B, "policy.paralel.tp=3"), "policy.paralel.tp: no such key; did you mean policy.parallel.tp?"),
        ((*QWEN32B, "rollout.tp=3"), "rollout.tp: found 3"),
        (
            ("algo=grpo", "model=qwen3_235b_a22b", "policy.parallel.pp=1"),
            "policy.parallel.pp: found stages of 11 layers",
        ),
        ((*QWEN32B, "rollout.router_replay=true"), "rollout.router_replay: found true, but the model has no experts"),
        ((*QWEN32B, "model.path=nobody/nothing"), "model.path: 'nobody/nothing' found; no config.json"),
        (("qwen32b",), "qwen32b: found without a value; each argument must be key=value, or group=option"),
        (
            (*PRESET, *PRETRAINING_ALONE),
            "train.num_iterations: 0 found with algo.value_pretrain.rollouts; a plan is of",
        ),
        (("--gpus",), "--gpus: no such option; usage:"),
        ((*PRESET, "--hours=1"), "--hours: found 1; with 1.7 half of it is left to train: the signal comes 3,000 s"),
        ((*PRESET, "--hours=nan"), "--hours: found nan; with 1.7"),
        ((*PRESET, "--mean-response=0"), "--mean-response: found 0; it must be 1 token or more"),
    ],
)
def test_a_wrong_configuration_ends_with_2_and_names_the_key(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "first", "advice"),
    [
        ((), None, None),
        (("cluster=h100x8",), None, None),
        (("cluster=h100x8", "cluster.hardware.memory_gib=2.4"), "GPU 0 (policy stage 0", "none of the changes"),
        (
            ("cluster=h100x8", "rollout.num_servers=7"),
            *("cluster: policy 1 + critic 1 + servers 7 GPUs", "it fits with rollout.num_servers=6;"),
        ),
    ],
)
def test_the_start_of_a_job_says_what_does_not_fit_where_the_hardware_is_known(
    overrides: tuple[str, ...], first: str | None, advice: str | None
) -> None:
    config = load_config([*TINY, *overrides])
    problems = check_plan(config, find_models(config))
    if first is None:
        assert problems == []
    else:
        assert any(problem.startswith(first) for problem in problems)
        assert advice in problems[-1]


NODE = ("algo=vapo", "model=qwen2_5_7b", "cluster=h100x8")
FIXED = ("policy.parallel.tp=2", "rollout.tp=1")


def find(arguments: Sequence[str], staleness: int = 0) -> list[Change]:
    return search(arguments, find_models(load_config(arguments)), None, staleness)


def test_the_fastest_plan_comes_first_and_each_line_makes_a_job_that_fits_in_the_seconds_that_it_shows() -> None:
    found = find(NODE)
    assert 1 < len(found) <= NUM_BEST
    seconds = [each.plan.seconds.iteration for each in found]
    assert seconds == sorted(seconds)
    assert seconds[0] <= plan(*NODE).seconds.iteration
    assert len({frozenset(each.overrides) for each in found}) == len(found)
    lines = [line.strip() for line in list_found("title", found) if line.startswith("     ")]
    for each, line in zip(found, lines, strict=True):
        pasted = plan(*NODE, *(word for word in line.split() if "=" in word))
        assert not pasted.problems
        assert pasted.seconds == each.plan.seconds
        assert each.plan.left >= 4 * GIB


def test_keys_of_the_command_line_keep_their_values() -> None:
    fixed = ("cluster.placement=split", *FIXED)
    for each in find([*NODE, *fixed]):
        assert not {text.split("=")[0] for text in each.overrides} & {text.split("=")[0] for text in fixed}
        config = load_config([*NODE, *fixed, *each.overrides])
        assert (config.cluster.placement, config.policy.parallel.tp, config.rollout.tp) == (Placement.split, 2, 1)


def test_responses_generated_ahead_need_servers_of_their_own_and_a_loss_for_older_samples() -> None:
    found = find([*NODE, *FIXED], staleness=1)
    assert found
    for each in found:
        assert {"rollout.max_staleness=1", "algo.mismatch.correction=tis"} <= set(each.overrides)
        assert load_config([*NODE, *FIXED, *each.overrides]).cluster.placement is not Placement.colocated
        parts = each.plan.seconds
        assert parts.iteration == pytest.approx(max(parts.generation, parts.training) + parts.sync)


def test_where_nothing_fits_nothing_is_found() -> None:
    assert find([*NODE, *FIXED, "cluster.hardware.memory_gib=20"]) == []


ANY = ("algo=vapo", "model=checkpoint", "model.path=Qwen/Qwen3-1.7B", "data.path=train.jsonl", "data.num_heldout=8")
OWN = ("rollout.response_length=4096", "rollout.tp=1", "train.num_iterations=500", "rollout.sync_deadline_s=77")


@pytest.mark.parametrize(
    ("cluster", "num_gpus"),
    [
        (("cluster=h100x8", "cluster.gpus_per_node=1"), 1),
        (("cluster=h100x8",), 8),
        pytest.param(("cluster=h100x16",), 16, marks=pytest.mark.slow),
        pytest.param(("cluster=h100x64",), 64, marks=pytest.mark.slow),
    ],
)
def test_any_checkpoint_trains_by_the_fastest_plan_of_its_cluster(cluster: Sequence[str], num_gpus: int) -> None:
    given = [*ANY, *OWN, *cluster]
    completed = load_complete(given)
    found = plan(*completed.overrides)
    assert found.num_gpus == num_gpus
    assert not found.problems
    assert num_gpus > 1 or found.seconds == find(given)[0].plan.seconds
    assert completed.overrides[: len(given)] == given
    typed, added = ([text.partition("=")[0] for text in each] for each in (given, completed.overrides[len(given) :]))
    assert not set(typed) & set(added)
    assert len(completed.lines) == 1
    assert all(each in completed.lines[0] for each in completed.overrides[len(given) : -1])
    config, seconds = completed.config, found.seconds
    assert config.rollout.request_deadline_s >= 2 * seconds.generation
    assert config.cluster.call_deadline_s >= 2 * max(seconds.scoring, seconds.update)
    assert config.checkpoint.save_every is not None
    assert config.checkpoint.save_every * seconds.iteration <= 4500
    # A run that is resumed has the overrides of its start.
    again = load_complete(completed.overrides)
    assert (again.overrides, again.config) == (completed.overrides, config)


def test_a_checkpoint_that_fits_no_plan_is_refused_and_one_on_an_unknown_gpu_keeps_its_keys() -> None:
    small = [*ANY, "cluster=h100x8", "cluster.gpus_per_node=1", "cluster.hardware.memory_gib=20"]
    with pytest.raises(ConfigError, match=r"model.plan: no plan that was tried fits 1 H100.*a larger cluster"):
        load_complete(small)
    assert load_complete([*small, "model.plan=none"]).overrides == [*small, "model.plan=none"]
    assert load_complete([*ANY, "cluster=gpu"]).overrides == [*ANY, "cluster=gpu"]


def test_what_an_experiment_sets_is_not_planned(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\npolicy: {recompute: full}\n")
    cluster = ("cluster=h100x8", "cluster.gpus_per_node=1")
    completed = load_complete([f"hydra.searchpath=[file://{tmp_path}]", *ANY, "experiment=mine", *cluster])
    assert completed.config.policy.recompute is Recompute.full
    assert not [text for text in completed.overrides if text.startswith("policy.recompute=")]
