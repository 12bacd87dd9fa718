"""From a problem to what the model reads (instruction, chat template, tokens), and text that the critic alone reads.

The latter is data.critic_prompt with a prompt's answer and metadata in it (BPCO 2608.23566; Le Critique 2608.16739,
section 3): V(h_t, z) remains a baseline that does not bias the policy gradient where z does not depend on the response
(its equation 5). As in prime-values, z is a closed system message in front of the conversation, behind a token that
begins every text; without a chat template it stands there as it is.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig
from megarl.task.environments import ToolPrompt
from megarl.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.task.data import Problem


PLACEHOLDER = "{question}"
SEPARATOR = "\n\n"  # Between turns where no chat template parts them.
DATE = datetime(2024, 7, 26)
"""What a chat template is told that asks for the date, so that a run reads the same prompts on the day that it is
resumed, and an evaluation those of its run. It is the date that Llama 3's templates have where they are told none"""


class Renderer:
    """Renders problems for one tokenizer. Raises ConfigError for an instruction without {question}."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        tools: ToolPrompt | None = None,
        vocab_size: int | None = None,
    ):
        """tools: those that the prompts describe; None without environment=tools. vocab_size: rows of the model's
        embedding, beyond which no token is accepted; None: not known."""
        if config.instruction is not None and PLACEHOLDER not in config.instruction:
            raise ConfigError([f"data.instruction: found {config.instruction!r}; it must contain {PLACEHOLDER}"])
        self.config, self.tokenizer, self.tools, self.vocab_size = config, tokenizer, tools, vocab_size
        self.uses_template = config.chat_template and bool(tokenizer.chat_template)
        self._inputs = find_inputs(tokenizer) if self.uses_template else set[str]()
        if unread := ", ".join(sorted(config.template_inputs.keys() - self._inputs)):
            read = ", ".join(sorted(self._inputs)) or "none"
            raise ConfigError([f"data.template_inputs: found {unread}; those that the chat template reads: {read}"])
        self._asks_date = False
        self._left_out = ""  # What the tokenizer would add at the end of a text.

    def render(self, problem: "Problem") -> str:
        """The text whose tokens are the prompt, with what the assistant's turn begins with; the policy continues it."""
        text, prefix = (
            self.render_messages(self.build_messages(problem), tools=problem.tools),
            self.config.response_prefix,
        )
        if prefix is None:
            return text
        question = next((m.content for m in reversed(problem.messages) if m.role == "user"), "")
        prefix = prefix.replace(PLACEHOLDER, question)
        return text + prefix if self.uses_template else text + SEPARATOR + prefix

    def build_messages(self, problem: "Problem") -> tuple[Message, ...]:
        """The problem's messages with data.instruction around the user's last one, data.system and the tools' text."""
        messages, instruction = problem.messages, self.config.instruction
        if instruction is not None:
            last = max((i for i, m in enumerate(messages) if m.role == "user"), default=len(messages) - 1)
            # Not str.format: questions and instructions may contain braces.
            asked = Message("user", instruction.replace(PLACEHOLDER, messages[last].content))
            messages = (*messages[:last], asked, *messages[last + 1 :])
        if self.config.system is not None:
            messages = (Message("system", self.config.system), *(m for m in messages if m.role != "system"))
        return messages if self.tools is None else self.tools.add_to(messages)

    def render_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), for_answer: bool = True
    ) -> str:
        """The text of the messages, up to where the assistant's next one begins, or without `for_answer` to the end of
        the last message. tools: those that the data describe, which count where the environment has none. Raises
        ConfigError where the chat template refuses them or leaves something out."""
        tools = tools if self.tools is None else ()
        if not self.uses_template:
            if tools or any(m.others.get("tool_calls") for m in messages):
                found = f"found {'tools' if tools else 'tool_calls'} in the data"
                raise ConfigError([f"data.chat_template: {found}, and no chat template to write them"])
            return SEPARATOR.join(m.content for m in messages if m.content)
        chat = [m.to_dict() for m in messages]
        own = () if self.tools is None or self.tools.text is not None else self.tools.schemas
        schemas: list[dict[Any, Any] | Callable[..., Any]] | None = [dict(each) for each in own or tools] or None

        def apply(chat: list[dict[str, Any]]) -> str:
            keywords: dict[str, Any] = {"strftime_now": self._format_date, "add_generation_prompt": for_answer}
            keywords |= self.config.template_inputs
            return str(self.tokenizer.apply_chat_template(chat, schemas, tokenize=False, **keywords))

        roles = ", ".join(m.role for m in messages)
        try:
            text = apply(chat)
        except Exception as error:  # a template is a program of the checkpoint's author
            why = f"the tokenizer's template refuses messages of {roles}: {error}"
            raise ConfigError([f"data.chat_template: {why}"]) from error
        _check_nothing_left_out(chat, text, apply)
        for name in (schema["function"]["name"] for schema in tools):
            if name not in text:
                raise _refuse_lost(f"the tool {name} that the data describe in the column tools")
        return text

    def _format_date(self, format: str) -> str:
        self._asks_date = True
        return DATE.strftime(format)

    def tokenize(
        self, texts: Sequence[str], add_special_tokens: bool | None = None, names: Sequence[str] = ()
    ) -> list[tuple[int, ...]]:
        """Token ids of each text.

        add_special_tokens: those that the tokenizer adds in front of a text, unless it begins with them; None: where no
        chat template is used, which writes its own. Those behind the text, where the response begins, are left out.
        names: where each text is from, for messages. Raises ConfigError for a text that the model cannot read.
        """
        if not texts:
            return []
        try:
            encoded = self.tokenizer(
                list(texts), add_special_tokens=False, return_offsets_mapping=self.tokenizer.is_fast
            )
        except Exception as error:  # tokenizers has no class of its own for an unknown character
            first = f"the first of which is {texts[0][:80]!r}; choose data that it can read, or another model"
            raise ConfigError([f"data: the model's tokenizer cannot read the prompts ({error}), {first}"]) from error
        if self.tokenizer.is_fast:
            for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                self._check_nothing_lost(text, ids, offsets)
        found = [tuple(ids) for ids in encoded["input_ids"]]
        if not self.uses_template if add_special_tokens is None else add_special_tokens:
            begin = self._find_begin(texts, found)
            found = [ids if begin == ids[: len(begin)] else begin + ids for ids in found]
        for i, ids in enumerate(found):
            outside = [token for token in ids if self.vocab_size is not None and token >= self.vocab_size]
            if outside:
                token = f"{outside[0]} ({self.tokenizer.convert_ids_to_tokens(outside[0])!r})"
                where = f"{names[i] if names else 'data'}: the text {texts[i][:80]!r} has the token {token}"
                needed = "Tokens that were added to the tokenizer need rows in the model"
                raise ConfigError([f"{where}; the model's embedding has {self.vocab_size} rows. {needed}"])
        return found

    def append_answers(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[tuple[int, ...]]:
        """Without a chat template: the tokens of each prompt, those of its answer, and the one that ends a text, where
        the tokenizer has one. Raises ConfigError as `tokenize`."""
        end = self.tokenizer.eos_token_id
        ends = () if end is None else (end,)
        ids = self.tokenize(answers, add_special_tokens=False)
        return [(*prompt.token_ids, *own, *ends) for prompt, own in zip(prompts, ids, strict=True)]

    def _find_begin(self, texts: Sequence[str], found: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The tokens that the tokenizer adds in front of a text by itself."""
        # A text that begins with a special token would hide where the added ones end.
        special = set(self.tokenizer.all_special_ids)
        plain = [(text, ids) for text, ids in zip(texts, found, strict=True) if ids and ids[0] not in special]
        text, ids = plain[0] if plain else (texts[0], found[0])
        whole = tuple(self.tokenizer(text)["input_ids"])
        for start in range(len(whole) - len(ids) + 1):
            end = start + len(ids)
            if whole[start:end] == ids:
                self._left_out = " ".join(self.tokenizer.convert_ids_to_tokens(list(whole[end:])))
                return whole[:start]
        why = f"reads {text[:80]!r} as other tokens with its special tokens than without"
        raise ConfigError([f"data: the model's tokenizer {why}"])

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts that the tokenizer reads as special tokens, the longest first, with those that the chat template
        puts around a message, also where the tokenizer does not call them special."""
        added = self.tokenizer.added_tokens_decoder
        found = {str(token) for token in added.values() if token.special} | set(self.tokenizer.all_special_tokens)
        if self.uses_template:
            try:
                around = self.render_messages([Message("user", "QUESTION")], for_answer=False)
            except ConfigError:  # It is refused where the prompts are rendered.
                around = ""
            found |= {str(token) for token in added.values() if not token.special and str(token) in around}
        return tuple(sorted((token for token in found if len(token.strip()) > 1), key=len, reverse=True))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")

    def find_special(self, content: str) -> list[str]:
        """The special tokens that a text has."""
        return list(dict.fromkeys(self._special.findall(content)))

    def defuse(self, content: str) -> str:
        """The content with a space in what the tokenizer would read as a special token: it may not end its message."""
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", content)

    def defuse_message(self, message: Message) -> Message:
        """The message with every text of it as `defuse` gives it."""

        def walk(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {walk(name): walk(each) for name, each in value.items()}
            if isinstance(value, list):
                return [walk(each) for each in value]
            return self.defuse(value) if isinstance(value, str) else value

        return Message(message.role, self.defuse(message.content), walk(message.others))

    def describe(self, prompt: Sequence[int]) -> str:
        """Which template and which special tokens the prompts have. prompt: the tokens of one that was rendered."""
        text = f"prompts in the chat template of {self.config.chat_template_path or 'the tokenizer'}"
        if not self.uses_template:
            why = "data.chat_template is false" if self.tokenizer.chat_template else "the tokenizer has none"
            text = f"prompts without a chat template ({why})"
        names = dict.fromkeys(self.tokenizer.convert_ids_to_tokens(list(prompt)))
        special = ", ".join(name for name in names if name in self.special_tokens)
        text += f"; special tokens of the first: {special or 'none'}"
        if self._left_out:
            text += f"; {self._left_out}, which the tokenizer puts at the end of a text, is left out"
        if unset := ", ".join(sorted(self._inputs - self.config.template_inputs.keys())):
            text += f"; data.template_inputs may have {unset}"
        if self._asks_date:
            text += f"; the template asks for the date and is always told {DATE:%d %b %Y}"
        return text

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
            found = f"has no token for {' '.join(lost)} in the prompt {text[:80]!r}"
            hint = "choose data (or data.instruction) that it can read, or another model"
            raise ConfigError([f"data: the model's tokenizer {found}; {hint}"])

    def _has_token(self, character: str) -> bool:
        ids: list[int] = self.tokenizer(character, add_special_tokens=False)["input_ids"]
        return bool(ids) and not any(self._is_unknown(token, character) for token in ids)

    def _is_unknown(self, token: int, text: str) -> bool:
        """The text may also name the unknown token itself, where it serves as another (<|endoftext|>)."""
        return bool(token == self.tokenizer.unk_token_id and text != self.tokenizer.unk_token)


def _check_nothing_left_out(
    chat: Sequence[Mapping[str, Any]], text: str, apply: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Raises ConfigError where what `apply` makes of the chat, the text, has lost a message's content or calls."""
    for i, message in enumerate(chat):
        changes: list[tuple[str, Any, str]] = []
        if message["content"].strip() not in text:
            changes.append(("content", "", repr(message["content"][:60])))
        if message.get("tool_calls"):
            changes.append(("tool_calls", [], "the tool_calls"))
        for name, empty, lost in changes:
            # It may be changed, such as SmolLM3's "/no_think"; it must not be lost.
            try:
                has_effect = apply([*map(dict, chat[:i]), {**message, name: empty}, *map(dict, chat[i + 1 :])]) != text
            except Exception:  # a template is a program of the checkpoint's author
                has_effect = True
            if not has_effect:
                raise _refuse_lost(f"number {i + 1}, {lost}, of messages of {', '.join(m['role'] for m in chat)}")


def _refuse_lost(what: str) -> ConfigError:
    hint = "data.chat_template_path names a file with another"
    return ConfigError([f"data.chat_template: the tokenizer's template leaves out {what}; {hint}"])


def find_inputs(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """What the chat template reads besides messages, tools and what transformers gives every template. Names that it
    sets itself count where it asks whether they are defined."""
    import jinja2
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

    template = str(tokenizer.chat_template)
    try:
        environment: jinja2.Environment = compile_template(template).environment
        tree = environment.parse(template)
    except jinja2.TemplateError:  # It is refused where the prompts are rendered.
        return set()
    tests = (test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    asked = {test.node.name for test in tests if isinstance(test.node, nodes.Name) and test.node.ctx == "load"}
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store" and name.name not in asked}
    own |= {name.name for name in tree.find_all(nodes.Name) if name.ctx == "param"}
    given = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", *environment.globals}
    return meta.find_undeclared_variables(tree) - own - given - set(tokenizer.special_tokens_map)


def use_chat_template(config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give the tokenizer the chat template of data.chat_template_path, where that is set. Raises ConfigError."""
    key, name = "data.chat_template_path", config.chat_template_path
    if name is None:
        return
    if not config.chat_template:
        raise ConfigError([f"{key}: has no effect with data.chat_template=false"])
    try:
        tokenizer.chat_template = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{key}: {name} cannot be read (from {Path.cwd()}): {error}"]) from error


def _is_visible(character: str) -> bool:
    return character.isprintable() and not character.isspace()


KEY = "data.critic_prompt"
FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|([{}])")
"""A brace that is text, the name of a field (never evaluated: dots and brackets are part of it), or a lone brace"""


class CriticPrompt:
    """What the critic reads of a prompt: the text's tokens, then the prompt's."""

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None):
        """vocab_size: rows of the critic's embedding. Raises ConfigError for a blank data.critic_prompt or a lone brace
        in it."""
        self._template, self._limit = config.critic_prompt or "", config.critic_prompt_length
        if not self._template.strip() or any(found[2] for found in FIELD.finditer(self._template)):
            needed = "it must be a text such as 'Reference answer: {answer}', and a brace that is text is written twice"
            raise ConfigError([f"{KEY}: found {self._template!r}; {needed}"])
        # Without the policy's tools.
        self._renderer = Renderer(config, tokenizer, vocab_size=vocab_size)
        self._first_token = tokenizer.bos_token_id
        self._encode = lru_cache(4096)(lambda text: self._tokenize([text])[0])

    def fill(self, prompt: Prompt) -> str:
        """The text for this prompt. Raises ConfigError for a field that the prompt does not have."""
        values = {**prompt.metadata, **({"answer": " or ".join(prompt.answers)} if prompt.answers else {})}

        def replace_field(found: re.Match[str]) -> str:
            name = found[1]
            if name is None:
                return found[0][0]
            if name not in values:
                where = prompt.metadata.get("location", f"prompt {prompt.id}")
                raise ConfigError([f"{KEY}: found {{{name}}}; the fields of {where} are {', '.join(sorted(values))}"])
            return self._renderer.defuse(values[name]) if self._renderer.uses_template else values[name]

        return FIELD.sub(replace_field, self._template)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The text's tokens. Raises ConfigError as `fill` and where they are above data.critic_prompt_length."""
        return self._encode(self.fill(prompt))

    def extend(self, prompt: Prompt) -> tuple[int, ...]:
        """The text's tokens and then the prompt's, with one token in front of both that begins every text. Raises as
        `encode`."""
        own, first = self.encode(prompt), (self._first_token,)
        # Of some models it begins every message.
        if prompt.token_ids[:1] == first and prompt.token_ids.count(self._first_token) == 1:
            return (*first, *(own[1:] if own[:1] == first else own), *prompt.token_ids[1:])
        return (*own, *prompt.token_ids)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check all prompts that are trained on. Raises ConfigError as `encode`."""
        self._tokenize(list(dict.fromkeys(map(self.fill, prompts))))

    def _tokenize(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokens of each text, also one that begins every text where a chat template writes it."""
        rendered = list(map(self._render, texts))
        try:
            found = self._renderer.tokenize(rendered, add_special_tokens=False)
        except ConfigError as error:
            raise ConfigError([f"{KEY}: {problem.removeprefix('data: ')}" for problem in error.problems]) from error
        if (most := max(map(len, found), default=0)) > self._limit:
            longest = f"the longest text that {KEY} gives has {most} tokens, and none is cut"
            raise ConfigError([f"data.critic_prompt_length: found {self._limit}; {longest}"])
        return found

    def _render(self, text: str) -> str:
        if not self._renderer.uses_template:
            return text
        for role in ("system", "user"):  # Some templates leave out a system message without a question.
            with contextlib.suppress(ConfigError):
                rendered = self._renderer.render_messages([Message(role, text)], for_answer=False)
                if text.strip() in rendered:
                    return rendered
        found = "the tokenizer's chat template shows neither a system message nor a user message that stands alone"
        raise ConfigError([f"{KEY}: {found}; data.chat_template=false does without it"])
