"""The dtype of presets of small models: that of GPUs, else what the CPU computes faster."""

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import root

FLAGS = {
    "flags\t\t: fpu avx512f avx512_bf16 avx512_vnni": "bfloat16",
    "flags\t\t: fpu avx512f amx_tile amx_bf16": "bfloat16",
    "Features\t: fp asimd i8mm bf16": "bfloat16",
    "flags\t\t: fpu avx2 avx512f avx512_vnni": "float32",
    "model name\t: bf16": "float32",
}


def list_dtypes(*overrides: str) -> set[str]:
    config = load_config(["model=smollm2_135m", *overrides])
    return {part.dtype.name for part in (config.policy, config.critic, config.reference, config.rollout)}


@pytest.mark.parametrize("line", FLAGS)
def test_the_small_model_is_in_bfloat16_where_the_cpu_has_instructions_for_it(line, monkeypatch, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t\t:\n")
    monkeypatch.setattr(root, "CPU_INFO", tmp_path / "cpuinfo")
    assert list_dtypes("algo=ppo") == list_dtypes("algo=grpo") == {FLAGS[line]}
    assert list_dtypes("algo=ppo", "cluster.gpus_per_node=2") == {"bfloat16"}
    assert list_dtypes("policy.dtype=bfloat16") == {"bfloat16", FLAGS[line]}
