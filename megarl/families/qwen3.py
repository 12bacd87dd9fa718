"""Qwen3 (2505.09388): query and key heads are normalized."""

from megarl.families.architecture import Architecture
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family, with_head_size


def read(config: ConfigJson) -> Architecture:
    config.require("attention_bias", False)
    config.ignore("sliding_window")
    return config.read_decoder(qk_norm=True, head_size=config.read_size("head_dim", 128))


FAMILY = Family(
    "qwen3",
    hf_class="Qwen3",
    sglang_module="qwen3",
    read=read,
    random_fields=with_head_size,
    only_values={"use_qk_norm": True},
)
