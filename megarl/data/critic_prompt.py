"""Text that the critic alone reads: data.critic_prompt with a prompt's answer and metadata in it, as tokens.

A critic may know what the policy does not (BPCO 2608.23566; Le Critique 2608.16739, section 3): V(h_t, z) remains a
baseline that does not bias the policy gradient where z does not depend on the response (its equation 5). The fields are
therefore those of the prompt, which are fixed before a response is sampled.

The papers do not say where z stands. The implementation of the second one (prime-values) puts a closed system message
in front of the conversation, behind a token that begins every text, and so does this; without a chat template the text
stands there as it is. All tokens of prompt and response then attend to it, and they are the policy's own, so that V of
response token t stands at the same response position.
"""

import string
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError
from megarl.config.schema.data import DataConfig
from megarl.data.render import Renderer
from megarl.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.critic_prompt"
NUM_CACHED = 4096
"""Texts whose tokens are kept: the responses to one prompt have the same one"""
ROLES = ("system", "user")
"""Roles of the message, by preference: some chat templates refuse or leave out a system message without a question"""


class CriticPrompt:
    """What the critic reads of a prompt: the text's tokens, then the prompt's."""

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None):
        """vocab_size: rows of the critic's embedding. Raises ConfigError where data.critic_prompt is blank or no
        template.
        """
        self._parts = parse(config.critic_prompt or "")
        self._limit = config.critic_prompt_length
        # Without the policy's tools.
        self._renderer = Renderer(config, tokenizer, vocab_size=vocab_size)
        self._first_token = tokenizer.bos_token_id
        self._encode = lru_cache(NUM_CACHED)(lambda text: self._tokenize([text])[0])

    def fill(self, prompt: Prompt) -> str:
        """The text for this prompt. Raises ConfigError for a field that the prompt does not have."""
        values = {**prompt.metadata, "answer": prompt.answer}
        for _, name in self._parts:
            if name is not None and name not in values:
                where = prompt.metadata.get("location", f"prompt {prompt.id}")
                raise ConfigError([f"{KEY}: found {{{name}}}; the fields of {where} are {', '.join(sorted(values))}"])
        if self._renderer.uses_template:
            values = {name: self._renderer.defuse(value) for name, value in values.items()}
        return "".join(text + ("" if name is None else values[name]) for text, name in self._parts)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The text's tokens. Raises ConfigError as `fill` and where they are above data.critic_prompt_length."""
        tokens = self._encode(self.fill(prompt))
        self._check_length(len(tokens))
        return tokens

    def extend(self, prompt: Prompt) -> tuple[int, ...]:
        """The text's tokens and then the prompt's, with one token in front of both that begins every text. Raises as
        `encode`.
        """
        own, first = self.encode(prompt), (self._first_token,)
        # Of some models it begins every message.
        if prompt.token_ids[:1] == first and prompt.token_ids.count(self._first_token) == 1:
            return (*first, *(own[1:] if own[:1] == first else own), *prompt.token_ids[1:])
        return (*own, *prompt.token_ids)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check all prompts that are trained on. Raises ConfigError as `encode`."""
        texts = list(dict.fromkeys(map(self.fill, prompts)))
        self._check_length(max(map(len, self._tokenize(texts)), default=0))

    def _check_length(self, found: int) -> None:
        if found > self._limit:
            raise ConfigError(
                [
                    f"data.critic_prompt_length: found {self._limit}; the longest text that {KEY} gives has {found}"
                    " tokens, and none is cut"
                ]
            )

    def _tokenize(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokens of each text, also one that begins every text where a chat template writes it."""
        rendered = list(map(self._render, texts))
        try:
            return self._renderer.tokenize(rendered, add_special_tokens=False)
        except ConfigError as error:
            raise ConfigError([f"{KEY}: {problem.removeprefix('data: ')}" for problem in error.problems]) from error

    def _render(self, text: str) -> str:
        if not self._renderer.uses_template:
            return text
        for role in ROLES:
            try:
                rendered = self._renderer.render_messages([Message(role, text)], for_answer=False)
            except ConfigError:
                continue
            if text.strip() in rendered:
                return rendered
        raise ConfigError(
            [
                f"{KEY}: the tokenizer's chat template shows neither a system message nor a user message that stands"
                " alone; data.chat_template=false does without it"
            ]
        )


def parse(template: str) -> list[tuple[str, str | None]]:
    """(text, name of the field after it) of each part, as Python's templates are written; None: no field follows.

    A name is never evaluated: dots and brackets are part of it. Raises ConfigError naming data.critic_prompt for what
    is no template.
    """
    if not template.strip():
        raise ConfigError([f"{KEY}: found {template!r}; it must be a text, for example 'Reference answer: {{answer}}'"])
    parts: list[tuple[str, str | None]] = []
    try:
        for text, name, specification, conversion in string.Formatter().parse(template):
            if name == "" or specification or conversion:
                raise ValueError("a field is a name between braces and nothing else")
            parts.append((text, name))
    except ValueError as error:
        raise ConfigError(
            [
                f"{KEY}: found {template!r}: {error}; a field is {{answer}} or another one of the prompt's, and a"
                " brace that is text is written twice"
            ]
        ) from error
    return parts
