"""The same training, evaluation, export and saved state in every layout, against one process and transformers."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import ALL_ROWS, build_spec, launch_each, load_and_train, train, train_and_save
from safetensors.torch import load_file
from tiny_checkpoints import build_sequences, compute_padded_kl, padded_reference_logprobs, write_checkpoint

from megarl.config.schema.algo import AlgoConfig, KLConfig, KLEstimator
from megarl.config.schema.roles import Dtype, Offload, Recompute, Trainable
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

CHECKPOINTS = {
    "qwen3": ("qwen3", False),
    "qwen2_tied": ("qwen2", True),
    "llama": ("llama", False),
    "llama_tied": ("llama", True),
}
SPLIT_LAYOUTS = ("tp2_sp", "pp2", "vpp2", "dp2", "cp2")
TRAINED = ((Role.policy, "llama_tied"), (Role.critic, "qwen3"))
PARTLY = {"trainable": Trainable.mlp, "value_range": (-1.0, 2.0)}
"""SAO's frozen attention and BPCO's bounded values"""
FULL_KL = AlgoConfig(kl=KLConfig(in_loss=True, loss_estimator=KLEstimator.full, loss_coef=0.3))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    written = {
        name: (root / name, write_checkpoint(root / name, family, tied=tied, num_hidden_layers=4))
        for name, (family, tied) in CHECKPOINTS.items()
    }
    # Padded to 64 rows: the second of two tensor-parallel ranks has no token at all.
    written["small_vocab"] = (root / "small_vocab", write_checkpoint(root / "small_vocab", vocab_size=30))
    return written


@pytest.fixture(scope="module")
def one(checkpoints: dict[str, tuple[Path, Any]]) -> dict[str, Any]:
    """Runs of one process: policy of every family, critics, cuts into micro-batches."""
    paths = {name: path for name, (path, _) in checkpoints.items()}
    runs = {f"policy-{name}": (build_spec(Role.policy, paths[name]), ALL_ROWS) for name in CHECKPOINTS}
    runs["critic-qwen3"] = (build_spec(Role.critic, paths["qwen3"]), ALL_ROWS)
    ways = {"": {}, "-recompute": {"recompute": Recompute.full}, "-offload": {"offload": Offload.all}}
    for way, fields in ways.items():
        runs[f"critic-qwen3-partly{way}"] = (build_spec(Role.critic, paths["qwen3"], **PARTLY, **fields), ALL_ROWS)
    runs["policy-small_vocab"] = (build_spec(Role.policy, paths["small_vocab"]), ALL_ROWS)
    runs["policy-qwen3-row"] = (build_spec(Role.policy, paths["qwen3"]), [0])
    for role, name in TRAINED:
        spec = build_spec(role, paths[name], tokens_per_microbatch=60)
        runs[f"{role.value}-{name}-reordered"] = (spec, [7, 3, 11, 0, 5, 1, 9, 2, 10, 6, 4, 8])
    for name in ("qwen3", "small_vocab"):
        runs[f"policy-{name}-full_kl"] = (build_spec(Role.policy, paths[name], algo=FULL_KL), ALL_ROWS)
    spec = build_spec(Role.policy, paths["qwen3"], algo=FULL_KL, tokens_per_microbatch=60)
    runs["policy-qwen3-full_kl-cut60"] = (spec, ALL_ROWS)
    runs["policy-qwen3-bf16"] = (build_spec(Role.policy, paths["qwen3"], dtype=Dtype.bfloat16), ALL_ROWS)
    return launch_each(1, train, runs)


@pytest.fixture(scope="module")
def two(checkpoints: dict[str, tuple[Path, Any]]) -> dict[str, Any]:
    """The same in two processes, several micro-batches where that matters."""
    runs = {}
    for role, name in TRAINED:
        for layout in SPLIT_LAYOUTS:
            spec = build_spec(role, checkpoints[name][0], layout, tokens_per_microbatch=60)
            runs[f"{role.value}-{name}-{layout}"] = (spec, ALL_ROWS)
    for layout in SPLIT_LAYOUTS:
        spec = build_spec(Role.critic, checkpoints["qwen3"][0], layout, tokens_per_microbatch=60, **PARTLY)
        runs[f"critic-qwen3-partly-{layout}"] = (spec, ALL_ROWS)
    runs["policy-small_vocab-tp2"] = (
        build_spec(Role.policy, checkpoints["small_vocab"][0], "tp2"),
        ALL_ROWS,
    )
    runs["policy-qwen3-row-dp2"] = (build_spec(Role.policy, checkpoints["qwen3"][0], "dp2"), [0])
    for layout in ("tp2", "tp2_sp", "dp2", "cp2"):
        spec = build_spec(Role.policy, checkpoints["qwen3"][0], layout, algo=FULL_KL, tokens_per_microbatch=60)
        runs[f"policy-qwen3-full_kl-{layout}"] = (spec, ALL_ROWS)
    spec = build_spec(Role.policy, checkpoints["small_vocab"][0], "tp2", algo=FULL_KL)
    runs["policy-small_vocab-full_kl-tp2"] = (spec, ALL_ROWS)
    return launch_each(2, train, runs)


def assert_same_training(run: dict[str, Any], reference: dict[str, Any], weight_tolerance: float = 2e-6) -> None:
    for step, (found, expected) in enumerate(zip(run["metrics"], reference["metrics"], strict=True)):
        assert found.keys() == expected.keys()
        # How much padding there is depends on the cut.
        for key in expected.keys() - {"policy/real_tokens_frac", "critic/real_tokens_frac"}:
            assert found[key] == pytest.approx(expected[key], rel=2e-5, abs=2e-6), f"step {step}: {key}"
    for name, tensor in reference["after"]["weights"].items():
        torch.testing.assert_close(
            run["after"]["weights"][name],
            tensor,
            rtol=0,
            atol=weight_tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    for name in ("evaluation", "entropies", "reference_kl"):
        if name in reference["after"]:
            torch.testing.assert_close(run["after"][name], reference["after"][name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logprobs_equal_transformers_at_a_temperature(
    name: str, checkpoints: dict[str, tuple[Path, Any]], one: dict[str, Any]
) -> None:
    expected = padded_reference_logprobs(checkpoints[name][1], build_sequences(seed=5), 0.8)
    torch.testing.assert_close(one[f"policy-{name}"]["before"]["evaluation"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_exported_weights_are_the_loaded_ones_bit_by_bit(
    name: str, checkpoints: dict[str, tuple[Path, Any]], one: dict[str, Any]
) -> None:
    source = load_file(checkpoints[name][0] / "model.safetensors")
    exported = one[f"policy-{name}"]["before"]["weights"]
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[key], source[key]) for key in source)


def test_training_moves_every_weight(checkpoints: dict[str, tuple[Path, Any]], one: dict[str, Any]) -> None:
    """Otherwise equality after training would show little."""
    for name in CHECKPOINTS:
        run = one[f"policy-{name}"]
        for key, tensor in run["after"]["weights"].items():
            assert (tensor - run["before"]["weights"][key]).abs().max() > 1e-4, key


@pytest.mark.parametrize(("role", "name"), TRAINED)
def test_training_does_not_depend_on_the_order_of_the_rows(role: Role, name: str, one: dict[str, Any]) -> None:
    assert_same_training(one[f"{role.value}-{name}-reordered"], one[f"{role.value}-{name}"])


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-full_kl-tp2",
        "qwen3-full_kl-tp2_sp",
        "qwen3-full_kl-dp2",
        "qwen3-full_kl-cp2",
        "qwen3-full_kl-cut60",
        "small_vocab-full_kl-tp2",
    ],
)
def test_training_with_the_full_kl_depends_on_neither_layout_nor_cut(
    name: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    run = (two | one)[f"policy-{name}"]
    assert_same_training(run, one[f"policy-{name.split('-')[0]}-full_kl"])


def test_the_full_kl_is_that_of_the_trained_model_and_the_start_checkpoint(
    checkpoints: dict[str, tuple[Path, Any]], one: dict[str, Any]
) -> None:
    run, start = one["policy-qwen3-full_kl"], checkpoints["qwen3"][1]
    assert torch.equal(run["before"]["reference_kl"], torch.zeros_like(run["before"]["reference_kl"]))
    assert run["metrics"][0]["policy/kl_loss"] == 0.0
    assert run["metrics"][2]["policy/kl_loss"] > 1e-3
    trained = copy.deepcopy(start)
    trained.load_state_dict(run["after"]["weights"])
    expected = compute_padded_kl(trained, start, build_sequences(seed=5), 0.8)
    assert expected.max() > 1e-2
    torch.testing.assert_close(run["after"]["reference_kl"], expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS)
@pytest.mark.parametrize(("role", "name"), TRAINED)
def test_training_and_evaluation_equal_those_of_one_process(
    role: Role, name: str, layout: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    run = two[f"{role.value}-{name}-{layout}"]
    assert_same_training(run, one[f"{role.value}-{name}"])
    assert run["after"]["num_reports"] == (2 if layout == "dp2" else 1)


@pytest.mark.parametrize("way", ["recompute", "offload", *SPLIT_LAYOUTS])
def test_a_partly_trained_bounded_critic_learns_the_same_in_every_way(
    way: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    assert_same_training((one | two)[f"critic-qwen3-partly-{way}"], one["critic-qwen3-partly"])


@pytest.mark.parametrize("way", ["", "-recompute", "-offload", *(f"-{layout}" for layout in SPLIT_LAYOUTS)])
def test_frozen_weights_stay_bit_by_bit_and_the_others_learn(
    way: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    run = (one | two)[f"critic-qwen3-partly{way}"]
    before, after = run["before"]["weights"], run["after"]["weights"]
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(4) for part in ("gate", "up", "down")]
    assert moved == {*names, "score.weight"}


def test_bounded_values_start_in_the_middle_and_stay_inside(one: dict[str, Any]) -> None:
    run, exists = one["critic-qwen3-partly"], build_sequences(seed=5).response_lengths[:, None] > torch.arange(19)
    values = {when: run[when]["evaluation"] for when in ("before", "after")}
    exists = exists[:, : values["after"].shape[1]]
    assert torch.equal(values["before"][exists], torch.full((int(exists.sum()),), 0.5))
    assert (values["after"][exists] - 0.5).abs().max() > 0.01
    assert -1 < values["after"][exists].min() < values["after"][exists].max() < 2


def test_a_rank_whose_vocabulary_is_all_padding_changes_nothing(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert_same_training(two["policy-small_vocab-tp2"], one["policy-small_vocab"])


def test_a_rank_without_rows_takes_part(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert_same_training(two["policy-qwen3-row-dp2"], one["policy-qwen3-row"])


def test_a_new_value_head_starts_at_zero_and_learns(one: dict[str, Any]) -> None:
    run = one["critic-qwen3"]
    assert torch.equal(run["before"]["evaluation"], torch.zeros_like(run["before"]["evaluation"]))
    assert run["after"]["evaluation"].abs().max() > 0.01
    assert run["metrics"][-1]["critic/loss"] < run["metrics"][0]["critic/loss"]


def test_bfloat16_stays_near_float32(one: dict[str, Any]) -> None:
    found, expected = one["policy-qwen3-bf16"], one["policy-qwen3"]
    torch.testing.assert_close(found["before"]["evaluation"], expected["before"]["evaluation"], rtol=0, atol=0.1)
    assert found["metrics"][0]["policy/grad_norm"] == pytest.approx(
        expected["metrics"][0]["policy/grad_norm"], rel=0.05
    )


@pytest.mark.parametrize(
    ("role", "fields", "layouts"),
    [(Role.policy, {}, SPLIT_LAYOUTS), (Role.critic, PARTLY, ("tp2_sp", "pp2", "dp2"))],
)
def test_loading_continues_identically_also_under_other_layouts(
    role: Role, fields: dict[str, Any], layouts: tuple[str, ...], checkpoints: dict[str, tuple[Path, Any]]
) -> None:
    """Bit by bit in the layout that saved, up to rounding in others."""
    path = checkpoints["qwen3"][0]
    specs = {layout: build_spec(role, path, layout, **fields) for layout in ("one", *layouts)}
    one = {"one": specs.pop("one")}
    with tempfile.TemporaryDirectory() as scratch:
        saved = launch_each(1, train_and_save, one, scratch=scratch)["one"]
        same = launch_each(1, load_and_train, one, scratch=scratch)["one"]
        others = launch_each(2, load_and_train, specs, scratch=scratch)
        recorded = json.loads((Path(scratch) / "state" / "hf" / "config.json").read_text())
    assert recorded.get("megarl_value_range") == ([-1.0, 2.0] if fields else None)
    assert same["fresh"] != saved["checksum"] == same["checksum"]
    assert same["metrics"] == saved["metrics"]
    for name, tensor in saved["after"]["weights"].items():
        assert torch.equal(same["after"]["weights"][name], tensor), name
    for run in others.values():
        assert_same_training(run, saved)
