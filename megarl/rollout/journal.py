"""RUN_DIR/journal: sampled responses, one file for each call, so that a resumed run need not sample them again."""

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from megarl.rollout.rollout_file import load_rollouts, write_rollouts
from megarl.types import Prompt, Rollout, Sample

NAME = "journal"


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

    def save(self, key: str, samples: Sequence[Sample]) -> None:
        write_rollouts(self._find(key), [Rollout(tuple(samples), 0)])

    def drop(self, key: str) -> None:
        """Remove what was saved under `key` and under keys that begin with `key`/."""
        name = key.replace("/", "-")
        for path in [self._find(key), *self._directory.glob(f"{name}-*.jsonl")]:
            path.unlink(missing_ok=True)

    def forget(self, through: int) -> None:
        """Remove the samples of value pretraining and of iterations up to this one."""
        for path in self._directory.glob("*.jsonl"):
            match = re.match(r"iteration-(\d+)-", path.name)
            if match is None or int(match[1]) <= through:
                path.unlink()

    def forget_pretraining(self, through: float = math.inf) -> None:
        """Remove the samples of value pretraining, up to the step `through` where it is given."""
        for path in self._directory.glob("pretraining-*.jsonl"):
            if int(path.stem.removeprefix("pretraining-")) <= through:
                path.unlink()

    def _find(self, key: str) -> Path:
        return self._directory / f"{key.replace('/', '-')}.jsonl"
