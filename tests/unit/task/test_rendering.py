"""From problems to what the policy reads, and what the critic alone reads."""

from dataclasses import replace
from typing import Any

import pytest
from data_cases import build_byte_tokenizer, build_char_tokenizer
from transformers import PreTrainedTokenizerFast

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig
from megarl.task.problems import Problem, ask
from megarl.task.render import CriticPrompt, Renderer, use_chat_template
from megarl.types import Message, Prompt

CHAT = Problem(
    (Message("system", "Be brief."), Message("user", "One?"), Message("assistant", "1"), Message("user", "Two?")), "2"
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DataConfig(), "<|system|>default\n<|user|>Why?\n<|assistant|>"),
        (DataConfig(system=""), "<|system|>\n<|user|>Why?\n<|assistant|>"),
        (DataConfig(system="Think."), "<|system|>Think.\n<|user|>Why?\n<|assistant|>"),
        (DataConfig(instruction="{question} {x}"), "<|system|>default\n<|user|>Why? {x}\n<|assistant|>"),
        (DataConfig(chat_template=False), "Why?"),
        (DataConfig(chat_template=False, system=""), "Why?"),
        (DataConfig(chat_template=False, system="Think.", instruction="Q: {question}"), "Think.\n\nQ: Why?"),
    ],
)
def test_a_question_is_rendered_as_configured(config: DataConfig, expected: str) -> None:
    assert Renderer(config, build_byte_tokenizer(chat=True)).render(ask("Why?", "")) == expected


def test_an_instruction_goes_around_the_last_user_message_and_a_prefix_begins_the_assistants_turn() -> None:
    config = DataConfig(system="New.", instruction="<{question}>", response_prefix="{question} =")
    text = Renderer(config, build_byte_tokenizer(chat=True)).render(CHAT)
    assert text == "<|system|>New.\n<|user|>One?\n<|assistant|>1\n<|user|><Two?>\n<|assistant|>Two? ="
    assert Renderer(replace(config, system=None), build_byte_tokenizer()).render(ask("1+2", "3")) == "<1+2>\n\n1+2 ="


def test_plain_text_gets_the_tokenizers_special_tokens_in_front_once_and_a_template_does_not() -> None:
    from tokenizers import processors

    plain = Renderer(DataConfig(), tokenizer := build_byte_tokenizer())
    chat = Renderer(DataConfig(), build_byte_tokenizer(chat=True))
    assert plain.tokenize(["ab"])[0][0] == 0
    assert chat.tokenize(["ab"])[0] == plain.tokenize(["ab"])[0][1:]
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", tokenizer.eos_token_id)]
    )
    assert [ids[0] for ids in plain.tokenize(["ab", "<bos>ab"])] == [0, 0]
    assert {len(ids) for ids in plain.tokenize(["ab", "<bos>ab"])} == {3}


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(("text", "lost"), [("Abc", "A"), ("ab_c~", "_ ~"), ("aé", "é")])
def test_a_character_that_the_tokenizer_would_drop_silently_is_an_error(text: str, lost: str, unknown: bool) -> None:
    renderer = Renderer(DataConfig(), build_char_tokenizer(unknown=unknown))
    with pytest.raises(ConfigError, match=f"no token for {lost} in the prompt '{text}'"):
        renderer.tokenize(["abc", text])


def test_every_text_survives_a_byte_level_tokenizer() -> None:
    texts = ["", "a\nb  c", "naïve 数学 🙂 e\u0301 \u200b", "$\\frac{1}{2}$<bos>"]
    tokenizer = build_byte_tokenizer()
    tokens = Renderer(DataConfig(), tokenizer).tokenize(texts)
    assert [tokenizer.decode(ids[1:]) for ids in tokens] == texts


def test_a_chat_template_may_be_a_file_and_is_always_told_the_same_date(tmp_path) -> None:
    (tmp_path / "chat.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }} {% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    config = DataConfig(system="", chat_template_path=str(tmp_path / "chat.jinja"))
    tokenizer = build_byte_tokenizer(chat=True)
    use_chat_template(config, tokenizer)
    assert Renderer(config, tokenizer).render(ask("Why?", "")) == "26 Jul 2024 <><Why?>"


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("config", "template", "message"),
    [
        (DataConfig(instruction="Add."), None, r"data\.instruction: found 'Add\.'; it must contain \{question\}"),
        (DataConfig(chat_template_path="gone.jinja"), None, r"data\.chat_template_path: gone\.jinja cannot be read"),
        (DataConfig(chat_template_path="a", chat_template=False), None, "has no effect with data.chat_template=false"),
        (DataConfig(system="x"), REFUSING, r"data\.chat_template: .* system, user: no system"),
        (DataConfig(system="x"), "{{ messages[1].content }}", r"template leaves out number 1, 'x', of messages of sys"),
        (DataConfig(), "", r"^f:1: the text 'Why\?' has the token \d+ .* has 1 rows"),
    ],
)
def test_what_cannot_be_rendered_is_named_with_its_key(config: DataConfig, template: str, message: str) -> None:
    tokenizer = build_byte_tokenizer(chat=True)
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


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "<bos>Answer: 42why?"),
        # A closed system message in front of the conversation.
        ("{TEMPLATE}", "<|system|>Answer: 42\n<|system|>default\n<|user|>why?\n<|assistant|>"),
        # A first token that begins every text stands once in front of both,
        ("<bos>{TEMPLATE}", "<bos><|system|>Answer: 42\n<|system|>default\n<|user|>why?\n<|assistant|>"),
        # and one that begins every message stays where it is.
        (ALL_BOS, "<bos>system: Answer: 42\n<bos>user: why?\n<bos>assistant: "),
        # A template may refuse or leave out a lone system message.
        (NO_SYSTEM.replace("SHOWN", "raise_exception('no system')"), "[u]Answer: 42[u]why?"),
        (NO_SYSTEM.replace("SHOWN", "''"), "[u]Answer: 42[u]why?"),
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


def test_fields_are_the_answer_and_the_prompts_metadata_by_their_whole_names() -> None:
    tokenizer = build_byte_tokenizer()
    metadata = {"rubric": "be {brief}", "reward_model.style": "rule", "answer": "a column of that name"}
    text = "{{x}} {answer}, {rubric}, {reward_model.style}"
    prompt = replace(ask_critic(tokenizer), metadata=metadata)
    assert build(tokenizer, text).fill(prompt) == "{x} 42, be {brief}, rule"


@pytest.mark.parametrize("name", ["rubrik", "answer.__class__", "answer[0]", "answer!r", "answer:>9"])
def test_a_field_that_the_prompt_does_not_have_is_refused_naming_those_that_it_has(name: str) -> None:
    tokenizer = build_byte_tokenizer()
    prompts = [ask_critic(tokenizer, **{name: "x"}), ask_critic(tokenizer, rubric="r", location="train.jsonl:2")]
    with pytest.raises(ConfigError) as caught:
        build(tokenizer, f"{{{name}}}").check(prompts)
    assert caught.value.problems == (
        f"data.critic_prompt: found {{{name}}}; the fields of train.jsonl:2 are answer, location, rubric",
    )


@pytest.mark.parametrize("text", ["  ", "{answer", "answer}", "{}", "{{answer}", "{a{b}}"])
def test_what_is_no_template_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.critic_prompt: found .*; it must be a text such as"):
        build(build_byte_tokenizer(), text)


def test_a_text_above_the_limit_is_refused_and_its_length_named() -> None:
    tokenizer = build_byte_tokenizer()
    prompts = [ask_critic(tokenizer, answer="1"), ask_critic(tokenizer, answer="1234")]
    build(tokenizer, critic_prompt_length=12).check(prompts)
    with pytest.raises(ConfigError, match=r"data\.critic_prompt_length: found 11; .* has 12 tokens"):
        build(tokenizer, critic_prompt_length=11).check(prompts)
