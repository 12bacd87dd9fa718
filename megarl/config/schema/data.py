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


@dataclass
class LetterCountDataConfig(DataConfig):
    """The tiny task: `b...=` asks for about letters_per_dot letters b for each dot."""

    prompt_length: int = 32
    """Maximum length of a prompt in tokens, each a character here."""
    num_heldout: int | None = 24
    """Number of held-out prompts; null: a quarter of all."""
    letters: str = "abcdef"
    """Letters that a prompt may ask for, each a different task."""
    max_dots: int = 16
    """Maximum number of dots of a prompt; every number from 1 up to it is used."""
    letters_per_dot: int = 4
    """Letters that a prompt asks for with each dot."""


@dataclass
class AdditionDataConfig(DataConfig):
    """Sums of two numbers of two digits (10 to 99)."""

    prompt_length: int = 64
    """Maximum length of a prompt in tokens."""
    num_heldout: int | None = 500
    """Number of held-out sums, none of them trained on; null: 500."""
    system: str | None = ""
    """Empty: SmolLM2's template otherwise adds 16 tokens to each prompt."""
    instruction: str | None = "Reply with only the number: {question}"
    """Text around the question; null: the question alone."""
    response_prefix: str | None = "{question} = "
    """Text that the assistant's turn begins with; part of the prompt, not generated. null: none."""
    num_train: int = 4096
    """Number of sums to train on."""
    answer_length: int = 12
    """Tokens that an answer takes at most: rollout.response_length of model=smollm2_135m with these data."""


@dataclass
class GuessDataConfig(DataConfig):
    """Numbers to guess, for environment=guess: every prompt is `1-7`, the number is the answer."""

    prompt_length: int = 64
    """Maximum length of a prompt in tokens."""
    num_heldout: int | None = None
    """Number of held-out prompts; null: one for each number, so that a greedy evaluation is exact. The prompts are
    those of training: what differs, the number, is hidden."""
    max_number: int = 7
    """The numbers are 1 to max_number, each equally often."""


@dataclass
class CalculatorDataConfig(DataConfig):
    """Products of two whole numbers, too large to be computed without a tool, after examples of how it is used."""

    prompt_length: int = 192
    """Maximum length of a prompt in tokens."""
    num_heldout: int | None = 256
    """Number of held-out products, none of them trained on; null: 256."""
    num_train: int = 4096
    """Number of products to train on."""
    digits: int = 3
    """Number of digits of each factor."""
    num_examples: int = 1
    """Number of worked examples, with a call and its result, that a prompt begins with."""
    example_call: str = '[calculator(expression="{question}")]'
    """The call in an example, {question} replaced; in the format that environment.parser reads."""


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
    "letter_count": LetterCountDataConfig,
    "addition": AdditionDataConfig,
    "calculator": CalculatorDataConfig,
    "guess": GuessDataConfig,
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
