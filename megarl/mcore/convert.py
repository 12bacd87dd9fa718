"""Checkpoints between Hugging Face's form and Megatron's, and whether two are the same.

A checkpoint is loaded and exported as a role loads and exports its weights, by one process that holds the whole model.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megarl.config.errors import ConfigError
from megarl.config.load import MODEL_FILE
from megarl.config.schema.roles import Dtype, LoraConfig, LoraLayers, ParallelConfig
from megarl.files import (
    MANIFEST,
    RUN_FILE,
    CheckpointError,
    load_json_object,
    load_manifest,
    verify_files,
    write_manifest,
)
from megarl.mcore import state
from megarl.mcore.batch import build_batch
from megarl.mcore.checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    ADAPTER_PREFIX,
    BACKENDS,
    DESCRIPTION,
    KIND,
    METADATA,
    STORED_DTYPES,
    VALUE_HEAD,
    CheckpointReader,
    compare_shapes,
    compute_global_shapes,
    copy_description,
    describe_role,
    find_problems,
    holds_optimizer,
    is_finite,
    list_entries,
    list_shapes,
    replace_directory,
    write_safetensors,
)
from megarl.mcore.model import DTYPES, PackedGPT, build_chunks, build_config, wrap_chunks
from megarl.mcore.process_groups import alone
from megarl.mcore.spec import Role, read_architecture
from megarl.mcore.state import TrainingState, attach_adapters, begin_save, export_peft, load_weights
from megarl.mcore.worker import run_stage
from megarl.models.architecture import Architecture
from megarl.types import Sequences

LOGITS_BOUND = 1e-4
"""Up to which a difference of float32 logits, relative to the largest of them, is rounding"""


@dataclass(frozen=True)
class Source:
    """A checkpoint of either form, found whole by the headers of its files."""

    directory: Path
    description: Path
    """Directory with config.json and, where there is one, the tokenizer"""
    role: Role
    arch: Architecture
    dtypes: frozenset[torch.dtype]
    """Of what is trained"""
    about: Mapping[str, Any] | None = None
    """What the manifest of Megatron's form says of it; None: Hugging Face's form"""
    lora: LoraConfig | None = None
    """Of the adapters beside the weights of Megatron's form"""
    makes_head: bool = False
    """It is a critic made of a model without a value head, and gets one of zeros, as training does"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors by their names."""
        entries = list_entries(self.arch, with_value_head=self.role is Role.critic)
        return {name: shape for entry in entries for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def holds_optimizer(self) -> bool:
        return self.about is not None and holds_optimizer(self.directory)

    def choose_dtype(self, wanted: Dtype | None) -> Dtype:
        """Raises CheckpointError where the checkpoint has several and none is wanted."""
        found = wanted or next((dtype for dtype, each in DTYPES.items() if self.dtypes == {each}), None)
        if found is None:
            names = ", ".join(sorted(map(name_dtype, self.dtypes)))
            raise CheckpointError(f"{self.directory}: tensors of {names}; --dtype must choose one for all")
        return found


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def list_roles(directory: Path) -> list[Path]:
    """The directories of the roles in a training checkpoint of one iteration."""
    names = [directory / role.value for role in Role]
    return [path for path in names if (path / MANIFEST).is_file() and load_manifest(path).about.get("kind") == KIND]


def open_source(directory: Path, *, role: Role | None = None, verify: bool = True) -> Source:
    """The checkpoint in a directory, of whichever form. role: of Hugging Face's; by default a critic where there is a
    value head. verify: check the files against the manifest first. Raises CheckpointError for what does not fit, or
    ValueError and FileNotFoundError for a config.json of no supported model.
    """
    if roles := list_roles(directory):
        raise CheckpointError(f"{directory}: holds the roles {', '.join(x.name for x in roles)}; give one of them")
    if any((directory / name).is_file() for name in (MANIFEST, BACKENDS, METADATA)):
        if verify:
            verify_files(directory)
        return _open_megatron(directory)
    if (directory / "config.json").is_file():
        return _open_hf(directory, role)
    raise CheckpointError(
        f"{directory}: neither a Hugging Face checkpoint (config.json) nor one of Megatron's ({MANIFEST})"
    )


def _open_hf(directory: Path, role: Role | None) -> Source:
    arch = read_architecture(directory)
    try:
        with CheckpointReader(directory) as reader:
            found = Role.critic if VALUE_HEAD in reader else Role.policy
            role = role or found
            if problems := list(find_problems(reader, arch, role)):
                raise CheckpointError(f"{directory}: {'; '.join(problems)}")
            constants = {name for entry in list_entries(arch, False) if entry.is_constant for name in entry.hf_names}
            dtypes = {STORED_DTYPES[reader.read_dtype(name)] for name in reader.names if name not in constants}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory}: {error}") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return Source(directory, directory, role, arch, frozenset(dtypes), makes_head=role is not found is Role.policy)


def _open_megatron(directory: Path) -> Source:
    about = load_manifest(directory).about
    try:
        is_role, role, tp = about["kind"] == KIND, Role(about["role"]), int(about["parallel"]["tp"])
        dtype = DTYPES[Dtype(about["dtype"])]
    except (KeyError, ValueError, TypeError):
        is_role = False
    if not is_role:
        raise CheckpointError(f"{directory / MANIFEST}: is not of a role's weights: {dict(about)}")
    arch, shapes = read_architecture(directory / DESCRIPTION), list_shapes(directory)
    adapters = [key for key in shapes if key.startswith(ADAPTER_PREFIX)]
    expected = compute_global_shapes(list_entries(arch, with_value_head=role is Role.critic), arch, tp)
    if problems := compare_shapes({key: shapes[key] for key in shapes.keys() - set(adapters)}, expected):
        raise CheckpointError(f"{directory}: {'; '.join(problems)}")
    lora = None
    if adapters:
        kinds = {LoraLayers.attention if "-self_attention-" in key else LoraLayers.mlp for key in adapters}
        try:
            fields = load_json_object(directory / DESCRIPTION / ADAPTER_FOLDER / ADAPTER_CONFIG)
            lora = LoraConfig(int(fields["r"]), float(fields["lora_alpha"]), [x for x in LoraLayers if x in kinds])
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise CheckpointError(f"{directory}: how to merge its adapters cannot be read: {error}") from None
    return Source(directory, directory / DESCRIPTION, role, arch, frozenset({dtype}), about, lora)


@contextmanager
def load_model(source: Source, dtype: Dtype) -> Iterator[list[PackedGPT]]:
    """The model in this process, which joins process groups of its own meanwhile; what is trained is in `dtype`. Raises
    CheckpointError for what cannot be read, or holds NaN or infinity.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-convert-") as scratch, alone(Path(scratch)):
        config = build_config(source.arch, ParallelConfig(), dtype, {})
        chunks = build_chunks(source.arch, config, with_value_head=source.role is Role.critic)
        attach_adapters(chunks, source.lora, 1, str(source.description))
        try:
            if source.about is None:
                state.load_hf(chunks, source.directory, source.arch)
            else:
                load_weights(source.directory, chunks)
        except (OSError, CheckpointError):
            raise
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        except (Exception, CheckpointException) as error:  # What is raised for a damaged file is anything.
            last = (str(error).strip().splitlines() or [""])[-1]
            raise CheckpointError(f"{source.directory}: cannot be read: {type(error).__name__}: {last}") from None
        yield chunks


def export_tensors(source: Source, chunks: list[PackedGPT]) -> Iterator[tuple[str, Tensor]]:
    """Names and whole Hugging Face tensors. Raises CheckpointError that names one with NaN or infinity."""
    for name, tensor in state.export_hf(chunks, source.arch):
        if not is_finite(tensor):
            raise CheckpointError(f"{source.directory}: {name} has NaN or infinity")
        yield name, tensor


def convert(source: Source, target: Path, *, dtype: Dtype | None = None, overwrite: bool = False) -> None:
    """Write the other form. Of a critic that is a ...ForSequenceClassification, of a policy with adapters the merged
    weights, and the adapters beside them; in Megatron's form the directory of a role, which any layout reads.

    dtype: by default the source's. Raises CheckpointError for tensors that are not what they should be, OSError where
    there is no room; `target` is then as it was.
    """
    chosen, (there, here) = source.choose_dtype(dtype), (source.directory.resolve(), target.resolve())
    if there == here or there in here.parents or here in there.parents:
        raise ValueError(f"{target}: is {there}, in it or around it; the target must be apart from the source")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target}: is there already; --overwrite replaces it")
    value_head = DTYPES[chosen] if source.role is Role.critic else None
    with replace_directory(target) as building, load_model(source, chosen) as chunks:
        description = building
        if source.about is None:
            begin_save(building, TrainingState(chunks, None, None, ParallelConfig())).finish()
            description = building / DESCRIPTION
        else:
            write_safetensors(building, export_tensors(source, chunks))
        copy_description(source.description, description, value_head, dtype=DTYPES[chosen])
        if source.lora is not None:
            fields = load_json_object(source.description / ADAPTER_FOLDER / ADAPTER_CONFIG)
            if (adapter := export_peft(chunks, source.arch, fields)) is not None:
                adapter.write(building)
        # The configuration of the run that wrote the model stays with it.
        files = [source.directory.resolve().parent / RUN_FILE, source.directory / MODEL_FILE]
        for file in [file for file in files if file.is_file()][:1]:
            shutil.copyfile(file, building / MODEL_FILE)
        if source.about is None:
            write_manifest(building, describe_role(source.role, chosen, ParallelConfig(), None))


def read_tensors(source: Source) -> dict[str, Tensor]:
    """Whole Hugging Face tensors by their names, in the dtypes in which they are stored."""
    if source.about is not None or source.makes_head:
        with load_model(source, source.choose_dtype(None)) as chunks:
            return {name: tensor.clone() for name, tensor in export_tensors(source, chunks)}
    with CheckpointReader(source.directory) as reader:
        return {name: reader.read(name).clone() for name in source.shapes}


def compare_tensors(a: Source, b: Source) -> list[str]:
    """What differs bit by bit, one line for each tensor. Raises CheckpointError where names, shapes or roles differ."""
    if a.role is not b.role:
        raise CheckpointError(f"{a.directory} is a {a.role.value}, {b.directory} a {b.role.value}")
    if problems := compare_shapes(a.shapes, b.shapes, f"in {b.directory} it is"):
        raise CheckpointError(f"{a.directory}: {'; '.join(problems)}")
    others, differences = read_tensors(b), []
    for name, own in read_tensors(a).items():
        other = others.pop(name)
        if own.dtype != other.dtype or not torch.equal(own, other):
            note = "" if own.dtype == other.dtype else f"; {name_dtype(own.dtype)} against {name_dtype(other.dtype)}"
            largest = float((own.float() - other.float()).abs().max())
            differences.append(f"{name}: differs by up to {largest:.3g}{note}")
    return differences


def compare_outputs(a: Source, b: Source, tokens: Tensor) -> tuple[str, bool]:
    """How much what `compute_outputs` gives differs, and whether that is rounding; tokens: int64 [n], two at least."""
    own, other = compute_outputs(a, tokens), compute_outputs(b, tokens)
    largest, scale = float((own - other).abs().max()), float(other.abs().max())
    what = "values" if a.role is Role.critic else "logits"
    text = f"{what} of {len(tokens)} tokens: differ by up to {largest:.3g}, the largest is {scale:.4g}"
    return f"{text}; the bound is {LOGITS_BOUND:g} of it", largest <= LOGITS_BOUND * scale


def compute_outputs(source: Source, tokens: Tensor) -> Tensor:
    """float32 on the CPU: a policy's logits [n - 1, V] of all tokens but the last, a critic's values [n - 1], Hugging
    Face's form by transformers, Megatron's by Megatron.
    """
    if len(tokens) < 2 or int(tokens.max()) >= source.arch.vocab_size:
        found = f"{source.directory}: token ids {tokens.tolist()}"
        raise ValueError(f"{found}; two or more within the vocabulary of {source.arch.vocab_size} are needed")
    is_critic = source.role is Role.critic
    with torch.inference_mode():
        if source.about is None:
            import transformers

            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            name = "AutoModelForSequenceClassification" if is_critic else "AutoModelForCausalLM"
            load = getattr(transformers, name).from_pretrained
            model = load(source.directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False).eval()
            if not is_critic:
                logits: Tensor = model(tokens[None, :-1]).logits[0]
                return logits
            values: Tensor = model.base_model(tokens[None, :-1]).last_hidden_state[0] @ model.score.weight.T
            return values.squeeze(1)
        with load_model(source, Dtype.float32) as chunks:
            (stage,) = wrap_chunks(chunks, chunks[0].config, None)
            sequences = Sequences(tokens, torch.tensor([len(tokens)]), torch.tensor([1]))
            out = run_stage(stage, build_batch(sequences, [0])).float().cpu()
    return out if is_critic else out[:, : source.arch.vocab_size]
