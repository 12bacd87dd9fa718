"""From a problem to what the model reads: instruction, chat template, tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.errors import ConfigError
from megarl.config.schema.data import DataConfig
from megarl.data.problem import Problem
from megarl.toolbox.prompt import ToolPrompt
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "{question}"
SEPARATOR = "\n\n"
"""Between turns where no chat template parts them."""


class Renderer:
    """Renders problems for one tokenizer. Raises ConfigError for an instruction without {question}."""

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", tools: ToolPrompt | None = None):
        """tools: those that the prompts describe; None without environment=tools."""
        config = _read_instruction(config)
        if config.instruction is not None and PLACEHOLDER not in config.instruction:
            raise ConfigError([f"data.instruction: found {config.instruction!r}; it must contain {PLACEHOLDER}"])
        self.config = config
        self.tokenizer = tokenizer
        self.tools = tools
        self.uses_template = config.chat_template and bool(tokenizer.chat_template)

    def render(self, problem: Problem) -> str:
        """The text whose tokens are the prompt."""
        return self.render_messages(self.build_messages(problem)) + self._render_prefix(problem)

    def build_messages(self, problem: Problem) -> tuple[Message, ...]:
        """The problem's messages with data.instruction, data.system and what the tools' prompt adds."""
        messages = self._add_instruction(problem.messages)
        if self.config.system is not None:
            messages = (Message("system", self.config.system), *(m for m in messages if m.role != "system"))
        return messages if self.tools is None else self.tools.add_to(messages)

    def _render_prefix(self, problem: Problem) -> str:
        """What the assistant's turn begins with; the policy continues it."""
        if self.config.response_prefix is None:
            return ""
        prefix = self.config.response_prefix.replace(PLACEHOLDER, _get_last_question(problem.messages))
        return prefix if self.uses_template else SEPARATOR + prefix

    def render_messages(self, messages: Sequence[Message], for_answer: bool = True) -> str:
        """The text of the messages, up to where the assistant's next one begins.

        for_answer: whether one follows them; False: the text ends with the last message.
        Raises ConfigError where the chat template refuses them.
        """
        if not self.uses_template:
            return SEPARATOR.join(m.content for m in messages if m.content)
        chat = [{"role": m.role, "content": m.content} for m in messages]
        schemas: list[dict[Any, Any] | Callable[..., Any]] | None = None
        if self.tools is not None and self.tools.text is None:
            schemas = [dict(schema) for schema in self.tools.schemas]
        try:
            text = self.tokenizer.apply_chat_template(chat, schemas, tokenize=False, add_generation_prompt=for_answer)
        except Exception as error:  # a template is a program of the checkpoint's author
            roles = ", ".join(m.role for m in messages)
            raise ConfigError(
                [f"data.chat_template: the tokenizer's template refuses messages of {roles}: {error}"]
            ) from error
        return str(text)

    def tokenize(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[tuple[int, ...]]:
        """Token ids of each text.

        add_special_tokens: those that the tokenizer adds at the ends of a text; None: where no chat template is used. A
        chat template writes its own special tokens; plain text gets those the tokenizer adds by itself.
        """
        if not texts:
            return []
        try:
            encoded = self.tokenizer(
                list(texts),
                add_special_tokens=not self.uses_template if add_special_tokens is None else add_special_tokens,
                return_offsets_mapping=self.tokenizer.is_fast,
            )
        except Exception as error:  # tokenizers has no class of its own for an unknown character
            raise ConfigError(
                [
                    f"data: the model's tokenizer cannot read the prompts ({error}), the first of which is"
                    f" {texts[0][:80]!r}; choose data that it can read, or another model"
                ]
            ) from error
        if self.tokenizer.is_fast:
            for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                self._check_nothing_lost(text, ids, offsets)
        return [tuple(ids) for ids in encoded["input_ids"]]

    def _check_nothing_lost(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> None:
        """Raises ConfigError for characters without a token, which tokenizers leave out silently."""
        covered = set[int]()
        for token, (start, end) in zip(ids, offsets, strict=True):
            if not self._is_unknown(token, text[start:end]):
                covered.update(range(start, end))
        if all(i in covered or not _is_visible(text[i]) for i in range(len(text))):
            return
        # Past a character left out, the offsets may be wrong: each character is asked for alone.
        lost = sorted(c for c in set(text) if _is_visible(c) and not self._has_token(c))
        if lost:
            raise ConfigError(
                [
                    f"data: the model's tokenizer has no token for {' '.join(lost)} in the prompt {text[:80]!r};"
                    " choose data (or data.instruction) that it can read, or another model"
                ]
            )

    def _has_token(self, character: str) -> bool:
        ids: list[int] = self.tokenizer(character, add_special_tokens=False)["input_ids"]
        return bool(ids) and not any(self._is_unknown(token, character) for token in ids)

    def _is_unknown(self, token: int, text: str) -> bool:
        """The text may also name the unknown token itself, where it serves as another (<|endoftext|>)."""
        return bool(token == self.tokenizer.unk_token_id and text != self.tokenizer.unk_token)

    def _add_instruction(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        instruction = self.config.instruction
        if instruction is None:
            return messages
        last = _find_last_question(messages)
        # Not str.format: questions and instructions may contain braces.
        question = Message("user", instruction.replace(PLACEHOLDER, messages[last].content))
        return (*messages[:last], question, *messages[last + 1 :])


def use_chat_template(config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give the tokenizer the chat template of data.chat_template_path, where that is set. Raises ConfigError."""
    if config.chat_template_path is None:
        return
    if not config.chat_template:
        raise ConfigError(["data.chat_template_path: has no effect with data.chat_template=false"])
    tokenizer.chat_template = _read_text("data.chat_template_path", config.chat_template_path)


def _read_instruction(config: DataConfig) -> DataConfig:
    """The configuration with the text of data.instruction_path as data.instruction."""
    if config.instruction_path is None:
        return config
    if config.instruction is not None:
        raise ConfigError(["data.instruction_path: found beside data.instruction; give one, the other is null"])
    text = _read_text("data.instruction_path", config.instruction_path).rstrip("\n")
    return replace(config, instruction=text, instruction_path=None)


def _read_text(key: str, name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{key}: {name} cannot be read (from {Path.cwd()}): {error}"]) from error


def _find_last_question(messages: Sequence[Message]) -> int:
    return max(i for i, message in enumerate(messages) if message.role == "user")


def _get_last_question(messages: Sequence[Message]) -> str:
    return messages[_find_last_question(messages)].content


def _is_visible(character: str) -> bool:
    return character.isprintable() and not character.isspace()
