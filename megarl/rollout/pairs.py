"""Preference pairs, from which a reward model learns without a server: a record has a prompt, and in the columns
`chosen` and `rejected` two responses to it, as texts or as chats that end with the response; or two responses and a
number that says which is better.

A response is read as the whole conversation, as `megarl serve` renders it for reward=reward_model; without a chat
template as the prompt's tokens, the response's and the one that ends a text. One more token follows, which nothing
reads: the value of the state in which it is chosen is the score at the response's last token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config.errors import ConfigError
from megarl.rollout.rollout_file import Group
from megarl.task.data import DataSplits, read_chat, read_response, read_tools
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response, Sample, Score

PREFERENCES = ("overall_preference", "preference_strength")
COLUMNS = ("chosen", "rejected")
SCORED = [(f"response{mark}1", f"response{mark}2", by) for mark in ("", "_") for by in PREFERENCES]
"""Columns of two responses, and of a number that is below 0 where the first is better, as HelpSteer3 has them"""


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
        read, reasons = [(prompt, _read(prompt)) for prompt in prompts], Counter[str]()
        answered = [(prompt, text) for prompt, found in read if not isinstance(found, str) for text in found]
        reasons.update(found for _, found in read if isinstance(found, str))
        ids = _tokenize(answered, renderer)
        pairs = list[Pair]()
        for (prompt, _), chosen, rejected in zip(answered[::2], ids[::2], ids[1::2], strict=True):
            if np.array_equal(chosen, rejected):
                reasons["of two equal responses"] += 1
            elif max(len(chosen), len(rejected)) >= longest:
                reasons[f"of {longest} tokens or more"] += 1
            else:
                pairs.append(Pair(prompt.id, chosen, rejected))
        notes += [f"{number} {side} pairs dropped, {why}" for why, number in reasons.items()]
        if not pairs:
            limit = f"data.prompt_length + rollout.response_length ({longest} tokens)"
            why = f"of two responses below {limit}; dropped were {dict(reasons)}"
            raise ConfigError([f"data.path: no {side} pair is left of {len(prompts)}: {why}"])
        sides.append(tuple(pairs))
    return Pairs(sides[0], sides[1], tuple(notes))


def _read(prompt: Prompt) -> tuple[str, str] | str:
    """The better response and the worse one, or why there is none. Raises ConfigError that says where, for a record
    that is not of such a form."""
    record, where = prompt.columns, prompt.metadata.get("location", "data")
    names = COLUMNS
    if not any(name in record for name in names):
        scored = next((found for found in SCORED if all(name in record for name in found)), None)
        if scored is not None:
            preference = record[scored[2]]
            if not isinstance(preference, int | float) or not preference:
                return f"without a preference in {scored[2]}"
            names = scored[:2] if preference < 0 else (scored[1], scored[0])
    texts = [read_response(f"{where}: {name}", record.get(name)) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str):
            found = f"found {record[name]!r:.80}" if name in record else f"found only {', '.join(map(str, record))}"
            needed = "expected a response, as a text or a chat that ends with it"
            raise ConfigError([f"{where}: {name}: {found}; {needed}, in {' and '.join(COLUMNS)}"])
    chats = [read_chat(f"{where}: {name}", record[name]) for name in names]
    before = [chat[:-1] for chat in chats if len(chat) > 1]
    if len(before) == 2 and before[0] != before[1]:
        return "whose chats differ before the last message"
    earlier = before[0] if before else prompt.messages
    asked, said = (sum(m.role == "user" for m in each) for each in (prompt.messages, earlier))
    if asked != said:
        found = f"found {said} messages of the user before the response, and {asked} in the column of the prompt"
        raise ConfigError([f"{where}: {names[0]}: {found}; data.prompt_field={names[0]} takes them from there"])
    return (texts[0], texts[1]) if all(text.strip() for text in texts) else "of which one response is blank"


def _tokenize(answered: Sequence[tuple[Prompt, str]], renderer: Renderer) -> list[NDArray[np.int32]]:
    """The tokens of each prompt with its response."""
    if renderer.uses_template:
        chats = [(*prompt.messages, Message("assistant", renderer.defuse(text))) for prompt, text in answered]
        tools = [read_tools(prompt.columns, prompt.messages) for prompt, _ in answered]
        texts = [renderer.render_messages(*each, for_answer=False) for each in zip(chats, tools, strict=True)]
        found = renderer.tokenize(texts)
    else:
        found = renderer.append_answers([prompt for prompt, _ in answered], [text for _, text in answered])
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
