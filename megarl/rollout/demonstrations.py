"""Demonstrations, which a policy imitates without a server: prompts with their answers, or chats, of which it learns
every turn of the assistant.

With a chat template the tokens are those of the whole chat. The assistant's are what follows a prompt that the policy
would continue, up to the token that ends an answer. The tokens before and after each turn must be the same as if
nothing followed it, as they are where a policy answers: a template that writes earlier turns otherwise is refused.
Without a template there is one answer, the prompt's tokens with the answer's and the one that ends a text behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config.errors import ConfigError
from megarl.rollout.conversation import find_turn_end
from megarl.rollout.rollout_file import Group
from megarl.task.data import DataSplits, read_tools
from megarl.task.process import shorten
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response, Sample, Score


class Demonstration(NamedTuple):
    id: str
    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Whether the token is the assistant's"""


@dataclass(frozen=True)
class Demonstrations:
    train: tuple[Demonstration, ...]
    heldout: tuple[Demonstration, ...]
    notes: tuple[str, ...]
    """How they were read"""


def build_demonstrations(data: DataSplits, renderer: Renderer, longest: int) -> Demonstrations:
    """The prompts of these data with their answers, without those that are too long.

    longest: tokens of all of one. Raises ConfigError that says where, for what the chat template writes otherwise as
    soon as it goes on, and where none is left.
    """
    notes, sides = list(data.notes), list[tuple[Demonstration, ...]]()
    if data.num_dropped:
        notes.append(f"{data.num_dropped} dropped (prompts above data.prompt_length, or that are held out too)")
    for side, prompts in (("training", data.train), ("held-out", data.heldout)):
        found = _tokenize_chats(prompts, renderer) if renderer.uses_template else _tokenize_texts(prompts, renderer)
        kept = tuple(each for each in found if len(each.tokens) <= longest)
        if len(kept) < len(found):
            notes.append(f"{len(found) - len(kept)} {side} demonstrations dropped, of more than {longest} tokens")
        if not kept:
            limit = f"data.prompt_length + rollout.response_length ({longest} tokens)"
            raise ConfigError([f"data: no {side} demonstration is left of {len(found)}: of at most {limit}"])
        sides.append(kept)
    learned, whole = (sum(int(each.learned.sum()) for each in sides[0]), sum(len(each.tokens) for each in sides[0]))
    first = sides[0][0]
    text = str(renderer.tokenizer.decode(first.tokens[first.learned].tolist()))
    notes.append(f"{learned} of {whole} tokens are learned; of the first {shorten(text, 80)!r}")
    return Demonstrations(sides[0], sides[1], tuple(notes))


def _tokenize_texts(prompts: Sequence[Prompt], renderer: Renderer) -> list[Demonstration]:
    for prompt in prompts:
        if any(message.role == "assistant" for message in prompt.messages):
            where = prompt.metadata.get("location", "data")
            why = "without a chat template nothing parts the turns of a chat: give the tokenizer one"
            raise ConfigError([f"{where}: found several answers; {why} (data.chat_template_path)"])
    whole = renderer.append_answers(prompts, [prompt.answer for prompt in prompts])
    return [
        Demonstration(prompt.id, np.array(ids, dtype=np.int32), np.arange(len(ids)) >= len(prompt.token_ids))
        for prompt, ids in zip(prompts, whole, strict=True)
    ]


def _tokenize_chats(prompts: Sequence[Prompt], renderer: Renderer) -> list[Demonstration]:
    chats = [(*prompt.messages, Message("assistant", renderer.defuse(prompt.answer))) for prompt in prompts]
    answers = [[i for i, message in enumerate(chat) if message.role == "assistant"] for chat in chats]
    # Of each answer the text before and with it; the last one's is the whole.
    tools = [read_tools(prompt.columns, prompt.messages) for prompt in prompts]
    texts = [
        renderer.render_messages(chat[: i + with_it], own, for_answer=not with_it)
        for chat, own, places in zip(chats, tools, answers, strict=True)
        for i in places
        for with_it in (False, True)
    ]
    tokens, end = iter(renderer.tokenize(texts)), find_turn_end(renderer)
    return [
        _join_turns(prompt, [(next(tokens), next(tokens)) for _ in places], end)
        for prompt, places in zip(prompts, answers, strict=True)
    ]


def _join_turns(
    prompt: Prompt, turns: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], end: int | None
) -> Demonstration:
    """turns: the tokens before each answer, and those with it. end: the token that ends an answer."""
    whole = turns[-1][1]
    learned = np.zeros(len(whole), dtype=np.bool_)
    for number, (before, after) in enumerate(turns, start=1):
        if whole[: len(after)] != after or after[: len(before)] != before:
            where = prompt.metadata.get("location", "data")
            why = f"the chat template writes answer {number} of {len(turns)} otherwise once the chat goes on"
            hint = "a policy would not see it so; data.chat_template_path names a file with another template"
            raise ConfigError([f"{where}: {why}; {hint}"])
        own = after[len(before) :]
        stop = len(own) if end is None or end not in own else len(own) - own[::-1].index(end)
        learned[len(before) : len(before) + stop] = True
    return Demonstration(prompt.id, np.array(whole, dtype=np.int32), learned)


def build_group(demonstration: Demonstration) -> Group:
    """The demonstration as the only response to its prompt, correct and of reward 1; its turns are the generated."""
    first = int(demonstration.learned.argmax())
    tokens, learned = demonstration.tokens[first:], demonstration.learned[first:]
    prompt = Prompt(demonstration.id, "", tuple(demonstration.tokens[:first].tolist()), "")
    zeros = np.zeros(len(tokens))
    response = Response(tokens, "", zeros, learned, zeros.astype(int).tolist(), FinishReason.stop)
    return (Sample(prompt, response, Score(1.0, True), group=0),)
