"""Reading the safetensors of a Hugging Face checkpoint directory."""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.checkpoint.manifest import name_some
from megarl.json_text import load_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 20
"""Elements that are looked at together where a whole tensor would need memory of its own size"""


class CheckpointReader:
    """The tensors of DIRECTORY/model.safetensors, or of the files that its index names.

    Raises FileNotFoundError where there is neither, ValueError for an index that is none, KeyError that names a tensor
    that is not there, SafetensorError that names a file which is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, str]
        if (directory / INDEX).is_file():
            self._files = _read_index(directory / INDEX)
        elif (directory / SINGLE).is_file():
            with _open(directory / SINGLE) as handle:
                self._files = dict.fromkeys(handle.keys(), SINGLE)
        else:
            other = name_some(sorted(file.name for file in directory.glob("*.safetensors")))
            raise FileNotFoundError(
                f"{directory}: found neither {SINGLE} nor {INDEX}, which says what is in {other or 'other files'}"
            )
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def find_misplaced(self, expected: Collection[str]) -> Iterator[str]:
        """How the files differ from the index that names them; nothing without one.

        expected: the tensors that the model needs; of others that are in the files alone nothing is said.
        """
        if not (self._directory / INDEX).is_file():
            return
        files = sorted(set(self._files.values()))
        if missing := [file for file in files if not (self._directory / file).is_file()]:
            yield f"lacks {name_some(missing)}, of {len(files)} files that {INDEX} names"
            return
        if SINGLE not in files and (self._directory / SINGLE).is_file():
            yield f"has {SINGLE} and {INDEX}, which names other files; remove those that are not of the model"
        holders: dict[str, list[str]] = {}
        for file in files:
            with _open(self._directory / file) as handle:
                for name in handle.keys():  # noqa: SIM118  (it is no mapping)
                    holders.setdefault(name, []).append(file)
        wrong = [
            f"{name} is in {' and '.join(holders.get(name, ['none of them']))}, by the index in {file}"
            for name, file in self._files.items()
            if name in expected and holders.get(name) != [file]
        ]
        if wrong:
            yield f"{INDEX} differs from the files: {name_some(wrong)}"
        unlisted = [f"{name} in {holders[name][0]}" for name in expected if name in holders and name not in self._files]
        if unlisted:
            yield f"{INDEX} lacks {name_some(unlisted)}"

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._open_file(name).get_tensor(name)
        return tensor

    def read_shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the tensor."""
        return tuple(self._open_file(name).get_slice(name).get_shape())

    def read_dtype(self, name: str) -> str:
        """The dtype as safetensors writes it (F32, BF16 ...), without reading the tensor."""
        dtype: str = self._open_file(name).get_slice(name).get_dtype()
        return dtype

    def release(self) -> None:
        """Unmap the files, as soon as no tensor of theirs is left; what is read next maps them again."""
        self._stack.close()
        self._open.clear()

    def _open_file(self, name: str) -> Any:
        if name not in self._files:
            raise KeyError(f"{self._directory}: has no tensor {name}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(_open(self._directory / file))
        return self._open[file]


def _read_index(path: Path) -> dict[str, str]:
    """File of each tensor; ValueError that names the index."""
    files = load_json_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path}: has no weight_map, the file of each tensor by its name")
    for name, file in files.items():
        # What an index of a stranger names must not lead out of its directory.
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise ValueError(f"{path}: {name} is in {file!r}; a file of this directory was expected")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise SafetensorError(f"{path}: {error}") from None


def count_parameters(directory: Path) -> int:
    """Numbers in all tensors, read from the files' headers. Raises FileNotFoundError as CheckpointReader."""
    with CheckpointReader(directory) as reader:
        return sum(math.prod(reader.read_shape(name)) for name in reader.names)


def is_finite(tensor: Tensor) -> bool:
    pieces = tensor.reshape(-1).split(PIECE)  # type: ignore[no-untyped-call]
    return all(bool(piece.isfinite().all()) for piece in pieces)
