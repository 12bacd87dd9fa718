"""The weights of a whole model in files, without Megatron: their names there and in Megatron, how they are split, and
checkpoints, read, checked before a run, and written whole or not at all.

A Hugging Face checkpoint is a directory; a critic's is a ...ForSequenceClassification with one label, its weights in
score.weight. In a checkpoint of Megatron's dist_checkpointing keys know no layout, and layers that are alike are
stacked: decoder.layers.mlp.experts.experts.linear_fc1.weight is [layers, experts, rows, columns]. Where some layers
have experts and others do not, each has keys of its own, decoder.layers.3.mlp...
"""

import json
import math
import os
import pickle
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megarl.config.schema.roles import Dtype, LoraConfig, LoraLayers, ParallelConfig
from megarl.files import CheckpointError, load_json_object, name_some
from megarl.mcore.spec import CRITIC_PROMPT, VALUE_RANGE, Role
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, Shape, Split, Weight, list_weights

VALUE_HEAD = "score.weight"
"""Hugging Face name of the value head: float [1, hidden size]"""
VOCAB_PADDING = 64
"""The vocabulary is padded to a multiple of this, so that checkpoints of different layouts have the same shapes."""
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")

EMBEDDING, FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model."""

    name: str
    """Megatron's, with global layer and expert numbers: decoder.layers.3.mlp.experts.17.linear_fc1.weight"""
    hf_names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shapes of the Hugging Face tensors"""
    split: Split
    served: str
    """SGLang's tensor"""
    expert: int | None = None
    """Global number of the expert that it belongs to"""
    is_constant: bool = False
    """A buffer in float32 that training leaves as it is"""
    rows: tuple[int, ...] = ()
    """Rows of each part, where one Hugging Face tensor holds them all"""
    served_row: int = 0
    """Its first row in SGLang's tensor, which holds others too"""
    interleaved: bool = False
    """SGLang's tensor has rows of its two parts by turns, so that each pair is taken as one row here"""

    @property
    def parts(self) -> list[tuple[str, int, int, int]]:
        """Hugging Face tensor, first row, rows and columns (of a vector 1) of what the parameter is made of."""
        found = []
        for name, shape in zip(self.hf_names, self.shapes, strict=True):
            first = 0
            for rows in self.rows or shape[:1]:
                found.append((name, first, rows, shape[1] if len(shape) > 1 else 1))
                first += rows
        return found


def describe(name: str, arch: Architecture, with_value_head: bool) -> Entry:
    """Find a parameter by Megatron's name with global layer and expert numbers. Raises KeyError for an unknown one."""
    h, vocab = arch.hidden_size, ((arch.vocab_size, arch.hidden_size),)
    if name == HEAD and with_value_head:
        return Entry(name, (VALUE_HEAD,), ((1, h),), Split.none, VALUE_HEAD)
    if name in (EMBEDDING, HEAD):
        hf_name = HF_EMBEDDING if name == EMBEDDING else HF_HEAD
        return Entry(name, (hf_name,), vocab, Split.vocab, hf_name)
    if name == FINAL_NORM:
        return Entry(name, ("model.norm.weight",), ((h,),), Split.none, "model.norm.weight")
    _, _, layer, suffix = name.split(".", 3)
    found = _EXPERT.search(suffix)
    weight = _index_names(arch, int(layer))[_EXPERT.sub("{}", suffix)]
    return _build_entry(name, weight, int(layer), int(found[0]) if found else None)


@lru_cache(maxsize=4096)
def _index_names(arch: Architecture, layer: int) -> dict[str, Weight]:
    """The table of a layer by Megatron's names, the local layers' and Transformer Engine's."""
    weights = list_weights(arch, layer)
    return {name: weight for weight in weights for name in (weight.name, weight.saved) if name}


def _build_entry(name: str, weight: Weight, layer: int, expert: int | None) -> Entry:
    prefix = f"model.layers.{layer}."
    hf_names = tuple(prefix + hf_name.replace("{}", str(expert)) for hf_name in weight.hf_names)
    served = prefix + weight.served if weight.served else hf_names[0]
    kinds = (weight.is_constant, weight.rows, weight.served_row, weight.interleaved)
    return Entry(name, hf_names, weight.shapes, weight.split, served, expert, *kinds)


def list_layer(
    arch: Architecture, layer: int, experts: Iterable[int] | None = None, *, saved: bool = False
) -> Iterator[Entry]:
    """The parameters of a layer, of all experts or of these. saved: under the names that Megatron's checkpoints have,
    in which norms belong to the linear layer after them; else the local layers' names.
    """
    weights = list_weights(arch, layer)
    numbers = list(experts if experts is not None else range(arch.experts.num_experts if arch.experts else 0))
    per_expert = [weight for weight in weights if weight.per_expert]
    for weight in weights:
        if not weight.per_expert:
            name = weight.saved if saved and weight.saved else weight.name
            yield _build_entry(f"decoder.layers.{layer}.{name}", weight, layer, None)
        elif weight is per_expert[0]:
            for number in numbers:
                for each in per_expert:
                    name = each.name.replace("{}", str(number))
                    yield _build_entry(f"decoder.layers.{layer}.{name}", each, layer, number)


def list_entries(arch: Architecture, with_value_head: bool) -> list[Entry]:
    """Every parameter of the whole model once, layer by layer, with the names that Megatron's checkpoints have."""
    layers = [entry for layer in range(arch.num_layers) for entry in list_layer(arch, layer, saved=True)]
    head = [] if arch.tied and not with_value_head else [describe(HEAD, arch, with_value_head)]
    return [describe(EMBEDDING, arch, False), *layers, describe(FINAL_NORM, arch, False), *head]


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    multiple = math.lcm(VOCAB_PADDING, tp)
    return math.ceil(vocab_size / multiple) * multiple


def to_megatron(entry: Entry, tensors: Sequence[Tensor], arch: Architecture, tp: int, tp_rank: int) -> Tensor:
    """Whole Hugging Face tensors -> this tensor-parallel rank's shard."""
    if entry.rows:
        tensors = tensors[0].split(entry.rows)  # type: ignore[no-untyped-call]
    if entry.split is Split.qkv:
        heads = arch.num_kv_heads
        grouped = torch.cat([x.reshape(heads, -1, *x.shape[1:]) for x in tensors], dim=1)
        # With fewer key-value heads than ranks the cuts are within a group.
        return grouped.reshape(-1, *tensors[0].shape[1:]).chunk(tp)[tp_rank]
    if entry.split is Split.gate_up:
        return torch.cat([x.chunk(tp)[tp_rank] for x in tensors])
    (whole,) = tensors
    if entry.split is Split.rows:
        return whole.chunk(tp)[tp_rank]
    if entry.split is Split.columns:
        return whole.chunk(tp, dim=1)[tp_rank]
    if entry.split is Split.vocab:
        size = padded_vocab_size(arch.vocab_size, tp) // tp
        shard = whole[tp_rank * size : (tp_rank + 1) * size]
        if len(shard) == size:
            return shard
        return torch.cat([shard, shard.new_zeros(size - len(shard), *whole.shape[1:])])
    return whole


def to_hf(entry: Entry, shards: Sequence[Tensor], arch: Architecture) -> list[tuple[str, Tensor]]:
    """The shards of all tensor-parallel ranks -> whole Hugging Face tensors by name."""
    if entry.split is Split.qkv:
        whole = torch.cat(list(shards))
        grouped = whole.reshape(arch.num_kv_heads, -1, arch.head_size, *whole.shape[1:])
        sizes = [arch.num_heads // arch.num_kv_heads, 1, 1]
        parts = [x.reshape(-1, *whole.shape[1:]) for x in grouped.split(sizes, dim=1)]  # type: ignore[no-untyped-call]
    elif entry.split is Split.gate_up:
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([half[i] for half in halves]) for i in range(2)]
    elif entry.split in (Split.rows, Split.columns):
        parts = [torch.cat(list(shards), dim=int(entry.split is Split.columns))]
    elif entry.split is Split.vocab:
        # The largest of all parameters: not copied where it is whole already.
        parts = [(shards[0] if len(shards) == 1 else torch.cat(list(shards)))[: arch.vocab_size]]
    else:
        parts = [shards[0]]
    if entry.rows:
        parts = [torch.cat(parts)]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


def compute_megatron_shape(entry: Entry, arch: Architecture, tp: int) -> Shape:
    """The shape of the whole parameter in Megatron, before tensor parallelism splits it over `tp` ranks."""
    vocab = entry.split is Split.vocab
    rows = padded_vocab_size(arch.vocab_size, tp) if vocab else sum(shape[0] for shape in entry.shapes)
    return (rows, *entry.shapes[0][1:])


ADAPTER_PREFIX = "adapters."
"""Keys of adapters in Megatron's checkpoints and names of their parameters begin so"""
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules"""
ADAPTER_FOLDER = "adapter"
"""Beside the weights of a Hugging Face checkpoint: what PEFT loads"""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LINEARS = {
    LoraLayers.attention: re.compile(r"\.self_attention\.linear_(?:qkv|proj)\.weight$"),
    LoraLayers.mlp: re.compile(r"\.mlp\.linear_fc[12]\.weight$"),
}


def has_adapter(entry: Entry, layers: Iterable[LoraLayers]) -> bool:
    return any(_LINEARS[kind].search(entry.name) for kind in layers)


def count_layer(arch: Architecture, lora: LoraConfig, tp: int) -> int:
    """Parameters of the adapters of one layer on a rank; layers are alike in what has adapters."""
    count = 0
    for entry in list_layer(arch, 0, experts=()):
        if has_adapter(entry, lora.layers):
            rows, columns = sum(shape[0] for shape in entry.shapes), entry.shapes[0][1]
            is_row = entry.split is Split.columns
            count += lora.rank * (columns // tp + rows if is_row else columns + rows // tp)
    return count


def to_peft(entry: Entry, a: Sequence[Tensor], b: Sequence[Tensor], arch: Architecture) -> Iterable[tuple[str, Tensor]]:
    """PEFT's tensors of one weight, from A and B of all tensor-parallel ranks; stacked weights have the same A."""
    if entry.split is Split.columns:
        ((name, whole),) = to_hf(entry, a, arch)
        pairs = [(name, whole, b[0].flatten(0, 1))]
    else:
        pairs = [(name, a[0], part) for name, part in to_hf(entry, [shard.flatten(0, 1) for shard in b], arch)]
    for name, own_a, own_b in pairs:
        module = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", own_a.clone()
        yield f"{module}.lora_B.weight", own_b.clone()


def build_peft_config(lora: LoraConfig, arch: Architecture, base: str, is_critic: bool) -> dict[str, Any]:
    """PEFT's adapter_config.json, for this model. base: the checkpoint that the adapters belong to."""
    entries = [entry for entry in list_layer(arch, 0, experts=()) if has_adapter(entry, lora.layers)]
    head = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if is_critic else {"task_type": "CAUSAL_LM"}
    return {
        "peft_type": "LORA",
        **head,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-2] for entry in entries for name in entry.hf_names}),
    }


@dataclass(frozen=True)
class PeftAdapter:
    """What peft.PeftModel.from_pretrained loads, from the folder `ADAPTER_FOLDER` of a checkpoint's directory."""

    config: Mapping[str, Any]
    """adapter_config.json"""
    tensors: Mapping[str, Tensor]

    def write(self, checkpoint: Path) -> None:
        folder = checkpoint / ADAPTER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(dict(self.config), indent=2) + "\n")
        if self.tensors:
            save_file(dict(self.tensors), folder / ADAPTER_WEIGHTS, {"format": "pt"})
            (folder / ADAPTER_WEIGHTS).chmod(0o644)


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 20
"""Elements that are looked at together where a whole tensor would need memory of its own size"""


_SHARE = re.compile(r"(.+)#(\d+)/(\d+),(\d+)/(\d+)")
"""Names of parts of a tensor of all experts, NAME#EXPERT/EXPERTS,PART/PARTS: of the expert's matrix, transposed, or
bias each PARTS-th number of the last dimension, from PART on"""


def name_stored(name: str) -> str:
    """The tensor in the files that has this one, or is it."""
    return found[1] if (found := _SHARE.fullmatch(name)) else name


def join_shares(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file; parts of one are held until all of them are there."""
    held: dict[str, dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        if (found := _SHARE.fullmatch(name)) is None:
            yield name, tensor
            continue
        expert, experts, part, parts = map(int, found.groups()[1:])
        shares = held[found[1]]
        shares[expert, part] = tensor.mT if tensor.ndim > 1 else tensor
        if len(shares) == experts * parts:
            each = [torch.stack([shares[x, y] for y in range(parts)], -1).flatten(-2) for x in range(experts)]
            yield found[1], torch.stack(each)
            del held[found[1]]


class CheckpointReader(ExitStack):
    """The tensors of DIRECTORY/model.safetensors, or of the files that its index names.

    Raises FileNotFoundError where there is neither, ValueError for an index that is none, KeyError that names a tensor
    that is not there, SafetensorError that names a file which is damaged.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._handles: dict[str, Any] = {}
        if (directory / INDEX).is_file():
            self._files = _read_index(directory / INDEX)
        elif (directory / SINGLE).is_file():
            self._files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            other = name_some(sorted(file.name for file in directory.glob("*.safetensors")))
            raise FileNotFoundError(
                f"{directory}: found neither {SINGLE} nor {INDEX}, which says what is in {other or 'other files'}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def find_misplaced(self, expected: Collection[str] | None = None) -> Iterator[str]:
        """How the files differ from the index that names them, and weights that servers would load beside them.

        expected: the tensors that the model needs; of others that are in the files alone nothing is said. None: those
        of the index.
        """
        found, files = {file.name for file in self._directory.glob("*.safetensors")}, sorted(set(self._files.values()))
        has_index = (self._directory / INDEX).is_file()
        if not has_index and (further := found - {SINGLE}):
            yield (
                f"has {name_some(sorted(further))} beside {SINGLE} and no {INDEX}; servers would load all of them:"
                " remove those that are not of the model"
            )
        if missing := [file for file in files if file not in found]:
            yield f"lacks {name_some(missing)}, of {len(files)} files that {INDEX} names"
        if missing or not has_index:
            return
        if SINGLE in found.difference(files):
            yield f"has {SINGLE} and {INDEX}, which names other files; remove those that are not of the model"
        holders: dict[str, list[str]] = {name: [] for name in sorted(self.names if expected is None else expected)}
        for file in files:
            for name in holders.keys() & set(self._open(file).keys()):
                holders[name].append(file)
        wrong = [
            f"{name} is in {' and '.join(own) or 'no file'}, by the index in {self._files.get(name, 'none')}"
            for name, own in holders.items()
            if own != [self._files.get(name)]
        ]
        if wrong:
            yield f"{INDEX} differs from the files: {name_some(wrong)}"

    def read(self, name: str) -> Tensor:
        """A tensor of the files, or a part of one of all experts (`_SHARE`)."""
        if (found := _SHARE.fullmatch(name)) is not None:
            expert, _, part, parts = map(int, found.groups()[1:])
            share: Tensor = self._open_file(found[1]).get_slice(found[1])[expert][..., part::parts]
            return (share.mT if share.ndim > 1 else share).contiguous()
        tensor: Tensor = self._open_file(name).get_tensor(name)
        return tensor

    def read_shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the tensor."""
        return tuple(self._open_file(name).get_slice(name).get_shape())

    def read_dtype(self, name: str) -> str:
        """The dtype as safetensors writes it (F32, BF16 ...), without reading the tensor."""
        dtype: str = self._open_file(name).get_slice(name).get_dtype()
        return dtype

    def _open_file(self, name: str) -> Any:
        if name not in self._files:
            raise KeyError(f"{self._directory}: has no tensor {name}")
        return self._open(self._files[name])

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = self.enter_context(safe_open(self._directory / file, framework="pt"))
            except SafetensorError as error:
                raise SafetensorError(f"{self._directory / file}: {error}") from None
        return self._handles[file]


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


def count_parameters(directory: Path) -> int:
    """Numbers in all tensors, read from the files' headers. Raises FileNotFoundError as CheckpointReader."""
    with CheckpointReader(directory) as reader:
        return sum(math.prod(reader.read_shape(name)) for name in reader.names)


def is_finite(tensor: Tensor) -> bool:
    pieces = tensor.reshape(-1).split(PIECE)  # type: ignore[no-untyped-call]
    return all(bool(piece.isfinite().all()) for piece in pieces)


MAX_FILE_BYTES = 4 << 30


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """One file, or numbered files with an index where there is more than max_file_bytes; the tensors of a file are held
    until it is full. Raises OSError.
    """
    parts: list[list[str]] = []
    total_size = size = 0
    held: dict[str, Tensor] = {}

    def write() -> None:
        path = directory / f"part-{len(parts)}"
        parts.append(list(held))
        try:
            save_file({name: tensor.contiguous() for name, tensor in held.items()}, path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from None
        path.chmod(0o644)  # safetensors lets the owner alone read it; servers of others read models too
        with path.open("rb") as file:
            os.fsync(file)
        held.clear()

    for name, tensor in join_shares(tensors):
        if held and size + tensor.nbytes > max_file_bytes:
            write()
            size = 0
        held[name] = tensor
        size, total_size = size + tensor.nbytes, total_size + tensor.nbytes
    write()
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    for number, name in enumerate(names):
        (directory / f"part-{number}").rename(directory / name)


def check_critic_checkpoint(directory: Path, critic: Architecture, policy: Architecture, longest: int) -> list[str]:
    """Why a checkpoint cannot be a critic of the policy; one message each. longest: of prompt and response."""
    problems = check_checkpoint(directory, critic, Role.critic)
    if not problems:
        with CheckpointReader(directory) as reader:
            own = sorted(name for name in reader.names if not name.startswith("model."))
            is_language_model = own == [HF_HEAD] or (critic.tied and not own)
            if VALUE_HEAD not in reader and not is_language_model:
                found = f"its tensors outside the transformer: {name_some(own) or 'none'}"
                problems.append(f"{directory}: has no value head {VALUE_HEAD} and is no language model; {found}")
            elif "score.bias" in reader:
                problems.append(f"{directory}: has a score.bias; a value head here has a weight alone")
    if critic.vocab_size != policy.vocab_size:
        problems.append(
            f"{directory}: vocab_size is {critic.vocab_size} and the policy's {policy.vocab_size}; the critic reads the"
            " policy's tokens, so they must have the same tokenizer"
        )
    return problems + _check_positions(directory, critic, longest)


def has_value_head(directory: Path) -> bool:
    with CheckpointReader(directory) as reader:
        return VALUE_HEAD in reader


def check_reference_checkpoint(directory: Path, arch: Architecture, policy: Architecture, longest: int) -> list[str]:
    """As `check_critic_checkpoint`, of the frozen model that scores the policy's responses."""
    problems = check_checkpoint(directory, arch, Role.reference)
    if arch.vocab_size < policy.vocab_size:
        problems.append(
            f"{directory}: vocab_size is {arch.vocab_size} and the policy's {policy.vocab_size}; it must have a row for"
            " each token that the policy may sample"
        )
    return problems + _check_positions(directory, arch, longest)


def _check_positions(directory: Path, arch: Architecture, longest: int) -> list[str]:
    if longest <= arch.max_length:
        return []
    lengths = f"data.prompt_length and rollout.response_length are {longest} tokens together"
    return [f"{directory}: has {arch.max_length} positions; {lengths}"]


def check_critic_prompt(directory: Path, critic_prompt: str | None) -> str | None:
    """Why a critic was not trained with this data.critic_prompt; None where it was, or its checkpoint says nothing."""
    fields = load_json_object(directory / "config.json")
    if fields.get(CRITIC_PROMPT, critic_prompt) == critic_prompt:
        return None
    return (
        f"{directory}: was trained with data.critic_prompt {fields[CRITIC_PROMPT]!r}, now {critic_prompt!r}; its"
        " values are of that input: set the key as there, or start from another critic"
    )


def check_value_range(directory: Path, value_range: Sequence[float] | None) -> str | None:
    """Why the value head of a checkpoint does not have this critic.value_range; None where it does."""
    recorded = load_json_object(directory / "config.json").get(VALUE_RANGE)
    if (None if value_range is None else list(value_range)) == recorded:
        return None
    found, right = json.dumps(value_range), json.dumps(recorded)
    return (
        f"found {found}; the value head of {directory} (critic.init) was trained with {right} ({VALUE_RANGE} in its"
        f" config.json), under which alone its values are what it has learned: it must be {right}"
    )


STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def check_checkpoint(directory: Path, arch: Architecture, role: Role) -> list[str]:
    """Why training cannot start from the tensors, each message with the directory or file. Tensors that config.json
    does not ask for are left alone.
    """
    expected = {name_stored(name) for entry in list_entries(arch, role is Role.critic) for name in entry.hf_names}
    if problems := check_files(directory, expected):
        return problems
    with CheckpointReader(directory) as reader:
        return [f"{directory}: {problem}" for problem in find_problems(reader, arch, role, may_have_more=True)]


def check_files(directory: Path, expected: Collection[str] | None = None) -> list[str]:
    """What a server would load otherwise than the index says; `expected` as in `CheckpointReader.find_misplaced`."""
    try:
        with CheckpointReader(directory) as reader:
            return [f"{directory}: {problem}" for problem in reader.find_misplaced(expected)]
    except (SafetensorError, OSError, ValueError) as error:
        return [str(error)]


def find_problems(
    reader: CheckpointReader, arch: Architecture, role: Role, may_have_more: bool = False
) -> Iterator[str]:
    """Tensors that are missing, misshaped, of no float dtype or tied in name alone, and those of another model unless
    there may be more. A critic without a value head gets one, so that it may be missing. Raises as the reader.
    """
    entries = list_entries(arch, with_value_head=role is Role.critic)
    expected = {}
    for entry in entries:
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True):
            if (found := _SHARE.fullmatch(name)) is not None:
                name, shape = found[1], (int(found[3]), *reversed((shape[0] * int(found[5]), *shape[1:])))
            expected[name] = shape
    makes_head = role is Role.critic and VALUE_HEAD not in reader
    ties_head = arch.tied and role is not Role.critic
    if makes_head:
        del expected[VALUE_HEAD]
    ignored = {HF_HEAD} - expected.keys() if makes_head or ties_head else set()
    names = [name for name in reader.names if not name.endswith("rotary_emb.inv_freq") and name not in ignored]
    if may_have_more:
        names = [name for name in names if name in expected]
    if problems := compare_shapes({name: reader.read_shape(name) for name in names}, expected):
        yield from problems
        return
    if unknown := {dtype for dtype in map(reader.read_dtype, expected) if dtype not in STORED_DTYPES}:
        yield f"has tensors of {', '.join(sorted(unknown))}; float weights are expected"
    elif ties_head and HF_HEAD in reader and not torch.equal(reader.read(HF_HEAD), reader.read(HF_EMBEDDING)):
        yield f"{HF_HEAD} is not {HF_EMBEDDING}, as tie_word_embeddings in config.json says"


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


# Everything of the source that is not weights goes along: config, tokenizer, chat template, generation settings.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def write_hf_checkpoint(
    directory: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    critic_fields: Mapping[str, Any] = MappingProxyType({}),
    adapter: PeftAdapter | None = None,
) -> None:
    """Write tensors with the source's config and tokenizer; `directory` is replaced, complete or not at all. With a
    value head among the tensors it is a ...ForSequenceClassification with `critic_fields` (those of WorkerSpec).

    adapter: written beside the weights that it is merged into.
    """
    with replace_directory(directory) as building:
        write_safetensors(building, tensors, MAX_FILE_BYTES)
        with CheckpointReader(building) as reader:
            value_head = reader.read(VALUE_HEAD).dtype if VALUE_HEAD in reader else None
            dtype = STORED_DTYPES[reader.read_dtype(min(reader.names))]
        copy_description(source, building, value_head, critic_fields, dtype)
        if adapter is not None:
            adapter.write(building)


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """An empty directory beside `directory` to be filled; it takes its place at the end, or is gone after an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield building
        building.chmod(0o755)
        if directory.exists():
            # A rename cannot replace a full directory: an older one is moved aside first.
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
            os.rename(directory, old / directory.name)
            os.rename(building, directory)
            shutil.rmtree(old)
        else:
            os.rename(building, directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def copy_description(
    source: Path,
    target: Path,
    value_head: torch.dtype | None,
    critic_fields: Mapping[str, Any] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
) -> None:
    """Copy everything of a Hugging Face checkpoint directory that is not weights.

    value_head: dtype of the value head of a critic, of which config.json then says ...ForSequenceClassification with
    `critic_fields`. dtype: of the weights, by which transformers loads them; None: it stays as in the source.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in [file for pattern in _COPIED for file in source.glob(pattern) if file.name != INDEX]:
        shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    config = load_json_object(path)
    before = dict(config)
    if value_head is not None:
        config |= critic_fields
        family = FAMILIES[config["model_type"]]
        config |= {
            "architectures": [family.hf_classifier or f"{family.hf_class}ForSequenceClassification"],
            **{"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        }
        config.pop("torch_dtype", None)
    if dtype or value_head:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype or value_head).removeprefix("torch.")
    if config != before:
        path.write_text(json.dumps(config, indent=2) + "\n")


KIND = "megatron"
DESCRIPTION = "hf"
"""Directory in it with everything of the Hugging Face checkpoint that is not weights"""
METADATA = ".metadata"
BACKENDS = "metadata.json"
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The only format whose optimizer state can change its tensor- and pipeline-parallel layout."""
SENT_ELEMENTS = 1 << 26
"""How many elements of the optimizer's state a save or load sends between data-parallel ranks at once"""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


def describe_role(role: Role, dtype: Dtype, parallel: ParallelConfig, iteration: int | None) -> dict[str, Any]:
    """What the manifest of a role's directory says about it."""
    layout = {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return {"kind": KIND, "role": role.value, "dtype": dtype.value, "parallel": layout, "iteration": iteration}


def locate(entry: Entry, arch: Architecture) -> tuple[str, tuple[int, ...]]:
    """Key and place along the stacked axes: (), (layer,), (layer, expert), or (expert,) where layers differ."""
    if not entry.name.startswith("decoder.layers."):
        return entry.name, ()
    _, _, layer, suffix = entry.name.split(".", 3)
    index: tuple[int, ...] = () if entry.expert is None else (entry.expert,)
    if entry.expert is not None:
        suffix = f"mlp.experts.experts.{suffix.removeprefix(f'mlp.experts.{entry.expert}.')}"
    if arch.has_unlike_layers:
        return f"decoder.layers.{layer}.{suffix}", index
    return f"decoder.layers.{suffix}", (int(layer), *index)


def compute_global_shapes(entries: Sequence[Entry], arch: Architecture, tp: int) -> Mapping[str, tuple[int, ...]]:
    """Key -> whole shape with the stacked axes."""
    layers = () if arch.has_unlike_layers else (arch.num_layers,)
    stacked = (*layers, arch.experts.num_experts if arch.experts else 0)
    located = ((entry, *locate(entry, arch)) for entry in entries)
    return {key: (*stacked[: len(index)], *compute_megatron_shape(entry, arch, tp)) for entry, key, index in located}


_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    f"{_CHECKPOINT}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    # It looks a name up among the memory layouts.
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{self._path}: refers to {module}.{name}, which does not belong in a checkpoint's metadata; nothing of it"
            " was run"
        )


def load_metadata(directory: Path) -> Any:
    """torch's Metadata. Raises CheckpointError where there is none, or something else in its place."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, path).load()
        tensors, storage = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; {directory} holds no checkpoint of Megatron's") from None
    except CheckpointError:
        raise
    except Exception as error:  # What a damaged pickle raises is anything.
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from None
    if not all(isinstance(key, str) for key in tensors) or not all(isinstance(x, MetadataIndex) for x in storage):
        raise CheckpointError(f"{path}: is not a checkpoint's metadata")
    return metadata


def holds_optimizer(directory: Path) -> bool:
    """Whether there is an optimizer's state beside the weights. Raises CheckpointError as `load_metadata`."""
    return any(_OPTIMIZER.match(key) for key in load_metadata(directory).state_dict_metadata)


def list_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Key -> shape of the whole tensor, stacked axes first; not of the optimizer's state. Raises as `load_metadata`."""
    return {
        key: tuple(value.size)
        for key, value in load_metadata(directory).state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and not _OPTIMIZER.match(key)
    }
