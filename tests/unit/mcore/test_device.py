"""The import hook: what it rewrites, and that it does nothing where CUDA is; which of Megatron's faster ways are on,
why others are not, and that Megatron itself has the same conditions.
"""

import ast
import os
import subprocess
import sys
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig, RandomModelConfig
from megarl.cpu import megatron as cpu_megatron
from megarl.cpu.megatron import CpuLoader, CpuRewriter, find_bytecode_folder
from megarl.mcore import device, model
from megarl.mcore.layers import Kernels, build_fast_fields, check_fast_fields, find_kernels, resolve_overlap
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.plan.job import describe_random

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is for machines without CUDA")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = torch.cuda.current_device()", "x = _megarl_cuda.current_device()"),
        ("y = x.cuda(non_blocking=True).is_cuda", "y = x.cpu().is_cpu"),
        ("y = torch.zeros(1, device='cuda')", "y = torch.zeros(1, device='cpu')"),
        ("y = torch.device('cuda', torch.cuda.current_device())", "y = torch.device('cpu')"),
        ("y = torch.device(f'cuda:{i}')", "y = torch.device('cpu')"),
        ("y = x.type() == 'torch.cuda.FloatTensor'", "y = x.type() == 'torch.FloatTensor'"),
        ("y = torch.empty(2, pin_memory=True)", "y = torch.empty(2, pin_memory=False)"),
        ("y = x.pin_memory().to(z)", "y = x.to(z)"),
        ("f = torch.compile(g)", "f = _megarl_cuda.compile(g)"),
        ("t = 'cuda graphs are fine in prose'", "t = 'cuda graphs are fine in prose'"),
        ("y = my.cuda_graph or x.cpu()", "y = my.cuda_graph or x.cpu()"),
    ],
)
def test_names_are_rewritten(source: str, expected: str) -> None:
    assert ast.unparse(ast.fix_missing_locations(CpuRewriter().visit(ast.parse(source)))) == expected


PROCESSES = {
    "nothing is rewritten where CUDA is present": (
        """
import torch
torch.cuda.is_available = lambda: True
import megarl.mcore
from megarl.mcore.device import find_processor
assert find_processor().backend == "nccl"
import megatron.core.parallel_state as state
assert not hasattr(state, "_megarl_cuda") and type(state.__loader__).__name__ == "SourceFileLoader"
""",
        "",
    ),
    "whether there is CUDA is asked when Megatron is imported and not before": (
        """
import torch
asked = []
torch.cuda.is_available = lambda: asked.append(1) or False
import megarl.mcore, megarl.mcore.spec, megarl.mcore.microbatches
assert not asked
import megatron.core.enums
assert asked
""",
        "",
    ),
    "Megatron is rewritten in memory and torch is not": (
        """
import torch
before = torch.cuda.current_device, torch.compile
import megarl.mcore
import megatron.core.parallel_state as state
assert type(state.__loader__).__name__ == "CpuLoader"
assert "torch.cuda.synchronize" in open(state.__file__).read()
assert (torch.cuda.current_device, torch.compile) == before
""",
        "",
    ),
    # FlashMLA ends its import with OSError and not with ImportError, which is all that Megatron catches.
    "Megatron does without the packages that need a driver, which a node with GPUs may use": (
        """
import megarl.mcore
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import attention
assert not gpt_layer_specs.HAVE_TE and not attention.HAVE_FMLA
from megarl.mcore.spec import has_transformer_engine
assert has_transformer_engine()
""",
        "",
    ),
    "deterministic kernels are asked of every library and given settings stay": (
        """
import os
os.environ |= {"NCCL_ALGO": "Tree", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
import torch
from megarl.mcore.device import use_deterministic_kernels
assert not torch.are_deterministic_algorithms_enabled()
use_deterministic_kernels()
assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
names = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")
print(*(os.environ[name] for name in names))
""",
        "0 Tree :4096:8",
    ),
    "importing Megatron first is an error that says so": (
        """
import megatron.core.enums
try:
    import megarl.mcore
except RuntimeError as error:
    print("import megarl.mcore first" in str(error))
""",
        "True",
    ),
}


@no_cuda
@pytest.mark.parametrize("claim", PROCESSES)
def test_in_a_process_of_its_own(claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = PROCESSES[claim]
    if "HAVE_FMLA" in code:
        for name in ("transformer_engine", "flash_mla"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object')")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[3]}")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [(Dtype.float32, None, "0"), (Dtype.float32, "1", "1"), (Dtype.bfloat16, None, None)],
)
def test_float32_products_on_a_gpu_are_not_rounded_to_tf32_unless_the_environment_says_so(
    dtype: Dtype, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"NVIDIA_TF32_OVERRIDE": given})
    device.Gpu().prepare(dtype, deterministic=False, num_threads=1)
    assert os.environ.get("NVIDIA_TF32_OVERRIDE") == expected


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, ["expandable_segments:True"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ["expandable_segments:True"]),
    ],
)
def test_training_processes_alone_have_expandable_segments_unless_the_environment_says_so(
    given: dict[str, str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the environment, which the servers of one process would inherit."""
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(os, "environ", dict(given))
    device.Gpu().prepare(Dtype.bfloat16, deterministic=False, num_threads=1)
    assert (found, os.environ) == (asked, given)


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(a module's file, a function that loads it as Megatron's are), with a bytecode folder of the test's own"""
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    find_bytecode_folder.cache_clear()
    source = tmp_path / "wheel" / "module.py"
    source.parent.mkdir()
    source.write_text("DEVICE = 'cuda'\n")

    def load() -> str:
        namespace: dict[str, str] = {}
        exec(CpuLoader("module", str(source)).get_code("module"), namespace)
        return namespace["DEVICE"]

    yield source, load
    find_bytecode_folder.cache_clear()


@pytest.mark.parametrize("kept", [True, False, None])
def test_a_rewritten_module_is_compiled_once_where_there_is_a_safe_place_and_again_when_it_has_changed(
    kept: bool | None, loaded, monkeypatch
) -> None:
    """kept: False where others could write the bytecode, None where there is no place for it."""
    source, load = loaded
    if kept is None:
        monkeypatch.setenv("MEGARL_CACHE", "/dev/null/nowhere")
    assert load() == "cpu"
    if kept is False:
        find_bytecode_folder().chmod(0o777)
        find_bytecode_folder.cache_clear()
    rewritten, rewrite = [], cpu_megatron.rewrite
    monkeypatch.setattr(cpu_megatron, "rewrite", lambda *args: rewritten.append(args) or rewrite(*args))
    assert load() == "cpu"
    assert bool(rewritten) is (kept is not True)
    assert [path.name for path in source.parent.iterdir()] == ["module.py"]
    source.write_text("DEVICE = 'cuda' + ' again'\n")
    assert load() == "cpu again"


@pytest.mark.parametrize(
    ("count", "first", "rank", "uuid", "taken"),
    [(1, 5, 5, "GPU-05", 0), (1, 5, 5, None, 0), (1, 0, 5, "GPU-05", None), (8, 0, 3, None, 3), (8, 0, 9, None, 1)],
)
def test_a_rank_takes_the_gpu_of_its_slot_and_ends_where_cuda_gives_it_another(
    count: int, first: int, rank: int, uuid: str | None, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """count: of GPUs that the process sees; first: the one that CUDA really gives it as number 0, which is another one
    where CUDA was used before CUDA_VISIBLE_DEVICES was set.
    """
    numbers: list[int] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: numbers[-1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"{first:02d}"))
    if taken is None:
        expected = "started for GPU GPU-05 and CUDA gives it GPU-00, with CUDA_VISIBLE_DEVICES=5"
        with pytest.raises(RuntimeError, match=expected):
            device.Gpu().take(rank, uuid)
    else:
        assert device.Gpu().take(rank, uuid) == f"GPU-{first:02d}"
        assert numbers == [taken]


TransformerConfig = model.TransformerConfig
EVERYTHING = Kernels(**{field.name: True for field in dataclass_fields(Kernels)})
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.fixture(scope="module")
def archs() -> dict[str, Architecture]:
    return {family: describe_random(RandomModelConfig(family=family)) for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "megatron", "lacks", "off"),
    [
        ("qwen3", {}, "", set()),
        ("qwen3_moe", {}, "", set()),
        ("qwen3_moe", {}, "permute", {"moe_permute_fusion"}),
        ("qwen3", {}, "rope", {"apply_rope_fusion"}),
        ("glm4", {}, "", {"apply_rope_fusion"}),
        ("qwen3", {}, "compiler", {"bias_activation_fusion"}),
        ("qwen3", {"use_te_activation_func": True}, "", {"bias_activation_fusion"}),
        ("qwen3", {}, "apex", set()),
        ("qwen3_moe", {}, "te", {"apply_rope_fusion", "moe_permute_fusion"}),
        ("qwen3", {}, "gpu", {"apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"}),
    ],
)
def test_each_way_is_off_alone_where_its_condition_does_not_hold(
    archs: dict[str, Architecture], family: str, megatron: dict[str, Any], lacks: str, off: set[str]
) -> None:
    kernels = replace(EVERYTHING, **({lacks: False} if lacks else {}))
    fields = build_fast_fields(archs[family], megatron, kernels)
    assert fields.keys() <= {field.name for field in dataclass_fields(TransformerConfig)}
    assert {field for field, is_on in fields.items() if not is_on} == off


def test_fused_rope_of_interleaved_positions_is_refused_on_every_machine(archs: dict[str, Architecture]) -> None:
    assert list(check_fast_fields(archs["qwen3"], {"apply_rope_fusion": True})) == []
    (problem,) = check_fast_fields(archs["glm4"], {"apply_rope_fusion": True})
    assert problem.startswith("model.megatron.apply_rope_fusion: found true, but the model turns neighbouring")


@pytest.mark.parametrize(
    ("given", "num_processes", "tp", "gpu", "expected"),
    [
        ((None, None), 2, 1, True, (True, True)),
        ((None, None), 2, 1, False, (False, False)),
        ((None, None), 1, 1, True, (False, False)),
        ((None, None), 2, 2, True, (False, False)),
        ((False, None), 2, 1, True, (False, False)),
        ((None, False), 2, 1, True, (True, False)),
        ((True, None), 2, 1, False, (True, False)),
        ((None, True), 2, 1, False, (True, True)),
        ((True, True), 1, 1, True, (True, True)),
    ],
)
def test_overlap_is_automatic_on_gpus_that_share_gradients_and_as_given_elsewhere(
    given: tuple[bool | None, bool | None], num_processes: int, tp: int, gpu: bool, expected: tuple[bool, bool]
) -> None:
    optimizer = OptimizerConfig(overlap_grad_reduce=given[0], overlap_param_gather=given[1])
    found = resolve_overlap(optimizer, ParallelConfig(num_processes=num_processes, tp=tp), gpu)
    assert (found.overlap_grad_reduce, found.overlap_param_gather) == expected


@on_cpu
@pytest.mark.parametrize("field", ["apply_rope_fusion", "moe_permute_fusion"])
def test_megatron_itself_refuses_what_is_off_for_want_of_a_kernel(archs: dict[str, Architecture], field: str) -> None:
    """The kernels that are looked for are those that Megatron asks for."""
    arch = archs["qwen3_moe"]
    own = model._own_fields(arch, ParallelConfig(), Dtype.float32) | model._DEFAULTS
    TransformerConfig(**own)
    if build_fast_fields(arch, {}, replace(find_kernels(), gpu=True, te=True))[field]:
        assert getattr(TransformerConfig(**own, **{field: True}), field)
    else:
        with pytest.raises((ValueError, ImportError), match="fus"):
            TransformerConfig(**own, **{field: True})
