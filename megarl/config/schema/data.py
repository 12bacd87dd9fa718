"""The `data` group: one source of prompts; each source has keys of its own."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class DataConfig:
    """The keys that every source has."""

    prompt_length: int = 512
    """Maximum length of a prompt in tokens; longer prompts are dropped and counted."""
    num_heldout: int | None = None
    """Number of held-out prompts; null: a tenth of the different questions, 256 at most, or all of data.heldout_path
    or data.heldout_split where one is given."""
    chat_template: bool = True
    """Use the tokenizer's chat template, where it has one."""
    chat_template_path: str | None = None
    """File with a chat template (Jinja) in place of the tokenizer's own. null: the tokenizer's."""
    system: str | None = None
    """System message. null: none is given, and a chat template may add its own, as SmolLM2's does (16 tokens); "" is an
    empty message, in place of the template's."""
    instruction: str | None = None
    """Text around the question, for example "{question} Answer with a number."; null: the question alone."""
    instruction_path: str | None = None
    """File with that text instead, as long as it may be."""
    response_prefix: str | None = None
    """Text that the assistant's turn begins with, {question} replaced; it is part of the prompt, not generated."""
    critic_prompt: str | None = None
    """Text that the critic alone reads before the prompt, for example "Reference answer: {answer}"; fields are answer
    and the prompt's metadata (the other columns of a file). null: the critic reads what the policy reads."""
    critic_prompt_length: int = 64
    """With critic_prompt: maximum length of that text in tokens; a longer one is an error."""

    @property
    def num_critic_tokens(self) -> int:
        """Maximum number of tokens that the critic reads and the policy does not."""
        return 0 if self.critic_prompt is None else self.critic_prompt_length


TOYS = "megarl.examples.toys.problems:"
"""Where the functions are that data=letter_count, addition, guess and calculator name"""


@dataclass
class FunctionDataConfig(DataConfig):
    """Problems that a function makes: your own, or one of examples/toys (data=letter_count, addition, guess,
    calculator)."""

    path: str = MISSING
    """The function of (seed, num_heldout), as FILE.py:NAME or package.module:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function; each is checked against its parameters."""


@dataclass
class ReasoningGymDataConfig(DataConfig):
    """Problems that the package reasoning-gym generates."""

    num_heldout: int | None = 256
    """Number of held-out problems, none of them trained on; null: 256."""
    task: str = "chain_sum"
    """A task name of reasoning-gym."""
    size: int = 4096
    """Number of problems to train on."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options, for example {max_terms: 3}; each key is checked against the real ones."""


class AnswerPart(Enum):
    """What of a record's answer is the reference answer."""

    whole = "whole"
    """all of it"""
    after_hashes = "after_hashes"
    """what stands behind the last #### at the beginning of a line, as in GSM8K"""
    boxed = "boxed"
    """what stands in the last \\boxed{}"""


@dataclass
class FileDataConfig(DataConfig):
    """The keys of a source that reads records with named fields."""

    path: str | None = None
    """The file, or the name or directory of the dataset."""
    prompt_field: str | None = None
    """Name of the field with the question; null: the first of the usual names that any record has."""
    answer_field: str | None = None
    """Name of the field with the answer; null: likewise. In both, a dot selects a field of a nested record."""
    answer_part: AnswerPart | None = None
    """What of an answer is the reference answer: whole, after_hashes (what stands behind ####, as in GSM8K) or boxed
    (what stands in \\boxed{}). null: whole; after_hashes where every answer ends with a line "#### NUMBER"; an error
    where it is in doubt."""


@dataclass
class JsonlDataConfig(FileDataConfig):
    """A file with one JSON object per line."""

    heldout_path: str | None = None
    """File of the held-out problems; null: a part of `path` is held out."""


@dataclass
class ParquetDataConfig(FileDataConfig):
    """A parquet file."""

    heldout_path: str | None = None
    """File of the held-out problems; null: a part of `path` is held out."""


@dataclass
class HuggingFaceDataConfig(FileDataConfig):
    """A dataset by its name on the hub, or a local directory of one."""

    subset: str | None = None
    """The dataset's configuration, for example "main"."""
    split: str = "train"
    """The dataset's split to train on."""
    heldout_split: str | None = None
    """The split that is held out; null: a part of `split` is."""


@dataclass
class VerifiersDataConfig(DataConfig):
    """The dataset of an environment of the package verifiers; its evaluation rows are held out."""

    id: str = MISSING
    """The environment; conf/data/verifiers.yaml takes that of environment=verifiers."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments; likewise."""


SCHEMAS: dict[str, type[DataConfig]] = {
    "function": FunctionDataConfig,
    "reasoning_gym": ReasoningGymDataConfig,
    "jsonl": JsonlDataConfig,
    "parquet": ParquetDataConfig,
    "huggingface": HuggingFaceDataConfig,
    "verifiers": VerifiersDataConfig,
}


def register(store: ConfigStore) -> None:
    """Put the schema of each source into Hydra's ConfigStore."""
    for name, schema in SCHEMAS.items():
        store.store(group="data", name=f"{name}_schema", node=schema)
