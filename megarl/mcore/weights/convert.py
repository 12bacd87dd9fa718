"""Checkpoints from Hugging Face's form into Megatron's and back, tensor by tensor, in one process without Megatron."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.folder import find_free
from megarl.checkpoint.manifest import CheckpointError, write_manifest
from megarl.config.brought import MODEL_FILE, RUN_FILE
from megarl.config.schema.roles import Dtype
from megarl.mcore.model.architecture import check_layout
from megarl.mcore.weights.dist_format import DESCRIPTION, describe_role
from megarl.mcore.weights.dist_writer import DistWriter, build_layout
from megarl.mcore.weights.hf_files import copy_description, replace_directory
from megarl.mcore.weights.safetensors_writer import TensorSpec, write_safetensors
from megarl.mcore.weights.source import HfSource, MegatronSource, WeightSource
from megarl.mcore.worker_spec import Role

Report = Callable[[int], None]
"""Called with the number of bytes that were just written"""


def hf_to_megatron(
    source: HfSource,
    target: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    report: Report = lambda num_bytes: None,
) -> None:
    """Write the directory of a role, cut as the ranks of a layout hold it; any other layout reads it too.

    dtype: by default the source's. Raises CheckpointError for tensors that are not what they should be, ValueError for
    a layout that does not divide the model, OSError where there is no room; `target` is then as it was.
    """
    stored = dtype or _find_dtype(source)
    parallel = build_layout(tp, pp, ep, source.arch.experts is not None)
    if problems := check_layout(source.arch, parallel, "layout"):
        raise ValueError("; ".join(problems))
    _check_target(source.directory, target, overwrite, source.num_parameters * stored.itemsize)
    with replace_directory(target) as building:
        with DistWriter(building, source.entries, source.arch, parallel) as writer:
            for entry, tensors in source.stream(dtype):
                whole = [tensor for _, tensor in tensors]
                writer.write(entry, whole)
                report(sum(tensor.nbytes for tensor in whole))
                del tensors, whole
        description = building / DESCRIPTION
        value_head = stored if source.role is Role.critic else None
        copy_description(source.description, description, value_head, dtype=stored)
        _copy_run(source.directory, building)
        write_manifest(building, describe_role(source.role, Dtype(_name({stored})), parallel, None))


def megatron_to_hf(
    source: MegatronSource,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    report: Report = lambda num_bytes: None,
) -> None:
    """An ordinary Hugging Face directory; of a critic a ...ForSequenceClassification, of a policy with adapters the
    merged weights, and the adapters beside them. Else as `hf_to_megatron`.
    """
    specs = [
        TensorSpec(name, shape, source.find_dtype(entry) if dtype is None or entry.is_constant else dtype)
        for entry in source.entries
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True)
    ]
    _check_target(source.directory, target, overwrite, sum(spec.num_bytes for spec in specs))
    with replace_directory(target) as building:
        write_safetensors(building, specs, _report(source, dtype, report))
        value_head = specs[-1].dtype if source.role is Role.critic else None
        copy_description(source.description, building, value_head, dtype=specs[0].dtype)
        _copy_run(source.directory, building)
        if (adapter := source.read_adapter()) is not None:
            adapter.write(building)


def _copy_run(source: Path, building: Path) -> None:
    """Keep the configuration of the run that wrote the model with it."""
    files = [file for file in (source.resolve().parent / RUN_FILE, source / MODEL_FILE) if file.is_file()]
    if files:
        shutil.copyfile(files[0], building / MODEL_FILE)


def _report(source: WeightSource, dtype: torch.dtype | None, report: Report) -> Iterator[tuple[str, Tensor]]:
    for _, tensors in source.stream(dtype):
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        while tensors:
            yield tensors.pop(0)
        report(num_bytes)


def _find_dtype(source: WeightSource) -> torch.dtype:
    found = source.dtypes
    if len(found) > 1 or not found <= {torch.float32, torch.bfloat16}:
        raise CheckpointError(f"{source.directory}: tensors of {_name(found)}; --dtype must choose one for all")
    return found.pop()


def _check_target(source: Path, target: Path, overwrite: bool, num_bytes: int) -> None:
    """Raises FileExistsError, ValueError where one holds the other, or OSError where the file system is too full."""
    there, here = source.resolve(), target.resolve()
    if there == here or there in here.parents or here in there.parents:
        raise ValueError(f"{target}: is {source}, in it or around it; the target must be apart from the source")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target}: is there already; --overwrite replaces it")
    parent, free = find_free(target.absolute().parent)
    if free < num_bytes:
        raise OSError(f"{parent}: {free / 1e9:.2f} GB free, {num_bytes / 1e9:.2f} GB needed for {target.name}")


def _name(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
