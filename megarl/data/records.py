"""Records with named fields (of JSON, parquet, datasets) as problems: finds the fields, cleans the answer."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.data import FileDataConfig
from megarl.data.problem import Problem
from megarl.json_text import parse_json
from megarl.types import Message

PROMPT_FIELDS = (
    "question",
    "problem",
    "prompt",
    "query",
    "instruction",
    "input",
    "messages",
    "conversations",
)
ANSWER_FIELDS = (
    "answer",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "gold",
    "label",
    "target",
    "reward_model.ground_truth",
    "output",
    "response",
    "completion",
    "solution",
)
ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
"""Names of roles in other data sets, and ours."""

Located = tuple[str, Mapping[str, Any]]
"""Where a record was found ("train.jsonl:17"), and the record."""


def read_problems(records: Iterable[Located], config: FileDataConfig) -> Iterator[Problem]:
    """One problem per record. The first record decides the fields, where the configuration names none.

    Raises ConfigError that says where, what was found and what would be right.
    """
    names: tuple[str, str | None] | None = None
    for where, record in records:
        if names is None:
            names = find_fields(where, record, config)
        yield to_problem(where, record, *names)


def find_fields(where: str, record: Mapping[str, Any], config: FileDataConfig) -> tuple[str, str | None]:
    """(prompt field, answer field); None: the answer is the last message of the chat."""
    prompt = config.prompt_field or _first_present(record, PROMPT_FIELDS)
    if prompt is None:
        raise ConfigError([_no_field(where, record, "question", PROMPT_FIELDS, "data.prompt_field")])
    others = tuple(name for name in ANSWER_FIELDS if name != prompt)
    answer = config.answer_field or _first_present(record, others)
    if answer is None and not _ends_with_assistant(_decode_chat(get_field(record, prompt))):
        raise ConfigError([_no_field(where, record, "answer", others, "data.answer_field")])
    return prompt, answer


def to_problem(where: str, record: Mapping[str, Any], prompt_field: str, answer_field: str | None) -> Problem:
    """The problem of one record. Fields that are neither question nor answer become metadata."""
    value = _decode_chat(get_field(record, prompt_field))
    used = {prompt_field.split(".")[0]}
    if isinstance(value, list):
        messages = read_messages(where, prompt_field, value)
    elif isinstance(value, str) and value.strip():
        if prompt_field == "instruction" and isinstance(record.get("input"), str) and answer_field != "input":
            used.add("input")
            value = f"{value}\n\n{record['input']}".strip()
        messages = (Message("user", value),)
    else:
        raise ConfigError([_bad_field(where, record, prompt_field, "a text that is not blank, or messages")])
    # A conversation that holds its answer must not show it to the model.
    last = messages[-1]
    if last.role == "assistant":
        messages = messages[:-1]
    if not any(m.role == "user" for m in messages):
        raise ConfigError([f"{where}: {prompt_field}: found no user message; expected one before the answer"])
    if answer_field is None and last.role != "assistant":
        raise ConfigError(
            [f"{where}: {prompt_field}: the last message is of {last.role}; expected the assistant's answer"]
        )
    answer = get_field(record, answer_field) if answer_field else last.content
    text = clean_answer(answer)
    if not text:
        name = answer_field or prompt_field
        raise ConfigError([_bad_field(where, record, name, "a text or number that is not blank")])
    metadata = {k: v if isinstance(v, str) else _dump(v) for k, v in record.items() if k not in used}
    metadata.pop(answer_field or "", None)
    return Problem(messages, text, {**metadata, "location": where}, record)


def read_messages(where: str, field: str, value: list[Any]) -> tuple[Message, ...]:
    """A chat: records of role and content (or from and value)."""
    messages = []
    for number, item in enumerate(value):
        entry = item if isinstance(item, Mapping) else {}
        role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
        role = ROLES.get(role, role) if isinstance(role, str) else role
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ConfigError(
                [
                    f"{where}: {field}[{number}]: found {_shorten(item)}; expected"
                    ' {"role": "system", "user" or "assistant", "content": text}'
                ]
            )
        messages.append(Message(role, content))
    if not messages:
        raise ConfigError([f"{where}: {field}: found no messages; expected one or more"])
    return tuple(messages)


def _decode_chat(value: Any) -> Any:
    """A chat that is written as JSON within a text, as ROLL's data sets have it; every other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        decoded = parse_json(value)
    except ValueError:
        return value
    chat = isinstance(decoded, list) and decoded and all(_is_message(item) for item in decoded)
    return decoded if chat else value


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys())


def clean_answer(value: Any) -> str:
    """The final answer as text: what stands after GSM8K's ####, inside the last \\boxed{}, 27.0 as 27.

    "" for a value that is no answer.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    text = str(value).strip()
    final: list[str] = re.findall(r"^####(.*)$", text, re.MULTILINE)
    if final:
        text = final[-1].strip()
        if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
            text = text.replace(",", "")
        return text
    return find_boxed(text) or text


def find_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None


def get_field(record: Mapping[str, Any], name: str) -> Any:
    """The value under a name, or under a dotted path of names; None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _first_present(record: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if get_field(record, name) is not None), None)


def _ends_with_assistant(value: Any) -> bool:
    last = value[-1] if isinstance(value, list) and value else None
    role = last.get("role", last.get("from")) if isinstance(last, Mapping) else None
    return isinstance(role, str) and ROLES.get(role, role) == "assistant"


def _no_field(where: str, record: Mapping[str, Any], what: str, names: Iterable[str], key: str) -> str:
    found = ", ".join(map(str, record)) or "no fields"
    return f"{where}: found {found}; expected a field with the {what} ({', '.join(names)}), or set {key}"


def _bad_field(where: str, record: Mapping[str, Any], name: str, expected: str) -> str:
    value = get_field(record, name)
    found = f"found {_shorten(value)}" if value is not None else f"found only {', '.join(map(str, record))}"
    return f"{where}: {name}: {found}; expected {expected}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
