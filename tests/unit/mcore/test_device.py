"""The import hook: what it rewrites, and that it does nothing where CUDA is."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.config.schema.roles import Dtype
from megarl.cpu import megatron as cpu_megatron
from megarl.cpu.megatron import CpuLoader, CpuRewriter, find_bytecode_folder
from megarl.mcore import device

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is for machines without CUDA")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
        ("import torch.cuda.nvtx as nvtx", "nvtx = _megarl_cuda.nvtx"),
        ("t = 'cuda graphs are fine in prose'", "t = 'cuda graphs are fine in prose'"),
        ("y = my.cuda_graph or x.cpu()", "y = my.cuda_graph or x.cpu()"),
    ],
)
def test_names_are_rewritten(source: str, expected: str) -> None:
    assert ast.unparse(ast.fix_missing_locations(CpuRewriter().visit(ast.parse(source)))) == expected


@no_cuda
def test_installing_twice_leaves_one_finder() -> None:
    cpu_megatron.install()
    cpu_megatron.install()
    names = [type(finder).__name__ for finder in sys.meta_path]
    assert names.count("CpuFinder") == 1
    assert device.device() == torch.device("cpu")
    assert device.find_machine().backend == "gloo"


@no_cuda
def test_nothing_is_rewritten_where_cuda_is_present() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
import megarl.mcore
from megarl.mcore.device import find_machine
assert find_machine().backend == "nccl"
import megatron.core.parallel_state as state
assert not hasattr(state, "_megarl_cuda") and type(state.__loader__).__name__ == "SourceFileLoader"
print("untouched")
"""
    assert run_python(code) == "untouched"


def test_whether_there_is_cuda_is_asked_when_megatron_is_imported_and_not_before() -> None:
    code = """
import torch
asked = []
torch.cuda.is_available = lambda: asked.append(1) or False
import megarl.mcore, megarl.mcore.spec, megarl.mcore.microbatches
assert not asked
import megatron.core.enums
assert len(asked) == 1
print("asked once")
"""
    assert run_python(code) == "asked once"


@no_cuda
def test_megatron_is_rewritten_in_memory_and_torch_is_not() -> None:
    code = """
import torch
before = torch.cuda.current_device, torch.compile
import megarl.mcore
import megatron.core.parallel_state as state
assert type(state.__loader__).__name__ == "CpuLoader"
assert "torch.cuda.synchronize" in open(state.__file__).read()
assert (torch.cuda.current_device, torch.compile) == before
print("rewritten")
"""
    assert run_python(code) == "rewritten"


@no_cuda
def test_megatron_does_without_the_packages_that_need_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA ends its import with OSError and not with ImportError, which is all that Megatron catches."""
    for name in ("transformer_engine", "flash_mla"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = """
import megarl.mcore
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import attention
assert not gpt_layer_specs.HAVE_TE and not attention.HAVE_FMLA
from megarl.mcore.spec import has_transformer_engine
assert has_transformer_engine(), "it is installed, and a node with GPUs may use it"
print("without them")
"""
    assert run_python(code) == "without them"


def test_deterministic_kernels_are_asked_of_every_library_and_given_settings_stay() -> None:
    code = """
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
"""
    assert run_python(code) == "0 Tree :4096:8"


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [(Dtype.float32, None, "0"), (Dtype.float32, "1", "1"), (Dtype.bfloat16, None, None)],
)
def test_float32_products_on_a_gpu_are_not_rounded_to_tf32_unless_the_environment_says_so(
    dtype: Dtype, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"NVIDIA_TF32_OVERRIDE": given})
    device.choose_kernels(dtype, deterministic=False)
    assert os.environ.get("NVIDIA_TF32_OVERRIDE") == expected


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


def fail(source: bytes, path: str) -> None:
    raise AssertionError(f"{path} was rewritten again")


def test_a_rewritten_module_is_compiled_once_and_nothing_is_written_beside_it(loaded, monkeypatch) -> None:
    source, load = loaded
    assert load() == "cpu"
    monkeypatch.setattr(cpu_megatron, "rewrite", fail)
    assert load() == "cpu"
    assert [path.name for path in source.parent.iterdir()] == ["module.py"]


def test_a_module_that_has_changed_is_rewritten_again(loaded) -> None:
    source, load = loaded
    load()
    source.write_text("DEVICE = 'cuda' + ' again'\n")
    assert load() == "cpu again"


@pytest.mark.parametrize("is_writable_by_others", [True, False])
def test_without_a_safe_place_for_bytecode_modules_are_rewritten_each_time(
    is_writable_by_others: bool, loaded, monkeypatch
) -> None:
    _, load = loaded
    if not is_writable_by_others:
        monkeypatch.setenv("MEGARL_CACHE", "/dev/null/nowhere")
    assert load() == "cpu"
    if is_writable_by_others:
        find_bytecode_folder().chmod(0o777)
        find_bytecode_folder.cache_clear()
    monkeypatch.setattr(cpu_megatron, "rewrite", fail)
    with pytest.raises(AssertionError, match="rewritten again"):
        load()


@no_cuda
def test_importing_megatron_first_is_an_error_that_says_so() -> None:
    code = """
import megatron.core.enums
try:
    import megarl.mcore
except RuntimeError as error:
    print(error)
"""
    assert "import megarl.mcore first" in run_python(code)


@no_cuda
def test_recomputation_sees_the_same_dropout() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 7)
    state = tracker.get_states()["dropout"].clone()
    outside = torch.get_rng_state()
    with tracker.fork("dropout"):
        first = torch.rand(4)
    with tracker.fork("dropout"):
        second = torch.rand(4)
    tracker.set_states({"dropout": state})
    with tracker.fork("dropout"):
        again = torch.rand(4)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), outside)


class FakeCuda:
    """What a process is told that sees these GPUs; `first` is the one that CUDA really gives it as number 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, first: int = 0) -> None:
        self.taken = -1
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(self, "taken", number))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.taken)
        properties = SimpleNamespace(uuid=f"{first:02d}")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)


def test_a_rank_that_cuda_gives_another_gpu_than_its_slots_ends_and_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where CUDA was used before CUDA_VISIBLE_DEVICES was set: torch counts one GPU, CUDA gives the node's first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    FakeCuda(monkeypatch, count=1, first=5)
    assert device.take_gpu(5, "GPU-05") == "GPU-05"
    assert device.take_gpu(5, None) == "GPU-05"
    FakeCuda(monkeypatch, count=1, first=0)
    with pytest.raises(
        RuntimeError, match="started for GPU GPU-05 and CUDA gives it GPU-00, with CUDA_VISIBLE_DEVICES=5"
    ):
        device.take_gpu(5, "GPU-05")


@pytest.mark.parametrize(("rank", "taken"), [(0, 0), (3, 3), (9, 1)])
def test_where_gpus_are_not_counted_a_rank_takes_the_one_of_its_number(
    rank: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch, count=8)
    device.take_gpu(rank, None)
    assert cuda.taken == taken
