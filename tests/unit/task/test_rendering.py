"""From problems to what the policy reads, and what the critic alone reads."""

from dataclasses import replace
from typing import Any

import pytest
from data_cases import build_byte_tokenizer, build_char_tokenizer
from transformers import PreTrainedTokenizerFast

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig
from megarl.task.data import Problem, ask
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
