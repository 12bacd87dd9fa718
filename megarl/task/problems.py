"""Problems as a source of prompts gives them, before any tokenizer sees them; records with named fields as problems."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.task import AnswerPart, FileDataConfig
from megarl.files import parse_json
from megarl.types import Message


@dataclass(frozen=True)
class Problem:
    """A task to solve. The last user message is its question."""

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The record that it was read from, as it was; empty for generated problems"""

    @property
    def question_key(self) -> str:
        """Equal for problems that ask the same: all messages but for the spacing."""
        return "\n".join(f"{m.role}: {' '.join(m.content.split())}" for m in self.messages)


@dataclass(frozen=True)
class ProblemSplits:
    train: Sequence[Problem]
    heldout: Sequence[Problem] | None
    """Held-out problems; None: the source has no held-out part of its own."""
    shares_questions: bool = False
    """Whether both parts ask the same: what differs is hidden in the environment, where no policy can memorize it"""
    notes: tuple[str, ...] = ()
    """What was chosen in reading them, for the reader of a log"""


def ask(question: str, answer: str, metadata: Mapping[str, str] | None = None) -> Problem:
    """A problem of one question."""
    return Problem((Message("user", question),), answer, metadata or {})


PROMPT_FIELDS = ["question", "problem", "prompt", "query", "instruction", "input", "messages", "conversations"]
# verl's column goes first, which is made for it; label and target often mean something else.
ANSWER_FIELDS = ["reward_model.ground_truth", "answer", "final_answer", "expected_answer", "ground_truth", "gold"]
ANSWER_FIELDS += ["label", "target", "output", "response", "completion", "solution"]
ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
"""Names of roles in other data sets, and ours."""
MEDIA = re.compile(r"(image|img|picture|photo|video|audio)s?(_(\d+|path|url|file|bytes)s?)?", re.IGNORECASE)
"""Names of columns with what a model of text does not read"""
UNREAD = ("tool_calls", "function_call", "images", "audio")
HASHES = re.compile(r"^####(.*)$", re.MULTILINE)
NUMBER_BEHIND_HASHES = re.compile(r"####[ \t]*[-+]?\$?[\d,.]*\d%?")
PARTS = {
    AnswerPart.whole: "everything",
    AnswerPart.after_hashes: "what stands behind ####",
    AnswerPart.boxed: "what stands in the last \\boxed{}",
}
Located = tuple[str, Mapping[str, Any]]
"""Where a record was found ("train.jsonl:17"), and the record."""


def read_problems(
    records: Iterable[Located], config: FileDataConfig, if_none: str = "data: there are no problems"
) -> tuple[list[Problem], str]:
    """One problem per record, and a sentence on which fields they are from. Fields that the configuration does not name
    are the first of the usual names that any record has a value for.

    Raises ConfigError that says where, what was found and what would be right; `if_none` where there are no records.
    """
    located = list(records)
    if not located:
        raise ConfigError([if_none])
    for where, record in located:
        for name, value in record.items():
            if MEDIA.fullmatch(str(name)) and value:
                found = f"found {_shorten(value)}; the model reads text alone and would not see it"
                hint = "Take the column out of the data where the questions can be answered without it"
                raise ConfigError([f"{where}: {name}: {found}. {hint}"])
    prompt_field, answer_field, others = find_fields(located, config)
    chats = [_read_chat(where, record, prompt_field, answer_field) for where, record in located]
    values = [
        get_field(record, answer_field) if answer_field else last and last.content
        for (_, record), (_, last) in zip(located, chats, strict=True)
    ]
    part = config.answer_part or _choose_part(located, values)
    problems: list[Problem] = []
    for (where, record), (messages, _), value in zip(located, chats, values, strict=True):
        answer = read_answer(value, part)
        if not answer:
            expected = "a text or number" if part is AnswerPart.whole else f"a text with {PARTS[part]}"
            needed = f"{expected} that is not blank"
            raise _refuse_field(where, record, answer_field or prompt_field, needed, "data.answer_field")
        used = {prompt_field.split(".")[0], answer_field}
        if prompt_field == "instruction" and answer_field != "input" and isinstance(record.get("input"), str):
            used.add("input")
        others_of = {name: each for name, each in record.items() if name not in used}
        texts = {
            name: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False, default=str)
            for name, each in others_of.items()
        }
        problems.append(Problem(messages, answer, {**texts, "location": where}, record))
    note = f"questions from column {prompt_field}, answers from "
    note += f"column {answer_field}" if answer_field else "the chats' last messages"
    note += "" if part is AnswerPart.whole else f", of each {PARTS[part]}"
    note += f" (not from {', '.join(others)})" if others else ""
    if left_out := sum(last is not None for _, last in chats) if answer_field else 0:
        note += f"; the assistant's message at the end of {left_out} chats is left out as an answer"
    return problems, note


def find_fields(records: Sequence[Located], config: FileDataConfig) -> tuple[str, str | None, list[str]]:
    """(prompt field, answer field, other fields that could be the answer's); None: the answer is the last message of
    the chat."""

    def find(names: list[str]) -> list[str]:
        return [name for name in names if any(get_field(record, name) is not None for _, record in records)]

    def refuse(what: str, names: list[str], key: str) -> ConfigError:
        where, record = records[0]
        found = ", ".join(map(str, record)) or "no fields"
        return ConfigError(
            [f"{where}: found {found}; expected a field with the {what} ({', '.join(names)}), or set {key}"]
        )

    prompts = [config.prompt_field] if config.prompt_field else find(PROMPT_FIELDS)
    if not prompts:
        raise refuse("question", PROMPT_FIELDS, "data.prompt_field")
    if config.answer_field is not None:
        return prompts[0], config.answer_field, []
    names = [name for name in ANSWER_FIELDS if name != prompts[0]]
    found = find(names)
    if not found and not any(isinstance(_decode_chat(get_field(record, prompts[0])), list) for _, record in records):
        raise refuse("answer", names, "data.answer_field")
    return prompts[0], found[0] if found else None, found[1:]


def _read_chat(
    where: str, record: Mapping[str, Any], prompt_field: str, answer_field: str | None
) -> tuple[tuple[Message, ...], Message | None]:
    """The messages, without the assistant's one at the end, which is returned too: it must not be shown to the model.
    Raises ConfigError where there is no question, or no such message and no answer field."""
    value, place = _decode_chat(get_field(record, prompt_field)), f"{where}: {prompt_field}"
    if isinstance(value, list):
        messages = read_messages(place, value)
    elif isinstance(value, str) and value.strip():
        if prompt_field == "instruction" and isinstance(record.get("input"), str) and answer_field != "input":
            value = f"{value}\n\n{record['input']}".strip()
        messages = (Message("user", value),)
    else:
        raise _refuse_field(where, record, prompt_field, "a text that is not blank, or messages", "data.prompt_field")
    last = messages[-1] if messages[-1].role == "assistant" else None
    if last is None and answer_field is None:
        raise ConfigError([f"{place}: the last message is of {messages[-1].role}; expected the assistant's answer"])
    messages = messages if last is None else messages[:-1]
    if not any(m.role == "user" for m in messages):
        raise ConfigError([f"{place}: found no user message; expected one before the answer"])
    return messages, last


def read_messages(where: str, value: list[Any]) -> tuple[Message, ...]:
    """A chat: records of role and content (or from and value)."""
    messages = []
    for number, item in enumerate(value):
        entry = item if isinstance(item, Mapping) else {}
        role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
        role = ROLES.get(role, role) if isinstance(role, str) else role
        unread = [name for name in UNREAD if entry.get(name)]
        if role not in ("system", "user", "assistant") or not isinstance(content, str) or unread:
            needed = '{"role": "system", "user" or "assistant", "content": text}'
            needed += f" without {' and '.join(unread)}" if unread else ""
            raise ConfigError([f"{where}[{number}]: found {_shorten(item)}; expected {needed}"])
        messages.append(Message(role, content))
    if not messages:
        raise ConfigError([f"{where}: found no messages; expected one or more"])
    return tuple(messages)


def _decode_chat(value: Any) -> Any:
    """A chat that is written as JSON within a text, as ROLL's data sets have it; every other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        decoded = parse_json(value)
    except ValueError:
        return value
    is_chat = all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in decoded)
    return decoded if decoded and is_chat else value


def read_answer(value: Any, part: AnswerPart = AnswerPart.whole) -> str:
    """The answer as text: the only element of a list, 27.0 as 27, of texts the part. "" for a value that is no answer,
    and for a text that has no such part."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    text = str(value).strip()
    if not isinstance(value, str) or part is AnswerPart.whole:
        return text
    if part is AnswerPart.boxed:
        return find_boxed(text) or ""
    text = HASHES.findall(text)[-1].strip() if HASHES.search(text) else ""
    return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def _choose_part(records: Sequence[Located], values: Sequence[Any]) -> AnswerPart:
    """What of the answers is meant where data.answer_part is null. Raises ConfigError where that is in doubt."""
    texts = [value if isinstance(value, str) else "" for value in values]
    # One line of hashes, which ends the text: headings of Markdown look otherwise.
    lines = [text.rstrip().splitlines()[-1:] if len(HASHES.findall(text)) == 1 else [] for text in texts]
    hashes = [bool(line and NUMBER_BEHIND_HASHES.fullmatch(line[0])) for line in lines]
    if all(hashes):
        return AnswerPart.after_hashes
    boxes = [find_boxed(text) is not None for text in texts]
    for part, has in ((AnswerPart.after_hashes, hashes), (AnswerPart.boxed, boxes)):
        if 2 * sum(has) >= len(has):
            count = f"{sum(has)} of {len(has)} answers, as that of {records[has.index(True)][0]}, have {PARTS[part]}"
            hint = f"{part.value} takes that part, whole takes the answer as it is"
            raise ConfigError([f"data.answer_part: found null; {count}: {hint}"])
    return AnswerPart.whole


def find_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:end].strip()
    return None


def get_field(record: Mapping[str, Any], name: str) -> Any:
    """The value under a name, or under a dotted path of names; None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refuse_field(where: str, record: Mapping[str, Any], name: str, expected: str, key: str) -> ConfigError:
    value, hint = get_field(record, name), ""
    if value is not None:
        found = f"found {_shorten(value)}"
    elif name in record or (isinstance(get_field(record, name.rpartition(".")[0]), Mapping) and "." in name):
        found, hint = "found null", f"; take such rows out of the data, or name another column with {key}"
    else:
        found = f"found only {', '.join(map(str, record))}"
    return ConfigError([f"{where}: {name}: {found}; expected {expected}{hint}"])


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
