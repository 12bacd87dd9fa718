"""One evaluation: servers on a checkpoint generate responses to the prompts of each set, which are scored."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from megarl.cluster.actors import Servers
from megarl.cluster.opened import open_ray
from megarl.config.errors import ConfigError
from megarl.config.overrides import name_choice
from megarl.config.placement import count_gpus, list_groups, place
from megarl.config.schema.root import Config
from megarl.config.schema.run import SERVERS, EvaluateConfig, RolloutConfig, get_temperature, list_ks
from megarl.cpu.process import settle_threads
from megarl.interfaces import DeadlineError
from megarl.mcore.checkpoints import check_files
from megarl.models.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.report.evaluation import (
    FILE_NAME,
    RESPONSES_FILE_NAME,
    SetResult,
    check_failures,
    describe_failures,
    format_response,
    format_table,
    summarize_set,
    write_evaluation,
)
from megarl.report.text import Decode, Progress, format_seconds
from megarl.rollout.collector import Collector
from megarl.rollout.conversation import (
    Conversation,
    EpisodeRunner,
    add_turn_end,
    build_conversation,
    check_conversation,
)
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.server import build_command, load_generation_spec
from megarl.run.components import Recovery
from megarl.signals import get_terminal
from megarl.task.data import build_data, build_evaluation_set, draw
from megarl.task.environments import build_tool_prompt
from megarl.task.render import Renderer, use_chat_template
from megarl.task.scorer import Scorer, build_scorer, reads_answers
from megarl.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvaluationSet:
    name: str
    prompts: tuple[Prompt, ...]
    open_scorer: Callable[[], Scorer]
    reads_answers: bool
    """Whether the reward reports which answer it read"""
    response_length: int
    conversation: Conversation | None = None
    """What answers the policy; None with environment=single_turn"""
    max_failed_frac: float = 1.0
    notes: tuple[str, ...] = ()
    """How the data were read"""


@dataclass(frozen=True)
class EvaluationInputs:
    checkpoint: Path
    tokenizer: "PreTrainedTokenizerBase"
    sets: tuple[EvaluationSet, ...]
    rollout: RolloutConfig
    """With the token among rollout.stop_token_ids with which the chat template ends an answer"""
    ends: str
    """What ends responses, in words"""


def run_evaluation(configs: Mapping[str, Config], run_dir: Path) -> list[SetResult]:
    """Evaluate one checkpoint on the sets of `configs`, which differ in data and reward only.

    Writes responses.jsonl, evaluation.json and logs/ under `run_dir`, prints progress and the table. Raises
    ConfigError, before any process is started, for problems that only the inputs reveal.
    """
    configs = {name: settle_threads(each, count_gpus(each, "evaluate")) for name, each in configs.items()}
    config = next(iter(configs.values()))
    inputs, evaluate = load_evaluation_inputs(configs), config.evaluate
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(contextlib.closing(Progress(get_terminal())))
        progress.line(describe_evaluation(inputs, evaluate, config.rollout.response_length))
        for each in inputs.sets:
            progress.line(f"{each.name}: {'; '.join((*each.notes, inputs.ends))}")
        started = time.monotonic()
        progress.enter("start")
        slots = place(config.cluster, list_groups(config, "evaluate"))[SERVERS]
        cluster = stack.enter_context(open_ray(config.cluster, len(slots)))
        rollout, stop_s = replace(inputs.rollout, offload=None), config.cluster.shutdown_deadline_s / 3
        given = rollout, inputs.checkpoint, run_dir / "logs", config.seed, cluster, slots, stop_s
        servers = stack.enter_context(contextlib.closing(Servers(*given)))
        engine = SGLangEngine(
            servers.start().result(),
            inputs.checkpoint,
            rollout,
            seed=config.seed,
            check_processes=servers.check_alive,
            api_key=servers.api_key,
            top_p=evaluate.top_p,
            top_k=evaluate.top_k,
        )
        stack.callback(engine.close)
        progress.leave()
        progress.line(f"servers ready after {format_seconds(time.monotonic() - started)}")
        recovery = Recovery(servers, progress.line, rollout.max_server_restarts)
        options: dict[str, Any] = {"seed": config.seed, "recovery": recovery, "decode": inputs.tokenizer.decode}
        results = evaluate_sets(engine, inputs.sets, evaluate, run_dir, progress, num_slots=engine.num_slots, **options)
        write_evaluation(run_dir / FILE_NAME, results, list_settings(configs, inputs))
        progress.line(format_table(results))
    return results


def load_evaluation_inputs(configs: Mapping[str, Config]) -> EvaluationInputs:
    """Load everything an evaluation reads. Raises ConfigError, for example for a missing file or a prompt too long."""
    from transformers import AutoConfig

    config = next(iter(configs.values()))
    checkpoint = resolve_checkpoint(config.model, default_cache_dir())
    if problems := check_files(checkpoint):
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
    return EvaluationInputs(checkpoint, tokenizer, tuple(sets), rollout, ends)


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
    open_scorer = partial(build_scorer, config.reward)
    with contextlib.closing(open_scorer()) as scorer:
        data = name_choice("data", config.data) if path is None else f"evaluate.paths.{name}={path}"
        scorer.check(prompts[:1], chosen=f"{name_choice('reward', config.reward)} with {data}")
    conversation = build_conversation(config, tokenizer, vocab_size)
    notes += check_conversation(conversation, prompts[:1])
    reads, failed = reads_answers(config.reward), config.reward.max_failed_frac
    length = config.rollout.response_length
    return EvaluationSet(name, prompts, open_scorer, reads, length, conversation, failed, tuple(notes))


def evaluate_sets(
    engine: SGLangEngine,
    sets: Sequence[EvaluationSet],
    config: EvaluateConfig,
    run_dir: Path,
    progress: Progress,
    *,
    num_slots: int,
    seed: int = 0,
    weight_version: int = 0,
    recovery: Recovery | None = None,
    decode: Decode | None = None,
) -> list[SetResult]:
    """The result of each set; every response is written to RUN_DIR/responses.jsonl as soon as it has been scored.

    num_slots: responses that the servers generate at once. seed: of the run. weight_version: of the servers, 0 after
    their start. recovery: None where a lost server is not restarted. decode: reads the observations in responses.jsonl.
    Raises TooManyFailuresError where more of a set's responses than reward.max_failed_frac have no reward.
    """
    recovery = recovery or Recovery(None, progress.line, 0)
    results, number = [], config.num_samples
    # Small calls, since rollout.request_deadline_s is for each.
    step = max(1, num_slots // number)
    with (run_dir / RESPONSES_FILE_NAME).open("w", encoding="utf-8") as file:
        for each in sets:
            samples: list[Sample] = []
            progress.enter(each.name)
            started, runner = time.monotonic(), EpisodeRunner(each.response_length, each.conversation)
            with contextlib.closing(each.open_scorer()) as scorer:
                collector = Collector(engine, scorer, runner, seed=seed, temperature=get_temperature(config))
                for start in range(0, len(each.prompts), step):
                    recovery.run(engine.check_health)
                    batch, key = each.prompts[start : start + step], f"{each.name}/{start}"
                    collect = partial(collector.sample, batch, number, weight_version=weight_version, key=key)
                    try:
                        found = recovery.run(collect)  # Restarted servers hold the same checkpoint.
                    except DeadlineError as error:
                        raise DeadlineError(
                            f"{error}; rollout.request_deadline_s is for {len(batch) * number} responses here: raise"
                            " it, or lower rollout.max_running_requests"
                        ) from error
                    file.writelines(format_response(each.name, i % number, one, decode) for i, one in enumerate(found))
                    file.flush()
                    samples += found
                    correct = sum(one.score.correct for one in samples)
                    progress.line(
                        f"{each.name}: {start + len(batch)} of {len(each.prompts)} problems, {correct} of"
                        f" {len(samples)} responses correct | {format_seconds(time.monotonic() - started)}"
                    )
            progress.leave()
            check_failures(samples, each.max_failed_frac)
            if text := describe_failures(samples):
                progress.line(f"warning: {each.name}: {text}; they count as wrong, with a reward of 0")
            # A user's own function reads answers where it says so.
            reads = each.reads_answers or any(sample.score.answer is not None for sample in samples)
            results.append(summarize_set(each.name, samples, list_ks(config), reads_answers=reads))
    return results


def describe_evaluation(inputs: EvaluationInputs, config: EvaluateConfig, response_length: int) -> str:
    sets = ", ".join(f"{each.name} ({len(each.prompts)} problems)" for each in inputs.sets)
    temperature = get_temperature(config)
    how = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
    how += f", top_p {config.top_p:g}" if config.top_p < 1 else ""
    how += f", top_k {config.top_k}" if config.top_k > 0 else ""
    each = "1 response" if config.num_samples == 1 else f"{config.num_samples} responses"
    return f"evaluating {inputs.checkpoint} on {sets}: {each} per problem, {how}, of up to {response_length} tokens"


def list_settings(configs: Mapping[str, Config], inputs: EvaluationInputs) -> dict[str, Any]:
    """The settings of the evaluation, as JSON values."""

    def to_plain(node: object) -> Any:
        return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)

    config = next(iter(configs.values()))
    values = {name: to_plain(getattr(config, name)) for name in ("model", "rollout", "evaluate")}
    for group in ("data", "reward"):
        values[group] = {name: to_plain(getattr(each, group)) for name, each in configs.items()}
    return {
        "checkpoint": str(inputs.checkpoint),
        "seed": config.seed,
        "temperature": get_temperature(config.evaluate),
        "config": values,
    }
