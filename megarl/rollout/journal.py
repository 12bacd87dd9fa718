"""What a run goes on from: sampled responses whose update is in no checkpoint yet, and those of the replay buffer.

RUN_DIR/journal has one file for each call, so that a resumed run need not sample again:

iteration-3-round-1.samples   what one call gave; likewise pretraining-2.samples
group-40-37.samples           with rollout.max_staleness > 0: group 37, the one that was complete after 40 others

Files are pickles, 13 bytes a token and no Python object for each, since every iteration waits for its journal. Only the
classes of a sample are read from them: what names another is refused, so that a file cannot run code.
"""

import io
import math
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.files import write_atomically
from megarl.types import FinishReason, Prompt, Response, RoutedExperts, Sample, Score, Turn, WeightVersions

JOURNAL = "journal"
"""The folder of `Journal` in a run's directory"""
Samples = tuple[Sample, ...]
OWN = {each.__name__ for each in (FinishReason, Prompt, Response, RoutedExperts, Sample, Score, Turn, WeightVersions)}
ARRAYS = {"_frombuffer", "_reconstruct", "scalar", "ndarray", "dtype"}
"""What NumPy's arrays and numbers are made by"""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_array = module in ("numpy", "numpy._core.numeric", "numpy._core.multiarray") and name in ARRAYS
        if is_array or (module == "megarl.types" and name in OWN):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"found {module}.{name}, which no sample has")


def save_samples(path: Path, groups: Sequence[Sequence[Samples]]) -> None:
    """Write samples; the file is complete on disk or absent. What only environments and rewards read is left out."""
    cleaned = [[tuple(map(_clean, group)) for group in each] for each in groups]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pickle.dumps(cleaned, protocol=5))


def load_samples(path: Path) -> list[list[Samples]]:
    """What `save_samples` wrote, bit for bit. Raises ValueError naming the file where it is damaged."""
    try:
        found: list[list[Samples]] = _Reader(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise
    except Exception as error:  # A damaged pickle raises whatever its bytes happen to mean.
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None
    return found


def _clean(sample: Sample) -> Sample:
    prompt, score, response = sample.prompt, sample.score, sample.response
    turns = [replace(turn, details=dict(turn.details)) for turn in response.turns]
    return replace(
        sample,
        prompt=replace(prompt, metadata=dict(prompt.metadata), messages=(), columns={}),
        response=Response(**{**vars(response), "turns": turns}),
        score=replace(score, details=dict(score.details)),
    )


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
        """Remove what was saved under `key` and under keys that begin with `key`/."""
        name = key.replace("/", "-")
        for path in [self._find(key), *self._directory.glob(f"{name}-*.samples")]:
            path.unlink(missing_ok=True)

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
