"""Tokenizers and configurations that the tests of `data` share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.config.schema.task import FunctionDataConfig, JsonlDataConfig

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*/()<>[],.:?"
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|system|>default\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

QWEN = """
{%- if tools %}[system]
{%- if messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}
{%- for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join }}){% endfor %}[end]
{%- elif messages[0].role == 'system' %}[system]{{ messages[0].content }}[end]{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}[user]{% endif %}({{ m.content }})
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}[end]{% endif %}
{%- elif m.role != 'system' %}[{{ m.role }}]{{ m.content }}[end]{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""A template that describes tools and puts messages of role tool in a row into one of the user, as Qwen's does"""


def load_published(name: str) -> str:
    """A chat template as a model is published with it."""
    return (Path(__file__).parent / "data" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def build_char_tokenizer(*, add_bos: bool = False, unknown: bool = False) -> PreTrainedTokenizerFast:
    """One token per character of ALPHABET."""
    names = ["<pad>", "<bos>", "<eos>", "<unk>"] if unknown else ["<pad>", "<bos>", "<eos>"]
    vocab = {token: number for number, token in enumerate([*names, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>" if unknown else None))
    tokenizer.decoder = decoders.Fuse()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>" if unknown else None,
    )


def build_byte_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, as the byte-level tokenizers of real models without their merges."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<bos>", *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")
    if chat:
        built.chat_template = CHAT_TEMPLATE
    return built


def jsonl_config(path: object, **keys: object) -> JsonlDataConfig:
    """data=jsonl on a file."""
    config = JsonlDataConfig(path=str(path))
    for key, value in keys.items():
        setattr(config, key, value)
    return config


def load_toy(name: str, num_heldout: int | None = None, **options: object) -> FunctionDataConfig:
    """The configuration of conf/data/NAME.yaml, one of examples/toys, with these values in place of its own."""
    values: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).parents[1] / "conf" / "data" / f"{name}.yaml"))
    del values["defaults"]
    values["options"] |= options
    config = FunctionDataConfig(**values)
    return config if num_heldout is None else replace(config, num_heldout=num_heldout)
