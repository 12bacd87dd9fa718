"""Preference pairs, from which a reward model learns without a server: a record has a prompt, and in the columns
`chosen` and `rejected` two responses to it, as texts or as chats that end with the response.

A response is read as the whole conversation, as `megarl serve` renders it for reward=reward_model; without a chat
template as the prompt's tokens, the response's and the one that ends a text. One more token follows, which nothing
reads: the value of the state in which it is chosen is the score at the response's last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config.errors import ConfigError
from megarl.rollout.rollout_file import Group
from megarl.rollout.source import IterationBatch, SavedSource
from megarl.task.data import DataSplits, PromptSampler, read_response
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response, Sample, Score

COLUMNS = ("chosen", "rejected")


class Pair(NamedTuple):
    """Two conversations, the better one first, int32 each."""

    id: str
    chosen: NDArray[np.int32]
    rejected: NDArray[np.int32]


@dataclass(frozen=True)
class Pairs:
    train: tuple[Pair, ...]
    heldout: tuple[Pair, ...]
    notes: tuple[str, ...]
    """How they were read"""


def build_pairs(data: DataSplits, renderer: Renderer, longest: int) -> Pairs:
    """The pairs of these prompts, without those of two equal responses and those that are too long.

    longest: tokens of a conversation and the one that follows it. Raises ConfigError that says where, for a record
    without two responses, and where no pair is left.
    """
    notes, sides = list(data.notes), list[tuple[Pair, ...]]()
    if data.num_dropped:
        notes.append(f"{data.num_dropped} dropped (prompts above data.prompt_length, or that are held out too)")
    for side, prompts in (("training", data.train), ("held-out", data.heldout)):
        ids = _tokenize([(prompt, text) for prompt in prompts for text in _read(prompt)], renderer)
        pairs = [
            Pair(prompt.id, *both) for prompt, both in zip(prompts, zip(ids[::2], ids[1::2], strict=True), strict=True)
        ]
        different = [pair for pair in pairs if not np.array_equal(pair.chosen, pair.rejected)]
        kept = tuple(pair for pair in different if max(len(pair.chosen), len(pair.rejected)) < longest)
        for number, why in ((len(pairs) - len(different), "of two equal responses"), (len(different) - len(kept), "")):
            if number:
                notes.append(f"{number} {side} pairs dropped, {why or f'of {longest} tokens or more'}")
        if not kept:
            limit = f"data.prompt_length + rollout.response_length ({longest} tokens)"
            raise ConfigError([f"data.path: no {side} pair is left of {len(pairs)}: of two responses below {limit}"])
        sides.append(kept)
    return Pairs(sides[0], sides[1], tuple(notes))


def _read(prompt: Prompt) -> tuple[str, str]:
    record, where = prompt.columns, prompt.metadata.get("location", "data")
    texts = [read_response(record.get(name)) for name in COLUMNS]
    for name, text in zip(COLUMNS, texts, strict=True):
        if not isinstance(text, str):
            found = f"found {record[name]!r:.80}" if name in record else f"found only {', '.join(map(str, record))}"
            raise ConfigError([f"{where}: {name}: {found}; expected a response, as a text or a chat that ends with it"])
    before = [each[:-1] for name in COLUMNS if isinstance(each := record[name], list)]
    if len(before) == 2 and before[0] != before[1]:
        raise ConfigError([f"{where}: chosen, rejected: their chats differ before the last message"])
    return texts[0], texts[1]


def _tokenize(answered: Sequence[tuple[Prompt, str]], renderer: Renderer) -> list[NDArray[np.int32]]:
    """The tokens of each prompt with its response."""
    if renderer.uses_template:
        chats = [(*prompt.messages, Message("assistant", renderer.defuse(text))) for prompt, text in answered]
        found = renderer.tokenize([renderer.render_messages(chat, for_answer=False) for chat in chats])
    else:
        end = renderer.tokenizer.eos_token_id
        ids = renderer.tokenize([text for _, text in answered], add_special_tokens=False)
        ends = () if end is None else (end,)
        found = [(*prompt.token_ids, *own, *ends) for (prompt, _), own in zip(answered, ids, strict=True)]
    return [np.array(each, dtype=np.int32) for each in found]


def build_group(pair: Pair) -> Group:
    """The better response, of reward 1, and the other, of reward 0; each as a prompt that one token follows."""
    return tuple(
        Sample(
            Prompt(pair.id, "", tuple(tokens.tolist()), ""),
            Response(tokens[-1:], "", [0.0], [True], [0], FinishReason.stop),
            Score(reward, reward > 0),
            group=0,
        )
        for tokens, reward in ((pair.chosen, 1.0), (pair.rejected, 0.0))
    )


class PairSource(SavedSource):
    """The pairs of one iteration after the other, in an order that follows from the seed, each once in a pass."""

    def __init__(self, pairs: Pairs, num_groups: int, seed: int):
        """num_groups: pairs of an iteration."""
        self._num_groups, self._num_saved = num_groups, len(pairs.train)
        self._sampler = PromptSampler(pairs.train, seed)

    def take(self, iteration: int, weight_version: int) -> IterationBatch:
        """The pairs of this iteration. Its metric: saved/epoch, the number of passes over them."""
        groups = [build_group(pair) for pair in self._sampler.next_batch(self._num_groups)]
        aged = [tuple(replace(sample, age=iteration) for sample in group) for group in groups]
        return IterationBatch(replayed=aged, metrics={"saved/epoch": self.count_passes()})
