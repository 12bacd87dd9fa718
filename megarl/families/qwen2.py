"""Qwen2 and Qwen2.5 (2407.10671): query, key and value projections have a bias."""

from megarl.families.architecture import Architecture
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family


def read(config: ConfigJson) -> Architecture:
    config.require("attention_bias", False)
    config.ignore("sliding_window")
    return config.read_decoder(qkv_bias=True)


FAMILY = Family(
    "qwen2", hf_class="Qwen2", sglang_module="qwen2", read=read, only_values={"qkv_bias": True, "is_qwen2_config": True}
)
