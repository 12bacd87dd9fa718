"""docs/parallelism.md and docs/slurm.md: their tables of plans are what the planner says of the presets. The presets'
saves, and the signals and hours of the Slurm jobs that texts show, are such as their plans ask for. The jobs of
docs/ray-clusters compose, are planned to fit, and get the nodes and folders they ask for; that their files are what the
schemas of KubeRay 1.7.0 (ray-operator/config/crd/bases/ray.io_rayjobs.yaml, unknown fields refused) and SkyPilot 0.14.1
(sky.Task.from_yaml) allow is checked by hand.
"""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tool_loading import load_tool

from megarl.config.load import check_overrides, load_config
from megarl.config.placement import check_cluster
from megarl.config.schema.root import Config
from megarl.plan.job import LONGEST_UNSAVED_S, build_plan, find_models
from megarl.plan.memory import GIB
from megarl.plan.tables import SIGNAL_S, describe_losses, describe_total, find_costs, find_signal

ROOT = Path(__file__).resolve().parents[2]
PARALLELISM = ROOT / "docs" / "parallelism.md"
ALGOS = ("vapo", "dapo", "grpo")
SPLIT = (
    "cluster=h100x16 cluster.placement=split rollout.transport=split rollout.max_staleness=1"
    " algo.mismatch.correction=tis"
)
MODELS = ("qwen32b", "qwen3_235b_a22b", "qwen3_8b")
OTHERS = ("qwen2_5_7b", "llama3_8b")
PLANS = [
    *((f"`algo={algo} model={model}`", f"algo={algo} model={model}") for model in MODELS for algo in ALGOS),
    *((f"`algo=vapo model={model}`", f"algo=vapo model={model}") for model in OTHERS),
    ("`algo=vapo model=qwen3_8b cluster=h200x8`", "algo=vapo model=qwen3_8b cluster=h200x8"),
    ("`algo=vapo model=qwen3_8b`, SPLIT", f"algo=vapo model=qwen3_8b {SPLIT}"),
]
"""What the row says, and the arguments"""


COSTS = (("GPU memory", "generation"), ("starts and waits", "generation"), ("matrix products", "update"))


def describe(label: str, arguments: str) -> str:
    """The row of a table: the label, GPUs, seconds of an iteration, hours and GPU-hours of the run with value
    pretraining, GiB left on the fullest GPU, the shares of COSTS in an iteration.
    """
    config = load_config(arguments.split())
    plan = build_plan(config, find_models(config))
    assert not plan.problems, (arguments, plan.problems)
    (total,) = re.findall(
        r"Total: (?:up to )?([\d.,]+) hours on .*?, ([\d,]+) GPU-hours", next(describe_total(config, plan))
    )
    left = config.cluster.hardware.memory_gib - max(max(gpus.phases.values()) for gpus in plan.gpus) / GIB
    hours = f"{float(total[0].replace(',', '')):,.0f}"
    numbers = (f"{plan.num_gpus}", f"{plan.seconds.iteration:,.0f}", hours, total[1], f"{left:.1f}")
    costs = find_costs(config, plan)
    numbers += tuple(f"{costs[each]:.0%}" for each in COSTS)
    return f"| {label} | {' | '.join(numbers)} |"


@pytest.mark.parametrize(("label", "arguments"), PLANS)
def test_the_docs_have_the_plan_of_every_preset(label: str, arguments: str) -> None:
    assert describe(label, arguments) in PARALLELISM.read_text().splitlines(), describe(label, arguments)


LADDER = [("none", 16384, {}), ("none", 9216, {}), ("selective", 9216, {}), ("full", 9216, {})]
LADDER += [("full", 9216, sizes) for sizes in ({"pp": 2}, {"tp": 4}, {"tp": 8})]
LADDER += [(recompute, 8704, {}) for recompute in ("none", "selective", "full")]
"""Recomputation, tokens of a micro-batch (8704: of qwen32b), and what differs from the preset's layout"""


def describe_step(recompute: str, tokens: int, sizes: dict[str, int]) -> str:
    """The numbers of a row of the ladder: GiB of a GPU in the update, seconds of an iteration."""
    keys = [f"recompute={recompute}", *(f"parallel.{axis}={size}" for axis, size in sizes.items())]
    words = [f"{role}.{key}" for role in ("policy", "critic") for key in keys]
    words += ["model.megatron.recompute_modules=[mlp]"] * (recompute == "selective")
    model = "model=qwen32b" if tokens == 8704 else "model=qwen3_8b"
    config = load_config(["algo=vapo", model, f"train.tokens_per_microbatch={tokens}", *words])
    plan = build_plan(config, find_models(config))
    most = max(gpus.phases["update"] for gpus in plan.gpus) / GIB
    return f" | {most:.1f} | {plan.seconds.iteration:,.0f} |"


@pytest.mark.parametrize(("recompute", "tokens", "sizes"), LADDER)
def test_the_ladder_of_memory_is_planned(recompute: str, tokens: int, sizes: dict[str, int]) -> None:
    numbers = describe_step(recompute, tokens, sizes)
    assert numbers in PARALLELISM.read_text(), numbers


@pytest.mark.parametrize(
    "arguments", [f"algo={algo} model={model}" for algo in ("grpo", "vapo", "bpco") for model in MODELS[::2]]
)
def test_the_slurm_page_has_the_cost_of_its_jobs(arguments: str) -> None:
    config = load_config(arguments.split())
    plan = build_plan(config, find_models(config))
    lines = " ".join(describe_total(config, plan, 24)).replace("no requeue", "0 requeue")
    hours, gpu_hours, requeues = re.findall(r"((?:up to )?[\d.,]+) (?=hours on|GPU-hours|requeue)", lines)
    nodes = f"{config.cluster.num_nodes} node{'s' * (config.cluster.num_nodes > 1)}"
    hours = f"{'up to ' * hours.startswith('up')}{float(hours.split()[-1]):,.0f}"
    row = f"| `{arguments}`, {nodes} | {hours} | {gpu_hours} | {requeues} |"
    assert row in (ROOT / "docs" / "slurm.md").read_text().splitlines(), row


def list_slurm_jobs() -> Iterator[tuple[str, list[str], list[str]]]:
    """(what a text shows, sbatch's options, what stands behind the script) of each training job of a planned model."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "slurm").glob("*.sh"))):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            found = re.match(r"(?:# )?(sbatch|slurm/train\.sh --submit)\b(.*)", line)
            if found is None:
                continue
            words = [word for word in shlex.split(found[2], comments=True) if re.match(r"--\w|[\w.]+=\w", word)]
            if not any(word.startswith("model=") for word in words) or "--command=evaluate" in words:
                continue
            options = [word for word in words if word.startswith("--")]
            yield f"{path.name}: {line}", options, [word for word in words if word not in options]


def read_option(options: list[str], name: str) -> str | None:
    return next((option.partition("=")[2] for option in options if option.startswith(f"--{name}=")), None)


def count_seconds(text: str) -> int:
    """Of HOURS:MINUTES:SECONDS."""
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def test_slurm_jobs_in_texts_have_the_signal_and_the_hours_that_their_plan_asks_for() -> None:
    script = (ROOT / "slurm" / "train.sh").read_text()
    nodes, signal = (re.search(rf"^#SBATCH --{name}=(\S+)$", script, re.MULTILINE)[1] for name in ("nodes", "signal"))
    jobs = list(list_slurm_jobs())
    assert len(jobs) >= 4
    for label, options, arguments in jobs:
        number = read_option(options, "nodes") or nodes
        config = load_config(["cluster=h100x16", *arguments, f"cluster.num_nodes={number}", "cluster.ray_address=a:1"])
        plan = build_plan(config, find_models(config))
        assert not plan.problems, (label, plan.problems)
        lead = int((read_option(options, "signal") or signal).partition("@")[2])
        assert lead >= (find_signal(config, plan.seconds) or SIGNAL_S), label
        limit = read_option(options, "time")
        # Each start trains, past its signal, until at least one checkpoint more is written.
        needed = max(2 * lead, lead + config.checkpoint.save_every * plan.seconds.iteration)
        assert limit is None or count_seconds(limit) >= needed, label


ONE_GPU = (
    "cluster.hardware={gpu: RTX 4090, memory_gib: 23.5, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s:"
    " 32, network_gb_s: 3, host_memory_gib: 64}"
)
"""As in docs/one-node.md"""
SAVED = [
    *(arguments.split() for _, arguments in PLANS),
    ["algo=vapo", "model=qwen2_7b"],
    ["algo=vapo", "model=qwen3_0_6b", "cluster=gpu", ONE_GPU],
]
"""The presets on the clusters that they name"""


@pytest.mark.parametrize("arguments", SAVED, ids=lambda words: " ".join(words[:3]))
def test_every_preset_saves_about_hourly(arguments: list[str]) -> None:
    config = load_config(arguments)
    plan = build_plan(config, find_models(config))
    assert config.checkpoint.save_every * plan.seconds.iteration <= LONGEST_UNSAVED_S
    assert list(describe_losses(config, plan)) == []


def test_a_preset_that_saved_every_five_iterations_is_told_the_number_that_mends_it() -> None:
    config = load_config(["algo=vapo", "model=qwen3_8b", "checkpoint.save_every=5"])
    (line,) = describe_losses(config, build_plan(config, find_models(config)))
    assert line.startswith("a checkpoint every 5.0 hours (checkpoint.save_every=5)")
    assert "checkpoint.save_every=1 writes one every 1.0" in line


KUBERAY, SKYPILOT = (
    yaml.safe_load((ROOT / "docs" / "ray-clusters" / name).read_text()) for name in ("kuberay.yaml", "skypilot.yaml")
)
CLUSTER = KUBERAY["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def list_overrides(command: str) -> list[str]:
    """What stands behind `python -m megarl.train`, the shell's variables as they are."""
    [line] = re.findall(r"python -m megarl\.train (.*)", command.replace("\\\n", " "))
    return shlex.split(line)


JOBS = {"kuberay": list_overrides(KUBERAY["spec"]["entrypoint"]), "skypilot": list_overrides(SKYPILOT["run"])}
JOBS["skypilot"] = [text.replace("$head:$PORT", f"head:{SKYPILOT['envs']['PORT']}") for text in JOBS["skypilot"]]


def find_config(name: str) -> Config:
    return load_config([text for text in JOBS[name] if not text.startswith("hydra.")])


@pytest.mark.parametrize("name", JOBS)
def test_the_job_composes_fits_and_joins_a_ray(name: str) -> None:
    check_overrides(JOBS[name])
    config = find_config(name)
    assert list(check_cluster(config)) == []
    assert config.cluster.ray_address is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert load_tool("plan.py").main([text for text in JOBS[name] if not text.startswith("hydra.")]) == 0
    assert f"fits: {config.cluster.num_nodes * config.cluster.gpus_per_node} GPUs" in printed.getvalue()


def test_kuberay_has_the_nodes_the_object_store_and_the_volume_that_the_job_asks_for() -> None:
    config = find_config("kuberay")
    assert 1 + sum(group["replicas"] for group in CLUSTER["workerGroupSpecs"]) == config.cluster.num_nodes
    [run_dir] = [text.partition("=")[2] for text in JOBS["kuberay"] if text.startswith("hydra.run.dir=")]
    for group in GROUPS:
        [container], [volume] = (group["template"]["spec"][key] for key in ("containers", "volumes"))
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.cluster.gpus_per_node
        assert int(group["rayStartParams"]["object-store-memory"]) == config.cluster.object_store_mb * 2**20
        # `ray job stop` would kill the driver before its checkpoint is written.
        assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > config.checkpoint.stop_deadline_s
        assert container["image"] == GROUPS[0]["template"]["spec"]["containers"][0]["image"]
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert all(path.startswith(f"{mount['mountPath']}/") for path in (run_dir, variables["HF_HOME"]))


def test_skypilot_has_the_nodes_the_object_store_and_the_volume_that_the_job_asks_for() -> None:
    config, run = find_config("skypilot"), SKYPILOT["run"]
    assert SKYPILOT["num_nodes"] == config.cluster.num_nodes
    assert SKYPILOT["resources"]["accelerators"] == f"H100:{config.cluster.gpus_per_node}"
    stores = re.findall(r"--object-store-memory=(\d+)", run)
    assert [int(each) for each in stores] == [config.cluster.object_store_mb * 2**20] * 2
    [folder] = SKYPILOT["volumes"]
    assert f"hydra.run.dir={folder}/" in run
    assert SKYPILOT["envs"]["HF_HOME"].startswith(f"{folder}/")
    subprocess.run(["bash", "-n", "-c", run], check=True)


def test_the_version_of_ray_is_the_locked_one() -> None:
    lock = (ROOT / "tools" / "install" / "cuda.lock").read_text()
    [locked] = re.findall(r"^ray==(\S+)", lock, re.MULTILINE)
    assert str(CLUSTER["rayVersion"]) == locked
    named = re.findall(r"ray\[default\]==([\w.]+)", (ROOT / "docs" / "slurm.md").read_text())
    assert named
    assert set(named) == {locked}
