"""What a run goes on from: sampled responses whose update is in no checkpoint yet, and those of the replay buffer.

RUN_DIR/journal has one file for each call, so that a resumed run need not sample again:

iteration-3-round-1.samples   what one call gave; likewise pretraining-2.samples
group-40-37.samples           with rollout.max_staleness > 0: group 37, the one that was complete after 40 others

Files are of msgpack, with what has an entry per token as bytes, since every iteration waits for its journal.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from megarl.files import write_atomically
from megarl.rollout.rollout_file import from_record, to_record
from megarl.types import Prompt, RoutedExperts, Sample, WeightVersions

JOURNAL = "journal"
"""The folder of `Journal` in a run's directory"""
Samples = tuple[Sample, ...]
ARRAYS = {"token_ids": np.int32, "rollout_logprobs": np.float32, "generated": np.bool_}


def save_samples(path: Path, groups: Sequence[Sequence[Samples]]) -> None:
    """Write samples; the file is complete on disk or absent. What only environments and rewards read is left out."""
    records = [[[_describe(sample) for sample in group] for group in each] for each in groups]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgpack.packb(records, unicode_errors="surrogatepass"))


def _describe(sample: Sample) -> dict[str, Any]:
    response, first_old = sample.response, sample.first_old_logprobs
    versions, experts = response.weight_versions, response.routed_experts
    return {
        **to_record(sample),
        "arrays": {name: getattr(response, name).tobytes() for name in ARRAYS},
        "versions": [versions.versions, versions.ends],
        "experts": None if experts is None else list(vars(experts).values()),
        "first_old_logprobs": None if first_old is None else first_old.tobytes(),
    }


def load_samples(path: Path) -> list[list[Samples]]:
    """What `save_samples` wrote, bit for bit. Raises ValueError naming the file where it is damaged."""
    content = path.read_bytes()
    try:
        records = msgpack.unpackb(content, unicode_errors="surrogatepass")
        return [[tuple(map(_build, group)) for group in each] for each in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None


def _build(record: dict[str, Any]) -> Sample:
    first_old, experts = record["first_old_logprobs"], record["experts"]
    # Arrays of bytes could not be written to, of which torch warns.
    arrays: dict[str, Any] = {
        name: np.frombuffer(bytearray(record["arrays"][name]), dtype) for name, dtype in ARRAYS.items()
    }
    versions, ends = record["versions"]
    record["response"] |= arrays | {
        "weight_versions": WeightVersions(tuple(versions), tuple(ends)),
        "routed_experts": None if experts is None else RoutedExperts(*experts),
    }
    kept = None if first_old is None else np.frombuffer(bytearray(first_old), np.float32)
    return from_record(record, first_old_logprobs=kept)


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
            if [s.prompt.id for s in samples] != [prompt.id for prompt in prompts for _ in range(num_responses)]:
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
