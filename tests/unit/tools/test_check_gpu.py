"""tools/check_gpu.py: its verdicts, checks that crash or are late, planted faults that it finds, also with real workers
and processes, peaks of memory, and the whole of it on a CPU.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tool_loading import load_tool

from megarl.cluster.actors import Sharer, WorkerGroup
from megarl.cluster.opened import Cluster
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import list_groups, place
from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import HardwareConfig
from megarl.models.families import parse_architecture
from megarl.plan.job import PlannedModels, build_jobs, count_job
from megarl.plan.memory import estimate_stages
from megarl.tools.gpu import ranks, runs, serving, sizes, training
from megarl.tools.gpu.lines import Verdict, conclude, fail, judge, skip
from megarl.tools.gpu.machine import Machine
from megarl.tools.gpu.measured import measuring_peaks
from megarl.tools.gpu.setting import CPU, CUDA, SMALL, Setting, describe_random, list_tensors

tool = load_tool("check_gpu.py")
NAN = float("nan")
HOPPER = Machine("NVIDIA H100 80GB HBM3", (9, 0), "580.0", "13.0", "3.12.3", {"torch": "2.11.0"}, {})


def run_code(code: str, tmp_path: Path, deadline_s: float = 30.0) -> Any:
    check = tool.Check("checked", "training", deadline_s)
    setting = Setting(CPU, (), tmp_path)
    return tool.run_check(check, setting, [sys.executable, "-c", code, str(tmp_path / "checked.jsonl")], os.environ)


@pytest.mark.parametrize(
    ("value", "least", "most", "verdict"),
    [
        (0.1, None, 0.1, Verdict.holds),
        (0.11, None, 0.1, Verdict.fails),
        (0.5, 0.75, 1.1, Verdict.fails),
        (NAN, None, 0.1, Verdict.fails),
        (float("inf"), 0.2, None, Verdict.fails),
    ],
)
def test_a_value_holds_within_its_bounds_and_one_that_is_no_number_fails(
    value: float, least: float | None, most: float | None, verdict: Verdict
) -> None:
    assert judge("a", "b", value, least=least, most=most).verdict is verdict


def test_the_exit_code_is_0_only_where_something_holds_and_nothing_fails() -> None:
    holds, fails, skipped = judge("a", "x", 0, most=1), fail("b", "y", "why"), skip("c", "z", "needs a GPU")
    assert conclude([holds, skipped]) == ("nothing fails (1 holds, 0 fails, 1 skipped)", 0)
    assert conclude([holds, fails, skipped]) == ("FAILS (1 holds, 1 fails, 1 skipped): b", 1)
    assert conclude([skipped])[1] == 1
    assert conclude([])[1] == 1


def test_a_check_that_crashes_is_a_failing_line_after_those_that_it_found(tmp_path: Path) -> None:
    line = json.dumps(asdict(judge("checked", "first", 0, most=1)))
    code = f"import sys, os; open(sys.argv[1], 'w').write({line + chr(10)!r}); print('nearly'); sys.stdout.flush();"
    outcome = run_code(code + "os.abort()", tmp_path)
    assert [found.verdict for found in outcome.lines] == [Verdict.holds, Verdict.fails]
    assert outcome.lines[1].reason == "ended by signal SIGABRT: nearly"
    assert "nearly" in outcome.log


def test_a_late_check_is_killed_with_its_processes(tmp_path: Path) -> None:
    child = "import pathlib, os, time; pathlib.Path({!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child.format(str(tmp_path / 'pid'))!r}])"
    outcome = run_code(code, tmp_path, deadline_s=3.0)
    assert [line.reason for line in outcome.lines] == ["not ended within 3 s; killed"]
    if (tmp_path / "pid").exists():  # It was started in time.
        wait_for_end(int((tmp_path / "pid").read_text()))


def wait_for_end(pid: int) -> None:
    """Raises AssertionError where the process lives on."""
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives on")


def test_what_cannot_run_is_skipped_with_its_reason() -> None:
    reason = tool.explain_no_fp8
    assert reason(HOPPER, CUDA) is None
    assert reason(HOPPER, CPU) == "needs a GPU"
    assert reason(replace(HOPPER, capability=(8, 0)), CUDA).startswith("GPU without FP8: compute capability 8.0")
    missing = {"transformer_engine": "Transformer Engine is not installed", "sglang": "SGLang is not installed"}
    without = replace(HOPPER, problems=missing)
    assert reason(without, CUDA) == "Transformer Engine is not installed"
    chosen = tool.choose("servers,fp8")
    outcomes = list(tool.run_all(chosen, without, Setting(CUDA, (), Path("/nowhere")), {}))
    assert [outcome.lines[0].verdict for _, outcome in outcomes] == [Verdict.skipped] * 2
    assert outcomes[0][1].lines[0].reason == "SGLang is not installed"


@pytest.mark.parametrize(
    ("device", "overrides", "message"),
    [
        (CPU, ["policy.dtypo=float32"], "policy.dtypo: no such key"),
        (CPU, ["rollout.response_length=900"], "rollout.response_length: found 900"),
        (CUDA, ["model.path=nobody/knows"], "model.path: 'nobody/knows' found"),
    ],
)
def test_a_wrong_override_is_refused_by_its_key(
    device: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = Setting(device, tuple(overrides), tmp_path).config


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "glm4", "qwen3_moe"])
def test_the_written_tensors_are_those_of_transformers(family: str) -> None:
    import transformers

    fields = describe_random(replace(SMALL, family=family), 128)
    arch = parse_architecture(fields, Path("model"))
    config = transformers.AutoConfig.for_model(**{key: x for key, x in fields.items() if key != "architectures"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    number = sum(param.numel() for param in model.parameters())
    assert sum(torch.Size(shape).numel() for _, shape in list_tensors(arch)) == number


def test_memory_beyond_the_plan_or_far_below_it_fails(tmp_path: Path) -> None:
    setting = Setting(CPU, (), tmp_path)
    arch = parse_architecture(setting.large, Path("model"))
    job = build_jobs(setting.config, PlannedModels(arch, arch, arch), on_gpu=False)["policy"]
    (stage,) = estimate_stages(job, count_job(setting.config, job))
    planned = {phase: getattr(stage, phase) for phase in ("building", "update", "resident", "forward")}
    planned["saving"] = sizes.plan_saving(job, stage)
    assert {line.verdict for line in sizes.compare_memory("a", planned, stage, planned["saving"])} == {Verdict.holds}
    for share in (0.7, 1.2):
        wrong = {**planned, "update": int(share * planned["update"])}
        verdicts = [line.verdict for line in sizes.compare_memory("a", wrong, stage, planned["saving"])]
        assert verdicts == [Verdict.holds, Verdict.fails, *[Verdict.holds] * 3]
    del planned["saving"]
    *_, last = sizes.compare_memory("a", planned, stage, 1)
    assert (last.verdict, last.reason.split(" of")[0]) == (Verdict.skipped, "no room for a state")
    assert sizes.plan_saving(replace(job, on_gpu=True), stage) == stage.checkpoint


def test_a_perturbed_gradient_and_log_probs_of_another_model_fail() -> None:
    role = {"before": torch.zeros(2, 3), "after": torch.ones(2, 3), "gradient": {"w": torch.ones(8)}, "computes": ""}
    wrong = {"policy": {**role, "gradient": {"w": torch.ones(8) * 1.01}}}
    found = list(training.compare_results("float32", wrong, {"policy": role}))
    assert [line.verdict for line in found] == [Verdict.holds, Verdict.fails, Verdict.holds]
    lost = {"policy": {**role, "gradient": {}}}
    assert list(training.compare_results("float32", lost, {"policy": role}))[1].verdict is Verdict.fails

    own = torch.full((2, 3), -2.0)
    for other, verdict in ((own, Verdict.holds), (own + 0.01, Verdict.fails)):
        assert {line.verdict for line in serving.compare("greedy", other, own, Dtype.float32)} == {verdict}


MB = 10**6


def allocate(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * MB, dtype=torch.uint8)


def test_each_phase_has_the_most_that_was_held_in_it_and_what_earlier_phases_left() -> None:
    outside = allocate(50)
    with measuring_peaks() as meter:
        with meter.phase("first"):
            kept = allocate(10)
            passing = allocate(30)
            del passing
        with meter.phase("idle"):
            pass
        with meter.phase("last"):
            more = allocate(5)
    assert meter.peaks == {"first": 40 * MB, "idle": 10 * MB, "last": 15 * MB}
    assert len(outside) + len(kept) + len(more) == 65 * MB


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long
def test_each_fault_of_the_processes_is_found_by_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes of Ray: one that is shown another GPU, rows that reach the wrong rank, an older state."""
    setting, stock = Setting(CPU, (), tmp_path), Cluster.options

    def show_another(self: Cluster, slot: Any, variables: Any = None) -> dict[str, Any]:
        return stock(self, slot, {**(variables or {}), "CUDA_VISIBLE_DEVICES": "7"})

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "options", show_another)
        failed = list(ranks.check_ranks(setting))
    assert {(line.what, line.verdict) for line in failed} == {(w, Verdict.fails) for w in ("together", "apart")}
    assert "was to be started with CUDA_VISIBLE_DEVICES=0 has 7" in failed[0].reason

    with monkeypatch.context() as patch:
        patch.setattr(Sharer, "find_share", lambda self, rank: 0)
        patch.setattr(ranks, "DENSE", {"dp": {}, "pp": {"pp": 2}})
        patch.setattr(ranks, "EXPERTS", {})
        wrong, *held = ranks.check_layouts(setting)
    assert (wrong.what, wrong.verdict) == ("dp", Verdict.fails)
    assert "was not sent to this rank" in wrong.reason
    assert {line.verdict for line in held} == {Verdict.holds}

    finish = WorkerGroup.finish_save

    def lose(self: WorkerGroup) -> Any:
        pending = finish(self)
        pending.result()
        for directory in tmp_path.glob("checkpoint-state-1"):
            shutil.rmtree(directory)
            shutil.copytree(tmp_path / "checkpoint-state-0", directory)
        return pending

    monkeypatch.setattr(WorkerGroup, "finish_save", lose)
    found = list(ranks.check_checkpoint(setting))
    fails = {line.what for line in found if line.verdict is Verdict.fails}
    assert fails == {line.what for line in found if line.what.startswith("saved after a step")}
    assert len(found) == 2 * len(fails)


SYNC = {"sync/bytes": 2.0**30, "sync/seconds_move": 1.0, "sync/bytes_over_bound": 1.0, "sync/probe_logprob_gap": 0.01}


@pytest.mark.parametrize(
    ("changed", "error", "fails"),
    [
        ({}, "", []),
        ({"sync/bytes_over_bound": 1.5}, "", ["colocated: bytes"]),
        ({"sync/probe_logprob_gap": 3.0}, "", ["colocated: log-probs of a server"]),
        ({}, "ended with status 1: error: SGLang server", ["colocated"]),
    ],
)
def test_a_sync_of_too_many_bytes_or_other_weights_or_none_fails(changed: dict, error: str, fails: list[str]) -> None:
    known, unknown = HardwareConfig(gpu="H100", nvlink_gb_s=450.0), HardwareConfig()
    found = list(runs.judge_sync("colocated", [{**SYNC, **changed}], error, known, 2))
    assert [line.what for line in found if line.verdict is Verdict.fails] == fails
    assert [line.verdict for line in runs.judge_sync("disk", [], "", unknown, 2)] == [Verdict.fails]
    assert error or found[0].reason.endswith("; 0.537 GB/s of each GPU, planned 360")
    assert next(runs.judge_sync("split", [SYNC], "", unknown, 2)).reason.endswith("; 0.537 GB/s of each GPU")


def test_a_reward_that_does_not_rise_and_memory_that_stays_with_a_server_fail() -> None:
    def run(*rewards: float) -> list[Verdict]:
        lines = [{"reward/mean": reward, "perf/time_per_step": 1.0, "time/update": 0.5} for reward in rewards]
        return [line.verdict for line in runs.judge_run(lines, "")]

    assert run(0.1, 0.2, 0.3, 0.4, 0.5) == [Verdict.holds, Verdict.skipped]
    assert run(0.1, 0.9, 0.1, 0.1, 0.1)[0] is Verdict.fails
    assert next(runs.judge_run([], "ended with status 1")).verdict is Verdict.fails
    free = {"before": 70, "started": 30, "released": 65, "taken again": 30}
    assert [line.verdict for line in serving.judge_release(free)] == [Verdict.holds] * 2
    kept, _ = serving.judge_release({**free, "released": 30, "taken again": 30})
    assert kept.verdict is Verdict.fails
    _, lost = serving.judge_release({**free, "taken again": 60})
    assert lost.verdict is Verdict.fails
    assert next(serving.judge_release({})).verdict is Verdict.skipped


@pytest.mark.parametrize("number", [1, 2, 8])
def test_the_runs_on_gpus_are_configured_as_they_may_be(number: int) -> None:
    ways = runs.list_ways(CUDA, number)
    assert ("split" in ways) == (number > 1)
    for way, own in ways.items():
        config = load_config([*runs.list_sizes(CUDA, number), f"rollout.transport={way}", *own])
        assert config.model.random.num_layers == 28
        slots = place(config.cluster, list_groups(config))
        used = {gpu for taken in slots.values() for slot in taken for gpu in slot.gpus}
        assert used == set(range(number))


def test_the_checks_end_in_time_and_what_has_none_left_is_skipped(tmp_path: Path, monkeypatch) -> None:
    given: list[float] = []

    def run_check(check: Any, *others: Any) -> Any:
        given.append(check.deadline_s)
        return tool.Outcome((), 0.0)

    monkeypatch.setattr(tool, "run_check", run_check)
    clock = iter([0.0, 0.0, 700.0, 850.0, 2390.0])
    monkeypatch.setattr(tool.time, "monotonic", lambda: next(clock))
    one = replace(HOPPER, num_gpus=1)
    found = list(tool.run_all(tool.choose("ranks,servers,run"), one, Setting(CUDA, (), tmp_path), {}))
    assert given == [300.0, 200.0]
    assert found[-1][1].lines[0].reason == "no time left of 15 minutes; --only run"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.long
def test_the_whole_tool_runs_on_a_cpu_and_bundles_its_logs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "megarl.cli", "check-gpu", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    verdicts: dict[str, set[str]] = {}
    for line in found["lines"]:
        verdicts.setdefault(line["check"], set()).add(line["verdict"])
    assert list(verdicts) == [check.name for check in tool.CHECKS]
    assert verdicts.pop("fp8") == {"skipped"}
    assert all("holds" in each and "fails" not in each for each in verdicts.values())
    assert found["machine"]["versions"]["megatron-core"] == "0.16.1"
    assert "nothing fails" in done.stdout
    assert "says nothing of a GPU" in done.stdout
    with tarfile.open(tmp_path / "found.tar.gz") as bundle:
        names = set(bundle.getnames())
    assert {"found.json", "server.log", "run/metrics.jsonl", "run/logs/policy-0.log", "ranks.jsonl"} <= names
