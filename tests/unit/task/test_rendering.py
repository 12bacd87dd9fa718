"""From problems to what the policy reads, and what the critic alone reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_cases import build_byte_tokenizer, build_char_tokenizer
from transformers import PreTrainedTokenizerFast

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig
from megarl.task.data import Problem, ask, read_tools, tokenize_problems
from megarl.task.environments import ToolPrompt
from megarl.task.render import CriticPrompt, Renderer, use_chat_template
from megarl.types import Message, Prompt

CHAT = (Message("system", "Be brief."), Message("user", "One?"), Message("assistant", "1"), Message("user", "Why?"))
ONE = "<|user|>One?\n<|assistant|>1\n"
AROUND = {"instruction": "<{question}>", "response_prefix": "{question} ="}


@pytest.mark.parametrize(
    ("keys", "before", "expected"),
    [
        ({}, 3, "<|system|>default\n<|user|>Why?\n<|assistant|>"),
        ({"system": ""}, 3, "<|system|>\n<|user|>Why?\n<|assistant|>"),
        ({"system": "Think."}, 3, "<|system|>Think.\n<|user|>Why?\n<|assistant|>"),
        ({"instruction": "{question} {x}"}, 3, "<|system|>default\n<|user|>Why? {x}\n<|assistant|>"),
        ({"chat_template": False, "system": ""}, 3, "Why?"),
        ({"chat_template": False, "system": "Think.", "instruction": "Q: {question}"}, 3, "Think.\n\nQ: Why?"),
        # An instruction goes around the last user's message, and a prefix begins the assistant's turn.
        ({"chat_template": False, **AROUND}, 3, "<Why?>\n\nWhy? ="),
        ({"system": "New.", **AROUND}, 0, f"<|system|>New.\n{ONE}<|user|><Why?>\n<|assistant|>Why? ="),
    ],
)
def test_a_question_is_rendered_as_configured(keys: Any, before: int, expected: str) -> None:
    problem = Problem(CHAT[before:], "")
    assert Renderer(DataConfig(**keys), build_byte_tokenizer(chat=True)).render(problem) == expected


def test_plain_text_gets_the_tokenizers_special_tokens_in_front_once_and_a_template_does_not() -> None:
    from tokenizers import processors

    plain = Renderer(DataConfig(), tokenizer := build_byte_tokenizer())
    chat = Renderer(DataConfig(), build_byte_tokenizer(chat=True))
    texts = ["ab", "", "a\nb  c", "naïve 数学 🙂 e\u0301 \u200b", "$\\frac{1}{2}$<bos>"]
    assert [tokenizer.decode(ids[1:]) for ids in plain.tokenize(texts)] == texts
    assert plain.tokenize(["ab"])[0] == (0, *chat.tokenize(["ab"])[0])
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", tokenizer.eos_token_id)]
    )
    assert [(ids[0], len(ids)) for ids in plain.tokenize(["ab", "<bos>ab"])] == [(0, 3)] * 2


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(("text", "lost"), [("Abc", "A"), ("ab_c~", "_ ~"), ("aé", "é")])
def test_a_character_that_the_tokenizer_would_drop_silently_is_an_error(text: str, lost: str, unknown: bool) -> None:
    renderer = Renderer(DataConfig(), build_char_tokenizer(unknown=unknown))
    with pytest.raises(ConfigError, match=f"no token for {lost} in the prompt '{text}'"):
        renderer.tokenize(["abc", text])


def build_called(word: str = "one") -> Problem:
    called = {"type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
    asked = (Message("user", "One?"), Message("assistant", "", {"tool_calls": [called]}), Message("tool", "a number"))
    return Problem(asked, "1")


CALLS = "{% for c in m.tool_calls %}call {{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
SHOWS_ALL = (
    "{% for t in tools or [] %}tool {{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}"
)


def test_calls_and_results_in_the_data_are_written_by_a_template_that_knows_them(tmp_path: Path) -> None:
    renderer = Renderer(DataConfig(instruction="Say: {question}"), tokenizer := build_byte_tokenizer(chat=True))
    tokenizer.chat_template = SHOWS_ALL
    problem = replace(build_called("<bos>one"), tools=({"type": "function", "function": {"name": "look_up"}},))
    asked = '<|user|>Say: One?<|assistant|>call look_up({"word": "<bos>one"})<|tool|>a number'
    assert renderer.render(problem) == f"tool look_up {asked}"
    # A special token in a call is text.
    (_, prompt), *_ = tokenize_problems([problem, *[ask("Two?", "2")] * 2], renderer, "training", [])
    assert "< bos>one" in prompt.text
    assert prompt.messages[1].others["tool_calls"][0]["function"]["arguments"] == {"word": "< bos>one"}
    tokenizer.chat_template = SHOWS_ALL.replace(CALLS, "")
    with pytest.raises(ConfigError, match=r"leaves out number 2, the tool_calls, .* \(f:7\)$"):
        tokenize_problems([replace(build_called(), metadata={"location": "f:7"})], renderer, "training", [])
    tokenizer.chat_template, problem = SHOWS_ALL, replace(build_called(), tools=problem.tools)
    # With an environment's own tools, those of the data are not shown.
    own = Renderer(DataConfig(), tokenizer, ToolPrompt(({"type": "function", "function": {"name": "own"}},), None))
    tokenize_problems([problem], own, "training", notes := [])
    assert own.render(problem).startswith("tool own <|user|>")
    assert notes[0] == "the tools that training records describe are left out: the environment has its own"


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        (SHOWS_ALL.replace(CALLS, ""), (), "leaves out number 2, the tool_calls, of messages of user, assistant, tool"),
        (SHOWS_ALL.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), (), "number 3, 'a number', of"),
        ("{% for m in messages %}{{ m.content }}" + CALLS + "{% endfor %}", ("find",), "the tool find that the data"),
        (None, (), "found tool_calls in the data, and no chat template to write them"),
        (None, ("find",), "found tools in the data, and no chat template to write them"),
    ],
)
def test_calls_results_and_tools_that_a_template_would_leave_out_are_refused(template, tools, message) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    schemas = tuple({"type": "function", "function": {"name": name}} for name in tools)
    with pytest.raises(ConfigError, match=rf"^data\.chat_template: .*{message}"):
        Renderer(DataConfig(), tokenizer).render(replace(build_called(), tools=schemas))


def test_tools_are_read_from_their_column_unless_the_system_message_describes_them() -> None:
    schema = {"name": "find", "description": None, "parameters": {"type": "object", "properties": {}}}
    expected = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    for column in ([schema], json.dumps([{"type": "function", "function": schema}]), [json.dumps(schema)]):
        assert read_tools({"tools": column}, ()) == ({"type": "function", "function": expected},)
        assert read_tools({"tools": column}, (Message("system", "You may call find()."),)) == ()
    assert all(read_tools({"tools": column}, ()) == () for column in (None, ["find"], "find", [], [{"function": "x"}]))


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("keys", "template", "message"),
    [
        ({"instruction": "Add."}, None, r"data\.instruction: found 'Add\.'; it must contain \{question\}"),
        ({"chat_template_path": "gone.jinja"}, None, r"data\.chat_template_path: gone\.jinja cannot be read"),
        ({"chat_template_path": "a", "chat_template": False}, None, "has no effect with data.chat_template=false"),
        ({"system": "x"}, REFUSING, r"data\.chat_template: .* system, user: no system"),
        ({"system": "x"}, "{{ messages[1].content }}", r"template leaves out number 1, 'x', of messages of sys"),
        ({}, "", r"^f:1: the text 'Why\?' has the token \d+ .* has 1 rows"),
        # A template may be a file, and is always told the same date.
        (
            {"chat_template_path": "chat.jinja", "system": ""},
            None,
            r"^f:1: the text '26 Jul 2024 <><Why\?>' has the tok",
        ),
    ],
)
def test_what_cannot_be_rendered_is_named_with_its_key(keys, template, message, tmp_path, monkeypatch) -> None:
    text = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}<{{ m.content }}>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    monkeypatch.chdir(tmp_path)
    config, tokenizer = DataConfig(**keys), build_byte_tokenizer(chat=True)
    tokenizer.chat_template = tokenizer.chat_template if template is None else template

    def tokenize() -> None:
        use_chat_template(config, tokenizer)
        renderer = Renderer(config, tokenizer, vocab_size=1)
        renderer.tokenize([renderer.render(ask("Why?", ""))], names=["f:1"])

    with pytest.raises(ConfigError, match=message):
        tokenize()


TEXT = "Answer: {answer}"


def build(tokenizer: PreTrainedTokenizerFast, text: str = TEXT, **keys: Any) -> CriticPrompt:
    return CriticPrompt(DataConfig(critic_prompt=text, **keys), tokenizer)


def ask_critic(tokenizer: PreTrainedTokenizerFast, answer: str = "42", **metadata: str) -> Prompt:
    renderer = Renderer(DataConfig(), tokenizer)
    text = renderer.render_messages([Message("user", "why?")])
    return Prompt("p1", text, renderer.tokenize([text])[0], answer, metadata)


ALL_BOS = (
    "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ SHOWN }}{% else %}[u]{{ m.content }}{% endif %}{% endfor %}"
)


TURNS = "<|system|>Answer: 42\n<|system|>default\n<|user|>why?\n<|assistant|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "<bos>Answer: 42why?"),
        # A closed system message in front of the conversation.
        ("{TEMPLATE}", TURNS),
        # A first token that begins every text stands once in front of both,
        ("<bos>{TEMPLATE}", f"<bos>{TURNS}"),
        # and one that begins every message stays where it is.
        (ALL_BOS, "<bos>system: Answer: 42\n<bos>user: why?\n<bos>assistant: "),
        # A template may refuse or leave out a lone system message.
        *[(NO_SYSTEM.replace("SHOWN", shown), "[u]Answer: 42[u]why?") for shown in ("raise_exception('no')", "''")],
    ],
)
def test_the_text_stands_in_front_of_the_prompts_own_tokens(template: str | None, expected: str) -> None:
    tokenizer = build_byte_tokenizer(chat=template is not None)
    if template is not None:
        tokenizer.chat_template = template.replace("{TEMPLATE}", str(tokenizer.chat_template))
    prompt = ask_critic(tokenizer)
    tokens = build(tokenizer).extend(prompt)
    assert tokenizer.decode(tokens) == expected
    own = prompt.token_ids[prompt.token_ids[:1] == (tokenizer.bos_token_id,) :]
    assert tokens[len(tokens) - len(own) :] == own


def test_the_critics_text_is_filled_with_the_answer_and_the_metadata_by_their_whole_names() -> None:
    tokenizer = build_byte_tokenizer()
    metadata = {"rubric": "be {brief}", "reward_model.style": "rule", "answer": "a column of that name"}
    text = "{{x}} {answer}, {rubric}, {reward_model.style}"
    prompt = replace(ask_critic(tokenizer), metadata=metadata)
    assert build(tokenizer, text).fill(prompt) == "{x} 42, be {brief}, rule"
    build(tokenizer, critic_prompt_length=10).check([prompt])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        *[({"text": text}, r"critic_prompt: found .*; the fields of f:2 are answer, location, rubric$")
          for text in ("{rubrik}", "{answer.__class__}", "{answer[0]}", "{answer!r}", "{answer:>9}")],
        *[({"text": text}, r"critic_prompt: found .*; it must be a text such as")
          for text in ("  ", "{answer", "answer}", "{}", "{{answer}", "{a{b}}")],
        ({"critic_prompt_length": 9}, r"critic_prompt_length: found 9; .* has 10 tokens"),
    ],
)  # fmt: skip
def test_what_is_no_text_for_the_critic_is_refused(keys: dict[str, Any], expected: str) -> None:
    tokenizer = build_byte_tokenizer()
    with pytest.raises(ConfigError, match=rf"data\.{expected}"):
        build(tokenizer, **keys).check([ask_critic(tokenizer, rubric="r", location="f:2")])
