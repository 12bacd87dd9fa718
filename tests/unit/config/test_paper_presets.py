"""Presets on models from 7B up: what their papers have, or what docs/algorithms.md says instead and why; complete jobs,
whose layouts the models allow. The config.json in checkpoints.yaml are those that the models were published with.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.algo.objective import find_policy_loss, format_objective, needs_critic
from megarl.config.checks import find_unused
from megarl.config.load import list_options, load_config
from megarl.config.overrides import list_values
from megarl.config.schema.roles import Recompute
from megarl.config.schema.root import Config
from megarl.mcore.spec import build_role_fields, check_layout, check_role_fields, read_architecture
from megarl.plan.memory import place_job
from megarl.run.inputs import build_specs

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"
ALGOS = list_options("algo")
OF_NO_SIZE = ("tiny", "tiny_moe", "smollm2_135m", "qwen3_0_6b", "qwen2_5_0_5b", "checkpoint")
MODELS = [name for name in list_options("model") if name not in OF_NO_SIZE]
STEPS = {
    **dict.fromkeys(("ppo", "vc_ppo", "vapo", "dapo", "topr", "cispo"), 16),
    **dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "cv_ppo"), 8),
    **dict.fromkeys(("grpo", "lite_ppo", "gspo", "bpco"), 4),
    **dict.fromkeys(("rloo", "sao", "distill"), 1),
}
ADAMW = {"policy.optimizer.lr": 1e-6, "algo.gamma": 1.0, "algo.clip_low": 0.2, "algo.entropy_coef": 0.0}
BASELINE = {
    **ADAMW,
    **{"train.samples_per_iteration": 8192, "train.samples_per_minibatch": 512, "critic.optimizer.lr": 2e-6},
    **{"algo.lambda_policy": 0.95, "algo.clip_high": 0.2, "algo.kl.in_reward": False, "algo.kl.in_loss": False},
    **{"policy.optimizer.decay": "constant", "critic.init": "reward model"},
}
PAPERS: dict[str, dict[str, Any]] = {
    # 2504.05118, section 5.1, "basic PPO"; rewards of 2503.01491, section 4.1
    "ppo": {**BASELINE, "algo.lambda_critic": 0.95, "reward.wrong": -1.0, "algo.loss_agg_mode": "seq-mean-token-mean"},
    # 2503.01491, section 4.1
    "vc_ppo": {**BASELINE, "algo.lambda_critic": 1.0, "reward.wrong": -1.0},
    # 2504.05118, section 5.1; rewards of section 3.3
    "vapo": {
        **BASELINE,
        **{"train.responses_per_prompt": 16, "algo.lambda_policy": "adaptive", "algo.length_alpha": 0.05},
        **{"algo.lambda_critic": 1.0, "algo.clip_high": 0.28, "algo.loss_agg_mode": "token-mean", "reward.wrong": 0.0},
        **{"algo.positive_lm_coef": 0.1, "algo.value_pretrain.steps": 50},
    },
    # 2501.03262, version 1, table 1; version 9, sections 4.1 and 5.1
    "reinforce_pp": {
        **{"algo.kl.coef": 0.001, "train.samples_per_iteration": 1024, "train.samples_per_minibatch": 128},
        **{"policy.optimizer.lr": 5e-7, "algo.clip_low": 0.2, "algo.clip_high": 0.2, "algo.gamma": 1.0},
        "reward.wrong": -1.0,
    },
    "reinforce_pp_baseline": {"algo.kl.loss_estimator": "k2", "algo.whiten_advantages": True},
    # 2402.14740, appendix
    "rloo": {
        **{"train.samples_per_iteration": 512, "train.responses_per_prompt": 4, "policy.optimizer.lr": 1e-6},
        **{"train.num_minibatches": 2, "algo.kl.coef": "0.03 and 0.10"},
    },
    # 2402.03300, section 4.1.4
    "grpo": {
        **{"policy.optimizer.lr": 1e-6, "algo.kl.loss_coef": 0.04, "train.responses_per_prompt": 64},
        **{"train.samples_per_minibatch": 1024, "train.samples_per_iteration": 1024, "rollout.response_length": 1024},
    },
    # 2508.08221, section 3.1 and appendix A.1
    "lite_ppo": {
        **{"policy.optimizer.lr": 1e-6, "policy.optimizer.weight_decay": 0.0, "policy.optimizer.warmup_steps": 50},
        **{"train.responses_per_prompt": 8, "train.samples_per_minibatch": 1024, "train.samples_per_iteration": 1024},
        **{"rollout.response_length": 8192, "rollout.temperature": 0.99, "algo.loss_agg_mode": "token-mean"},
    },
    # 2503.14286
    "topr": {
        **{"policy.optimizer.lr": 5e-7, "reward.wrong": -1.0, "train.responses_per_prompt": 16},
        **{"algo.advantage": "no baseline", "algo.loss_agg_mode": "seq-mean-token-mean"},
    },
    # 2503.14476, section 4.1 and equation 7
    "dapo": {
        **ADAMW,
        **{"train.samples_per_iteration": 8192, "train.responses_per_prompt": 16, "train.samples_per_minibatch": 512},
        **{"policy.optimizer.warmup_steps": 20 * 16, "algo.clip_high": 0.28, "algo.overlong.penalty": 1.0},
        **{"rollout.response_length": 20480, "algo.overlong.buffer_frac": 4096 / 20480, "reward.wrong": -1.0},
        "algo.loss_agg_mode": "token-mean",
    },
    # 2507.18071, section 5.1 and equations 5 to 7
    "gspo": {
        **{"algo.clip_low": 3e-4, "algo.clip_high": 4e-4, "algo.advantage_std": "group"},
        **{"algo.loss_agg_mode": "seq-mean-token-mean", "train.samples_per_iteration": "not given"},
    },
    # 2506.13585, section 3.1 and equations 4 and 5; the optimizer of section 3.2
    "cispo": {
        **{"algo.clip_low": 1.0, "algo.clip_high": "not given", "algo.advantage_std": "group"},
        **{"algo.loss_agg_mode": "token-mean", "algo.dynamic_sampling.enabled": True, "algo.overlong.penalty": 1.0},
        **{"policy.optimizer.beta2": 0.95, "policy.optimizer.eps": 1e-15, "train.samples_per_iteration": "not given"},
        **{"reward.wrong": "not given"},
    },
    # 2503.20783, section 3; sizes of its script examples/qwen2.5-math-7b.sh
    "dr_grpo": {
        **ADAMW,
        **{"train.samples_per_iteration": 1024, "train.responses_per_prompt": 8, "train.samples_per_minibatch": 128},
        **{"algo.advantage_std": "none", "algo.loss_agg_mode": "seq-mean-token-sum-norm", "algo.kl.in_loss": False},
        "rollout.response_length": 3000,
    },
    # 2607.07508, section 4.1
    "sao": {
        **{"algo.clip_low": 0.3, "algo.clip_high": 5.0, "algo.length_alpha": 1.5, "algo.lambda_critic": 1.0},
        **{"train.samples_per_iteration": 128, "train.responses_per_prompt": 1, "algo.gamma": 1.0},
        **{"policy.optimizer.lr": 1e-6, "critic.optimizer.lr": 5e-6, "critic.updates_per_policy_update": 2},
        **{"policy.frozen_iterations": 10, "critic.trainable": "mlp", "rollout.response_length": 131072},
        **{"rollout.max_staleness": "asynchronous", "algo.value_pretrain.steps": "not given"},
    },
    # 2608.23566, sections 3 and 4; the loss's threshold and aggregation of its scripts
    "bpco": {
        **{"algo.clip_low": 0.2, "algo.clip_high": 0.2, "algo.length_alpha": 0.4, "algo.lambda_critic": 1.0},
        **{"train.samples_per_iteration": 1024, "train.responses_per_prompt": 1, "train.samples_per_minibatch": 256},
        **{"policy.optimizer.lr": 1e-6, "critic.optimizer.lr": 1e-5, "policy.frozen_iterations": 15},
        **{"critic.value_range": [0.0, 1.0], "algo.whiten_advantages": False, "reward.wrong": 0.0},
        **{"algo.loss_agg_mode": "seq-mean-token-sum", "rollout.response_length": 24000},
    },
    "cv_ppo": {},  # has no paper
    # tinker_cookbook/recipes/distillation of the authors of the blog post
    "distill": {
        **{"policy.optimizer.lr": 5e-5, "train.samples_per_iteration": 2048, "train.responses_per_prompt": 4},
        **{"algo.kl.advantage_coef": 1.0, "train.samples_per_minibatch": 2048},
    },
}
"""The published values."""


@functools.cache
def load(algo: str, model: str) -> Config:
    path = ["model.path=mine"] if model == "checkpoint" else []
    return load_config([f"algo={algo}", f"model={model}", *path])


@functools.cache
def read_values(algo: str, model: str) -> dict[str, Any]:
    return dict(list_values(load(algo, model)))


def read_table(first: str) -> list[list[str]]:
    """The cells of the rows of the table whose header begins with `first`."""
    lines = DOCS.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def read_differences() -> dict[tuple[str, str], list[str]]:
    """Algorithm and key to what the paper has, what the preset has and why; a row may be about several algorithms, with
    one value of the papers for all of them or one for each.
    """
    found = {}
    for names, key, published, *rest in read_table("| `algo=` | key |"):
        algos, papers = re.findall(r"\w+", names), published.split(", ")
        for algo, paper in zip(algos, papers if len(papers) > 1 else papers * len(algos), strict=True):
            found[algo, key] = [paper, *rest]
    return found


DIFFERENCES = read_differences()


@pytest.mark.parametrize("model", list_options("model"))
@pytest.mark.parametrize("algo", list_options("algo"))
def test_every_algorithm_composes_with_every_model(algo: str, model: str) -> None:
    config = load(algo, model)
    assert (config.algo.name, config.model.name) == (algo, model)
    if model in ("tiny", "smollm2_135m"):
        assert config.train.num_samples == 256
        assert config.train.num_optimizer_steps == (1 if algo == "rloo" else 4)
        assert config.algo.value_pretrain.num_steps <= 4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_clipped_loss_takes_several_optimizer_steps_so_that_its_clip_has_an_effect(algo: str, model: str) -> None:
    config = load(algo, model)
    assert config.train.num_optimizer_steps == STEPS[algo]
    loss = find_policy_loss(config.algo.surrogate)
    clips = not list(find_unused(config, ["algo.clip_high"]))
    assert clips == (algo not in ("rloo", "topr"))
    # The ratio to the rollout engine leaves 1 in a single step, too, where responses are stale.
    clips &= not loss.ratio_to_rollout and algo != "distill"  # its authors take one step, and more are possible
    assert not clips or config.train.num_optimizer_steps > 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_value_of_a_paper_is_the_presets_or_declared_in_the_docs(algo: str, model: str) -> None:
    values = read_values(algo, model)
    for key, published in PAPERS[algo].items():
        if values[key] != published:
            assert (algo, key) in DIFFERENCES, f"{key}: {values[key]}, in the paper {published}"
            assert DIFFERENCES[algo, key][0] == str(published)


def test_the_table_of_sizes_in_the_docs_is_what_the_presets_compose_to() -> None:
    table = read_table("| `algo=` | prompts x K |")
    rows = {algo: row[1:] for row in table for algo in re.findall(r"\w+", row[0])}
    assert sorted(rows) == ALGOS
    for algo in ALGOS:
        for model in MODELS:
            config = load(algo, model)
            train, optimizer = config.train, config.policy.optimizer
            critic = f"{config.critic.optimizer.lr:g}" if needs_critic(config.algo) else ""
            assert rows[algo] == [
                f"{train.num_prompts} x {train.responses_per_prompt}",
                str(train.minibatch_size),
                str(train.num_optimizer_steps),
                f"{optimizer.lr:g}",
                critic,
                str(optimizer.warmup_steps),
                f"{config.reward.wrong:g}",
            ]
            if critic:
                assert config.critic.optimizer.warmup_steps == optimizer.warmup_steps
                assert config.critic.optimizer.beta2 == optimizer.beta2


@pytest.mark.parametrize(("algo", "key"), DIFFERENCES)
def test_a_declared_difference_is_the_presets_value_and_not_the_papers(algo: str, key: str) -> None:
    published, ours, why = DIFFERENCES[algo, key]
    # The critic of its own is what that preset of a model is for.
    models = [model for model in MODELS if key != "critic.init" or model != "qwen3_8b_critic_1_7b"]
    found = {read_values(algo, model)[key] for model in models}
    listed = yaml.safe_load(f"[{ours}]")
    assert found == set(listed)
    assert str(published) != ours
    assert why


def test_the_objective_in_the_docs_is_what_the_preset_prints() -> None:
    config = load("dapo", "qwen3_8b")
    assert format_objective(config.algo, config.train.responses_per_prompt, config.reward.wrong) in DOCS.read_text()


PUBLISHED = yaml.safe_load(Path(__file__).with_name("checkpoints.yaml").read_text())
SMALL = ("qwen3_1_7b", "qwen3_4b", "llama3_2_1b", "r1_distill_qwen_1_5b", "r1_distill_qwen_7b")
ON_ONE_NODE = dict.fromkeys(("qwen2_7b", "qwen2_5_7b", "qwen3_8b", "qwen3_8b_critic_1_7b", "llama3_8b", *SMALL), 8)
ON_TWO_NODES = dict.fromkeys(("qwen3_30b_a3b", "gpt_oss_20b"), 16)
ON_ONE_GPU = dict.fromkeys(("qwen3_0_6b", "qwen2_5_0_5b"), 1)
GPUS = {**ON_ONE_GPU, **ON_ONE_NODE, **ON_TWO_NODES, "qwen32b": 64, "qwen3_235b_a22b": 256}


@pytest.mark.parametrize("model", GPUS)
def test_vapo_with_a_preset_is_a_complete_job_that_fills_its_cluster(model: str) -> None:
    config = load("vapo", model)
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
    config = load(algo, model)
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
