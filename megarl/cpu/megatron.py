"""Megatron-Core without CUDA: its CUDA names are rewritten while it loads, and two of its modules corrected.

Megatron-Core names its device in its source ("cuda", torch.cuda.current_device(), x.cuda() ...). `install` puts a
finder on sys.meta_path that rewrites those names in the syntax trees of megatron.core, where CUDA is absent. The files
on disk and torch itself stay as they are. Whether CUDA is present is asked when Megatron is first imported and not
before: the question initializes CUDA, which then sees the GPUs of the environment of that moment.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from megarl.cpu import cuda
from megarl.models.checkpoint import default_cache_dir

NEED_GPU = ("transformer_engine", "flash_mla")
"""Packages of the CUDA lock that Megatron would import, and that cannot be loaded, or cannot compute, without a driver:
FlashMLA is linked against libcuda.so.1, and Megatron gives Transformer Engine's optimizer every tensor."""
STANDIN = "_megarl_cuda"


def _is_torch(node: ast.expr, name: str) -> bool:
    """node is the expression `torch.<name>`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


class CpuRewriter(ast.NodeTransformer):
    """CUDA names -> their CPU counterparts.

    torch.cuda -> the stand-in module; torch.compile -> identity; x.is_cuda -> x.is_cpu; x.cuda() -> x.cpu();
    x.pin_memory() -> x; pin_memory=True -> False; "cuda", "cuda:0" and f"cuda:..." -> "cpu";
    "torch.cuda.FloatTensor" -> "torch.FloatTensor".
    """

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_torch(node, "cuda"):
            return ast.Name(id=STANDIN, ctx=ast.Load())
        if _is_torch(node, "compile"):
            return ast.Attribute(ast.Name(id=STANDIN, ctx=ast.Load()), "compile", ast.Load())
        self.generic_visit(node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        makes_device = _is_torch(node.func, "device")
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":
                keyword.value = ast.Constant(False)
        if makes_device and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "cpu":
            node.args = node.args[:1]
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Constant):
            if node.func.attr == "cuda":
                node.func.attr, node.args, node.keywords = "cpu", [], []
            elif node.func.attr == "pin_memory" and not node.args:
                return node.func.value
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value == "cuda" or node.value.startswith("cuda:"):
                return ast.Constant("cpu")
            if node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
                return ast.Constant(node.value.replace("torch.cuda.", "torch."))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
            return ast.Constant("cpu")
        return self.generic_visit(node)


def rewrite(source: bytes | str, path: str) -> ast.Module:
    """The module's syntax tree for the CPU, with the stand-in imported at its top."""
    tree: ast.Module = CpuRewriter().visit(ast.parse(source, path))
    first = 0
    for statement in tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_docstring or is_future):
            break
        first += 1
    tree.body.insert(first, ast.parse(f"import megarl.cpu.cuda as {STANDIN}").body[0])
    return ast.fix_missing_locations(tree)


@functools.cache
def find_bytecode_folder() -> Path | None:
    """Where the bytecode of rewritten modules is kept between processes, or None: nowhere.

    Nowhere, where it cannot be made, or where somebody else can write: what lies there is executed.
    """
    rewriter = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    try:
        folder = default_cache_dir() / "bytecode" / rewriter
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def _fix_random(module: ModuleType) -> None:
    """tensor_parallel.random keeps its random states in the CPU's generator."""

    @contextlib.contextmanager
    def fork(self: Any, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # Without the stock check that the CPU's state stays the same meanwhile: here it is the tracked state.
        if name not in self.states_:
            raise KeyError(f"random state {name!r} is not added; known: {sorted(self.states_)}")
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)

    vars(module).update(_get_cuda_rng_state=cuda.get_rng_state, _set_cuda_rng_state=cuda.set_rng_state)
    module.CudaRNGStatesTracker.fork = fork


def _fix_mappings(module: ModuleType) -> None:
    """tensor_parallel.mappings gathers and scatters parts of different sizes, which Gloo cannot: they are padded."""
    stock_gather: Callable[..., torch.Tensor] = module._gather_along_first_dim
    stock_scatter: Callable[..., torch.Tensor] = module._reduce_scatter_along_first_dim

    def pad(x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return stock_gather(input_, group, output_split_sizes, use_global_buffer)
        longest = max(*output_split_sizes, 1)
        parts = stock_gather(pad(input_, longest), group).split(longest)  # type: ignore[no-untyped-call]
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return stock_scatter(input_, group, input_split_sizes, use_global_buffer)
        longest = max(*input_split_sizes, 1)
        parts = input_.split(input_split_sizes)  # type: ignore[no-untyped-call]
        padded = torch.cat([pad(part, longest) for part in parts])
        return stock_scatter(padded, group)[: input_split_sizes[group.rank()]]

    vars(module).update(_gather_along_first_dim=gather, _reduce_scatter_along_first_dim=scatter)


FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.tensor_parallel.mappings": _fix_mappings,
    "megatron.core.tensor_parallel.random": _fix_random,
}


class CpuLoader(SourceFileLoader):
    """Compiles the rewritten source.

    Bytecode is kept by Python's own rules (stale files, PYTHONDONTWRITEBYTECODE), but under `find_bytecode_folder`:
    rewriting is near half of what a worker's start costs, and the wheel's bytecode cache is neither read nor written.
    """

    def source_to_code(  # type: ignore[override]  # As Python itself calls it.
        self, data: bytes, path: str, *, _optimize: int = -1
    ) -> CodeType:
        changes = any(name in data for name in (b"cuda", b"torch.compile", b"pin_memory"))
        return compile(rewrite(data, path) if changes else data, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> CodeType | None:
        before, folder = sys.pycache_prefix, find_bytecode_folder()
        # Where there is no folder, nothing can be read or written under this name either.
        sys.pycache_prefix = str(folder or "/dev/null/none")
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix = before

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        fix = FIXES.get(module.__name__)
        if fix is not None:
            fix(module)


class CpuFinder(MetaPathFinder):
    """Finds the modules of megatron.core where they are and has `CpuLoader` load them; those of `NEED_GPU` it finds
    nowhere, so that Megatron is the same with the packages of the CUDA lock as with those of the CPU lock.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_root = f"{fullname}.".startswith("megatron.core.")
        if not (is_root or fullname in NEED_GPU) or not _is_wanted():
            return None
        if not is_root:
            raise ModuleNotFoundError(f"{fullname} is not used on a machine without CUDA", name=fullname)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return spec
        spec.loader = CpuLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Prepare this process for Megatron; call before the first megatron import. May be called again.

    Raises RuntimeError where megatron.core was imported before without the hook, on a machine without CUDA.
    """
    if any(isinstance(finder, CpuFinder) for finder in sys.meta_path):
        return
    loaded = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    if loaded and not torch.cuda.is_available():
        raise RuntimeError(
            f"{loaded[0]} was imported before megarl.mcore on a machine without CUDA: "
            "import megarl.mcore first, so that Megatron can be rewritten for the CPU"
        )
    sys.meta_path.insert(0, CpuFinder())


@functools.cache
def _is_wanted() -> bool:
    """Whether Megatron is rewritten for the CPU in this process."""
    if torch.cuda.is_available():
        return False
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed.*", category=UserWarning)
    # What torch says of every nvcc on the PATH, as that of a login node.
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in str(record.msg))
    return True
