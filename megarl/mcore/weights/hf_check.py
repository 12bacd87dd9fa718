"""Whether a Hugging Face directory holds the tensors that its config.json asks for, read from the files' headers."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from megarl.checkpoint.manifest import name_some
from megarl.mcore.weights.entries import list_entries
from megarl.mcore.weights.hf_critic import VALUE_HEAD
from megarl.mcore.weights.hf_reader import INDEX, SINGLE, CheckpointReader, is_finite
from megarl.mcore.weights.safetensors_writer import DTYPE_NAMES
from megarl.mcore.worker_spec import Role
from megarl.models.architecture import Architecture

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CONSOLIDATED = "consolidated.safetensors"
"""The same weights in another form, which SGLang leaves out where there is no third file"""
_QUANTIZED = "by which servers would quantize; a policy is trained from weights that are not quantized"
FURTHER_FILES = {
    "hf_quant_config.json": _QUANTIZED,
    "quant_model_description.json": _QUANTIZED,
    "adapter_config.json": "of an adapter that neither the trainer nor a server would load; merge it into the weights",
}
"""What makes another model of the weights, and what is wrong with it"""
MOST_LOOKED_AT = 2**28
"""Numbers that are looked at for NaN before a process is started, some tenths of a second; of larger models the roles
find it as they load their weights"""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_checkpoint(directory: Path, arch: Architecture, role: Role) -> list[str]:
    """Why training cannot start from the tensors, each message with the directory or file; [] where nothing is wrong.

    Tensors that config.json does not ask for are left alone.
    """
    try:
        with CheckpointReader(directory) as reader:
            expected = [name for entry in list_entries(arch, role is Role.critic) for name in entry.hf_names]
            problems = [*reader.find_misplaced(expected), *_find_further_files(directory)]
            problems += [f"has {name}, {why}" for name, why in FURTHER_FILES.items() if (directory / name).is_file()]
            problems = problems or list(find_problems(reader, arch, role, may_have_more=True))
            return [f"{directory}: {problem}" for problem in problems]
    except (SafetensorError, OSError, ValueError) as error:
        return [str(error)]


def check_files(directory: Path) -> list[str]:
    """What a server would load otherwise than the index says, each message with the directory or file."""
    try:
        with CheckpointReader(directory) as reader:
            return [
                f"{directory}: {each}"
                for each in (*reader.find_misplaced(reader.names), *_find_further_files(directory))
            ]
    except (SafetensorError, OSError, ValueError) as error:
        return [str(error)]


def _find_further_files(directory: Path) -> Iterator[str]:
    """Weights that servers would load and the trainer does not."""
    if not (directory / INDEX).is_file():
        further = sorted(
            file.name for file in directory.glob("*.safetensors") if file.name not in (SINGLE, CONSOLIDATED)
        )
        if further:
            yield (
                f"has {name_some(further)} beside {SINGLE} and no {INDEX}; servers would load all of them: remove those"
                " that are not of the model"
            )


def find_problems(
    reader: CheckpointReader, arch: Architecture, role: Role, may_have_more: bool = False
) -> Iterator[str]:
    """Tensors that are missing, of another model, misshaped, of no float dtype or tied in name alone; of a model that
    may have more, NaN too.

    A critic without a value head gets one, so that the head may be missing. Raises as the reader.
    """
    entries = list_entries(arch, with_value_head=role is Role.critic)
    expected = {name: shape for entry in entries for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}
    makes_head = role is Role.critic and VALUE_HEAD not in reader
    ties_head = arch.tied and role is not Role.critic
    if makes_head:
        del expected[VALUE_HEAD]
    ignored = {HEAD} - expected.keys() if makes_head or ties_head else set()
    names = [name for name in reader.names if not name.endswith("rotary_emb.inv_freq") and name not in ignored]
    if may_have_more:
        names = [name for name in names if name in expected]
    if problems := compare_shapes({name: reader.read_shape(name) for name in names}, expected):
        yield from problems
        return
    if unknown := {dtype for dtype in map(reader.read_dtype, expected) if dtype not in DTYPES}:
        yield f"has tensors of {', '.join(sorted(unknown))}; float weights are expected"
    elif ties_head and HEAD in reader and not torch.equal(reader.read(HEAD), reader.read(EMBEDDING)):
        yield f"{HEAD} is not {EMBEDDING}, as tie_word_embeddings in config.json says"
    elif may_have_more and sum(map(math.prod, expected.values())) <= MOST_LOOKED_AT:
        damaged = [name for name in expected if not is_finite(reader.read(name))]
        yield from [f"NaN or infinity in {name_some(damaged)}"] if damaged else ()


def compare_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], expects: str = "config.json asks for"
) -> list[str]:
    """What differs in names and shapes; up to five tensors of each problem are named."""
    misshaped = [
        f"{name} is {list(found[name])}, {expects} {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "of another model": sorted(found.keys() - expected.keys()),
        "misshaped": misshaped,
    }
    return [f"{problem}: {name_some(names)}" for problem, names in problems.items() if names]
