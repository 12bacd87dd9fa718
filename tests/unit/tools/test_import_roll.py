"""tools/import_roll.py on files in ROLL's form: what it prints loads, every key has its line, every loss is named."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from yaml import YAMLError

from megarl.config.checks.unused import find_unused
from megarl.config.load import load_config
from megarl.config.schema.cluster import ClusterConfig
from megarl.config.schema.data import JsonlDataConfig
from megarl.config.schema.reward import MathRewardConfig
from megarl.config.schema.root import Config
from megarl.config.search_path import CONF_DIR, write_search_path
from megarl.tools.import_roll import Outcome, get_exit_code, import_roll, list_losses, list_overrides
from megarl.tools.roll_file import read_roll_file

ROOT = Path(__file__).resolve().parents[3]
FILES = Path(__file__).parent / "roll"
WORKERS = "roll.pipeline.rlvr.rewards"
MATH = f"{WORKERS}.math_rule_reward_worker.MathRuleRewardWorker"
CODE = f"{WORKERS}.code_sandbox_reward_worker.CodeSandboxRewardWorker"
PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
STRATEGY = "actor_train.strategy_args.strategy_config"


def make(**changes: Any) -> dict[str, Any]:
    """A small job in ROLL's form, which loses nothing; the changes by dotted key, None to leave one out."""
    tree = {
        **{"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "adv_estimator": "reinforce"},
        **{"prompt_length": 2048, "response_length": 4096, "pretrain": "Qwen/Qwen2.5-7B"},
        "actor_train": {
            "training_args": {
                "learning_rate": 1e-6,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 32,
            },
            "data_args": {
                **{"template": "qwen2_5", "file_name": ["data/math.jsonl"], "messages": "messages"},
                "domain_interleave_probs": {"math_rule": 1.0},
            },
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}},
            "device_mapping": "list(range(0,16))",
        },
        "actor_infer": {"generating_args": {"temperature": 0.99}, "device_mapping": "list(range(0,8))"},
        "rewards": {"math_rule": {"worker_cls": MATH, "tag_included": ["deepmath_103k"]}},
    }
    config = OmegaConf.create(tree)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return OmegaConf.to_container(config)


def import_tree(tmp_path: Path, tree: Any) -> tuple[list[Outcome], list[str]]:
    file = write(tmp_path / "roll.yaml", tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return import_roll(read_roll_file(file))


def load_tree(tmp_path: Path, tree: Any, **lost: list[str]) -> Config:
    """The imported job, which loads; what is lost of what is learned is exactly `lost`."""
    outcomes, problems = import_tree(tmp_path, tree)
    assert not problems
    assert list_losses(outcomes) == lost
    assert get_exit_code(outcomes, problems) == bool(lost)
    return load_config([f"{key}={text}" for key, text in list_overrides(outcomes).items()])


def run_import(file: Path, *options: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "import_roll.py"), str(file), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not is_dataclass(value):
        return {prefix[:-1]: value}
    return {k: v for f in fields(value) for k, v in flatten(getattr(value, f.name), f"{prefix}{f.name}.").items()}


def test_a_file_of_rolls_loads_with_the_values_that_it_says():
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml", "--allow-loss")
    assert code == 0, report
    config = load_config(overrides)
    algo, train, policy = config.algo, config.train, config.policy
    assert (algo.advantage, algo.whiten_advantages, algo.advantage_clip, algo.reward_clip) == (
        *("reinforce", True, 2.0, 10.0),
    )
    assert (algo.dual_clip, algo.overlong.filter, algo.kl.in_reward, algo.kl.in_loss) == (1.4, True, False, False)
    assert algo.loss_agg_mode.name == "seq-mean-token-mean"  # ROLL's default
    assert (train.prompts_per_iteration, train.responses_per_prompt, train.num_iterations) == (64, 8, 500)
    # 1 per device, 32 accumulation steps, 16 data-parallel ranks
    assert (train.samples_per_minibatch, policy.parallel.num_processes) == (512, 16)
    assert (policy.optimizer.lr, policy.optimizer.warmup_steps, policy.optimizer.beta2) == (1e-6, 20, 0.999)
    # ROLL's default schedule is linear, over 500 iterations of one optimizer step
    assert (policy.optimizer.decay.name, policy.optimizer.decay_iterations) == ("linear", 500)
    assert (config.rollout.response_length, config.data.prompt_length, config.rollout.temperature) == (4096, 2048, 0.99)
    assert (config.model.path, config.seed) == ("Qwen/Qwen2.5-7B", 42)
    # Of five domains the one with a counterpart, of five files the one that is named after it.
    assert (config.data.path, type(config.reward)) == ("data/math_deepmath_deal.jsonl", MathRewardConfig)


def test_a_file_that_loses_data_and_reward_ends_with_1_and_says_so_in_its_last_line():
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml")
    last = report.splitlines()[-1]
    assert code == 1
    assert overrides
    assert "LOST of what is learned: data (actor_train.data_args.file_name); reward (" in last
    assert all(name in last for name in ("code_sandbox", "llm_judge", "crossthinkqa", "ifeval"))
    assert "--allow-loss" in last


def test_a_ppo_file_of_rolls_loses_nothing_and_has_a_critic_with_its_own_optimizer():
    code, overrides, report = run_import(FILES / "example_ppo.yaml")
    assert code == 0, report
    assert report.splitlines()[-1].endswith("nothing that is learned is lost")
    config = load_config(overrides)
    assert config.algo.advantage == "gae"
    assert config.algo.lambda_policy == config.algo.lambda_critic == 0.95
    source = OmegaConf.load(FILES / "example_ppo.yaml")
    assert config.critic.optimizer.lr == source.critic.training_args.learning_rate
    assert config.critic.init is None


@pytest.mark.parametrize("name", ["rlvr_reinforce.yaml", "example_ppo.yaml"])
def test_every_key_of_the_file_has_a_line_of_the_report(name):
    def walk(tree, prefix=""):
        for key, child in tree.items():
            if isinstance(child, dict) and child:
                yield from walk(child, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    outcomes, _ = import_roll(read_roll_file(FILES / name))
    told = {key for outcome in outcomes for key in outcome.key.split(", ")}
    keys = set(walk(OmegaConf.to_container(OmegaConf.load(FILES / name))))
    assert not keys - told
    assert not [outcome for outcome in outcomes if outcome.verdict == "not known"]


def test_math_data_and_reward_are_those_of_the_file(tmp_path):
    config = load_tree(tmp_path, make(**{"validation.data_args.file_name": ["data/aime.jsonl"]}))
    assert isinstance(config.data, JsonlDataConfig)
    assert (config.data.path, config.data.heldout_path) == ("data/math.jsonl", "data/aime.jsonl")
    assert (config.data.prompt_field, config.data.answer_field) == ("messages", "ground_truth")
    assert isinstance(config.reward, MathRewardConfig)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "grpo"])
def test_nothing_of_the_tiny_task_the_laptop_or_a_preset_is_in_an_imported_job(tmp_path, estimator):
    outcomes, problems = import_tree(tmp_path, make(adv_estimator=estimator))
    assert not problems
    overrides = list_overrides(outcomes)
    config = load_config([f"{key}={text}" for key, text in overrides.items()])
    found = flatten(config)
    expected = {**flatten(Config()), **flatten(JsonlDataConfig(), "data."), **flatten(MathRewardConfig(), "reward.")}
    gpu = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "cluster" / "gpu.yaml"))
    expected |= {f"cluster.{key}": value for key, value in gpu.items()} | {"model.name": "checkpoint"}
    strange = {key: value for key, value in found.items() if key not in overrides and value != expected.get(key)}
    without_effect = dict(find_unused(config, strange))
    assert strange.keys() - without_effect.keys() <= {"algo.name"}
    assert found["cluster.object_store_mb"] != ClusterConfig().object_store_mb


def test_topr_of_the_policy_gradient_worker_is_topr_here_with_its_token_ratio(tmp_path):
    variant = {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "topr", "norm_mean_type": "batch"}
    config = load_tree(tmp_path, make(**variant, **{"actor_train.topr_negative_weight": 0.5}))
    assert (config.algo.name, config.algo.rl_loss_coef, config.algo.advantage) == ("topr", 0.0, "reinforce")
    topr = config.algo.topr
    assert (topr.positive_loss_coef, topr.negative_loss_coef, topr.ratio_level.name) == (1.0, 0.5, "token")


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"adv_estimator": "grpo", "whiten_advantages": True}, True),
        ({"adv_estimator": "grpo"}, False),
        ({"add_token_level_kl": True}, None),
        ({"adv_estimator": "gae"}, None),
    ],
)
def test_topr_is_lost_where_a_score_above_0_is_not_an_advantage_above_0(tmp_path, changes, lost):
    variant = {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "topr"}
    outcomes, problems = import_tree(tmp_path, make(**variant, **changes))
    assert ("actor_train.pg_variant" in list_losses(outcomes).get("objective", [])) is (lost is not False)
    assert bool(problems) is (lost is None)  # the topr terms want one advantage for all tokens
    assert get_exit_code(outcomes, problems) == (lost is not False)


def test_a_policy_gradient_variant_is_read_with_its_worker_alone(tmp_path):
    assert load_tree(tmp_path, make(**{"actor_train.pg_variant": "topr"})).algo.rl_loss_coef == 1.0
    vanilla = {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "vanilla", "rollout_batch_size": 32}
    assert load_tree(tmp_path, make(**vanilla)).algo.surrogate == "logprob"


@pytest.mark.parametrize("variant", ["tis", "cispo", "kimi15", None])
def test_a_loss_without_a_counterpart_is_lost(tmp_path, variant):
    tree = make(**{"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": variant})
    key = "actor_train.worker_cls" if variant is None else "actor_train.pg_variant"
    outcomes, _ = import_tree(tmp_path, tree)
    assert key in list_losses(outcomes)["objective"]


def test_a_difficulty_mask_of_groups_of_equal_rewards_becomes_dynamic_sampling(tmp_path):
    mask = {"difficulty_mask": True, "difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.95}
    assert load_tree(tmp_path, make(**mask)).algo.dynamic_sampling.enabled
    # One right of eight is 0.125.
    wider = {**mask, "difficulty_low_threshold": 0.2}
    assert not load_tree(tmp_path, make(**wider), objective=["difficulty_mask"]).algo.dynamic_sampling.enabled
    alone = make(**wider, num_return_sequences_in_group=1, rollout_batch_size=256)
    assert not load_tree(tmp_path, alone).algo.dynamic_sampling.enabled


@pytest.mark.parametrize(
    ("kind", "arguments", "same"),
    [
        ("std_filter", {"std_threshold": 0}, True),
        ("std_filter", {"std_threshold": 0.36}, False),  # one right of eight: 0.354
        ("mean_filter", {"threshold_up": 0.9, "threshold_down": 0.1}, True),
        ("mean_filter", {"threshold_up": 0.8, "threshold_down": 0.1}, False),
    ],
)
def test_a_filter_of_groups_of_equal_rewards_becomes_dynamic_sampling(tmp_path, kind, arguments, same):
    tree = make(**{"rewards.math_rule.query_filter_config": {"type": kind, "filter_args": arguments}})
    lost = {} if same else {"data": ["rewards.math_rule.query_filter_config.type"]}
    assert load_tree(tmp_path, tree, **lost).algo.dynamic_sampling.enabled is same


def test_layouts_and_recomputation_are_kept(tmp_path):
    sizes = {
        **{"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3, "context_parallel_size": 2},
        **{"expert_model_parallel_size": 4, "recompute_granularity": "selective", "sequence_parallel": True},
    }
    policy = load_tree(tmp_path, make(**{f"{STRATEGY}.{name}": value for name, value in sizes.items()})).policy
    layout = policy.parallel
    assert (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.sp) == (2, 2, 3, 2, 4, True)
    assert policy.recompute.name == "selective"
    no_vpp = load_tree(tmp_path, make(**{f"{STRATEGY}.virtual_pipeline_model_parallel_size": None}))
    assert no_vpp.policy.parallel.vpp == 1


def test_fsdp_becomes_megatron_with_context_parallelism_and_the_same_minibatch(tmp_path):
    tree = make(**{"actor_train.model_args.ulysses_size": 2, "actor_train.strategy_args.strategy_name": "fsdp2_train"})
    del tree["actor_train"]["strategy_args"]["strategy_config"]
    config = load_tree(tmp_path, tree)
    assert (config.policy.parallel.cp, config.policy.recompute.name) == (2, "full")
    assert config.train.samples_per_minibatch == 1 * 32 * 8


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"rewards.math_rule.worker_cls": CODE}, {"data": ["actor_train.data_args.file_name"]}),
        ({"actor_train.model_args.lora_target": "all-linear"}, {"model": ["actor_train.model_args.lora_target"]}),
        ({"whiten_rewards": True}, {"objective": ["whiten_rewards"]}),
        ({"length_loss_weight": True}, {"objective": ["length_loss_weight"]}),
        ({"error_max_len_clip": True}, {"objective": ["error_max_len_clip"]}),
        ({"actor_train.data_args.template": "base"}, {"data": ["actor_train.data_args.template"]}),
        ({"actor_train.data_args.image_folder": "i"}, {"data": ["actor_train.data_args.image_folder"]}),
        ({"actor_train.data_args.file_name": ["a.jsonl", "b.jsonl"]}, {"data": ["actor_train.data_args.file_name"]}),
        ({"actor_train.data_args.file_name": "a.csv"}, {"data": ["actor_train.data_args.file_name"]}),
        ({"pretrain": "${oc.env:HOME}/m"}, {"model": ["pretrain"]}),
        ({"clip_loss_of_next_year": 1}, {"objective": ["clip_loss_of_next_year"]}),
        ({"defaults": ["../other"]}, {"objective": ["defaults"]}),
        ({"adv_estimator": "gigpo"}, {"objective": ["adv_estimator"]}),
        ({"rollout_batch_size": "${nowhere}"}, {"objective": ["rollout_batch_size"]}),
        ({"actor_train.model_update_frequency": 4}, {"objective": ["actor_train.model_update_frequency"]}),
    ],
)
def test_what_is_learned_and_has_no_counterpart_is_lost_with_code_1(tmp_path, changes, lost):
    outcomes, problems = import_tree(tmp_path, make(**changes))
    assert {kind: keys for kind, keys in list_losses(outcomes).items() if kind in lost} == lost
    assert get_exit_code(outcomes, problems) == 1


@pytest.mark.parametrize("changes", [{"rewards": {"code": {"worker_cls": CODE}}}, {"pretrain": None}])
def test_a_job_without_a_reward_or_model_here_does_not_load_even_with_allow_loss(tmp_path, changes):
    tree = make(**changes)
    if "rewards" in changes:
        tree["rewards"] = changes["rewards"]
        tree["actor_train"]["data_args"]["domain_interleave_probs"] = {"code": 1.0}
    outcomes, problems = import_tree(tmp_path, tree)
    assert problems
    assert get_exit_code(outcomes, problems, allow_loss=True) == 1


def test_what_is_not_learned_is_told_and_no_loss(tmp_path):
    changes = {"track_with": "wandb", "output_dir": "./x", "checkpoint_config.type": "oss", "logging_steps": 5}
    load_tree(tmp_path, make(**changes, enable_reference=True, l2=0.1, use_topr_loss=True))


def test_samples_ahead_of_the_update_and_their_correction_are_kept(tmp_path):
    weight = {"train_infer_correction.is_weight": {"enabled": True, "weight_type": "geometric", "upper_bound": 1.5}}
    config = load_tree(tmp_path, make(async_generation_ratio=1, **weight))
    assert config.rollout.max_staleness == 1
    assert (config.algo.mismatch.level.name, config.algo.mismatch.high) == ("geometric", 1.5)
    assert config.algo.mismatch.correction.name in ("tis", "clip")
    # Without a weight ROLL corrects nothing, which is refused here.
    config = load_tree(tmp_path, make(async_generation_ratio=1), objective=["async_generation_ratio"])
    assert config.algo.mismatch.correction.name in ("tis", "clip")


def test_the_ratio_of_the_response_is_gspo(tmp_path):
    assert load_tree(tmp_path, make(importance_sampling="seq")).algo.surrogate == "gspo"
    assert load_tree(tmp_path, make(importance_sampling="token")).algo.surrogate == "clip"


def test_the_critic_starts_from_a_model_of_its_own_and_its_minibatch_must_be_the_policys(tmp_path):
    critic = {
        **{"adv_estimator": "gae", "reward_pretrain": "my/reward"},
        "critic.training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32},
        "critic.device_mapping": "list(range(0,8))",
    }
    assert load_tree(tmp_path, make(**critic)).critic.init == "my/reward"
    other = make(**critic, **{"critic.training_args.gradient_accumulation_steps": 16})
    load_tree(tmp_path, other, objective=["critic.training_args.per_device_train_batch_size"])


def test_the_response_is_what_the_sequence_leaves_of_the_prompt(tmp_path):
    tree = make(sequence_length=5000)
    assert load_tree(tmp_path, tree).rollout.response_length == 5000 - 2048


def test_what_rolls_algorithm_does_not_read_is_told_and_left_out(tmp_path):
    outcomes, _ = import_tree(tmp_path, make(value_clip=0.5, **{"critic.training_args.learning_rate": 1e-5}))
    assert not any(key.startswith(("algo.value_clip", "reference.", "critic.")) for key in list_overrides(outcomes))
    told = next(outcome for outcome in outcomes if outcome.key == "value_clip")
    assert (told.verdict, told.lost) == ("no effect", "")
    assert "has no critic" in told.note


def test_interpolations_are_followed_and_those_that_lead_nowhere_are_told(tmp_path):
    tree = make(response_length="${longest}", longest=100, exp_name="${nowhere.else}", output_dir="out/${pretrain}")
    outcomes, problems = import_tree(tmp_path, tree)
    assert not problems
    assert list_overrides(outcomes)["rollout.response_length"] == "100"
    by_key = {outcome.key: outcome for outcome in outcomes}
    assert by_key["exp_name"].verdict == "not resolved"
    assert by_key["output_dir"].found == "out/Qwen/Qwen2.5-7B"
    assert not list_losses(outcomes)


def test_a_file_whose_values_contradict_one_another_is_told_so_with_code_1(tmp_path):
    tree = make(adv_estimator="grpo", num_return_sequences_in_group=1)
    code, overrides, report = run_import(write(tmp_path / "roll.yaml", yaml.safe_dump(tree)))
    assert code == 1
    assert overrides
    assert "error: train.responses_per_prompt: 1 found" in report
    assert "do not load" in report.splitlines()[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_train.training_args.per_device_train_batch_size": "x"},
        {"actor_train.device_mapping": {"a": 1}},
        {"actor_train.data_args.domain_interleave_probs": 3},
        {"rollout_batch_size": [1, 2]},
        {"num_return_sequences_in_group": "many", "difficulty_mask": True},
        {"max_steps": float("inf"), "actor_train.training_args.warmup_ratio": 0.1},
        {"actor_train.training_args.lr_scheduler_type": ["linear"]},
        {"pretrain": "it's {a} \\ path"},
        {"rewards": 3},
    ],
)
def test_a_value_of_the_wrong_kind_is_told_and_ends_no_import(tmp_path, changes):
    outcomes, problems = import_tree(tmp_path, make(**changes))
    assert all(isinstance(problem, str) for problem in problems)
    assert outcomes


BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "a mapping"),
        ("a: [1\n", "expected"),
        ("!!python/object/apply:os.system ['touch pwned']\n", "a mapping"),
        ("", "empty"),
        ("# a comment\n", "empty"),
        ("hello world\n", "a mapping"),
        ("learning_rate: 1e-6\nmodel_name: x\nseed: 1\nmax_steps: 5\n", "no configuration of ROLL's RLVR pipeline"),
        ("sft_train: {a: 1}\npretrain: x\n", "SFT"),
        ("actor_train: {a: 1}\nactor_infer: {a: 1}\ncustom_envs: {Sokoban: {}, x: 1}\n", "agentic"),
        (BOMB, "values found"),
        ("a: &a [*a]\n", "contains it"),
        ("a: &a {b: *a}\n", "contains it"),
        ("[" * 50_000, "nested"),
        ("x" * 1_000_001, "bytes"),
        ("\x00\x01", "special characters"),
    ],
)
def test_a_file_that_is_none_of_rolls_rlvr_pipeline_is_refused_with_the_reason(tmp_path, text, said):
    with pytest.raises((ValueError, YAMLError)) as refused:
        read_roll_file(write(tmp_path / "roll.yaml", text))
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "a: [1\n", BOMB, None])
def test_what_cannot_be_imported_ends_with_code_2_and_one_line_that_names_the_file(tmp_path, text):
    file = tmp_path / "roll.yaml"
    code, overrides, report = run_import(file if text is None else write(file, text))
    assert (code, overrides) == (2, [])
    assert report.startswith(f"error: {file}: ")
    assert "Traceback" not in report


def test_interpolations_that_multiply_are_refused_and_circles_end(tmp_path):
    many = "actor_train: {a: x}\nactor_infer: {a: x}\nb: {" + ", ".join(f"c{n}: '${{b}}'" for n in range(9)) + "}\n"
    with pytest.raises(ValueError, match="interpolations written out"):
        read_roll_file(write(tmp_path / "roll.yaml", many))
    circle = "actor_train: {a: x}\nactor_infer: {a: x}\nb: ${c}\nc: ${b}\n"
    assert set(read_roll_file(write(tmp_path / "roll.yaml", circle)).unresolved) == {"b", "c"}


def test_a_written_experiment_composes_to_the_same_configuration(tmp_path):
    options = ("--write", "from_roll", "--config-dir", str(tmp_path))
    assert run_import(FILES / "rlvr_reinforce.yaml", *options)[0] == 1
    assert not (tmp_path / "experiment").exists()
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml", "--allow-loss", *options)
    assert code == 0, report
    assert load_config([write_search_path([tmp_path]), "experiment=from_roll"]) == load_config(overrides)
    assert run_import(FILES / "rlvr_reinforce.yaml", "--allow-loss", *options)[0] == 2


def test_devices_per_server_become_tp_and_the_number_of_servers_is_the_quotient(tmp_path):
    tree = make(**{"actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2})
    rollout = load_tree(tmp_path, tree).rollout
    assert (rollout.num_servers, rollout.tp) == (4, 2)
