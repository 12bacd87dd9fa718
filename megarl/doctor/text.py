"""The text that the doctor prints."""

import textwrap
from collections.abc import Iterator, Sequence

from megarl.doctor.facts import Facts, Finding, Level, Need
from megarl.doctor.judge import choose_platform, needs_driver
from megarl.sandbox.program import PROTECTIONS

SHOWN = (
    *("torch", "megatron-core", "transformer-engine", "apex", "sglang", "sglang-kernel", "flashinfer-python"),
    *("flash-attn-4", "ray", "hydra-core", "transformers"),
)
MODULES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"} | {
    "sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer",
}  # fmt: skip
"""The module of a distribution, where it has another name"""
WIDTH = 120
INDENT = 9


def render(title: str, facts: Facts, need: Need, findings: Sequence[Finding]) -> list[str]:
    """The lines of the text, of at most WIDTH characters where the machine's own names are not longer."""
    return [
        f"megarl doctor: {title}",
        "",
        *_render_packages(facts, choose_platform(facts, need)),
        "",
        *_render_machine(facts),
        "",
        *_render_findings(findings),
    ]


def _render_packages(facts: Facts, platform: str) -> Iterator[str]:
    pins = facts.pins.get(platform, {})
    yield f"{'package':<20}{'here':<16}{platform}.lock"
    for name in SHOWN:
        version, pin = facts.versions.get(name), pins.get(name)
        line = f"{name:<20}{version or '-':<16}{pin or '-':<16}{_remark(facts, name, version, pin)}"
        yield line.rstrip()


def _remark(facts: Facts, name: str, version: str | None, pin: str | None) -> str:
    problem = (facts.imports.problems or {}).get(MODULES.get(name, name))
    if problem is not None:
        return "needs the driver" if needs_driver(facts, problem) else "broken"
    if name == "apex":
        return "optional: NVIDIA's, from source" if facts.apex is None else facts.apex.value
    if version is None:
        return "not there" if pin else "for CUDA alone"
    if name == "torch" and facts.imports.torch_version is not None:
        build = f"CUDA {facts.imports.torch_cuda}" if facts.imports.torch_cuda else "CPU build"
        return build if version.partition("+")[0] == pin else f"{build}, another version"
    return "" if version == pin or pin is None else "another version"


def _render_machine(facts: Facts) -> Iterator[str]:
    machine, gpus = facts.machine, facts.imports.gpus
    kinds = sorted({f"{gpu.name} ({gpu.memory_gb:.0f} GB)" for gpu in gpus})
    job = f", in job {machine.slurm_job}" if machine.slurm_job else ""
    soft, hard = machine.open_files
    containers = ", ".join(machine.containers) or "none of docker, podman, apptainer, enroot"
    models = [f"{each.key}: {each.asked}{'' if each.problem is None else ', NOT FOUND'}" for each in facts.checkpoints]
    lacking = [name for name in PROTECTIONS if name not in machine.sandbox]
    rows = {
        "system": f"{machine.system}, {machine.num_cores} cores, {machine.memory_gb:.0f} GB; Python {machine.python}",
        "GPUs": (f"{len(gpus)} x {', '.join(kinds)}" if gpus else "none")
        + (f"; driver {machine.driver}" if machine.driver else "; no NVIDIA driver"),
        "compiler": f"{machine.compiler or 'none'}; Python.h {'found' if machine.has_python_header else 'not found'};"
        f" nvcc {f'{machine.nvcc} ({machine.nvcc_cuda})' if machine.nvcc else 'none'}; ninja {machine.ninja or 'none'}",
        "Slurm": f"{machine.slurm or 'not found'}{job}; containers: {containers}",
        "limits": f"/dev/shm {machine.shm_free_gb:.1f} GB free, temporary folder {machine.tmp_free_gb:.1f} GB free,"
        f" open files {_count(soft)} (at most {_count(hard)})",
        "model": "; ".join(models),
        "HF cache": f"{machine.hub_cache}, {machine.num_cached_models} models",
        "sandbox": ", ".join(machine.sandbox or ["limits only"]) + f"; not here: {', '.join(lacking)}" * bool(lacking),
    }
    yield from (f"{name:<10}{text}" for name, text in rows.items())


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _render_findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        yield from _wrap(f"{finding.level.value:<{INDENT}}{finding.text}{remedy}")
    stopping = count_stopping(findings)
    if stopping:
        yield f"it cannot run here: {stopping} {'thing is' if stopping == 1 else 'things are'} missing or wrong"
    else:
        yield "it can run here"


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def count_stopping(findings: Sequence[Finding]) -> int:
    return sum(finding.level is not Level.note for finding in findings)
