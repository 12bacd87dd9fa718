"""RUN_DIR/journal: sampled responses, so that a resumed run need not sample them again.

iteration-3-round-1.jsonl   what one call gave; likewise pretraining-2.jsonl
group-40-37.jsonl           with rollout.max_staleness > 0: group 37, the one that was complete after 40 others
"""

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from megarl.rollout.rollout_file import load_rollouts, write_rollouts
from megarl.types import Prompt, Rollout, Sample

NAME = "journal"
_GROUP = re.compile(r"group-(\d+)-(\d+)")


class Journal:
    """Samples by the key of their call; a file is complete on disk or absent."""

    def __init__(self, directory: Path):
        self._directory = directory

    def load(self, key: str, prompts: Sequence[Prompt], num_responses: int) -> tuple[Sample, ...] | None:
        """The samples that were saved under this key; None where there are none for these prompts.

        A file that cannot be read or has other prompts is not used; a warning says so.
        """
        path = self._find(key)
        if not path.is_file():
            return None
        try:
            (rollout,) = load_rollouts(path)
        except ValueError as error:
            warnings.warn(f"{error}; the responses are sampled again", RuntimeWarning, stacklevel=2)
            return None
        asked = [prompt.id for prompt in prompts for _ in range(num_responses)]
        if [sample.prompt.id for sample in rollout.samples] != asked:
            warnings.warn(
                f"{path}: has responses to other prompts than this run's; they are sampled again",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return rollout.samples

    def save_group(self, place: int, number: int, samples: Sequence[Sample]) -> None:
        """Save group `number`, which is the one at `place` (from 0) in the order in which groups are complete."""
        self.save(_name_group(place, number), samples)

    def list_groups(self, first: int) -> list[tuple[int, int]]:
        """(place, number) of the groups from place `first` on, in order."""
        found = (_GROUP.fullmatch(path.stem) for path in self._directory.glob("group-*.jsonl"))
        return sorted((int(m[1]), int(m[2])) for m in found if m is not None and int(m[1]) >= first)

    def load_group(self, place: int, number: int, prompt: Prompt, num_responses: int) -> tuple[Sample, ...] | None:
        """As `load`; a file that cannot be used is removed, since the group will be saved at another place."""
        key = _name_group(place, number)
        found = self.load(key, [prompt], num_responses)
        if found is None:
            self.drop(key)
        return found

    def drop_group(self, place: int, number: int) -> None:
        self.drop(_name_group(place, number))

    def save(self, key: str, samples: Sequence[Sample]) -> None:
        write_rollouts(self._find(key), [Rollout(tuple(samples), 0)])

    def drop(self, key: str) -> None:
        """Remove what was saved under `key` and under keys that begin with `key`/."""
        name = key.replace("/", "-")
        for path in [self._find(key), *self._directory.glob(f"{name}-*.jsonl")]:
            path.unlink(missing_ok=True)

    def drop_failed(self) -> None:
        """Remove the files that have a sample without a reward: whoever resumes samples and scores them again."""
        for path in self._directory.glob("*.jsonl"):
            (rollout,) = load_rollouts(path)
            if any(sample.score.failure is not None for sample in rollout.samples):
                path.unlink()

    def forget(self, through: int, num_groups: int = 0) -> None:
        """Remove the samples of value pretraining, of iterations up to this one and of the first `num_groups` groups
        in the order in which they were complete."""
        for path in self._directory.glob("*.jsonl"):
            iteration, group = re.match(r"iteration-(\d+)-", path.name), _GROUP.fullmatch(path.stem)
            is_kept = int(iteration[1]) > through if iteration else group is not None and int(group[1]) >= num_groups
            if not is_kept:
                path.unlink()

    def forget_pretraining(self, through: float = math.inf) -> None:
        """Remove the samples of value pretraining, up to the step `through` where it is given."""
        for path in self._directory.glob("pretraining-*.jsonl"):
            if int(path.stem.removeprefix("pretraining-")) <= through:
                path.unlink()

    def _find(self, key: str) -> Path:
        return self._directory / f"{key.replace('/', '-')}.jsonl"


def _name_group(place: int, number: int) -> str:
    return f"group-{place}-{number}"
