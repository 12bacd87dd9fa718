"""An episode's tokens are those of the whole conversation in chat templates of the forms of published ones.

The templates are written for these tests and are shorter than those whose turns they imitate.
"""

import pytest
from data_cases import build_byte_tokenizer
from tokenizers import AddedToken

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig
from megarl.environment import Observation
from megarl.rollout.conversation import ObservationEncoder, find_turn_end
from megarl.task.render import Renderer
from megarl.types import Message, Prompt

THINKING = """
{%- set ns = namespace(last=-1) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set content = m.content %}
{%- if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > ns.last and '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
{%- endif %}{% endif %}"""
ROLE_TOKENS = (
    "[gMASK]<sop>"
    + THINKING
    + """
{%- if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\\n' + content.strip() }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"""
)
IM = (
    THINKING
    + """
{%- if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
HEADERS = """<|begin_of_text|>{% for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{{- m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
OPENED = """<bos>{% for m in messages %}{% if m.role == 'assistant' %}
{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
{%- else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
CHANNELS = """{% for m in messages %}{% if m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
ENDED = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}<|endoftext|>{% endif %}"""
SYSTEM_IN_FIRST = """<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ (system if loop.first else '') + m.content }} [/INST]
{%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
SYSTEM_IN_LAST = SYSTEM_IN_FIRST.replace("loop.first", "loop.last")
FIRST_RESULT = """{% set ns = namespace(first=true) %}{% for m in messages %}{% if m.role == 'tool' %}
{%- if ns.first %}<|results|>{% set ns.first = false %}{% endif %}<|result|>{{ m.content }}
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

TEMPLATES = {
    "qwen3": (IM, "<|im_end|>"),
    "glm-4.5": (ROLE_TOKENS, "<|user|>"),
    "llama-3.1": (HEADERS, "<|eot_id|>"),
    "phi-3": (ENDED, "<|end|>"),
    "mistral": (SYSTEM_IN_FIRST, "</s>"),
}
"""By the models that have such: the template, and the token that ends an answer"""
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "<|observation|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|User|>", "<|Assistant|>", "<|start|>", "<|channel|>"),
    *("<|message|>", "<|return|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]", "<|results|>", "<|result|>"),
)
TAKES_SPACE = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
"""As those of Phi-3, which take the space behind them"""


def build(template: str) -> ObservationEncoder:
    tokenizer = build_byte_tokenizer()
    phi = template == ENDED
    added = [
        *(AddedToken(t, special=True) for t in SPECIAL),
        *(AddedToken(t, special=True, rstrip=phi) for t in TAKES_SPACE),
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = template
    return ObservationEncoder(Renderer(DataConfig(), tokenizer))


def play(
    encoder: ObservationEncoder, answers: list[str], *observations: Observation, end: str | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of an episode turn by turn, and of all its messages rendered at once.

    answers: with their end. end: the token that is the template's end of an answer; None: what is found as that.
    """
    renderer = encoder._renderer
    messages = [Message("system", "Be brief."), Message("user", "1 + 1?")]
    encoder.check(Prompt("p", "", (1,), "", messages=tuple(messages)))
    ids = list(renderer.tokenize([renderer.render_messages(messages)])[0])
    last = find_turn_end(renderer) if end is None else renderer.tokenize([end])[0][0]
    for answer, observation in zip(answers, observations, strict=True):
        said = renderer.tokenize([answer])[0]
        ids += [*said, *encoder.encode(observation, said[-1])]
        new = [Message("user", observation)] if isinstance(observation, str) else observation
        content = encoder.decode(said[:-1] if said[-1] == last else said)
        messages += [Message("assistant", content), *(Message(m.role, renderer.defuse(m.content)) for m in new)]
    return ids, list(renderer.tokenize([renderer.render_messages(messages)])[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_has_the_tokens_of_the_whole_conversation_with_texts_and_results_of_tools(name: str) -> None:
    template, end = TEMPLATES[name]
    said = [f"{text}{end}" for text in ("3", "no <|im_start|>user\n\n4", "")]
    ids, whole = play(build(template), said, "Wrong.", "a<|im_end|>b</s>", "  \nAgain\n")
    assert ids == whole
    if name == "mistral":  # whose roles alternate
        return
    end = "<|observation|>" if name == "glm-4.5" else end
    one, two = [Message("tool", "2<|im_end|>")], [Message("tool", "3"), Message("tool", "4")]
    # The thinking of turns that tools answer is kept by templates, in the form that the models write.
    thought = "<think>\nhm\n</think>\n\n" if name in ("qwen3", "glm-4.5") else ""
    answers = [f"{thought}call{end}", f"calls{end}", f"{thought}call{end}"]
    ids, whole = play(build(template), answers, one, two, one, end=end)
    assert ids == whole


@pytest.mark.parametrize("stop", ["<|endoftext|>", "\n", "."])
@pytest.mark.parametrize("name", ["qwen3", "phi-3"])
def test_behind_another_stop_token_the_template_ends_the_answer_as_well(name: str, stop: str) -> None:
    ids, whole = play(build(TEMPLATES[name][0]), [f"3{stop}"], "Wrong.")
    assert ids == whole


def test_thinking_of_earlier_turns_stays_where_the_template_leaves_it_out_and_the_run_says_so() -> None:
    encoder = build(IM)
    ids, whole = play(encoder, ["<think>\nhm\n</think>\n\n3<|im_end|>"], "Wrong.")
    assert encoder.decode(ids).replace("<think>\nhm\n</think>\n\n", "") == encoder.decode(whole)
    assert "leaves out the thinking of earlier turns; training keeps it" in str(encoder.describe_thinking())
    assert build(HEADERS).describe_thinking() is None
    # What an answer begins with is written for the next one only.
    encoder = build(OPENED)
    ids, whole = play(encoder, ["hm</think>3<|end|>"], "Wrong.")
    assert encoder.decode(ids).replace("<think>\nhm</think>", "") == encoder.decode(whole)
    assert encoder.describe_thinking() is not None


def test_special_tokens_that_the_policy_writes_itself_are_followed_by_the_templates_own() -> None:
    encoder = build(CHANNELS)
    final = "<|channel|>final<|message|>"
    messages = (Message("user", "1 + 1?"), Message("assistant", "3"), Message("user", "Wrong."))
    renderer = encoder._renderer
    said = renderer.tokenize([final + "3<|end|>"])[0]
    ids = [*renderer.tokenize([renderer.render_messages(messages[:1])])[0], *said, *encoder.encode("Wrong.", said[-1])]
    assert ids == list(renderer.tokenize([renderer.render_messages(messages)])[0])


@pytest.mark.parametrize(
    ("template", "observation", "why"),
    [
        (SYSTEM_IN_LAST, "Wrong.", "with messages of user: it writes the first messages otherwise"),
        (FIRST_RESULT, [Message("tool", "2")], "with messages of tool: behind answer 2 of 4 messages"),
        (SYSTEM_IN_FIRST, [Message("user", "a"), Message("user", "b")], "refuses messages of .*: roles must alternate"),
    ],
)
def test_a_template_that_cannot_go_on_turn_by_turn_is_refused_with_its_reason(
    template: str, observation: Observation, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data\.chat_template: .*{why}"):
        play(build(template), ["3<|end|>"], observation)
