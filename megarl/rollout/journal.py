"""What a run goes on from: sampled responses whose update is in no checkpoint yet, and those of the replay buffer.

RUN_DIR/journal has one file for each call, so that a resumed run need not sample again:

iteration-3-round-1.samples   what one call gave; likewise pretraining-2.samples
group-40-37.samples           with rollout.max_staleness > 0: group 37, the one that was complete after 40 others

Files are those of safetensors: what has an entry per token as arrays, since every iteration waits for its journal, and
the rest as JSON.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megarl.files import parse_strict_json, write_atomically
from megarl.rollout.rollout_file import from_record, to_record
from megarl.types import Prompt, RoutedExperts, Sample, WeightVersions

JOURNAL = "journal"
"""The folder of `Journal` in a run's directory"""
Samples = tuple[Sample, ...]
NONE = np.zeros(0, np.float32)
ARRAYS: dict[str, tuple[type, Callable[[Sample], Any]]] = {
    "token_ids": (np.int32, lambda sample: sample.response.token_ids),
    "rollout_logprobs": (np.float32, lambda sample: sample.response.rollout_logprobs),
    "generated": (np.bool_, lambda sample: sample.response.generated),
    "first_old_logprobs": (np.float32, lambda sample: NONE if (x := sample.first_old_logprobs) is None else x),
    "routed_experts": (np.uint8, lambda sample: _read_bytes(sample.response.routed_experts)),
}
"""The arrays of a file, those of all samples one after the other: dtype, and what a sample has"""
EXPERTS = ("num_layers", "top_k", "num_experts")


def save_samples(path: Path, groups: Sequence[Sequence[Samples]]) -> None:
    """Write samples; the file is complete on disk or absent. What only environments and rewards read is left out."""
    samples = [sample for each in groups for group in each for sample in group]
    records = [[[_describe(sample) for sample in group] for group in each] for each in groups]
    text = json.dumps(records, allow_nan=False).encode()
    arrays = {"records": np.frombuffer(text, np.uint8)}
    for name, (dtype, get) in ARRAYS.items():
        arrays[name] = np.concatenate([np.zeros(0, dtype), *map(get, samples)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(arrays))


def _describe(sample: Sample) -> dict[str, Any]:
    experts, versions = sample.response.routed_experts, sample.response.weight_versions
    return {
        **to_record(sample),
        "sizes": {name: len(get(sample)) for name, (_, get) in ARRAYS.items()},
        "versions": [versions.versions, versions.ends],
        "experts": None if experts is None else [getattr(experts, name) for name in EXPERTS],
        "has_first_old": sample.first_old_logprobs is not None,
    }


def _read_bytes(experts: RoutedExperts | None) -> NDArray[np.uint8]:
    return np.frombuffer(b"" if experts is None else experts.data, np.uint8)


def load_samples(path: Path) -> list[list[Samples]]:
    """What `save_samples` wrote, bit for bit. Raises ValueError naming the file where it is damaged."""
    try:
        arrays = load(path.read_bytes())
        records, ends = parse_strict_json(arrays["records"].tobytes()), dict.fromkeys(ARRAYS, 0)
        return [[tuple(_build(record, arrays, ends) for record in group) for group in each] for each in records]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None


def _build(record: dict[str, Any], arrays: Mapping[str, NDArray[Any]], ends: dict[str, int]) -> Sample:
    """The sample whose arrays begin at `ends`, which then are its own ends."""
    own: dict[str, NDArray[Any]] = {}
    for name, size in record["sizes"].items():
        own[name] = arrays[name][ends[name] : ends[name] + size]
        ends[name] += size
    first_old, experts = own.pop("first_old_logprobs"), own.pop("routed_experts").tobytes()
    versions, version_ends = record["versions"]
    record["response"] |= {
        **own,
        "weight_versions": WeightVersions(tuple(versions), tuple(version_ends)),
        "routed_experts": None if record["experts"] is None else RoutedExperts(experts, *record["experts"]),
    }
    return from_record(record, first_old_logprobs=first_old if record["has_first_old"] else None)


def name_pretraining(step: int) -> str:
    """The key of the responses of a step of value pretraining, counted from 1."""
    return f"pretraining-{step}"


def name_group(place: int, number: int) -> str:
    """The key of group `number`, which is the one at `place` (from 0) in the order in which groups are complete."""
    return f"group-{place}-{number}"


_GROUP = re.compile(r"group-(\d+)-(\d+)")


class Journal:
    """Samples by the key of their call; a file is complete on disk or absent."""

    def __init__(self, directory: Path):
        self._directory = directory

    def load(self, key: str, prompts: Sequence[Prompt], num_responses: int) -> Samples | None:
        """The samples that were saved under this key; None where there are none for these prompts.

        A file that cannot be read or has other prompts is not used; a warning says so.
        """
        path = self._find(key)
        try:
            ((samples,),) = load_samples(path)
            asked = [prompt.id for prompt in prompts for _ in range(num_responses)]
            if [sample.prompt.id for sample in samples] != asked:
                raise ValueError(f"{path}: has responses to other prompts than this run's")
        except FileNotFoundError:
            return None
        except ValueError as error:
            warnings.warn(f"{error}; the responses are sampled again", RuntimeWarning, stacklevel=2)
            return None
        return samples

    def list_groups(self, first: int) -> list[tuple[int, int]]:
        """(place, number) of the groups from place `first` on, in order."""
        found = (_GROUP.fullmatch(path.stem) for path in self._directory.glob("group-*.samples"))
        return sorted((int(m[1]), int(m[2])) for m in found if m is not None and int(m[1]) >= first)

    def save(self, key: str, samples: Samples) -> None:
        save_samples(self._find(key), [[samples]])

    def drop(self, key: str) -> None:
        """Remove what was saved under `key`."""
        self._find(key).unlink(missing_ok=True)

    def drop_failed(self) -> None:
        """Remove the files that have a sample without a reward: whoever resumes samples and scores them again."""
        for path in self._directory.glob("*.samples"):
            ((samples,),) = load_samples(path)
            if any(sample.score.failure is not None for sample in samples):
                path.unlink()

    def forget(self, through: int, num_groups: int = 0, num_steps: float = math.inf) -> None:
        """Remove the samples of iterations up to this one, of the first `num_groups` groups in the order in which they
        were complete, and of the first `num_steps` steps of value pretraining."""
        kept: Mapping[str, float] = {
            r"iteration-(\d+)-.*": through + 1,
            _GROUP.pattern: num_groups,
            r"pretraining-(\d+)": num_steps + 1,
        }
        for path in self._directory.glob("*.samples"):
            if not any((m := re.fullmatch(name, path.stem)) and int(m[1]) >= first for name, first in kept.items()):
                path.unlink()

    def _find(self, key: str) -> Path:
        return self._directory / f"{key.replace('/', '-')}.samples"
