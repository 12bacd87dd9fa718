"""From problems to what the policy reads, and what the critic alone reads."""

from dataclasses import replace

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


def test_an_instruction_goes_around_the_last_user_message_and_a_system_key_replaces_the_chats() -> None:
    config = DataConfig(system="New.", instruction="<{question}>")
    text = Renderer(config, build_byte_tokenizer(chat=True)).render(CHAT)
    assert text == "<|system|>New.\n<|user|>One?\n<|assistant|>1\n<|user|><Two?>\n<|assistant|>"


def test_the_response_prefix_begins_the_assistants_turn_with_the_bare_question() -> None:
    config = DataConfig(instruction="Solve {question}", response_prefix="{question} =", system="")
    problem = ask("1+2", "3")
    assert Renderer(config, build_byte_tokenizer()).render(problem) == "Solve 1+2\n\n1+2 ="
    chat = Renderer(config, build_byte_tokenizer(chat=True)).render(problem)
    assert chat == "<|system|>\n<|user|>Solve 1+2\n<|assistant|>1+2 ="


def test_plain_text_gets_the_tokenizers_special_tokens_and_a_template_does_not() -> None:
    plain = Renderer(DataConfig(), build_byte_tokenizer())
    chat = Renderer(DataConfig(), build_byte_tokenizer(chat=True))
    assert plain.tokenize(["ab"])[0][0] == 0
    assert chat.tokenize(["ab"])[0] == plain.tokenize(["ab"])[0][1:]
    assert len(Renderer(DataConfig(), build_char_tokenizer()).tokenize(["ab"])[0]) == 2
    assert len(Renderer(DataConfig(), build_char_tokenizer(add_bos=True)).tokenize(["ab"])[0]) == 3


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


def test_a_template_that_refuses_the_messages_is_named() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"data.chat_template: .* system, user: no system"):
        Renderer(DataConfig(system="x"), tokenizer).render(ask("Why?", ""))


def test_a_chat_template_may_be_a_file(tmp_path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    config = DataConfig(system="", chat_template_path=str(tmp_path / "chat.jinja"))
    tokenizer = build_byte_tokenizer(chat=True)
    use_chat_template(config, tokenizer)
    assert Renderer(config, tokenizer).render(ask("Why?", "")) == "<><Why?>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(chat_template_path="gone.jinja"), r"data\.chat_template_path: gone\.jinja cannot be read"),
        (DataConfig(chat_template_path="a", chat_template=False), "has no effect with data.chat_template=false"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_their_key(config: DataConfig, message: str) -> None:
    tokenizer = build_byte_tokenizer(chat=True)
    use = use_chat_template if config.chat_template_path else Renderer
    with pytest.raises(ConfigError, match=message):
        use(config, tokenizer)


def test_plain_text_begins_with_bos_once_and_never_ends_with_eos() -> None:
    from tokenizers import processors

    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", end)]
    )
    plain, begun = Renderer(DataConfig(), tokenizer).tokenize(["ab", "<bos>ab"])
    assert plain == begun
    assert (plain[0], len(plain)) == (0, 3)


def test_a_token_beyond_the_embedding_is_refused_with_its_text() -> None:
    with pytest.raises(ConfigError, match=r"^f:1: the text 'ab' has the token \d+ .* has 1 rows"):
        Renderer(DataConfig(), build_byte_tokenizer(), vocab_size=1).tokenize(["ab"], names=["f:1"])


def test_the_date_of_a_template_is_always_the_same() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    assert Renderer(DataConfig(), tokenizer).render(ask("Why?", "")) == "26 Jul 2024 Why?"


TEXT = "Answer: {answer}"


def build(tokenizer: PreTrainedTokenizerFast, text: str = TEXT, **keys: object) -> CriticPrompt:
    return CriticPrompt(DataConfig(critic_prompt=text, **keys), tokenizer)  # type: ignore[arg-type]


def ask_critic(
    tokenizer: PreTrainedTokenizerFast, question: str = "why?", answer: str = "42", **metadata: str
) -> Prompt:
    renderer = Renderer(DataConfig(), tokenizer)
    text = renderer.render_messages([Message("user", question)])
    return Prompt("p1", text, renderer.tokenize([text])[0], answer, metadata)


def test_a_chat_template_makes_a_closed_system_message_of_it_in_front_of_the_conversation() -> None:
    tokenizer = build_byte_tokenizer(chat=True)
    prompt = ask_critic(tokenizer)
    text = tokenizer.decode(build(tokenizer).extend(prompt))
    assert text == f"<|system|>Answer: 42\n{prompt.text}"
    assert prompt.text.startswith("<|system|>default\n<|user|>why?")


@pytest.mark.parametrize("chat", [False, True])
def test_what_follows_the_text_is_the_prompts_own_tokens_and_a_first_token_stands_once_in_front(chat: bool) -> None:
    tokenizer = build_byte_tokenizer(chat=chat)
    if chat:
        tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    prompt = ask_critic(tokenizer)
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
    tokens = build(tokenizer).extend(ask_critic(tokenizer))
    assert tokenizer.decode(tokens) == "<bos>system: Answer: 42\n<bos>user: why?\n<bos>assistant: "


@pytest.mark.parametrize("refused", ["raise_exception('no system')", "''"])
def test_a_template_that_refuses_or_leaves_out_a_lone_system_message_is_given_one_of_the_user(refused: str) -> None:
    tokenizer = build_byte_tokenizer()
    shown = "{% if m.role == 'system' %}{{ REFUSED }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + shown.replace("REFUSED", refused) + "{% endfor %}"
    assert tokenizer.decode(build(tokenizer).encode(ask_critic(tokenizer))) == "[user]Answer: 42"


def test_fields_are_the_answer_and_the_prompts_metadata_by_their_whole_names() -> None:
    tokenizer = build_byte_tokenizer()
    metadata = {"rubric": "be {brief}", "reward_model.style": "rule", "answer": "a column of that name"}
    prompt = replace(ask_critic(tokenizer), metadata=metadata)
    text = "{{x}} {answer}, {rubric}, {reward_model.style}"
    assert build(tokenizer, text).fill(prompt) == "{x} 42, be {brief}, rule"


@pytest.mark.parametrize("name", ["rubrik", "answer.__class__", "answer[0]"])
def test_a_field_that_the_prompt_does_not_have_is_refused_naming_those_that_it_has(name: str) -> None:
    tokenizer = build_byte_tokenizer()
    prompts = [
        ask_critic(tokenizer, rubric="r", **{name: "x"}),
        ask_critic(tokenizer, rubric="r", location="train.jsonl:2"),
    ]
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
    prompts = [ask_critic(tokenizer, answer="1"), ask_critic(tokenizer, answer="1234")]
    build(tokenizer, critic_prompt_length=12).check(prompts)
    with pytest.raises(ConfigError, match=r"data\.critic_prompt_length: found 11; .* has 12 tokens"):
        build(tokenizer, critic_prompt_length=11).check(prompts)
