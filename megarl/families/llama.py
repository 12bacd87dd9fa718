"""Llama 3 (2407.21783), and what is built like it, such as SmolLM2."""

from megarl.families.architecture import Architecture
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family, with_head_size


def read(config: ConfigJson) -> Architecture:
    config.require("attention_bias", False)
    return config.read_decoder()


FAMILY = Family("llama", hf_class="Llama", sglang_module="llama", read=read, random_fields=with_head_size)
