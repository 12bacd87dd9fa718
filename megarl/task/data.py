"""From the `data` group to the prompts of a run: what is read, rendered, held out and drawn."""

import hashlib
import inspect
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema import task as schema
from megarl.config.schema.task import AnswerPart
from megarl.files import parse_json
from megarl.task.environments import VERIFIERS, ToolPrompt
from megarl.task.process import load_callable, running_users_code, shorten
from megarl.task.render import Renderer
from megarl.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """A task to solve. The last user message is its question."""

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The record that it was read from, as it was; empty for generated problems"""
    references: tuple[str, ...] = ()
    """All reference answers where there are several, of which `answer` is the first"""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the record describes, as chat templates take them"""

    @property
    def question_key(self) -> str:
        """Equal for problems that ask the same: all messages but for the spacing."""
        said = [(m.role, " ".join(m.content.split()), _format_others(m)) for m in self.messages]
        return "\n".join(f"{role}: {content}{others}" for role, content, others in said)


@dataclass(frozen=True)
class ProblemSplits:
    train: Sequence[Problem]
    heldout: Sequence[Problem] | None
    """Held-out problems; None: the source has no held-out part of its own."""
    shares_questions: bool = False
    """Whether both parts ask the same: what differs is hidden in the environment, where no policy can memorize it"""
    notes: tuple[str, ...] = ()
    """What was chosen in reading them, for the reader of a log"""


def _format_others(message: Message) -> str:
    return json.dumps(message.others, ensure_ascii=False, sort_keys=True) if message.others else ""


def ask(question: str, answer: str, metadata: Mapping[str, str] | None = None) -> Problem:
    """A problem of one question."""
    return Problem((Message("user", question),), answer, metadata or {})


PROMPT_FIELDS = ["question", "problem", "prompt", "query", "instruction", "input", "messages", "conversations"]
PROMPT_FIELDS += ["context", "chosen"]  # Sets of preferences may have the prompt in their chats alone.
SYSTEM_FIELDS = ["system", "system_prompt"]
# verl's column goes first, which is made for it; label and target often mean something else.
ANSWER_FIELDS = ["reward_model.ground_truth", "answer", "final_answer", "expected_answer", "ground_truth", "gold"]
ANSWER_FIELDS += ["label", "target", "output", "response", "completion", "solution"]
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "function_call": "assistant"}
ROLES |= {"developer": "system", "function": "tool", "observation": "tool"}
"""Names of roles in other data sets, and ours."""
MEDIA = re.compile(r"(image|img|picture|photo|video|audio)s?(_(\d+|path|url|file|bytes)s?)?", re.IGNORECASE)
"""Names of columns with what a model of text does not read"""
TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):", re.IGNORECASE)
"""What begins a message in a chat that is written as a text, as Anthropic's are"""
MOST_BLANK = 0.1
"""Largest share of records without a question or an answer that are left out"""
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
    records: Iterable[Located], config: schema.FileDataConfig, if_none: str = "data: there are no problems"
) -> tuple[list[Problem], str]:
    """One problem per record, and a sentence on which fields they are from. Fields that the configuration does not name
    are the first of the usual names that any record has a value for.

    Records whose question or answer is null or blank are left out and counted, where they are few. Raises ConfigError
    that says where, what was found and what would be right; `if_none` where there are no records.
    """
    located = list(records)
    if not located:
        raise ConfigError([if_none])
    located = _select(located, config.select)
    for where, record in located:
        for name, value in record.items():
            _refuse_media(where, str(name), value)
    prompt_field, answer_field, others = find_fields(located, config)
    located, blank = _leave_out_blank(located, [name for name in (prompt_field, answer_field) if name])
    chats = [_read_chat(where, record, prompt_field, answer_field) for where, record in located]
    has_answers = answer_field is not None or any(last is not None for _, last in chats)
    values = [
        read_response(f"{where}: {answer_field}", get_field(record, answer_field))
        if answer_field
        else last and _format_answer(last)
        for (where, record), (_, last) in zip(located, chats, strict=True)
    ]
    part = config.answer_part or _choose_part(located, values)
    problems: list[Problem] = []
    num_systems = num_several = 0
    for (where, record), (messages, last), value in zip(located, chats, values, strict=True):
        answers = extract_answers(value, part) if has_answers else ("",)
        if not answers and answer_field is None and last is None:
            needed = "expected the assistant's answer"
            raise ConfigError([f"{where}: {prompt_field}: the last message is of {messages[-1].role}; {needed}"])
        if not answers:
            expected = "a text or number" if part is AnswerPart.whole else f"a text with {PARTS[part]}"
            needed = f"{expected} that is not blank"
            raise _refuse_field(where, record, answer_field or prompt_field, needed, "data.answer_field")
        system = next(
            (text for name in SYSTEM_FIELDS if isinstance(text := record.get(name), str) and text.strip()), ""
        )
        if system and prompt_field not in SYSTEM_FIELDS and not any(m.role == "system" for m in messages):
            messages, num_systems = (Message("system", system), *messages), num_systems + 1
        used = {prompt_field.split(".")[0], answer_field}
        if prompt_field == "instruction" and answer_field != "input" and isinstance(record.get("input"), str):
            used.add("input")
        texts = {
            name: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False, default=str)
            for name, each in record.items()
            if name not in used
        }
        references, tools = (answers if len(answers) > 1 else ()), read_tools(record, messages)
        num_several += len(answers) > 1
        metadata = {**texts, "location": where}
        problems.append(Problem(messages, answers[0], metadata, record, references=references, tools=tools))
    note = f"questions from column {prompt_field}, "
    note += f"answers from column {answer_field}" if answer_field else "answers from the chats' last messages"
    if not has_answers:
        note = f"questions from column {prompt_field}, no answers (data.answer_field names their column)"
    note += "" if part is AnswerPart.whole else f", of each {PARTS[part]}"
    note += f" (not from {', '.join(others)})" if others else ""
    if left_out := sum(last is not None for _, last in chats) if answer_field not in (None, prompt_field) else 0:
        note += f"; the assistant's message at the end of {left_out} chats is left out as an answer"
    note += f"; {num_several} have several answers, of which any is right" if num_several else ""
    note += f"; {num_systems} have their system message from a column of that name" if num_systems else ""
    return problems, note + blank


def _refuse_media(where: str, name: str, value: Any) -> None:
    """Raises ConfigError for what a model of text does not read, by the column's name or what stands in it."""
    is_image = isinstance(value, Mapping) and {"bytes", "path"} == set(value)
    if (MEDIA.fullmatch(name) and value) or is_image or type(value).__module__.startswith("PIL."):
        found = f"found {shorten(repr(value), 80)}; the model reads text alone and would not see it"
        hint = "Take the column out of the data where the questions can be answered without it"
        raise ConfigError([f"{where}: {name}: {found}. {hint}"])


def _leave_out_blank(located: list[Located], names: Sequence[str]) -> tuple[list[Located], str]:
    """The records in which none of these fields is null or blank, and a note on the others; all of them where those are
    many, or where all are blank alike."""

    def is_blank(record: Mapping[str, Any], name: str) -> bool:
        value = get_field(record, name)
        if value is None:
            return name in record or "." in name
        return value == [] if isinstance(value, list) else isinstance(value, str) and not value.strip()

    blank = {i for i, (_, record) in enumerate(located) if any(is_blank(record, name) for name in names)}
    if not 0 < len(blank) <= MOST_BLANK * len(located):
        return located, ""
    first = located[min(blank)][0]
    note = f"; {len(blank)} without {' or '.join(names)} are left out, the first {first}"
    return [each for number, each in enumerate(located) if number not in blank], note


def _select(located: list[Located], wanted: Mapping[str, Any]) -> list[Located]:
    """The records that have one of the values in each of these fields. Raises ConfigError where none is left."""
    for name, value in wanted.items():
        values = {str(each) for each in (value if isinstance(value, list) else [value])}
        kept = [(where, record) for where, record in located if str(get_field(record, name)) in values]
        if not kept:
            has = ", ".join(sorted({repr(str(get_field(record, name))) for _, record in located})[:10])
            found = f"found {value!r}; none of {len(located)} records, as {located[0][0]}, has it, they have {has}"
            raise ConfigError([f"data.select.{name}: {shorten(found, 400)}"])
        located = kept
    return located


def find_fields(records: Sequence[Located], config: schema.FileDataConfig) -> tuple[str, str | None, list[str]]:
    """(prompt field, answer field, other fields that could be the answer's); None: the answer is the last message of
    the chat, or there is none. Raises ConfigError where no field has a question."""

    def find(names: list[str]) -> list[str]:
        return [name for name in names if any(get_field(record, name) is not None for _, record in records)]

    prompts = [config.prompt_field] if config.prompt_field else find(PROMPT_FIELDS)
    if not prompts:
        where, record = records[0]
        needed = f"expected a field with the question ({', '.join(PROMPT_FIELDS)}), or set data.prompt_field"
        raise ConfigError([f"{where}: found {', '.join(map(str, record)) or 'no fields'}; {needed}"])
    if config.answer_field is not None:
        return prompts[0], config.answer_field, []
    names = [name for name in ANSWER_FIELDS if name != prompts[0]]
    found = find(names)
    return prompts[0], found[0] if found else None, found[1:]


def _read_chat(
    where: str, record: Mapping[str, Any], prompt_field: str, answer_field: str | None
) -> tuple[tuple[Message, ...], Message | None]:
    """The messages, without the assistant's one at the end, which is returned too: it must not be shown to the model.
    Raises ConfigError where there is no question."""
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
    messages = messages if last is None else messages[:-1]
    if not any(m.role == "user" for m in messages):
        raise ConfigError([f"{place}: found no user message; expected one before the answer"])
    return messages, last


def read_messages(where: str, value: Sequence[Any]) -> tuple[Message, ...]:
    """A chat: records of role and content (or from and value), with the calls of tools and their results. Raises
    ConfigError that says where, what was found and what would be right."""
    messages = []
    for number, item in enumerate(value):
        entry, place = item if isinstance(item, Mapping) else {}, f"{where}[{number}]"
        named = entry.get("role") or entry.get("from")
        role = ROLES.get(named.lower(), named.lower()) if isinstance(named, str) else named
        content, stated = entry.get("content"), entry.get("tool_calls") or entry.get("function_call")
        content = entry.get("value") if content is None else content
        for name, each in entry.items():
            _refuse_media(place, str(name), each)
        if isinstance(content, list):
            content = _join_parts(place, content)
        if named == "function_call":
            content, stated = "", content
        calls = _read_calls(stated) if stated else []
        if calls and content is None:
            content = ""
        known = ("system", "user", "assistant", "tool")
        if role not in known or not isinstance(content, str) or calls is None or (calls and role != "assistant"):
            needed = '{"role": "system", "user", "assistant" or "tool", "content": text}'
            if stated:
                needed = 'of an assistant alone: [{"function": {"name": text, "arguments": {...}}}]'
            raise ConfigError([f"{place}: found {shorten(repr(item), 80)}; expected {needed}"])
        names = {"assistant": ("reasoning_content",), "tool": ("tool_call_id", "name")}.get(role, ())
        others = {name: entry[name] for name in names if isinstance(entry.get(name), str)}
        messages.append(Message(role, content, {**others, **({"tool_calls": calls} if calls else {})}))
    if not messages:
        raise ConfigError([f"{where}: found no messages; expected one or more"])
    return tuple(messages)


def _join_parts(where: str, parts: Sequence[Any]) -> str:
    """The text of a content in parts, as OpenAI has it. Raises ConfigError for images and whatever is no text."""
    texts = list[str]()
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = f"a part of type {part['type']}" if isinstance(part, Mapping) and "type" in part else "no text"
            raise ConfigError([f"{where}: found {kind}, {shorten(repr(part), 80)}; the model reads text alone"])
        texts.append(text)
    return "\n".join(texts)


def _read_calls(value: Any) -> list[dict[str, Any]] | None:
    """Calls of tools as chat templates take them, {"type": "function", "function": {"name", "arguments"}} with
    arguments as an object; None for what are no calls."""
    value = _decode(value, "[{")
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        name, arguments = function.get("name"), _decode(function.get("arguments") or {}, "{")
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return None
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**named, "type": "function", "function": {"name": name, "arguments": _drop_null(arguments)}})
    return calls


def read_tools(record: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of tools in the column `tools`, as chat templates take them; none where the column has something
    else, or a system message describes them all."""
    value = _decode(record.get("tools"), "[")
    tools = []
    for each in value if isinstance(value, list) else []:
        tool = _decode(each, "{")
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return ()
        tools.append({"type": "function", "function": _drop_null(function)})
    said = "\n".join(m.content for m in messages if m.role == "system")
    return () if all(tool["function"]["name"] in said for tool in tools) else tuple(tools)


def _drop_null(value: Any) -> Any:
    """Without the fields that are null, which tables give to every record that lacks one of another's."""
    if isinstance(value, Mapping):
        return {name: _drop_null(each) for name, each in value.items() if each is not None}
    return [_drop_null(each) for each in value] if isinstance(value, list) else value


def _decode(value: Any, begins: str) -> Any:
    """What a JSON text stands for that begins with one of these characters; every other value as it is."""
    if not isinstance(value, str) or not value.lstrip()[:1] or value.lstrip()[0] not in begins:
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _decode_chat(value: Any) -> Any:
    """A chat that is written within a text, as JSON (ROLL's data sets) or with "Human:" and "Assistant:" in front of
    the messages, the last one an answer (Anthropic's); every other value as it is."""
    if not isinstance(value, str):
        return value
    decoded = _decode(value, "[")
    if isinstance(decoded, list):
        is_chat = all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in decoded)
        return decoded if decoded and is_chat else value
    begin, *parts = TRANSCRIPT.split(value.strip())
    roles = [name.capitalize() for name in parts[::2]]
    if begin or roles[:1] != ["Human"] or roles[-1] != "Assistant" or not parts[-1].strip():
        return value
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[role], "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)]


def read_chat(where: str, value: Any) -> tuple[Message, ...]:
    """The messages where the value is a chat; else none. Raises ConfigError as `read_messages`."""
    chat = _decode_chat(value)
    is_chat = isinstance(chat, list) and chat and isinstance(chat[-1], Mapping) and chat[-1].keys() & {"role", "from"}
    return read_messages(where, chat) if is_chat else ()


def read_response(where: str, value: Any) -> Any:
    """The text of the last message where the value is a chat; else the value. Raises ConfigError as `read_messages`."""
    chat = read_chat(where, value)
    return _format_answer(chat[-1]) if chat else value


def _format_answer(message: Message) -> str:
    """What an assistant's message says; of one that only calls tools the calls as JSON."""
    calls = message.others.get("tool_calls")
    return json.dumps(calls, ensure_ascii=False) if calls and not message.content.strip() else message.content


def extract_answers(value: Any, part: AnswerPart = AnswerPart.whole) -> tuple[str, ...]:
    """The answers as texts: 27.0 as 27, of texts the part, of a list every one once. None for a value that is no
    answer or has something in it that is none, and for a text that has no such part."""
    if isinstance(value, list):
        found = [extract_answers(each, part) if not isinstance(each, list) else () for each in value]
        return tuple(dict.fromkeys(text for each in found for text in each)) if all(found) else ()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return ()
    text = str(value).strip()
    if isinstance(value, str) and part is AnswerPart.boxed:
        text = find_boxed(text) or ""
    elif isinstance(value, str) and part is AnswerPart.after_hashes:
        text = HASHES.findall(text)[-1].strip() if HASHES.search(text) else ""
        text = text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    return (text,) if text else ()


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
    """The value under a name, or under a dotted path of names and of numbers in lists, also within a text of JSON; None
    where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = _decode(value, "{[")
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refuse_field(where: str, record: Mapping[str, Any], name: str, expected: str, key: str) -> ConfigError:
    value, hint = get_field(record, name), ""
    if value is not None:
        found = f"found {shorten(repr(value), 80)}"
        if isinstance(value, Mapping) and value:
            hint = f"; {key}={name}.{next(iter(value))} names a field of it"
    elif name in record or (isinstance(get_field(record, name.rpartition(".")[0]), Mapping) and "." in name):
        found, hint = "found null", f"; take such rows out of the data, or name another column with {key}"
    else:
        found = f"found only {', '.join(map(str, record))}"
    return ConfigError([f"{where}: {name}: {found}; expected {expected}{hint}"])


Read = tuple[list[Problem], str]
"""Problems, and a note on how they were read"""


def load_files(config: schema.JsonlDataConfig, seed: int) -> ProblemSplits:
    """The problems of data.path and of data.heldout_path. Raises ConfigError."""
    read = read_parquet if isinstance(config, schema.ParquetDataConfig) else read_jsonl

    def load(key: str, name: Any) -> Read:
        names = name if isinstance(name, list) else [name]
        if not name or not all(isinstance(each, str | Path) and str(each) for each in names):
            raise ConfigError([f"{key}: found {name or 'nothing'}; it must be a file, {key}=FILE"])
        paths = [Path(each).expanduser() for each in names]
        for path in paths:
            if not path.is_file():
                what = "is a directory" if path.is_dir() else f"does not exist (from {Path.cwd()})"
                raise ConfigError([f"{key}: {path} {what}; it must be a file"])
        records = (record for path in paths for record in read(path))
        shown = ", ".join(map(str, names))
        try:
            return read_problems(records, config, f"{key}: {shown} holds no problems; expected one or more records")
        except OSError as error:
            raise ConfigError([f"{key}: {shown} cannot be read: {error}"]) from error

    return _join(load, ("data.path", config.path), ("data.heldout_path", config.heldout_path))


def _join(load: Callable[[str, Any], Read], first: tuple[str, Any], second: tuple[str, Any]) -> ProblemSplits:
    """What is trained on and, where it is given, what is held out, each with its note; one note where they are alike.
    first, second: the arguments of `load`."""
    problems, note = load(*first)
    others, other = (None, note) if second[1] is None else load(*second)
    notes = (note,) if note == other else (f"for training {note}", f"held out {other}")
    return ProblemSplits(problems, others, notes=notes)


def read_jsonl(path: Path) -> Iterator[Located]:
    """("FILE:LINE", object) for every line that is not blank. Raises ConfigError for what is no object."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                # "utf-8-sig" takes the byte-order mark that some editors put first.
                record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError([f"{where}: found bytes that are not UTF-8 ({error}); expected JSON"]) from None
            except ValueError as error:
                start = line[:60].decode("utf-8", "replace").strip()
                raise ConfigError([f"{where}: found {start!r} ({error}); expected one JSON object a line"]) from None
            if not isinstance(record, dict):
                raise ConfigError([f"{where}: found a JSON {type(record).__name__}; expected one JSON object a line"])
            yield where, record


def read_parquet(path: Path) -> Iterator[Located]:
    """("FILE: row N", record), rows numbered from 0. Raises ConfigError for what is no parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = (record for batch in file.iter_batches(batch_size=1024) for record in batch.to_pylist())
            yield from ((f"{path}: row {number}", record) for number, record in enumerate(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError([f"{path}: expected a parquet file: {error}"]) from error


def load_dataset(config: schema.HuggingFaceDataConfig, seed: int) -> ProblemSplits:
    """The problems of data.split and, where it is given, data.heldout_split. Raises ConfigError."""
    if not config.path:
        raise ConfigError(["data.path: found nothing; it must be a dataset's name or directory"])

    def load(key: str, split: str) -> Read:
        records = enumerate(open_dataset(str(config.path), config.subset, split, key))
        located = ((f"{config.path}[{split}]: row {number}", record) for number, record in records)
        return read_problems(located, config, f"{key}: {split!r} of {config.path} holds no problems")

    return _join(load, ("data.split", config.split), ("data.heldout_split", config.heldout_split))


def open_dataset(path: str, subset: str | None, split: str, key: str) -> Any:
    """One split as a datasets.Dataset. Code inside a dataset is never run. Raises ConfigError."""
    import datasets

    directory = Path(path).expanduser()
    local = directory.is_dir()
    try:
        if any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(directory))
            parts = found if isinstance(found, datasets.DatasetDict) else {str(found.split or split): found}
            if split not in parts:
                raise ConfigError([f"{key}: found {split!r}; {path} has {', '.join(parts)}"])
            return parts[split]
        try:
            return datasets.load_dataset(str(directory) if local else path, name=subset, split=split)
        except ConnectionError:
            # datasets does not look at what `hf download --repo-type dataset` has put into the hub's cache.
            if local or (cached := _find_cached(path)) is None:
                raise
            return datasets.load_dataset(cached, name=subset, split=split)
    except ConfigError:
        raise
    except Exception as error:  # the library raises its own, the hub's and the network's
        reason = f"cannot read {split!r} (data.subset {subset})"
        if not local and not isinstance(error, ValueError):
            reason = "no directory here, not in the local cache, and the hub was not reached or does not have it; where"
            reason += f" there is a network, `hf download --repo-type dataset {path}` puts it into the cache (HF_HOME)"
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError([f"data.path: {path}: {reason}: {detail}"]) from error


def _find_cached(name: str) -> str | None:
    """The directory of a dataset in the Hugging Face hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def load_made(config: schema.FunctionDataConfig, seed: int) -> ProblemSplits:
    """What the function makes: problems or records as in a file, held-out ones apart or not. Raises ConfigError."""
    path = config.path
    make = load_callable(path, "data.path")
    parameters = inspect.signature(make).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        check_names("data.options.", config.options, list(parameters), f"such parameter of {path}")
    with running_users_code(f"data.path: {path}", path):
        found = make(seed, config.num_heldout, **config.options)
    if isinstance(found, ProblemSplits):
        return found

    def read(side: str, records: Any) -> Read:
        located = [(f"{path}: {side} record {number}", each) for number, each in enumerate(records)]
        for where, record in located:
            if not isinstance(record, Mapping):
                raise ConfigError([f"{where}: found {record!r}; expected a dict with question and answer"])
        return read_problems(located, schema.FileDataConfig(), f"data.path: {path} made no {side} problems")

    train, heldout = found if isinstance(found, tuple) else (found, None)
    return _join(read, ("training", train), ("held-out", heldout))


def check_names(key: str, names: Iterable[str], known: list[str], what: str) -> None:
    for name in names:
        if name not in known:
            nearest = find_nearest_key(name, known)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(known)}"
            raise ConfigError([f"{key}{name}: no {what}; {hint}"])


GYM = "megarl.examples.reasoning_gym.gym:"
SOURCES: Mapping[type[schema.DataConfig], Callable[[Any, int], ProblemSplits]] = {
    schema.FunctionDataConfig: load_made,
    schema.ReasoningGymDataConfig: lambda config, seed: load_callable(GYM + "load_reasoning_gym")(config, seed),
    schema.JsonlDataConfig: load_files,
    schema.ParquetDataConfig: load_files,
    schema.HuggingFaceDataConfig: load_dataset,
    schema.VerifiersDataConfig: lambda config, seed: load_callable(VERIFIERS + "load_rows")(config, seed),
}
"""What loads the problems of each configuration; a new source is a new entry."""

Tokenized = tuple[Problem, Prompt]


@dataclass(frozen=True)
class DataSplits:
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    num_dropped: int
    """Longer than data.prompt_length, or for training and held out as well"""
    num_repeated: int = 0
    """Of these, repeats of a held-out question"""
    notes: tuple[str, ...] = ()
    """How the data were read: columns, chat template, special tokens"""


@dataclass(frozen=True)
class Split:
    """Problems with their prompts, before what both sides ask is taken out of the training side."""

    train: list[Tokenized]
    heldout: list[Tokenized]
    num_read: int
    num_too_long: int
    shares_questions: bool
    notes: tuple[str, ...]


def split_data(
    config: schema.DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    tools: ToolPrompt | None = None,
    vocab_size: int | None = None,
) -> Split:
    """Both sides of a source, the same for the same seed; arguments of `build_data`. Raises ConfigError."""
    problems = load_problems(config, seed)
    renderer = Renderer(config, tokenizer, tools, vocab_size)
    notes, num_read = list(problems.notes), len(problems.train)
    train = tokenize_problems(problems.train, renderer, "training", notes)
    num_too_long = len(problems.train) - len(train)
    if problems.heldout is None:
        train, heldout = split_heldout(train, config.num_heldout, seed)
    else:
        whole = tokenize_problems(problems.heldout, renderer, "held-out", notes)
        num_too_long += len(problems.heldout) - len(whole)
        if config.num_heldout is not None and config.num_heldout < 1:
            raise ConfigError([f"data.num_heldout: found {config.num_heldout}; it must be 1 or more"])
        heldout = draw(whole, config.num_heldout, f"heldout/{seed}")
        num_read += len(problems.heldout) - len(whole) + len(heldout)
    notes.append(describe_prompts(renderer, train))
    return Split(train, heldout, num_read, num_too_long, problems.shares_questions, tuple(notes))


def build_data(
    config: schema.DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    tools: ToolPrompt | None = None,
    vocab_size: int | None = None,
) -> DataSplits:
    """The prompts of a run, the same for the same seed. No question is on both sides, unless the source shares them.

    tools: those that the prompts describe. vocab_size: rows of the model's embedding. Raises ConfigError.
    """
    return join_splits({"": split_data(config, tokenizer, seed, tools, vocab_size)})


def join_splits(splits: Mapping[str, Split]) -> DataSplits:
    """The prompts of all sources, one source after the other, each with its source's name. What one of them holds out
    none trains on, but for sources that ask the same on both sides. Raises ConfigError where a source has none left."""
    asked = {problem.question_key for split in splits.values() for problem, _ in split.heldout}
    train, heldout, notes, num_dropped, num_too_long = list[Prompt](), list[Prompt](), list[str](), 0, 0
    for name, split in splits.items():
        kept = split.train if split.shares_questions else [it for it in split.train if it[0].question_key not in asked]
        if not kept:
            key, others = (f"data.sources.{name}", " by one of the sources") if name else ("data", "")
            why = f"every training question is held out as well{others}; the two files or splits must differ"
            raise ConfigError([f"{key}: {why}"])
        train += [replace(prompt, source=name) if name else prompt for _, prompt in kept]
        heldout += [replace(prompt, source=name) if name else prompt for _, prompt in split.heldout]
        notes += [f"{name}: {note}" if name else note for note in split.notes]
        notes += [f"{name}: {len(kept)} prompts to train on, {len(split.heldout)} held out"] if name else []
        num_dropped += split.num_read - len(kept) - len(split.heldout)
        num_too_long += split.num_too_long
    return DataSplits(tuple(train), tuple(heldout), num_dropped, num_dropped - num_too_long, tuple(notes))


def describe_prompts(renderer: Renderer, items: Sequence[Tokenized]) -> str:
    """How the prompts are rendered, and the first one's answer."""
    first = items[0][1]
    return f"{renderer.describe(first.token_ids)}; the first answer is {first.answer[:60]!r}"


def load_problems(config: schema.DataConfig, seed: int) -> ProblemSplits:
    """All problems of this configuration; the same for the same seed. Raises ConfigError, also for the base class."""
    if type(config) not in SOURCES:
        raise ConfigError([f"data: {type(config).__name__} is not a source; choose one with data=letter_count, ..."])
    return SOURCES[type(config)](config, seed)


def tokenize_problems(problems: Sequence[Problem], renderer: Renderer, side: str, notes: list[str]) -> list[Tokenized]:
    """Problems of at most data.prompt_length tokens with their prompts, in order. notes: grows by what was done.
    Raises ConfigError where none is short enough, and for one that a model could not answer."""
    if renderer.tools is not None and any(problem.tools for problem in problems):
        notes.append(f"the tools that {side} records describe are left out: the environment has its own")
    asked, problems = problems, _settle_special(problems, renderer, side, notes)
    texts = [_render(problem, renderer) for problem in problems]
    tokens = renderer.tokenize(texts, names=[each.metadata.get("location", "data") for each in problems])
    limit, tokenizer = renderer.config.prompt_length, renderer.tokenizer
    for problem, ids in zip(problems, tokens, strict=True):
        if tokenizer.bos_token_id is not None and ids[:2] == (tokenizer.bos_token_id,) * 2:
            raise _refuse(problem, f"the prompt begins with {tokenizer.bos_token} twice; it must be once")
        if ids[-1:] == (tokenizer.eos_token_id,) and not renderer.uses_template:
            why = "behind which a model writes another text; take it out of the data"
            raise _refuse(problem, f"the prompt ends with {tokenizer.eos_token}, {why}")
    if not any(len(ids) <= limit for ids in tokens):
        found = f"the shortest has {min(map(len, tokens))} tokens" if tokens else "the source has none"
        raise ConfigError([f"data.prompt_length: found {limit}; no {side} prompt is left, {found}"])
    repeats, kept = Counter[str](), list[Tokenized]()
    for own, problem, text, ids in zip(asked, problems, texts, tokens, strict=True):
        parts = [part for m in own.messages for part in (m.role, m.content, *filter(None, [_format_others(m)]))]
        digest = hashlib.sha256("\0".join([*parts, *(own.references or [own.answer])]).encode()).hexdigest()[:16]
        repeats[digest] += 1
        if len(ids) <= limit:
            name = digest if repeats[digest] == 1 else f"{digest}-{repeats[digest]}"
            messages = renderer.build_messages(problem)
            answers = problem.answer, problem.metadata, messages, problem.columns, problem.references
            kept.append((problem, Prompt(name, text, ids, *answers)))
    return kept


def _render(problem: Problem, renderer: Renderer) -> str:
    try:
        return renderer.render(problem)
    except ConfigError as error:
        where = problem.metadata.get("location")
        raise ConfigError([f"{text} ({where})" if where else text for text in error.problems]) from error


def _refuse(problem: Problem, why: str) -> ConfigError:
    return ConfigError([f"{problem.metadata.get('location', 'data')}: {why}"])


def _settle_special(problems: Sequence[Problem], renderer: Renderer, side: str, notes: list[str]) -> Sequence[Problem]:
    """The problems without special tokens in their texts, which would end a message of a chat template; plain text may
    have them. Raises ConfigError where most problems have some: a chat template has been applied to them before."""
    special = [
        [token for m in p.messages for token in renderer.find_special(m.content + _format_others(m))] for p in problems
    ]
    found = {i: tokens for i, tokens in enumerate(special) if tokens}
    if not found:
        return problems
    names = ", ".join(dict.fromkeys(token for tokens in found.values() for token in tokens))
    if not renderer.uses_template:
        notes.append(f"{len(found)} {side} prompts have special tokens of their own: {names}")
        return problems
    if 2 * len(found) > len(problems):
        where = f"found {names} in the messages of {len(found)} of {len(problems)} {side} problems"
        hint = "the chat template writes these tokens itself. data.chat_template=false takes the texts as they are"
        raise _refuse(problems[next(iter(found))], f"{where}; {hint}")
    notes.append(f"in {len(found)} {side} prompts special tokens are read as text, with a space in each: {names}")
    return [
        replace(p, messages=tuple(map(renderer.defuse_message, p.messages))) if i in found else p
        for i, p in enumerate(problems)
    ]


def split_heldout(
    problems: list[Tokenized], num_heldout: int | None, seed: int
) -> tuple[list[Tokenized], list[Tokenized]]:
    """(training, held-out): a random part, repeats of a question kept on one side. Raises ConfigError where
    `num_heldout` would leave a side empty."""
    keys = list(dict.fromkeys(problem.question_key for problem, _ in problems))
    if num_heldout is None:
        num_heldout = max(1, min(256, len(keys) // 10))
    if not 1 <= num_heldout < len(keys):
        needed = "and each side needs one or more"
        raise ConfigError([f"data.num_heldout: {num_heldout} of {len(keys)} different questions to split, {needed}"])
    random.Random(f"heldout/{seed}").shuffle(keys)
    chosen = set(keys[:num_heldout])
    held: dict[str, Tokenized] = {}
    for item in problems:
        if item[0].question_key in chosen:
            held.setdefault(item[0].question_key, item)
    return [item for item in problems if item[0].question_key not in chosen], list(held.values())


T = TypeVar("T", bound=Any)


def build_evaluation_set(
    config: schema.DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    *,
    name: str,
    notes: list[str],
    path: str | None = None,
    num_problems: int | None = None,
    tools: ToolPrompt | None = None,
    key: str | None = None,
    vocab_size: int | None = None,
) -> tuple[Prompt, ...]:
    """The problems of data=`name`, in their order: every one, or `num_problems` drawn at random under `seed`.

    path, key: a file or directory in place of the configuration's, and its key (evaluate.paths.NAME). notes: grows by
    how the set was read. Raises ConfigError, also for a prompt longer than data.prompt_length.
    """
    key = key or f"evaluate.paths.{name}"
    try:
        # The held-out part as the only one, so that the training part need not be read.
        chosen = config if path is None else use_local_path(config, path, key)
        for whole, part in (("split", "heldout_split"), ("path", "heldout_path")):
            if getattr(chosen, part, None) is not None:
                chosen = replace(chosen, **{whole: getattr(chosen, part), part: None})
        found = load_problems(chosen, seed)
    except ConfigError as error:
        hint = ""
        if isinstance(config, schema.HuggingFaceDataConfig) and path is None:
            hint = f"; {key}=FILE reads a local .jsonl or .parquet file, or a dataset's directory"
        raise ConfigError([f"data={name}: {problem}{hint}" for problem in error.problems]) from error
    problems = draw(found.train if found.heldout is None else found.heldout, num_problems, f"evaluate/{seed}")
    renderer = Renderer(replace(chosen, prompt_length=sys.maxsize), tokenizer, tools, vocab_size)
    notes += found.notes
    tokenized = tokenize_problems(problems, renderer, name, notes)
    notes.append(describe_prompts(renderer, tokenized))
    prompts = tuple(prompt for _, prompt in tokenized)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest > config.prompt_length:
        why = f"the longest prompt of data={name} has {longest} tokens, and an evaluation leaves no problem out"
        raise ConfigError([f"data.prompt_length: found {config.prompt_length}; {why}"])
    return prompts


def use_local_path(config: schema.DataConfig, path: str, key: str) -> schema.DataConfig:
    """The same set out of a .jsonl or .parquet file or a dataset's directory. Raises ConfigError naming `key`."""
    if not isinstance(config, schema.FileDataConfig) and key.startswith("evaluate."):
        raise ConfigError([f"{key}: found {path}; this set is generated, and reads no file"])
    place = Path(path).expanduser()
    if not place.exists():
        raise ConfigError([f"{key}: {path} does not exist (from {Path.cwd()})"])
    kinds = {**dict.fromkeys((".jsonl", ".json"), schema.JsonlDataConfig), ".parquet": schema.ParquetDataConfig}
    kind = schema.HuggingFaceDataConfig if place.is_dir() else kinds.get(place.suffix)
    if kind is None:
        raise ConfigError([f"{key}: found {path}; it must be a .jsonl or .parquet file, or a dataset's directory"])
    names = {field.name for field in fields(kind if isinstance(config, kind) else schema.FileDataConfig)}
    return kind(**{name: value for name, value in vars(config).items() if name in names} | {"path": path})


def draw(problems: Sequence[T], number: int | None, seed: str) -> list[T]:
    """All, or a random number of them in their order."""
    if number is None or number >= len(problems):
        return list(problems)
    rows = random.Random(seed).sample(range(len(problems)), number)
    return [problems[row] for row in sorted(rows)]


class PromptSampler(Generic[T]):
    """Draws prompts, or groups of saved responses, without replacement within an epoch; a batch may span epochs. The
    order depends on the prompts, the seed and the epoch only, but for prompts that are to be skipped."""

    def __init__(self, prompts: Sequence[T], seed: int | str):
        if not prompts:
            raise ValueError("the sampler needs at least one prompt")
        self._prompts, self._seed = tuple(prompts), seed
        self._fingerprint = hashlib.sha256("\n".join(p.id for p in self._prompts).encode()).hexdigest()
        self._skipped: dict[str, int] = {}
        """The epoch up to which a prompt is passed over, by its id"""
        self._num_skipped = 0
        self._start_epoch(0)

    def next_batch(self, n: int) -> list[T]:
        """The next `n` prompts (1 or more)."""
        batch: list[T] = []
        while len(batch) < n:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            taken = self._order[self._position : self._position + n - len(batch)]
            found = [p for p in map(self._prompts.__getitem__, taken) if self._skipped.get(p.id, -1) < self._epoch]
            batch.extend(found)
            self._num_skipped += len(taken) - len(found)
            self._position += len(taken)
        return batch

    def skip(self, prompts: Iterable[T], num_epochs: int) -> int:
        """Pass over these prompts in so many further epochs. Returns how many were since the last call."""
        self._skipped = {name: last for name, last in self._skipped.items() if last >= self._epoch}
        self._skipped |= dict.fromkeys((prompt.id for prompt in prompts), self._epoch + num_epochs)
        found, self._num_skipped = self._num_skipped, 0
        return found

    def note(self, samples: Sequence[Any]) -> None:
        """Responses do not decide which prompts are drawn."""

    def count_epochs(self) -> dict[str, float]:
        """Metrics by source: there are none."""
        return {}

    def complete(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state of this sampler is complete as it is."""
        return state

    def state(self) -> dict[str, Any]:
        """Where the sampler stands, as plain values."""
        stands = {"epoch": self._epoch, "position": self._position}
        skips = {"skipped": json.dumps(self._skipped)} if self._skipped else {}
        return {"seed": self._seed, "prompts": self._fingerprint, **stands, **skips}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state()` was taken. Raises ValueError where the state is of other prompts or another seed."""
        for key, own in (("seed", self._seed), ("prompts", self._fingerprint)):
            if state.get(key) != own:
                found = f"its {key} is {state.get(key)!r}, here it is {own!r}"
                raise ValueError(f"the sampler's state is of another run: {found}")
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])
        self._skipped, self._num_skipped = json.loads(str(state.get("skipped", "{}"))), 0

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(len(self._prompts)))
        random.Random(f"sampler/{self._seed}/{epoch}").shuffle(self._order)
