"""What a run will read, before it runs: it starts no server and no training process.

    megarl data [group=option] [key=value] ...

takes what megarl train takes. It prints how the data are read, ten prompts as the model gets them, with special tokens
between ⟦ and ⟧, the lengths, prompts that are dropped, repeats, and answers that the reward cannot read. Exit code 0:
nothing is wrong. 1: the run would be refused, or some answers cannot be read. 2: the configuration itself is wrong.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megarl.config.errors import ConfigError
from megarl.config.load import load
from megarl.config.overrides import name_choice, take_config_dirs
from megarl.config.schema import task as schema
from megarl.config.schema.algo import compares_pairs
from megarl.config.schema.mix import name_in_source, naming_source, split_config
from megarl.config.schema.root import Config
from megarl.models.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.rollout.pairs import build_pairs
from megarl.rollout.server import load_generation_spec
from megarl.run.command import end_with_config_error
from megarl.task.data import DataSplits, build_data, draw
from megarl.task.environments import build_tool_prompt
from megarl.task.process import shorten
from megarl.task.render import Renderer, use_chat_template
from megarl.task.scorer import Scorer, build_scorer, reads_answers
from megarl.types import FinishReason, Prompt, Response

NUM_SHOWN = 10
NUM_BARS = 10
LONGEST_BAR = 40
NUM_TRIED = 200
"""Prompts whose answers the reward is tried on"""
FEW_LETTERS = 10
"""Of a prompt in which punctuation may be all that counts"""
NUM_NAMED = 5
"""Of records that something is wrong with"""
ASKS_SERVER = (schema.HttpRewardConfig, schema.JudgeRewardConfig, schema.ScalarModelRewardConfig)


def main() -> None:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    try:
        arguments = take_config_dirs(arguments)
        if options := [text for text in arguments if text.startswith("-")]:
            raise ConfigError([f"{options[0]}: no such option; megarl data takes key=value, as megarl train does"])
        loaded = load(arguments)
        for line in loaded.lines:
            print(line)
        problems = list[str]()
        for name, config in split_config(loaded.config).items():
            own = list[str]()
            with naming_source(name):
                for line in preview(config, own):
                    print(f"{name}: {line}" if name else line)
            problems += [name_in_source(name, problem) for problem in own]
        sys.stdout.flush()
    except ConfigError as error:
        end_with_config_error(error)
    except BrokenPipeError:  # As `end_with_closed_pipe`, whose signal would also end it where a reward's process died.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


def preview(config: Config, problems: list[str]) -> Iterator[str]:
    """The lines. problems: grows by what a run would be refused for or could not learn from. Raises ConfigError for
    data that cannot be read at all."""
    is_pairs = compares_pairs(config.algo)
    if not (config.has_servers or is_pairs):
        raise ConfigError(["data: this configuration learns from saved responses and reads no data"])
    checkpoint = resolve_checkpoint(config.model, default_cache_dir())
    tokenizer, vocab_size = load_tokenizer(checkpoint), load_generation_spec(checkpoint).vocab_size
    use_chat_template(config.data, tokenizer)
    tools = None if is_pairs else build_tool_prompt(config.environment, config.data, tokenizer)
    renderer = Renderer(config.data, tokenizer, tools, vocab_size)
    unlimited = replace(config.data, prompt_length=sys.maxsize)
    whole = build_data(unlimited, tokenizer, config.seed, tools, vocab_size)
    prompts = [*whole.train, *whole.heldout]
    if is_pairs:
        longest = config.data.prompt_length + config.rollout.response_length
        pairs = build_pairs(whole, renderer, longest)
        yield from pairs.notes
        for number, pair in enumerate(draw(pairs.train, NUM_SHOWN, f"preview/{config.seed}"), start=1):
            for name, ids in (("better", pair.chosen), ("worse", pair.rejected)):
                yield from _show(f"{number}. {pair.id}, {name}", ids.tolist(), renderer)
        every = [side for pair in (*pairs.train, *pairs.heldout) for side in (pair.chosen, pair.rejected)]
        yield from draw_histogram(list(map(len, every)), "conversations", f"at most {longest - 1} in a run")
    else:
        yield from whole.notes
        for number, prompt in enumerate(draw(whole.train, NUM_SHOWN, f"preview/{config.seed}"), start=1):
            answers = " or ".join(map(repr, prompt.answers)) or "none"
            head = f"{number}. {_locate(prompt)}: {len(prompt.token_ids)} tokens, answer {shorten(answers, 100)}"
            yield from _show(head, prompt.token_ids, renderer)
        limit = config.data.prompt_length
        yield from draw_histogram([len(each.token_ids) for each in prompts], "prompts", f"data.prompt_length={limit}")
        yield from _list_too_long(prompts, limit)
    yield from list_repeats(whole)
    if is_pairs:
        return
    try:
        data = build_data(config.data, tokenizer, config.seed, tools, vocab_size)
        yield f"a run trains on {len(data.train)} prompts and holds out {len(data.heldout)}"
    except ConfigError as error:
        problems += error.problems
    yield from try_reward(config, prompts, problems)


def _show(head: str, token_ids: Sequence[int], renderer: Renderer) -> Iterator[str]:
    """The text of these tokens, special ones marked."""
    names, special = renderer.tokenizer.convert_ids_to_tokens(list(token_ids)), set(renderer.special_tokens)
    text, plain = "", list[int]()
    for token, name in zip(token_ids, names, strict=True):
        if name in special:
            text += f"{renderer.tokenizer.decode(plain)}⟦{name}⟧"
            plain = []
        else:
            plain.append(token)
    yield head
    yield from (f"    {line}" for line in (text + str(renderer.tokenizer.decode(plain))).splitlines())


def _locate(prompt: Prompt) -> str:
    return prompt.metadata.get("location", prompt.id)


def draw_histogram(lengths: Sequence[int], what: str, limit: str) -> Iterator[str]:
    """A bar for each of up to NUM_BARS equal ranges of tokens."""
    ordered, count = sorted(lengths), len(lengths)
    low, high = ordered[0], ordered[-1]
    width = -(-(high - low + 1) // NUM_BARS)
    bars = Counter((length - low) // width for length in lengths)
    middle, most = ordered[count // 2], ordered[min(count - 1, count * 95 // 100)]
    yield f"tokens of {count} {what}: {low} to {high}, median {middle}, 95% at most {most}; {limit}"
    for bar in range((high - low) // width + 1):
        start = low + bar * width
        drawn = "#" * -(-bars[bar] * LONGEST_BAR // max(bars.values()))
        yield f"    {f'{start} to {min(start + width - 1, high)}':>16} {drawn} {bars[bar]}"


def _list_too_long(prompts: Sequence[Prompt], limit: int) -> Iterator[str]:
    over = sorted((each for each in prompts if len(each.token_ids) > limit), key=lambda each: -len(each.token_ids))
    named = "".join(f"; {_locate(each)} has {len(each.token_ids)}" for each in over[:NUM_NAMED])
    yield f"{len(over)} prompts are longer than data.prompt_length={limit} and dropped{named}"


def list_repeats(data: DataSplits) -> Iterator[str]:
    """Prompts that are there several times, and held-out ones that are nearly alike to one of training."""
    yield f"{data.num_repeated} repeats of held-out prompts are dropped from training"
    first, answers = dict[str, Prompt](), defaultdict[str, set[str]](set)
    for prompt in data.train:
        key = " ".join(prompt.text.split())
        first.setdefault(key, prompt)
        answers[key].update(prompt.answers)
    several = [key for key, found in answers.items() if len(found) > max(1, len(first[key].references))]
    named = "".join(f"; {_locate(first[key])}" for key in several[:NUM_NAMED])
    repeats = len(data.train) - len(first)
    yield f"{repeats} prompts of training repeat another; {len(several)} have different answers{named}"
    alike = {_simplify(prompt): prompt for prompt in reversed(data.train)}
    near = [(each, alike[key]) for each in data.heldout if (key := _simplify(each)) in alike]
    named = "".join(f"; {_locate(each)} and {_locate(other)}" for each, other in near[:NUM_NAMED])
    yield f"{len(near)} held-out prompts differ from one of training in case, spaces or punctuation alone{named}"


def _simplify(prompt: Prompt) -> str:
    """The letters and digits of a prompt; all of it where there are few."""
    kept = re.sub(r"[\W_]+", "", prompt.text.casefold())
    return kept if len(kept) > FEW_LETTERS else prompt.text


def try_reward(config: Config, prompts: Sequence[Prompt], problems: list[str]) -> Iterator[str]:
    """Whether the reward can read the answers, and those that read them also accept them as responses."""
    chosen = f"{name_choice('reward', config.reward)} with {name_choice('data', config.data)}"
    if isinstance(config.reward, ASKS_SERVER):
        yield f"{chosen} is not tried: it asks a server"
        return
    tried = random.Random(f"preview/{config.seed}").sample(prompts, min(NUM_TRIED, len(prompts)))
    unread, refused = list[str](), list[str]()
    with contextlib.closing(build_scorer(config.reward)) as scorer:
        asks = reads_answers(config.reward) and not isinstance(config.reward, schema.WeightedRewardConfig)
        for prompt in tried:
            try:
                scorer.check([prompt], config.reward.wrong, chosen)
            except ConfigError as error:
                unread.append(f"{_locate(prompt)}: {' '.join(error.problems)}")
                continue
            if asks and not asyncio.run(_accepts(scorer, prompt)):
                refused.append(f"{_locate(prompt)}: {chosen} scores the answer {prompt.answer!r} itself as wrong")
    accepted = f", {len(refused)} are not accepted" if asks else ""
    yield f"{chosen}: {len(unread)} of {len(tried)} answers tried cannot be read{accepted}"
    problems += [*unread[:NUM_NAMED], *refused[:NUM_NAMED]]


async def _accepts(scorer: Scorer, prompt: Prompt) -> bool:
    """Whether the answer is correct as a response, as it is or in a box."""
    for text in (prompt.answer, f"\\boxed{{{prompt.answer}}}"):
        response = Response((0,), text, (0.0,), (True,), (0,), FinishReason.stop)
        if (await scorer.score(prompt, response)).correct:
            return True
    return False


if __name__ == "__main__":
    main()
