"""A checkpoint of either kind as a stream of whole Hugging Face tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from torch import Tensor

from megarl.checkpoint.manifest import NAME as MANIFEST
from megarl.checkpoint.manifest import CheckpointError, load_manifest, verify_files
from megarl.config.schema.roles import LoraLayers
from megarl.mcore.model.architecture import read_architecture
from megarl.mcore.weights.adapters import (
    PREFIX,
    AdapterFactors,
    PeftAdapter,
    has_adapter,
    load_config,
    merge,
    name_adapter,
    to_peft,
)
from megarl.mcore.weights.dist_format import BACKENDS, DESCRIPTION, KIND, METADATA, compute_global_shapes, locate
from megarl.mcore.weights.dist_reader import DistReader, holds_optimizer
from megarl.mcore.weights.entries import Entry, list_entries, to_hf
from megarl.mcore.weights.hf_check import DTYPES, EMBEDDING, compare_shapes, find_problems
from megarl.mcore.weights.hf_critic import VALUE_HEAD
from megarl.mcore.weights.hf_reader import PIECE, CheckpointReader, is_finite
from megarl.mcore.worker_spec import Role
from megarl.models.architecture import Architecture
from megarl.models.family import Shape


class WeightSource(ABC):
    """Opened and found whole by its metadata; a tensor's contents are seen when it is read."""

    kind: str

    def __init__(self, directory: Path, description: Path, role: Role) -> None:
        self.directory = directory
        self.description = description
        """Directory with config.json and, where there is one, the tokenizer"""
        self.arch: Architecture = read_architecture(description)
        self.role = role
        self.entries = list_entries(self.arch, with_value_head=role is Role.critic)

    def __enter__(self) -> "WeightSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """Nothing to do where files are not kept open."""

    @abstractmethod
    def find_dtype(self, entry: Entry) -> torch.dtype:
        """The dtype of the stored parameter."""

    @abstractmethod
    def read(self, entry: Entry) -> list[tuple[str, Tensor]]:
        """Names and whole Hugging Face tensors, as stored. Raises CheckpointError that names tensor and file."""

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the Hugging Face tensors by their names."""
        return {name: shape for entry in self.entries for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of what is trained."""
        return {self.find_dtype(entry) for entry in self.entries if not entry.is_constant}

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are stored."""
        return sum(
            math.prod(shape) * self.find_dtype(entry).itemsize for entry in self.entries for shape in entry.shapes
        )

    def stream(self, dtype: torch.dtype | None = None) -> Iterator[tuple[Entry, list[tuple[str, Tensor]]]]:
        """Every parameter once, in `dtype` where it is given and the parameter is no constant.

        Raises CheckpointError also for NaN and infinity.
        """
        for entry in self.entries:
            wanted = None if entry.is_constant else dtype
            tensors = [(name, tensor if wanted is None else tensor.to(wanted)) for name, tensor in self.read(entry)]
            for name, tensor in tensors:
                if not is_finite(tensor):
                    raise CheckpointError(f"{self.directory}: {name} has NaN or infinity")
            # Not one tensor is kept here while the next is read.
            del tensor
            yield entry, tensors
            del tensors

    def _refuse(self, problems: Iterable[str]) -> None:
        if found := [problem for problem in problems if problem]:
            self.close()
            raise CheckpointError(f"{self.directory}: {'; '.join(found)}")


class HfSource(WeightSource):
    """A Hugging Face directory. A critic made of a model without a value head gets one of zeros, as training does."""

    kind = "Hugging Face"

    def __init__(self, directory: Path, role: Role | None = None) -> None:
        """role: by default a critic where there is a value head. Raises CheckpointError for what does not fit."""
        try:
            self._reader = CheckpointReader(directory)
        except (SafetensorError, FileNotFoundError, ValueError) as error:
            raise CheckpointError(str(error)) from None
        found = Role.critic if VALUE_HEAD in self._reader else Role.policy
        super().__init__(directory, directory, role or found)
        self.makes_head = self.role is Role.critic and found is not Role.critic
        try:
            self._refuse(find_problems(self._reader, self.arch, self.role))
        except (SafetensorError, FileNotFoundError) as error:
            self._refuse([str(error)])

    def close(self) -> None:
        self._reader.__exit__(None, None, None)

    def find_dtype(self, entry: Entry) -> torch.dtype:
        if entry.is_constant:
            return torch.float32
        names = [EMBEDDING] if self.makes_head and entry.hf_names == (VALUE_HEAD,) else entry.hf_names
        dtypes = {DTYPES[self._reader.read_dtype(name)] for name in names}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.directory}: {', '.join(names)} are of different dtypes: {dtypes}")
        return dtypes.pop()

    def read(self, entry: Entry) -> list[tuple[str, Tensor]]:
        if self.makes_head and entry.hf_names == (VALUE_HEAD,):
            return [(VALUE_HEAD, torch.zeros(1, self.arch.hidden_size, dtype=self.find_dtype(entry)))]
        # The pages of a mapped file that were read count as memory of the process.
        self._reader.release()
        try:
            tensors = [(name, self._reader.read(name)) for name in entry.hf_names]
            return [(name, x.float()) for name, x in tensors] if entry.is_constant else tensors
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory}: {', '.join(entry.hf_names)}: {error}") from None


class MegatronSource(WeightSource):
    """What `MegatronWorker.save` or `hf_to_megatron` wrote, of any layout, with a manifest."""

    kind = "Megatron"

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for what does not fit."""
        self.about = load_manifest(directory).about
        try:
            is_role, role, tp = self.about["kind"] == KIND, Role(self.about["role"]), int(self.about["parallel"]["tp"])
        except (KeyError, ValueError, TypeError):
            is_role = False
        if not is_role:
            raise CheckpointError(f"{directory / MANIFEST}: is not of a role's weights: {dict(self.about)}")
        super().__init__(directory, directory / DESCRIPTION, role)
        self._reader = DistReader(directory)
        expected = compute_global_shapes(self.entries, self.arch, tp)
        found = {key: shape for key, shape in self._reader.shapes.items() if not key.startswith(PREFIX)}
        self._adapted = {key.rpartition(".")[0] for key in self._reader.shapes.keys() - found.keys()}
        self._refuse([*compare_shapes(found, expected), *self._reader.find_problems()])
        if self._adapted:
            try:
                self._peft_config, self._scale = load_config(self.description)
            except (ValueError, OSError) as error:
                self._refuse([f"has adapters, and how to merge them cannot be read: {error}"])

    @property
    def holds_optimizer(self) -> bool:
        return holds_optimizer(self.directory)

    def find_dtype(self, entry: Entry) -> torch.dtype:
        return self._reader.find_dtype(locate(entry, self.arch)[0])

    def read(self, entry: Entry) -> list[tuple[str, Tensor]]:
        weight, factors = self._reader.read(*locate(entry, self.arch)), self._read_factors(entry)
        return to_hf(entry, [merge(weight, factors, self._scale) if factors else weight], self.arch)

    def read_adapter(self) -> PeftAdapter | None:
        """The adapters that `read` merges into the weights; None where there are none."""
        tensors: dict[str, Tensor] = {}
        for entry in self.entries:
            if (factors := self._read_factors(entry)) is not None:
                tensors |= to_peft(entry, [factors.a], [factors.b], self.arch)
        return PeftAdapter(self._peft_config, tensors) if tensors else None

    def _read_factors(self, entry: Entry) -> AdapterFactors | None:
        key = PREFIX + name_adapter(entry) if has_adapter(entry, LoraLayers) else ""
        if key not in self._adapted:
            return None
        return AdapterFactors(self._reader.read(f"{key}.a", ()), self._reader.read(f"{key}.b", ()))


def open_source(directory: Path, *, role: Role | None = None, verify: bool = True) -> HfSource | MegatronSource:
    """The checkpoint in a directory, of whichever kind. verify: check the files against the manifest first.

    Raises CheckpointError, or ValueError and FileNotFoundError for a config.json of no supported model.
    """
    if roles := list_roles(directory):
        raise CheckpointError(f"{directory}: holds the roles {', '.join(x.name for x in roles)}; give one of them")
    if any((directory / name).is_file() for name in (MANIFEST, BACKENDS, METADATA)):
        if verify:
            verify_files(directory)
        return MegatronSource(directory)
    if (directory / "config.json").is_file():
        return HfSource(directory, role)
    raise CheckpointError(
        f"{directory}: neither a Hugging Face checkpoint (config.json) nor one of Megatron's ({MANIFEST})"
    )


def list_roles(directory: Path) -> list[Path]:
    """The directories of the roles in a training checkpoint of one iteration."""
    names = [directory / role.value for role in Role]
    return [path for path in names if (path / MANIFEST).is_file() and load_manifest(path).about.get("kind") == KIND]


def find_largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b| in float32; infinite where one is NaN and 0 where all bits are equal. a, b: of one shape."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    pieces = zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE), strict=True)  # type: ignore[no-untyped-call]
    found = [float((x.float() - y.float()).abs().max()) for x, y in pieces]
    return float("inf") if any(x != x for x in found) else max(found)
