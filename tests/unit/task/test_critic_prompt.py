"""data.critic_prompt as text and tokens: where it stands, what its fields are, and what is refused."""

from dataclasses import replace

import pytest
from data_cases import build_byte_tokenizer, build_char_tokenizer
from transformers import PreTrainedTokenizerFast

from megarl.config.errors import ConfigError
from megarl.config.schema.data import DataConfig
from megarl.task.render import CriticPrompt, Renderer
from megarl.types import Message, Prompt

TEXT = "Answer: {answer}"


def build(tokenizer: PreTrainedTokenizerFast, text: str = TEXT, **keys: object) -> CriticPrompt:
    return CriticPrompt(DataConfig(critic_prompt=text, **keys), tokenizer)  # type: ignore[arg-type]


def ask(tokenizer: PreTrainedTokenizerFast, question: str = "why?", answer: str = "42", **metadata: str) -> Prompt:
    renderer = Renderer(DataConfig(), tokenizer)
    text = renderer.render_messages([Message("user", question)])
    return Prompt("p1", text, renderer.tokenize([text])[0], answer, metadata)


def test_plain_text_stands_in_front_of_the_prompt_as_it_is() -> None:
    tokenizer = build_byte_tokenizer()
    tokens = build(tokenizer, f"{TEXT}\n").extend(ask(tokenizer))
    assert tokenizer.decode(tokens) == "<bos>Answer: 42\nwhy?"


def test_a_chat_template_makes_a_closed_system_message_of_it_in_front_of_the_conversation() -> None:
    tokenizer = build_byte_tokenizer(chat=True)
    prompt = ask(tokenizer)
    text = tokenizer.decode(build(tokenizer).extend(prompt))
    assert text == f"<|system|>Answer: 42\n{prompt.text}"
    assert prompt.text.startswith("<|system|>default\n<|user|>why?")


@pytest.mark.parametrize("chat", [False, True])
def test_what_follows_the_text_is_the_prompts_own_tokens_and_a_first_token_stands_once_in_front(chat: bool) -> None:
    tokenizer = build_byte_tokenizer(chat=chat)
    if chat:
        tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    prompt = ask(tokenizer)
    critic_prompt = build(tokenizer)
    own, extended = critic_prompt.encode(prompt), critic_prompt.extend(prompt)
    first = (tokenizer.bos_token_id,)
    assert prompt.token_ids[:1] == first == extended[:1]
    assert (own[:1] == first) is chat
    assert extended == (*first, *own[chat:], *prompt.token_ids[1:])
    assert extended.count(tokenizer.bos_token_id) == 1


def test_a_first_token_that_begins_every_message_stays_where_it_is() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    tokens = build(tokenizer).extend(ask(tokenizer))
    assert tokenizer.decode(tokens) == "<bos>system: Answer: 42\n<bos>user: why?\n<bos>assistant: "


@pytest.mark.parametrize("refused", ["raise_exception('no system')", "''"])
def test_a_template_that_refuses_or_leaves_out_a_lone_system_message_is_given_one_of_the_user(refused: str) -> None:
    tokenizer = build_byte_tokenizer()
    shown = "{% if m.role == 'system' %}{{ REFUSED }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + shown.replace("REFUSED", refused) + "{% endfor %}"
    assert tokenizer.decode(build(tokenizer).encode(ask(tokenizer))) == "[user]Answer: 42"


def test_a_template_that_shows_no_message_alone_is_refused() -> None:
    tokenizer = build_byte_tokenizer()
    prompt = ask(tokenizer)
    tokenizer.chat_template = "{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"data\.critic_prompt: the tokenizer's chat template shows neither"):
        build(tokenizer).encode(prompt)


def test_fields_are_the_answer_and_the_prompts_metadata_by_their_whole_names() -> None:
    tokenizer = build_byte_tokenizer()
    metadata = {"rubric": "be {brief}", "reward_model.style": "rule", "answer": "a column of that name"}
    prompt = replace(ask(tokenizer), metadata=metadata)
    text = "{{x}} {answer}, {rubric}, {reward_model.style}"
    assert build(tokenizer, text).fill(prompt) == "{x} 42, be {brief}, rule"


@pytest.mark.parametrize("name", ["rubrik", "answer.__class__", "answer[0]"])
def test_a_field_that_the_prompt_does_not_have_is_refused_naming_those_that_it_has(name: str) -> None:
    tokenizer = build_byte_tokenizer()
    prompts = [ask(tokenizer, rubric="r", **{name: "x"}), ask(tokenizer, rubric="r", location="train.jsonl:2")]
    with pytest.raises(ConfigError) as caught:
        build(tokenizer, f"{{{name}}}").check(prompts)
    assert caught.value.problems == (
        f"data.critic_prompt: found {{{name}}}; the fields of train.jsonl:2 are answer, location, rubric",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("  ", "it must be a text"),
        ("{answer", "expected '}' before end of string"),
        ("answer}", "Single '}' encountered"),
        ("{}", "a field is a name between braces"),
        ("{answer!r}", "a field is a name between braces"),
        ("{answer:>9}", "a field is a name between braces"),
    ],
)
def test_what_is_no_template_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.critic_prompt: found ") as caught:
        build(build_byte_tokenizer(), text)
    assert reason in caught.value.problems[0]


def test_a_text_above_the_limit_is_refused_and_its_length_named() -> None:
    tokenizer = build_byte_tokenizer()
    prompts = [ask(tokenizer, answer="1"), ask(tokenizer, answer="1234")]
    build(tokenizer, critic_prompt_length=12).check(prompts)
    with pytest.raises(ConfigError, match=r"data\.critic_prompt_length: found 11; .* has 12 tokens"):
        build(tokenizer, critic_prompt_length=11).check(prompts)


def test_characters_without_a_token_are_refused() -> None:
    tokenizer = build_char_tokenizer()
    with pytest.raises(ConfigError, match=r"^data\.critic_prompt: the model's tokenizer has no token for A in "):
        build(tokenizer).check([ask(tokenizer)])
