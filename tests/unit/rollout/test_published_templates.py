"""Chat templates that models are published with (tests/data/chat_templates): a conversation with a system message,
tools and thinking has turn by turn the tokens that it has rendered at once, or is refused; what ends an answer.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data_cases import build_byte_tokenizer, load_published
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megarl.config.errors import ConfigError
from megarl.config.schema.root import RolloutConfig
from megarl.config.schema.task import DataConfig, ToolsEnvironmentConfig
from megarl.rollout.conversation import ObservationEncoder, add_turn_end
from megarl.rollout.server import load_generation_spec
from megarl.task.environments import build_tool_prompt, describe_call
from megarl.task.render import Renderer
from megarl.types import Message, Prompt

SPECIAL = re.compile(r"<[|｜][^<>{}' \n]+[|｜]>|\[/?[A-Z_]{3,}\]|</?s>|<bos>|<\w+_of_turn>|\[gMASK\]|<sop>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added to the tokenizers of Qwen3 and others as what is no special token"""
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% if m.role != 'assistant' or not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Written here after that of OLMo 2, whose roles are no tokens"""
THOUGHT = "<think>\nhm\n</think>\n\n"
LEFT_OUT = "the chat template leaves out the thinking of earlier turns; training keeps it, as it was generated"
BY_TEXT = (
    "the chat template describes no tools, or does not take their results behind an answer: a text in the system"
    " message describes them (environment.description)"
)


class Published(NamedTuple):
    """What megarl does with one."""

    bos: str
    eos: str
    ends: tuple[str, ...]
    """Tokens that end its answers"""
    thoughts: str = "all"
    """Whose thinking it keeps: all answers', those's behind the last question, or none's"""
    by_text: bool = True
    """A text in the system message describes tools"""
    says: tuple[str, ...] = ()
    opened: str = ""
    """What it begins the next answer with, and has in no earlier one"""
    refused: str = ""


IM = ("<|endoftext|>", "<|im_end|>", ("<|im_end|>",))
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",))
CASES = {
    "deepseek_r1_distill": Published(*DEEPSEEK, "none", says=(LEFT_OUT,), opened="<think>\n"),
    "deepseekv31": Published(*DEEPSEEK, "none", says=(LEFT_OUT,)),
    "gemma3": Published("<bos>", "<eos>", ("<end_of_turn>",)),
    "glm4moe": Published("", "<|endoftext|>", ("<|user|>", "<|observation|>"), "last", False),
    "gptoss": Published("<|startoftext|>", "<|return|>", ("<|end|>", "<|return|>"), says=(
        "behind an answer that ends with <|return|> the chat template writes <|end|>; training has both",)),
    "kimi_k2": Published("[BOS]", "[EOS]", ("<|im_end|>",), by_text=False),
    "llama3_1": Published("<|begin_of_text|>", "<|eot_id|>", ("<|eot_id|>",), by_text=False),
    "mistral_nemo": Published("<s>", "</s>", ("</s>",), refused="it writes the first messages otherwise once others"),
    "mistral_small": Published("<s>", "</s>", ("</s>",)),
    "olmo2": Published("<|endoftext|>", "<|endoftext|>", ("<|endoftext|>",)),
    "phi4": Published(*IM),
    "qwen2_5": Published(*IM, by_text=False),
    "qwen3": Published(*IM, "last", False),
    "smollm3": Published("<|begin_of_text|>", "<|im_end|>", ("<|im_end|>",)),
}  # fmt: skip


def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    case, text = CASES[name], OLMO2 if name == "olmo2" else load_published(name)
    tokenizer = build_byte_tokenizer()
    names = {*SPECIAL.findall(text.replace(OLMO2, "")), case.eos, *filter(None, [case.bos])}
    tokenizer.add_tokens([AddedToken(each, special=True) for each in sorted(names)])
    tokenizer.add_tokens([AddedToken(each) for each in PLAIN if each in text])
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = case.bos or None, case.eos, text
    return tokenizer


def converse(renderer: Renderer, case: Published) -> list[Message]:
    """Ends with an answer, behind the results of a tool."""
    call: dict[str, Any] = {"name": "calculator", "arguments": {"expression": "2*3"}}
    tools, thought = renderer.tools, THOUGHT * (case.thoughts != "none")
    assert tools is not None
    # A text's calls are part of the answer, and its results a question.
    called = Message("assistant", describe_call(**call))
    if not case.by_text:
        own = thought * (case.thoughts == "last")
        called = Message("assistant", own, {"tool_calls": [{"id": "call00001", "type": "function", "function": call}]})
    begun = tools.add_to([Message("system", "Be brief."), Message("user", "1 + 1?")])
    first = Message("assistant", THOUGHT * (case.thoughts == "all") + "3")
    asked, answered = Message("user", "Wrong.\n"), Message("assistant", thought + "It is 6.")
    return [*begun, first, asked, called, *tools.answer(["6"]), answered]


@pytest.mark.parametrize("name", CASES)
def test_turn_by_turn_a_published_template_gives_the_tokens_of_the_whole_or_is_refused(name: str) -> None:
    case, tokenizer = CASES[name], build_tokenizer(name)
    renderer = Renderer(DataConfig(), tokenizer, build_tool_prompt(ToolsEnvironmentConfig(), DataConfig(), tokenizer))
    encoder, messages = ObservationEncoder(renderer), converse(renderer, case)
    prompt = Prompt("p", "", (1,), "", messages=tuple(messages[:2]))
    if case.refused:
        with pytest.raises(ConfigError, match=rf"^data\.chat_template: .*{case.refused}"):
            encoder.check(prompt)
        return
    encoder.check(prompt)
    assert renderer.tools is not None
    assert (renderer.tools.text is not None) == case.by_text
    assert tuple(encoder.describe()) == (*case.says, *[BY_TEXT] * case.by_text)
    (whole,) = renderer.tokenize([renderer.render_messages(messages, for_answer=False)])
    ends = set(tokenizer.convert_tokens_to_ids(list(case.ends)))
    ids = renderer.tokenize([renderer.render_messages(messages[:2])])[0]
    for observation in (messages[3:4], messages[5:-1], None):
        if case.opened:
            ids = ids[: -len(renderer.tokenize([case.opened])[0])]
        assert whole[: len(ids)] == ids
        # The policy writes what stands there.
        size = next((i for i, token in enumerate(whole[len(ids) :], start=1) if token in ends), len(whole) - len(ids))
        ids += whole[len(ids) : len(ids) + size]
        ids += tuple(encoder.encode(observation, ids[-1])) if observation else ()
    assert encoder.decode(whole[len(ids) :]).strip() == ""


def test_what_a_template_reads_besides_messages_is_given_by_name_and_said() -> None:
    found = {"qwen3": "enable_thinking", "gptoss": "builtin_tools, model_identity, reasoning_effort", "qwen2_5": ""}
    found |= {"llama3_1": "builtin_tools, custom_tools, date_string, tools_in_user_message", "gemma3": ""}
    for name, inputs in found.items():
        said = Renderer(DataConfig(), build_tokenizer(name)).describe(())
        assert said.partition("; data.template_inputs may have ")[2].partition(";")[0] == inputs
    question, tokenizer = [Message("user", "1 + 1?")], build_tokenizer("qwen3")
    silent = Renderer(DataConfig(template_inputs={"enable_thinking": False}), tokenizer)
    assert silent.render_messages(question).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "template_inputs" not in silent.describe(())
    ObservationEncoder(silent).check(Prompt("p", "", (1,), "", messages=tuple(question)))
    thorough = Renderer(DataConfig(template_inputs={"reasoning_effort": "high"}), build_tokenizer("gptoss"))
    assert "Reasoning: high\n" in thorough.render_messages(question)
    for keys, read in (({}, "enable_thinking"), ({"chat_template": False}, "none")):
        with pytest.raises(ConfigError, match=rf"inputs: found tools, x; those that the chat template reads: {read}$"):
            Renderer(DataConfig(template_inputs={"x": 1, "tools": []}, **keys), tokenizer)


@pytest.mark.parametrize(
    ("name", "config", "generation", "expected"),
    [
        # One token by all, as of Qwen2.5 with a tokenizer of the same; names where they differ, as in Qwen2.5-Math.
        ("phi4", "<|im_end|>", ["<|im_end|>"], ["<|im_end|> ({})"]),
        (
            *("qwen2_5", "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
            [
                "<|im_end|> ({}, by generation_config.json and the chat template and the tokenizer)",
                "<|endoftext|> ({}, by generation_config.json and config.json)",
            ],
        ),
        # An end that neither file has: the tokenizer's and the template's.
        (
            *("gemma3", None, ["<bos>"]),
            [
                "<bos> ({}, by generation_config.json)",
                "<end_of_turn> ({}, by the chat template)",
                "<eos> ({}, by the tokenizer)",
            ],
        ),
        # Its answers have parts, which end alike.
        ("gptoss", "<|return|>", None, ["<|return|> ({})"]),
    ],
)
def test_responses_end_with_what_any_source_says_and_it_is_named_where_they_differ(
    name: str, config: str | None, generation: list[str] | None, expected: list[str], tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(name)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    files = {"config.json": {"vocab_size": len(tokenizer)}, "generation_config.json": {}}
    for file, tokens in zip(files, (config, generation), strict=True):
        ids = None if tokens is None else {"eos_token_id": tokenizer.convert_tokens_to_ids(tokens)}
        (tmp_path / file).write_text(json.dumps(files[file] | (ids or {})))
    spec = load_generation_spec(tmp_path)
    rollout, text = add_turn_end(RolloutConfig(), spec, Renderer(DataConfig(), tokenizer))
    tokens = [each.partition(" ")[0] for each in expected]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    assert text == "responses end with " + ", ".join(map(str.format, expected, ids))
    assert [*spec.stop_token_ids, *rollout.stop_token_ids] == ids
