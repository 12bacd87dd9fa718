"""The variants of data.*, environment.* and reward.*: each has keys of its own."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.errors import ConfigError
from megarl.config.schema.key import GENERATED, NOT_ALONE, TRAINED, WITH_CRITIC, Effect, key, needs

OF_HELDOUT = Effect(
    lambda it: it.command != "evaluate" or it.config.evaluate.heldout or not hasattr(it.node, "prompt_field"),
    "in an evaluation of a whole set; it counts with evaluate.heldout=true (evaluate.num_problems=N takes a part)",
)
RENDERS = Effect(
    lambda it: GENERATED.counts(it) or it.node.critic_prompt is not None,
    "with rollout.file, which has the prompts' tokens; it counts with data.critic_prompt or with rollout.file=null",
)
SCORING: dict[str, Any] = {"low": 0.01, "high": 3600, "why": "seconds; to start a comparison takes a hundredth"}


@dataclass
class DataConfig:
    """The keys that every source has."""

    prompt_length: int = key(512, low=1, despite=GENERATED)
    """Maximum tokens of a prompt; longer prompts are dropped and counted."""
    num_heldout: int | None = key(None, when=OF_HELDOUT)
    """Number of held-out prompts; null: a tenth of the questions, at most 256, or all of a held-out file or split."""
    chat_template: bool = key(True, off=False, despite=GENERATED, when=RENDERS)
    """Use the tokenizer's chat template if it has one."""
    chat_template_path: str | None = None
    """File with a chat template (Jinja) instead of the tokenizer's own."""
    template_inputs: dict[str, Any] = field(default_factory=dict)
    """What the chat template reads besides messages and tools, for example {enable_thinking: false}."""
    system: str | None = key(None, is_prose=True)
    """System message; null: none, but a chat template may add its own; "": an empty message."""
    instruction: str | None = key(None, is_prose=True)
    """Text around the question, for example "{question} Answer with a number."; null: the question alone."""
    response_prefix: str | None = key(None, is_prose=True)
    """Text that begins the assistant's turn, with {question} replaced; part of the prompt, not generated."""
    critic_prompt: str | None = key(None, is_prose=True, despite=GENERATED, when=(TRAINED, WITH_CRITIC))
    """Text before the prompt that only the critic reads, for example "Reference answer: {answer}"."""
    critic_prompt_length: int = key(64, low=1, despite=GENERATED, when=(TRAINED, WITH_CRITIC, needs("critic_prompt")))
    """Maximum tokens of that text; a longer one is an error."""

    @property
    def num_critic_tokens(self) -> int:
        """Maximum number of tokens that the critic reads and the policy does not."""
        return 0 if self.critic_prompt is None else self.critic_prompt_length


TOY_PROBLEMS = "megarl.examples.toys.problems:"
"""Where the functions are that data=letter_count, addition, guess and calculator name"""


@dataclass
class FunctionDataConfig(DataConfig):
    """Problems that a function makes: your own, or one of examples/toys (data=letter_count, addition, guess,
    calculator)."""

    path: str = MISSING
    """The function of (seed, num_heldout), as FILE.py:NAME or package.module:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function, checked against its parameters."""


@dataclass
class ReasoningGymDataConfig(DataConfig):
    """Problems that the package reasoning-gym generates."""

    num_heldout: int | None = key(256, low=1, high=10**6, why="all are made at the start")
    """Number of held-out problems, none of them trained on; null: 256."""
    task: str = "chain_sum"
    """A task name of reasoning-gym."""
    size: int = key(4096, low=1, high=10**6, why="all are made at the start")
    """Number of problems to train on."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options, for example {max_terms: 3}, checked against the real ones."""


AnswerPart = Enum("AnswerPart", {"whole": "whole", "after_hashes": "after_hashes", "boxed": "boxed"})


@dataclass
class FileDataConfig(DataConfig):
    """A source of records with named fields."""

    path: str | None = None
    """The file, or the name or directory of the dataset."""
    prompt_field: str | None = None
    """Field with the question; null: the first of the usual names that a record has."""
    answer_field: str | None = None
    """Field with the answer; null: likewise. In both, a dot selects a field of a nested record."""
    select: dict[str, Any] = field(default_factory=dict)
    """Field -> value, or list of values, of the records that are read; others are left out: {data_source: gsm8k}."""
    answer_part: AnswerPart | None = None
    """Part of an answer that is the reference. after_hashes: the text after the last ####, as in GSM8K; boxed: the
    content of the last \\boxed{}; null: whole, or after_hashes if every answer ends with "#### NUMBER"."""


@dataclass
class JsonlDataConfig(FileDataConfig):
    """A file with one JSON object per line."""

    path: Any = None
    """The file, or a list of files."""
    heldout_path: str | None = None
    """File of the held-out problems; null: a part of `path` is held out."""


@dataclass
class ParquetDataConfig(JsonlDataConfig):
    """A parquet file, with the keys of data=jsonl."""


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
    """The environment; conf/data/verifiers.yaml takes it from environment=verifiers."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments; likewise."""


ShareBy = Enum("ShareBy", {"samples": "samples", "tokens": "tokens"})


@dataclass
class MixDataConfig(DataConfig):
    """Several sources of prompts. What a source does not say itself is the run's own."""

    sources: dict[str, Any] = field(default_factory=dict)
    """Name -> `kind`, a choice of data=, its keys, and `share`, `reward` and `environment` (each with kind and keys),
    `reward_scale` (1), `response_length`: {math: {kind: gsm8k, share: 0.7, reward: {kind: math}}, ...}."""
    common: dict[str, Any] = field(default_factory=dict)
    """The same keys for the sources that do not have their own, for example {kind: jsonl, path: all.jsonl}."""
    share_by: ShareBy = ShareBy.samples
    """What shares are of: samples, or the tokens of responses, by their lengths so far. Without shares each source has
    as many prompts as it has problems."""


@dataclass
class EnvironmentConfig:
    """What answers the policy. Each kind of environment has different keys."""


@dataclass
class SingleTurnEnvironmentConfig(EnvironmentConfig):
    """Nothing answers: the first response is the whole episode."""


@dataclass
class MultiTurnEnvironmentConfig(EnvironmentConfig):
    """Environments of several turns."""

    max_turns: int = key(8, low=1, high=100_000)
    """Maximum turns; a longer episode is cut there (finish_reason max_turns)."""
    turn_length: int | None = key(None, low=1, high=2**24)
    """Maximum tokens of one action; null: only rollout.response_length, of actions and observations together."""
    step_deadline_s: float = key(60.0, low=0.01, high=86_400)
    """Deadline of one answer of the environment; then the sample has failed and is skipped."""


@dataclass
class ClassEnvironmentConfig(MultiTurnEnvironmentConfig):
    """Your own class, derived from megarl.environment.Environment, or that of environment=guess (examples/toys)."""

    path: str = MISSING
    """The class, as FILE.py:NAME or package.module:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the object that is made for each episode."""


@dataclass
class AgentEnvironmentConfig(MultiTurnEnvironmentConfig):
    """An agent of yours that asks a model through an OpenAI-compatible endpoint, as it is (docs/agents.md). One of
    command, path and url says what it is."""

    max_turns: int = key(64, low=1, high=100_000)
    """Maximum requests of an episode; more are refused."""
    step_deadline_s: float = key(120.0, low=0.01, high=86_400)
    """Longest silence: time between an answer and the next request, or the agent's end."""
    command: list[str] = field(default_factory=list)
    """A program and its arguments, started for each episode, with the task on standard input."""
    path: str | None = None
    """A function of the task, as FILE.py:NAME or package.module:NAME, in a process of its own for each episode."""
    url: str | None = None
    """A service that is sent the task of each episode."""
    episode_deadline_s: float = key(600.0, low=0.01, high=7 * 86_400)
    """Deadline of a whole episode; then the sample has failed and is skipped."""
    max_episodes: int = key(16, low=1, high=100_000)
    """Episodes that the agent can bear at a time."""
    parser: str | None = None
    """SGLang's parser of tool calls; null: the one for the model's chat template."""
    description: str | None = None
    """What the system message says of an agent's tools, with {tools} replaced by JSON schemas; null: what the chat
    template says, else a text that asks for calls in hermes' format."""
    host: str = "127.0.0.1"
    """Address at which the endpoint listens; another for a service on another machine."""


@dataclass
class VerifiersEnvironmentConfig(MultiTurnEnvironmentConfig):
    """An environment of the package verifiers, with data=verifiers and reward=environment; its tools are described and
    called as with environment=tools."""

    max_turns: int = key(1_000, low=1, high=100_000)
    """Maximum turns, in addition to the environment's own limit."""
    id: str = MISSING
    """The name of an installed environment, or FILE.py:NAME or package.module:NAME."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    parser: str | None = None
    """SGLang's parser of tool calls; null: the one for the model's chat template."""


@dataclass
class ToolsEnvironmentConfig(MultiTurnEnvironmentConfig):
    """Tools that the policy may call: Python functions, in processes of their own. The first action without a call is
    the answer and ends the episode."""

    tools: list[str] = field(default_factory=lambda: ["calculator"])
    """calculator, python (in the sandbox), or your functions as FILE.py:NAME or package.module:NAME, described to the
    policy by signature and docstring."""
    parser: str | None = None
    """SGLang's parser of the calls, for example hermes or llama3; null: the one for the model's chat template."""
    description: str | None = None
    """Text of the system message, with {tools} replaced by JSON schemas; null: the chat template's, else one that asks
    for calls in hermes' format."""
    num_processes: int = key(2, low=1, high=1024, why="each is a process of the driver's machine")
    """Processes that run the functions, each one call at a time."""
    call_timeout_s: float = key(10.0, low=0.01, high=86_400)
    """Time limit of one call; a longer one is answered with an error."""
    memory_gb: float = key(1.0, low=0.01, high=2**20)
    """GiB that a call may use beyond what its process has after loading; more is answered with an error."""
    max_calls: int = key(4, low=1, high=100_000)
    """Maximum calls in one action; further ones are answered with an error."""
    result_length: int = key(2000, low=1, high=2**24)
    """Maximum characters of one result; the rest is cut off."""
    call_reward: float = 0.0
    """Reward of a first action whose calls all succeed, added to what `reward=` gives."""


@dataclass
class RewardConfig:
    """How responses are scored. Each kind of reward has different keys."""

    wrong: float = key(0.0, kw_only=True, below=1, despite=(GENERATED, NOT_ALONE), when=TRAINED)
    """Reward of a wrong answer (DAPO: -1): training uses wrong + (1 - wrong) s for a score s, and logs s."""
    max_failed_frac: float = key(0.1, kw_only=True, low=0, high=1)
    """Maximum share of responses whose verifier or environment failed; a larger share ends the run."""


@dataclass
class ProcessRewardConfig(RewardConfig):
    """Rewards that run in processes of their own."""

    num_workers: int | None = key(None, kw_only=True, low=1, high=1024, why="each is a process")
    """Processes that score at a time; null: one for every four cores, 1 to 16."""
    timeout_s: float = key(5.0, kw_only=True, **SCORING)
    """Time limit of a call, for a response or a group; an endless comparison counts as wrong, anything else as
    failed."""
    memory_gb: float = key(8.0, kw_only=True, low=0.01, high=2**20, why="GiB")
    """Memory limit in GiB of one process, as address space beyond what it has after loading."""


@dataclass
class ExactRewardConfig(RewardConfig):
    """The response is the answer, up to case, spaces and a full stop at the end."""


@dataclass
class LetterCountRewardConfig(RewardConfig):
    """The tiny task: "b...=" asks for about 12 letters b, four for each dot."""

    tolerance: float = key(1.25, low=1)
    """Lengths within this factor of the requested one get the length score 1."""
    falloff: float = key(4.0, above=1)
    """The length score falls from 1 at a factor of `tolerance` to 0 at `tolerance` * `falloff`, linear in
    log(length)."""


@dataclass
class AdditionRewardConfig(RewardConfig):
    """The response is the number and nothing else."""


StatedAnswer = Enum("StatedAnswer", {"boxed": "boxed", "final": "final", "any": "any"})


@dataclass
class MathRewardConfig(ProcessRewardConfig):
    """Mathematical equality of the stated answer and the expected one, read by math-verify's parser."""

    answer: StatedAnswer = StatedAnswer.final
    """What states the answer. boxed: a box alone; final: a box, an explicit final statement ("Answer: 72", "#### 72",
    `<answer>`), or nothing but the answer; any: else also the last value of the last sentence."""


@dataclass
class ReasoningGymRewardConfig(ProcessRewardConfig):
    """The task's own scorer from reasoning-gym."""

    correct_at: float = key(1.0, above=0, high=1)
    """Lowest score that counts as correct; scorers give less than 1 for partly correct answers."""


@dataclass
class EnvironmentRewardConfig(RewardConfig):
    """The rewards that the environment gave to the turns, and nothing else."""

    correct_at: float = 1.0
    """Lowest sum of the turns' rewards that counts as correct."""


@dataclass
class FunctionRewardConfig(ProcessRewardConfig):
    """Your own function of (prompt, response), or with TRL's or verl's parameters."""

    path: str = MISSING
    """The function, as FILE.py:NAME or package.module:NAME."""


@dataclass
class GroupFunctionRewardConfig(FunctionRewardConfig):
    """Your own function of (prompt, responses), which scores all responses of a group at once; also TRL's."""


@dataclass
class NumericRewardConfig(RewardConfig):
    """The last number of the response is the answer, exactly or within a tolerance."""

    tolerance: float = key(0.0, low=0)
    """Largest difference from the answer that counts as correct. Numbers are read and compared exactly."""
    relative_tolerance: float = key(0.0, low=0)
    """The same as a share of the answer; the larger of the two holds."""


@dataclass
class FormatRewardConfig(ProcessRewardConfig):
    """The response has a form, whatever it says."""

    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>"
    """Regular expression (Python's; a dot matches line ends too) for the whole response without outer white space."""


@dataclass
class LengthRewardConfig(RewardConfig):
    """The number of tokens that the policy generated is in a range."""

    min_length: int = key(0, low=0)
    """Fewest tokens with the full score."""
    max_length: int = key(512, low=0)
    """Most tokens with the full score."""
    falloff: int = key(128, low=0)
    """Tokens outside of the range at which the score is 0, linear in between."""


@dataclass
class CodeRewardConfig(ProcessRewardConfig):
    """The response's Python program passes the prompt's tests, in a sandbox."""

    timeout_s: float = key(10.0, kw_only=True, **SCORING)
    """Time limit of a program for each pair of input and output, or for all statements; longer fails."""
    memory_gb: float = key(1.0, kw_only=True, low=0.01, high=2**20, why="GiB")
    """Memory limit in GiB of one program, as address space."""
    partial: bool = False
    """The score is the share of tests that pass; else all must."""


@dataclass
class ServerRewardConfig(RewardConfig):
    """Rewards that a server gives."""

    url: str = field(default=MISSING, kw_only=True)
    """The server, as http://HOST:PORT or https://HOST; with reward=http also the path."""
    api_key_env: str | None = field(default=None, kw_only=True)
    """Environment variable with the key that is sent (Bearer); it is never saved or shown."""
    timeout_s: float = key(60.0, kw_only=True, low=0.01, high=86_400, why="seconds")
    """Deadline of one request; then it is repeated."""
    max_retries: int = key(3, kw_only=True, low=0, high=100)
    """Further attempts after status 408, 409, 429, 5xx or a lost connection; then the sample has failed."""
    max_concurrency: int = key(64, kw_only=True, low=1, high=100_000, why="each is a connection")
    """Maximum requests at a time; further ones wait."""


@dataclass
class HttpRewardConfig(ServerRewardConfig):
    """The answer of your own server over HTTP."""


Verdict = Enum("Verdict", {"score": "score", "word": "word"})


@dataclass
class JudgeRewardConfig(ServerRewardConfig):
    """A language model judges the response, behind any server with OpenAI's chat completions, such as SGLang's."""

    model: str | None = None
    """The model's name for the server; null: the first that it lists."""
    rubric: str | None = key(None, is_prose=True)
    """The judge's instructions, with {question}, {answer} and {response} put in; null: compare answers."""
    verdict: Verdict = Verdict.score
    """score: an explanation, then a number from 0 to 10 in a box; word: p(yes) / (p(yes) + p(no)) of the next token."""
    yes: str = "yes"
    """With verdict=word: the word of a good response, one token of the judge."""
    no: str = "no"
    """The word of a bad response, also one token."""
    max_tokens: int = key(1024, low=1, high=2**24)
    """With verdict=score: maximum tokens of the judge's answer; a longer one is a failure."""
    correct_at: float = 0.5
    """Lowest reward that counts as correct."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, for example {chat_template_kwargs: {enable_thinking: false}}."""


@dataclass
class ScalarModelRewardConfig(ServerRewardConfig):
    """A scalar reward model behind an SGLang server reads prompt and response as a conversation."""

    scale: float = 1.0
    """The reward is offset + scale * (output of the model's head)."""
    offset: float = 0.0
    """Added to the scaled score."""
    correct_at: float = 0.0
    """Lowest reward that counts as correct; meaningful only if the model was trained so."""


@dataclass
class WeightedRewardConfig(RewardConfig):
    """The sum of other rewards, each times its weight."""

    parts: dict[str, Any] = field(default_factory=dict)
    """Name of each part -> its `kind`, a choice of reward=, its `weight` (1), and the keys of that kind, as in {right:
    {kind: math, weight: 0.9}}."""
    correct_by: str | None = None
    """Part that decides whether a response is correct; null: correct_at does."""
    correct_at: float = 1.0
    """Lowest sum that counts as correct."""


SCHEMAS: dict[str, dict[str, type[Any]]] = {
    "data": {
        "function": FunctionDataConfig,
        "reasoning_gym": ReasoningGymDataConfig,
        "jsonl": JsonlDataConfig,
        "parquet": ParquetDataConfig,
        "huggingface": HuggingFaceDataConfig,
        "verifiers": VerifiersDataConfig,
        "mix": MixDataConfig,
    },
    "environment": {
        "single_turn": SingleTurnEnvironmentConfig,
        "class": ClassEnvironmentConfig,
        "verifiers": VerifiersEnvironmentConfig,
        "agent": AgentEnvironmentConfig,
        "tools": ToolsEnvironmentConfig,
    },
    "reward": {
        "exact": ExactRewardConfig,
        "letter_count": LetterCountRewardConfig,
        "addition": AdditionRewardConfig,
        "math": MathRewardConfig,
        "reasoning_gym": ReasoningGymRewardConfig,
        "environment": EnvironmentRewardConfig,
        "function": FunctionRewardConfig,
        "group_function": GroupFunctionRewardConfig,
        "numeric": NumericRewardConfig,
        "format": FormatRewardConfig,
        "length": LengthRewardConfig,
        "code": CodeRewardConfig,
        "http": HttpRewardConfig,
        "judge": JudgeRewardConfig,
        "reward_model": ScalarModelRewardConfig,
        "weighted": WeightedRewardConfig,
    },
}
"""By group and kind"""

OF_ALL = frozenset(field.name for field in fields(RewardConfig))
"""Keys that say something of the sum, not of a part"""
WITHOUT_RANGE = (FunctionRewardConfig, HttpRewardConfig, ScalarModelRewardConfig, EnvironmentRewardConfig)
"""Kinds of reward whose scores may be any number; those of the others are from 0 to 1"""


@dataclass(frozen=True)
class RewardPart:
    """One reward of a weighted sum."""

    name: str
    weight: float
    config: RewardConfig


def read_parts(config: WeightedRewardConfig) -> tuple[RewardPart, ...]:
    """The parts in the order in which they are given. Raises ConfigError naming the full key of the first problem."""
    if not config.parts:
        example = "reward.parts.right.kind=math reward.parts.right.weight=0.9"
        raise ConfigError([f"reward.parts: found none; reward=weighted needs some, as in {example}"])
    if config.correct_by not in (None, *config.parts):
        names = ", ".join(map(str, config.parts))
        raise ConfigError([f"reward.correct_by: found {config.correct_by!r}; the parts are {names}"])
    return tuple(_read_part(str(name), given) for name, given in config.parts.items())


def find_score_range(config: RewardConfig) -> tuple[float, float] | None:
    """The least and the largest score; None where it may be any number."""
    if config.wrong != 0:
        return 0.0, 1.0  # every other score is refused
    if isinstance(config, WeightedRewardConfig):
        parts = read_parts(config)
        if any(find_score_range(part.config) is None for part in parts):
            return None
        return sum(min(part.weight, 0.0) for part in parts), sum(max(part.weight, 0.0) for part in parts)
    return None if isinstance(config, WITHOUT_RANGE) else (0.0, 1.0)


def _read_part(name: str, given: Any) -> RewardPart:
    key, choices = f"reward.parts.{name}", sorted(set(SCHEMAS["reward"]) - {"weighted"})
    options = {str(option): value for option, value in given.items()} if isinstance(given, Mapping) else {}
    kind, weight = options.pop("kind", None), options.pop("weight", 1.0)
    if kind not in choices or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        must = f"a part has a name of lower-case letters, digits and _, and {key}.kind is one of {', '.join(choices)}"
        raise ConfigError([f"{key}: found {given!r}; {must}"])
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ConfigError([f"{key}.weight: found {weight!r}; it must be a finite number"])
    if of_sum := [option for option in options if option in OF_ALL]:
        raise ConfigError([f"{key}.{of_sum[0]}: has no effect in a part; reward.{of_sum[0]} is that of the sum"])
    config = build_choice("reward", str(kind), options, key, ("weight",), OF_ALL)
    assert isinstance(config, RewardConfig)
    return RewardPart(name, float(weight), config)


def build_choice(
    group: str,
    kind: str,
    options: Mapping[str, Any],
    key: str,
    beside: Iterable[str] = (),
    without: Collection[str] = (),
) -> Any:
    """The configuration of a choice of a group with these of its keys. beside, without: keys that a message names too
    or not. Raises ConfigError naming what is wrong below `key`."""
    node = OmegaConf.structured(SCHEMAS[group][kind])
    known = [str(option) for option in node if option not in without]
    try:
        for option, value in options.items():
            OmegaConf.update(node, option, value)
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        wrong = f"{key}.{getattr(error, 'key', kind)}: {str(error).strip().splitlines()[0]}"
        raise ConfigError([f"{wrong}; kind={kind} has {', '.join((*beside, *known))}"]) from error
