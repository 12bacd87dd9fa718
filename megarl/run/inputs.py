"""The inputs of a run or an evaluation, loaded and checked before any process is started."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.algo.objective import needs_critic
from megarl.config.checks import describe_iteration_size
from megarl.config.errors import ConfigError
from megarl.config.overrides import name_choice
from megarl.config.schema.algo import NO_ADVANTAGE, compares_pairs, needs_reference
from megarl.config.schema.mix import list_sources, naming_source, split_config
from megarl.config.schema.root import Config
from megarl.files import load_json_object
from megarl.interfaces import Sampling, Truncation
from megarl.mcore import checkpoints
from megarl.mcore.spec import ROLE_KEYS, Role, WorkerSpec, check_layout, check_role_fields, read_architecture
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import (
    default_cache_dir,
    describe_other_tokens,
    find_checkpoint,
    load_tokenizer,
    resolve_checkpoint,
)
from megarl.models.families import list_unknown_keys
from megarl.rollout.collector import EvalSet
from megarl.rollout.conversation import add_turn_end
from megarl.rollout.demonstrations import Demonstrations, build_demonstrations
from megarl.rollout.episodes import AnyConversation, build_conversation, check_conversation
from megarl.rollout.pairs import Pairs, build_pairs
from megarl.rollout.rollout_file import NO_GROUPS, Limits, SavedGroups, find_groups
from megarl.rollout.server import build_command, load_generation_spec
from megarl.sync.pieces import check_serving_layout
from megarl.sync.sync import PROBE_LENGTH, build_probe_tokens
from megarl.task.data import DataSplits, Split, build_data, build_evaluation_set, draw, join_splits, split_data
from megarl.task.environments import ToolPrompt, build_tool_prompt
from megarl.task.render import CriticPrompt, Renderer, use_chat_template
from megarl.task.scorer import build_scorer
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    checkpoint: Path
    """Hugging Face checkpoint directory that every role and server starts from"""
    architecture: Architecture
    """The architecture of that checkpoint"""
    tokenizer: "PreTrainedTokenizerBase"
    specs: dict[Role, WorkerSpec]
    """Of the roles that the algorithm needs"""
    critic_prompt: CriticPrompt | None
    """With data.critic_prompt and a critic"""
    saved_rollouts: SavedGroups | None
    """The responses that value pretraining learns from, if not from fresh ones"""
    saved_groups: SavedGroups | None = None
    """What rollout.file has; None: responses are generated. Else all below is empty."""
    pairs: Pairs | None = None
    """What a reward model learns from"""
    demonstrations: Demonstrations | None = None
    """What rollout.from_data learns from"""
    data: DataSplits = field(default_factory=lambda: DataSplits((), (), 0))
    conversations: Mapping[str, AnyConversation | None] = field(default_factory=lambda: {"": None})
    """What answers the policy, by source, without data=mix under ""; None with environment=single_turn"""
    probe_tokens: tuple[int, ...] = ()
    """The text on which every weight sync is verified"""
    eval_sets: tuple[EvalSet, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """rollout.stop_token_ids, and the token with which the chat template ends an answer"""


@dataclass(frozen=True)
class EvaluationSet:
    name: str
    prompts: tuple[Prompt, ...]
    config: Config
    """With the data and the reward of this set"""
    conversation: AnyConversation | None = None
    """What answers the policy; None with environment=single_turn"""
    notes: tuple[str, ...] = ()
    """How the data were read"""


@dataclass(frozen=True)
class EvaluationInputs:
    checkpoint: Path
    tokenizer: "PreTrainedTokenizerBase"
    sets: tuple[EvaluationSet, ...]
    stop_token_ids: tuple[int, ...]
    """rollout.stop_token_ids, and the token with which the chat template ends an answer"""
    ends: str
    """What ends responses, in words"""


@dataclass(frozen=True)
class Models:
    """The checkpoints that the roles start from, validated."""

    checkpoint: Path
    architecture: Architecture
    critic_checkpoint: Path
    critic_architecture: Architecture
    """The policy's where critic.init is not set"""
    reference_checkpoint: Path
    reference_architecture: Architecture
    """The policy's where reference.init is not set"""
    teachers: tuple[Path, ...] = ()
    """Of reference.by_source, in order; of the reference's architecture"""

    def get_architecture(self, role: Role) -> Architecture:
        others = {Role.critic: self.critic_architecture, Role.reference: self.reference_architecture}
        return others.get(role, self.architecture)


def load_inputs(config: Config) -> Inputs:
    """Load all inputs. Raises ConfigError, for example for a missing checkpoint, an unreadable file or a wrong size.

    With rollout.file, or where only the critic learns, there are no data, reward, environment and servers.
    """
    models = load_models(config)
    if config.has_servers:
        # Raises for unknown options; the real command is built where the server starts.
        build_command(config.rollout, models.checkpoint, host=config.cluster.listen_host, port=0, seed=config.seed)
    specs, tokenizer = load_specs(config, models), load_tokenizer(models.checkpoint)
    if config.has_servers or compares_pairs(config.algo) or config.rollout.from_data:
        use_chat_template(config.data, tokenizer)
    own = build_critic_prompt(config, models, tokenizer)
    saved = load_saved_rollouts(config, models, own)
    inputs = Inputs(models.checkpoint, models.architecture, tokenizer, specs, own, saved)
    if config.has_servers:
        return _add_prompts(config, inputs)
    if compares_pairs(config.algo):
        return replace(inputs, saved_groups=NO_GROUPS, pairs=load_pairs(config, models, tokenizer))
    if config.rollout.from_data:
        return replace(inputs, saved_groups=NO_GROUPS, demonstrations=load_demonstrations(config, models, tokenizer))
    groups = NO_GROUPS if config.has_critic_alone else load_saved_groups(config, models, tokenizer, own)
    return replace(inputs, saved_groups=groups)


def load_pairs(config: Config, models: Models, tokenizer: "PreTrainedTokenizerBase") -> Pairs:
    """The pairs of a reward model. Raises ConfigError that says where, and where an iteration takes more than there
    are."""
    pairs = build_pairs(*_read_data(config, tokenizer, models.critic_architecture.vocab_size))
    _check_number(config, len(pairs.train), "pairs")
    return pairs


def load_demonstrations(config: Config, models: Models, tokenizer: "PreTrainedTokenizerBase") -> Demonstrations:
    """What the policy imitates. Raises ConfigError as `load_pairs`."""
    found = build_demonstrations(*_read_data(config, tokenizer, models.architecture.vocab_size))
    _check_number(config, len(found.train), "demonstrations")
    return found


def _read_data(
    config: Config, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> tuple[DataSplits, Renderer, int]:
    """The data, what renders them, and the most tokens of a prompt with its response."""
    data = build_data(config.data, tokenizer, config.seed, vocab_size=vocab_size)
    renderer = Renderer(config.data, tokenizer, vocab_size=vocab_size)
    return data, renderer, config.data.prompt_length + config.rollout.response_length


def _check_number(config: Config, number: int, what: str) -> None:
    if number < config.train.num_prompts:
        size = f"{config.train.num_prompts} {what} of an iteration; the data have {number}"
        raise ConfigError([f"{describe_iteration_size(config.train)}, which is {size}, and it takes none twice"])


def _add_prompts(config: Config, inputs: Inputs) -> Inputs:
    """With the data, and what has been tried on their first prompts."""
    tokenizer, vocab_size = inputs.tokenizer, inputs.architecture.vocab_size
    configs, tools = split_config(config), dict[str, ToolPrompt | None]()
    splits, conversations = dict[str, Split](), dict[str, AnyConversation | None]()
    for name, each in configs.items():
        with naming_source(name):
            tools[name] = build_tool_prompt(each.environment, each.data, tokenizer)
    spec = load_generation_spec(inputs.checkpoint)
    rollout, ends = add_turn_end(config.rollout, spec, Renderer(config.data, tokenizer, next(iter(tools.values()))))
    for name, each in configs.items():
        with naming_source(name):
            splits[name] = split_data(each.data, tokenizer, config.seed, tools[name], vocab_size)
    data, turns = join_splits(splits), dict[str, None]()
    sets = build_eval_sets(config, tokenizer, tools, vocab_size)
    for name, each in configs.items():
        first = [next(prompt for prompt in side if prompt.source == name) for side in (data.train, data.heldout)]
        with naming_source(name):
            with contextlib.closing(build_scorer(each.reward)) as scorer:
                chosen = f"{name_choice('reward', each.reward)} with {name_choice('data', each.data)}"
                scorer.check(first, config.reward.wrong, chosen, config.algo.reward_norm.parts)
            conversations[name] = build_conversation(each, tokenizer, vocab_size)
            turns |= dict.fromkeys(check_conversation(conversations[name], first))
    if inputs.critic_prompt is not None:
        inputs.critic_prompt.check(data.train)
    return replace(
        inputs,
        data=replace(data, notes=(*data.notes, ends, *turns)),
        conversations=conversations,
        probe_tokens=build_probe_tokens(data.heldout, vocab_size, min(PROBE_LENGTH, inputs.architecture.max_length)),
        eval_sets=sets,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def build_eval_sets(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    tools: Mapping[str, ToolPrompt | None],
    vocab_size: int | None = None,
) -> tuple[EvalSet, ...]:
    """Read all sets. tools: by source. vocab_size: rows of the model's embedding.

    Raises ConfigError naming train.eval_sets.NAME for a file that cannot be read.
    """
    sets: list[EvalSet] = []
    configs = split_config(config)
    for name, each in config.train.eval_sets.items():
        key, notes, source = f"train.eval_sets.{name}.path", list[str](), each.source or ""
        try:
            prompts = build_evaluation_set(
                *(configs[source].data, tokenizer, config.seed),
                name=name,
                path=each.path,
                num_problems=each.num_prompts,
                tools=tools[source],
                key=key,
                vocab_size=vocab_size,
                notes=notes,
            )
        except ConfigError as error:
            problems = [text if text.startswith(key) else f"{key}: {text}" for text in error.problems]
            raise ConfigError(problems) from error
        prompts = tuple(replace(prompt, source=source) for prompt in prompts)
        sampling = Sampling(each.temperature, urgent=True, truncation=Truncation(each.top_p, each.top_k))
        sets.append(EvalSet(str(name), prompts, each.num_samples, sampling, tuple(notes)))
    return tuple(sets)


def build_critic_prompt(config: Config, models: Models, tokenizer: "PreTrainedTokenizerBase") -> CriticPrompt | None:
    """What the critic alone reads; None without data.critic_prompt or without a critic. Raises ConfigError."""
    if config.data.critic_prompt is None or not needs_critic(config.algo):
        return None
    return CriticPrompt(config.data, tokenizer, models.critic_architecture.vocab_size)


def load_models(config: Config) -> Models:
    """Find and read the checkpoints. Raises ConfigError naming model.path, critic.init or reference.init."""
    checkpoint = resolve_checkpoint(config.model, default_cache_dir())
    architecture = _read_architecture(checkpoint, "model.path")
    if problems := checkpoints.check_checkpoint(checkpoint, architecture, Role.policy):
        raise ConfigError([f"model.path: {problem}" for problem in problems])
    reference = _load_reference(config, checkpoint, architecture)
    if not needs_critic(config.algo) or config.critic.init is None:
        return Models(checkpoint, architecture, checkpoint, architecture, *reference)
    critic_checkpoint = find_checkpoint(config.critic.init, "critic.init")
    critic_architecture = _read_architecture(critic_checkpoint, "critic.init")
    longest = config.data.prompt_length + config.rollout.response_length
    problems = checkpoints.check_critic_checkpoint(critic_checkpoint, critic_architecture, architecture, longest)
    if problem := checkpoints.check_critic_prompt(critic_checkpoint, config.data.critic_prompt):
        problems.append(problem)
    if problems:
        raise ConfigError([f"critic.init: {problem}" for problem in problems])
    has_head = checkpoints.has_value_head(critic_checkpoint)
    if has_head and (problem := checkpoints.check_value_range(critic_checkpoint, config.critic.value_range)):
        raise ConfigError([f"critic.value_range: {problem}"])
    return Models(checkpoint, architecture, critic_checkpoint, critic_architecture, *reference)


def _load_reference(
    config: Config, checkpoint: Path, policy: Architecture
) -> tuple[Path, Architecture, tuple[Path, ...]]:
    """The checkpoint of the frozen model and its architecture, reference.init or the policy's, and further teachers."""
    if not needs_reference(config.algo):
        return checkpoint, policy, ()
    init, by_source, directory, architecture = config.reference.init, config.reference.by_source, checkpoint, policy
    if init is not None:
        directory, architecture = _load_teacher(config, "reference.init", init, checkpoint, policy)
    elif config.algo.advantage == NO_ADVANTAGE and (others := (set(list_sources(config)) or {""}) - set(by_source)):
        why = "nothing but the reference is learned from, and the policy's own start has nothing to teach"
        whom = f" {', '.join(sorted(others))}" if by_source else ""
        raise ConfigError([f"reference.init: found null with algo.advantage=none; {why}{whom}: it must be a teacher"])
    teachers = []
    for name, path in by_source.items():
        key = f"reference.by_source.{name}"
        teacher, own = _load_teacher(config, key, path, checkpoint, policy)
        if own != architecture:
            of = "the policy's own" if init is None else f"that of reference.init ({directory})"
            raise ConfigError([f"{key}: {teacher} has another architecture; it must be {of}, in whose place it scores"])
        teachers.append(teacher)
    return directory, architecture, tuple(teachers)


def _load_teacher(
    config: Config, key: str, path: str, checkpoint: Path, policy: Architecture
) -> tuple[Path, Architecture]:
    directory = find_checkpoint(path, key)
    architecture = _read_architecture(directory, key)
    longest = config.data.prompt_length + config.rollout.response_length
    problems = checkpoints.check_reference_checkpoint(directory, architecture, policy, longest)
    if not problems and (problem := describe_other_tokens(load_tokenizer(directory), load_tokenizer(checkpoint))):
        problems = [f"{directory}: {problem}; the reference scores the policy's tokens, so both need one tokenizer"]
    if problems:
        raise ConfigError([f"{key}: {problem}" for problem in problems])
    return directory, architecture


def load_specs(config: Config, models: Models) -> dict[Role, WorkerSpec]:
    """The worker specs of the roles that the algorithm needs. Raises ConfigError where they do not fit the models."""
    references = models.reference_checkpoint, *models.teachers
    specs = build_specs(config, models.checkpoint, models.critic_checkpoint, references)
    architectures = {role: models.get_architecture(role) for role in specs}
    problems = list(_check_lengths(config, models))
    for role, spec in specs.items():
        problems += check_layout(architectures[role], spec.parallel, f"{role.value}.parallel", spec.megatron)
        problems += check_role_fields(architectures[role], spec)
    if config.model.megatron:
        from megarl.mcore.model import check_options  # imports Megatron, which takes seconds

        for role, spec in specs.items():
            problems += [f"{role.value}: {problem}" for problem in check_options(architectures[role], spec)]
    if problems:
        raise ConfigError(problems)
    return specs


def _check_lengths(config: Config, models: Models) -> Iterator[str]:
    length, own = config.rollout.response_length, config.data.num_critic_tokens
    longest, positions = config.data.prompt_length + length, models.architecture.max_length
    if longest > positions:
        text = f"with data.prompt_length {config.data.prompt_length} it is {longest} tokens"
        yield f"rollout.response_length: found {length}; {text}; the model has {positions} positions"
    positions = models.critic_architecture.max_length
    if own and needs_critic(config.algo) and longest + own > positions:
        text = f"with data.prompt_length and rollout.response_length the critic reads up to {longest + own} tokens"
        yield f"data.critic_prompt_length: found {own}; {text}; it has {positions} positions"
    if config.has_servers:
        yield from check_serving_layout(models.architecture, config.rollout.tp)


def load_saved_rollouts(
    config: Config, models: Models, critic_prompt: CriticPrompt | None = None
) -> SavedGroups | None:
    """The file that value pretraining learns from, None where it samples. Raises ConfigError with FILE:LINE."""
    settings, critic, length = config.algo.value_pretrain, models.critic_architecture, config.rollout.response_length
    if settings.rollouts is None or settings.num_steps == 0 or not needs_critic(config.algo):
        return None
    limits = Limits(critic.vocab_size, critic.max_length, length, critic_prompt=critic_prompt)
    return _find_groups("algo.value_pretrain.rollouts", settings.rollouts, limits)


def _find_groups(key: str, path: str, limits: Limits, wrong: float = 0.0) -> SavedGroups:
    try:
        return find_groups(Path(path).expanduser(), limits, wrong)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{key}: {error}"]) from error


def load_saved_groups(
    config: Config, models: Models, tokenizer: "PreTrainedTokenizerBase", critic_prompt: CriticPrompt | None = None
) -> SavedGroups:
    """What rollout.file has. Raises ConfigError where it is damaged, with FILE:LINE, or does not fit the run."""
    assert config.rollout.file is not None
    vocab_size = min(models.architecture.vocab_size, models.critic_architecture.vocab_size)
    # The critic's positions, which reads data.critic_prompt too; the policy has those of the two lengths.
    lengths = models.critic_architecture.max_length, config.rollout.response_length, config.data.prompt_length
    limits = Limits(vocab_size, *lengths, "the model", critic_prompt)
    saved = _find_groups("rollout.file", config.rollout.file, limits, config.reward.wrong)
    if problems := [*_check_groups(config, saved), *_check_tokens(saved, Renderer(config.data, tokenizer))]:
        raise ConfigError(problems)
    return saved


def _check_groups(config: Config, saved: SavedGroups) -> Iterator[str]:
    wanted, number = config.train.responses_per_prompt, config.train.num_prompts
    other = next((group for group in saved.groups if group.num_samples != wanted), None)
    if other is not None:
        group = f"{other.where} begins a group of {other.num_samples} responses"
        yield f"train.responses_per_prompt: found {wanted}; {group}, and all groups must have as many as the key says"
    elif len(saved.groups) < number:
        groups = f"{number} groups of an iteration; rollout.file has {len(saved.groups)}"
        yield f"{describe_iteration_size(config.train)}, which is {groups}, and an iteration takes none twice"


def _check_tokens(saved: SavedGroups, renderer: Renderer) -> Iterator[str]:
    """A message where the model's tokenizer reads a prompt's text as other tokens than those that were answered."""
    for prompt in saved.prompts:
        try:
            ways = [renderer.tokenize([prompt.text], add)[0] for add in (False, True)]
        except ConfigError as error:
            yield f"rollout.file: the model's tokenizer cannot read the text of prompt {prompt.id!r}: {error}"
            return
        if prompt.token_ids not in ways:
            yield (
                f"rollout.file: prompt {prompt.id!r} has the tokens {list(prompt.token_ids)}; the model's tokenizer"
                f" reads its text as {list(ways[0])}: the responses must be of a policy with the same tokenizer"
            )
            return


def build_specs(
    config: Config, checkpoint: Path, critic_checkpoint: Path | None = None, references: Sequence[Path] = ()
) -> dict[Role, WorkerSpec]:
    """The worker spec of each role. critic_checkpoint, references: what they start from, if not `checkpoint`; all but
    the first of references are those of reference.by_source."""
    num_steps, train, bounds = config.train.num_optimizer_steps, config.train, config.critic.value_range

    def build(role: Role, start: Path, num_steps: int = 0, **own: Any) -> WorkerSpec:
        node = getattr(config, role.value)
        is_trained = role is not Role.reference
        own |= {name: getattr(node, name) for name in ROLE_KEYS.values()} if is_trained else {}
        own |= {"lora": node.lora} if is_trained and node.lora.rank else {}
        return WorkerSpec(
            role=role,
            checkpoint=str(start),
            parallel=node.parallel,
            optimizer=node.optimizer.resolve_schedule(num_steps, train.num_iterations) if is_trained else None,
            dtype=node.dtype,
            offload=node.offload,
            algo=config.algo,
            temperature=config.rollout.temperature,
            response_length=config.rollout.response_length,
            tokens_per_microbatch=train.tokens_per_microbatch,
            seed=config.seed,
            megatron=config.model.megatron,
            num_threads=config.cluster.cpu_threads_per_worker or 1,
            deadline_s=config.cluster.call_deadline_s,
            collective_deadline_s=config.cluster.collective_deadline_s,
            deterministic=train.deterministic,
            **own,
        )

    specs: dict[Role, WorkerSpec] = {}
    if not config.has_critic_alone:
        specs[Role.policy] = build(Role.policy, checkpoint, num_steps, router_replay=config.rollout.router_replay)
    if needs_critic(config.algo):
        specs[Role.critic] = build(
            Role.critic,
            critic_checkpoint or checkpoint,
            num_steps * config.critic.updates_per_policy_update,
            critic_prompt=config.data.critic_prompt,
            trainable=config.critic.trainable,
            value_range=None if bounds is None else (bounds[0], bounds[1]),
        )
    if needs_reference(config.algo) and not config.has_critic_alone:
        start, *teachers = references or (checkpoint,)
        specs[Role.reference] = build(Role.reference, start, teachers=tuple(map(str, teachers)))
    return specs


def describe_start(config: Config, critic: WorkerSpec, saved: SavedGroups | None) -> str:
    """What the critic starts from and what value pretraining learns from, as one sentence."""
    start, settings = "the policy's weights, with a new value head", config.algo.value_pretrain
    if config.critic.init is not None:
        has_head = checkpoints.has_value_head(Path(critic.checkpoint))
        start = f"{critic.checkpoint}, {'its value head included' if has_head else 'with a new value head'}"
    text = f"critic: starts from {start}; "
    if settings.num_steps == 0:
        return text + "no value pretraining"
    given = "freshly sampled"
    if saved is not None:
        given = f"out of the {saved.num_rollouts} ({saved.num_samples} responses) in {saved.path}"
    return text + f"value pretraining of up to {settings.steps} rollouts, {given}"


def _read_architecture(checkpoint: Path, key: str) -> Architecture:
    """The architecture; prints the keys of config.json of which nothing is known."""
    try:
        architecture = read_architecture(checkpoint)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{key}: {error}"]) from error
    path = checkpoint / "config.json"
    for line in list_unknown_keys(load_json_object(path), path):
        print(f"{key}: {line}", flush=True)
    return architecture


def load_evaluation_inputs(configs: Mapping[str, Config]) -> EvaluationInputs:
    """Load everything an evaluation reads. Raises ConfigError, for example for a missing file or a prompt too long."""
    from transformers import AutoConfig

    config = next(iter(configs.values()))
    checkpoint = resolve_checkpoint(config.model, default_cache_dir())
    if problems := checkpoints.check_files(checkpoint):
        raise ConfigError([f"model.path: {problem}" for problem in problems])
    # Raises for unknown options; the real command is built where the server starts.
    build_command(config.rollout, checkpoint, host=config.cluster.listen_host, port=0, seed=config.seed)
    tokenizer = load_tokenizer(checkpoint)
    use_chat_template(config.data, tokenizer)
    spec, tools = load_generation_spec(checkpoint), build_tool_prompt(config.environment, config.data, tokenizer)
    rollout, ends = add_turn_end(config.rollout, spec, Renderer(config.data, tokenizer, tools))
    sets: list[EvaluationSet] = []
    for name, each in configs.items():
        try:
            sets.append(_load_set(name, each, tokenizer, spec.vocab_size))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    longest = max(len(prompt.token_ids) for each in sets for prompt in each.prompts)
    model = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True, trust_remote_code=False)
    limit, length = getattr(model, "max_position_embeddings", None), config.rollout.response_length
    if limit is not None and longest + length > limit:
        text = f"found {length}; with the longest prompt, of {longest} tokens, it is {longest + length}"
        raise ConfigError([f"rollout.response_length: {text}; the model has {limit} positions"])
    return EvaluationInputs(checkpoint, tokenizer, tuple(sets), tuple(rollout.stop_token_ids), ends)


def _load_set(name: str, config: Config, tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> EvaluationSet:
    evaluate, notes, path = config.evaluate, list[str](), config.evaluate.paths.get(name)
    tools = build_tool_prompt(config.environment, config.data, tokenizer)
    given, number = (config.data, tokenizer, config.seed), evaluate.num_problems
    said: dict[str, Any] = {"tools": tools, "vocab_size": vocab_size}
    if evaluate.heldout:  # Those on which a run evaluates itself.
        splits = build_data(*given, **said)
        notes += splits.notes
        prompts = tuple(draw(splits.heldout[: config.train.num_eval_prompts], number, f"evaluate/{config.seed}"))
    else:
        prompts = build_evaluation_set(*given, name=name, path=path, num_problems=number, notes=notes, **said)
    with contextlib.closing(build_scorer(config.reward)) as scorer:
        data = name_choice("data", config.data) if path is None else f"evaluate.paths.{name}={path}"
        scorer.check(prompts[:1], chosen=f"{name_choice('reward', config.reward)} with {data}")
    conversation = build_conversation(config, tokenizer, vocab_size)
    notes += check_conversation(conversation, prompts[:1])
    return EvaluationSet(name, prompts, config, conversation, tuple(notes))
