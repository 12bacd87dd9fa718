"""Problems of a Hugging Face dataset: by name from the hub or its local cache, or a local directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.data import HuggingFaceDataConfig
from megarl.data.problem import Problem, ProblemSplits, note_parts
from megarl.data.records import Located, read_problems


class HuggingFaceSource:
    def __init__(self, config: HuggingFaceDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """The problems of data.split and, where it is given, data.heldout_split. Raises ConfigError."""
        train, note = self._load_split("data.split", self.config.split)
        if self.config.heldout_split is None:
            return ProblemSplits(train, None, notes=(note,))
        heldout, other = self._load_split("data.heldout_split", self.config.heldout_split)
        return ProblemSplits(train, heldout, notes=note_parts(note, other))

    def _load_split(self, key: str, split: str) -> tuple[list[Problem], str]:
        if not self.config.path:
            raise ConfigError(["data.path: found nothing; it must be a dataset's name or directory"])
        dataset = open_dataset(self.config.path, self.config.subset, split, key)
        problems, note = read_problems(_locate(dataset, f"{self.config.path}[{split}]"), self.config)
        if not problems:
            raise ConfigError([f"{key}: {split!r} of {self.config.path} holds no problems"])
        return problems, note


def open_dataset(path: str, subset: str | None, split: str, key: str) -> Any:
    """One split as a datasets.Dataset. Code inside a dataset is never run. Raises ConfigError."""
    import datasets

    directory = Path(path).expanduser()
    local = directory.is_dir()
    try:
        if (directory / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(directory))
            if split not in found:
                raise ConfigError([f"{key}: found {split!r}; {path} has {', '.join(found)}"])
            return found[split]
        if (directory / "state.json").is_file():
            return _only_split(datasets.load_from_disk(str(directory)), path, split, key)
        return datasets.load_dataset(str(directory) if local else path, name=subset, split=split)
    except ConfigError:
        raise
    except Exception as error:  # the library raises its own, the hub's and the network's
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if local or isinstance(error, ValueError):
            reason = f"cannot read {split!r} (data.subset {subset})"
        else:
            reason = (
                "no directory here, not in the local cache, and the hub was not reached or does not have it;"
                " offline, give a local directory, or a file with data=jsonl or data=parquet"
            )
        raise ConfigError([f"data.path: {path}: {reason}: {detail}"]) from error


def _only_split(dataset: Any, path: str, split: str, key: str) -> Any:
    """A dataset saved alone; its split may have a name."""
    own = str(dataset.split) if dataset.split is not None else split
    if own != split:
        raise ConfigError([f"{key}: found {split!r}; {path} holds only {own!r}"])
    return dataset


def _locate(dataset: Any, name: str) -> Iterator[Located]:
    for number, record in enumerate(dataset):
        yield f"{name}: row {number}", record
