"""The presets of models for GPUs: complete jobs, whose layouts the models allow.

The config.json in checkpoints.yaml are those that the models were published with.
"""

import json
from pathlib import Path

import pytest
import yaml

from megarl.config.load import load_config
from megarl.config.schema.roles import Recompute
from megarl.mcore.spec import build_role_fields, check_layout, check_role_fields, read_architecture
from megarl.plan.memory import place_job
from megarl.run.inputs import build_specs

PUBLISHED = yaml.safe_load(Path(__file__).with_name("checkpoints.yaml").read_text())
ON_ONE_NODE = dict.fromkeys(("qwen2_7b", "qwen2_5_7b", "qwen3_8b", "llama3_8b"), 8)
ON_ONE_GPU = dict.fromkeys(("qwen3_0_6b", "qwen2_5_0_5b"), 1)
GPUS = {**ON_ONE_GPU, **ON_ONE_NODE, "qwen32b": 64, "qwen3_235b_a22b": 256}


@pytest.mark.parametrize("model", GPUS)
def test_vapo_with_a_preset_is_a_complete_job_that_fills_its_cluster(model: str) -> None:
    config = load_config(["algo=vapo", f"model={model}"])
    roles = [config.policy, config.critic]
    assert len(set().union(*place_job(config).values())) == GPUS[model]
    assert config.cluster.num_nodes * config.cluster.gpus_per_node == GPUS[model]
    assert [role.optimizer.lr for role in roles] == [1e-6, 1e-5 if model in ON_ONE_GPU else 2e-6]
    assert config.model.path
    assert config.data.path
    assert type(config.reward).__name__ == "MathRewardConfig"


@pytest.mark.parametrize("algo", ["vapo", "grpo", "reinforce_pp"])
@pytest.mark.parametrize("model", GPUS)
def test_the_model_and_megatron_take_the_layout_of_every_role(model: str, algo: str, tmp_path: Path) -> None:
    from megarl.mcore.model import build_config

    # The published checkpoint without its weights.
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["all"] | PUBLISHED[model]))
    arch = read_architecture(tmp_path)
    config = load_config([f"algo={algo}", f"model={model}"])
    for role, spec in build_specs(config, tmp_path).items():
        assert not check_layout(arch, spec.parallel, role.value, spec.megatron)
        assert not list(check_role_fields(arch, spec))
        built = build_config(arch, spec.parallel, spec.dtype, spec.megatron, build_role_fields(spec))
        assert built.num_layers == arch.num_layers
        wanted = Recompute.none if spec.optimizer is None else getattr(config, role.value).recompute
        assert (built.recompute_granularity or "none") == wanted.name
    assert config.data.prompt_length + config.rollout.response_length <= arch.max_length
    assert len(set().union(*place_job(config).values())) <= GPUS[model]


@pytest.mark.parametrize("cluster", ["gpu", "h100x8", "h100x16", "h100x64", "h100x256", "h200x8"])
def test_any_checkpoint_on_gpus_has_the_deadlines_of_gpus_and_a_preset_or_the_user_overrides_them(cluster: str) -> None:
    rollout = load_config(["model=checkpoint", "model.path=/x", f"cluster={cluster}"]).rollout
    assert (rollout.startup_deadline_s, rollout.request_deadline_s, rollout.sync_deadline_s) == (1800, 7200, 1200)
    given = ["model=checkpoint", "model.path=/x", f"cluster={cluster}", "rollout.request_deadline_s=99"]
    assert load_config(given).rollout.request_deadline_s == 99
    assert load_config(["model=qwen3_235b_a22b", f"cluster={cluster}"]).rollout.startup_deadline_s == 3600
