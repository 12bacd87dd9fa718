import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_spec

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.entries import padded_vocab_size
from megarl.mcore.hf import CheckpointReader, write_hf_checkpoint, write_safetensors
from megarl.mcore.model import build_config, check_options
from megarl.mcore.spec import read_architecture
from megarl.models.architecture import Architecture

CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 96},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 100, "tie_word_embeddings": True},
}


def read(directory: Path, **changes: Any) -> Architecture:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return read_architecture(directory)


def test_rope_is_read_in_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    assert read(tmp_path, rope_theta=5e5).rope_theta == 5e5
    new = read(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (new.rope_theta, new.rope_factor) == (1e6, None)
    scaling = {
        **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
    assert read(tmp_path, rope_theta=5e5, rope_scaling=scaling).rope_factor == 32.0


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json: not found"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("megatron", "parallel", "message"),
    [
        ({"attention_dropot": 0.1}, ParallelConfig(), "did you mean attention_dropout"),
        (
            {"num_layers": 3},
            ParallelConfig(),
            "num_layers: found 3; the checkpoint, the layout or the dtype",
        ),
        (
            {"fp8": "hybrid"},
            ParallelConfig(),
            "model.megatron.fp8: found 'hybrid'; set policy.fp8 and critic.fp8 instead",
        ),
        ({"fp8_param": True}, ParallelConfig(), "model.megatron.fp8_param: found True; weights are kept in the role's"),
        ({"fp4_param": True}, ParallelConfig(), "model.megatron.fp4_param: found True; weights are kept in the role's"),
        ({"fp4": "e2m1"}, ParallelConfig(), "model.megatron.fp4: found .e2m1.; it needs Transformer Engine"),
        (
            {"deterministic_mode": True},
            ParallelConfig(),
            "model.megatron.deterministic_mode: found True; set train.deterministic instead",
        ),
        ({}, ParallelConfig(num_processes=2, tp=2), "tp: found 2, .* the model's 3 key-value heads; the nearest is 1"),
        ({}, ParallelConfig(num_processes=4, tp=4), "tp: found 4, .* the model's 6 attention heads; the nearest is 3"),
        ({}, ParallelConfig(num_processes=3, pp=3), "parallel.pp: found 3, .* the model's 4 layers; the nearest is 2"),
        ({}, ParallelConfig(num_processes=2, pp=2, vpp=3), "vpp: found 3, .* 2 layers of a stage; the nearest is 2"),
        ({}, ParallelConfig(sp=True), "parallel.sp: found true with tp 1"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_key(
    tmp_path: Path, megatron: dict[str, Any], parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(read(tmp_path), parallel, Dtype.float32, megatron)


def test_megatron_options_reach_the_transformer_config(tmp_path: Path) -> None:
    config = build_config(read(tmp_path), ParallelConfig(), Dtype.bfloat16, {"recompute_modules": ["mlp"]})
    assert config.recompute_modules == ["mlp"]
    assert config.params_dtype is torch.bfloat16
    assert config.num_query_groups == 3


@pytest.mark.parametrize(
    ("megatron", "parallel"),
    [
        ({}, ParallelConfig(num_processes=6, tp=6)),
        ({}, ParallelConfig(num_processes=2, pp=2, vpp=2)),
        ({"num_layers_in_last_pipeline_stage": 2}, ParallelConfig(num_processes=3, pp=3)),
    ],
)
def test_layouts_that_megatron_takes_are_taken(
    tmp_path: Path, megatron: dict[str, Any], parallel: ParallelConfig
) -> None:
    config = build_config(read(tmp_path), parallel, Dtype.float32, megatron)
    assert config.tensor_model_parallel_size == parallel.tp
    # Two stages of an interleaved pipeline would otherwise mix up what they send each other.
    assert config.overlap_p2p_comm == (parallel.vpp > 1) == (not config.batch_p2p_comm)


def test_what_megatron_itself_refuses_is_found_before_anything_starts(tmp_path: Path) -> None:
    """Megatron-Core 0.16.1 raises ImportError for permute fusion where Transformer Engine is missing."""
    from megatron.core.transformer.moe import moe_utils

    arch = read(tmp_path)
    refused: list[dict[str, Any]] = [{"cpu_offloading": True, "cpu_offloading_num_layers": 99}]
    if getattr(moe_utils, "fused_permute", None) is None:
        refused.append({"moe_permute_fusion": True})
    for options in refused:
        (problem,) = check_options(arch, build_spec(tmp_path, megatron=options))
        assert problem.startswith("model.megatron: refused by Megatron with this layout")
    assert check_options(arch, build_spec(tmp_path)) == []


def test_the_padded_vocabulary_is_the_same_for_layouts_that_are_powers_of_two() -> None:
    assert {padded_vocab_size(100, tp) for tp in (1, 2, 4, 8)} == {128}
    assert padded_vocab_size(100, 3) % 3 == 0


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    target = tmp_path / "run" / "weights"

    def failing() -> Any:
        yield "a", torch.zeros(2)
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        write_hf_checkpoint(target, source, failing())
    assert list(target.parent.iterdir()) == []
    for value in (1.0, 2.0):
        write_hf_checkpoint(target, source, [("a", torch.full((2,), value))])
    assert {file.name for file in target.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    with CheckpointReader(target) as reader:
        assert reader.read("a").tolist() == [2.0, 2.0]
        with pytest.raises(KeyError, match="has no tensor b"):
            reader.read("b")
    assert [path.name for path in target.parent.iterdir()] == ["weights"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_config_json_names_the_dtype_of_the_weights_by_which_transformers_loads_them(
    dtype: torch.dtype, key: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: "float16", "model_type": "llama"}))
    write_hf_checkpoint(tmp_path / "written", tmp_path, [("model.norm.weight", torch.ones(2, dtype=dtype))])
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert written == {key: str(dtype).removeprefix("torch."), "model_type": "llama"}


def test_tensors_of_a_file_that_is_written_are_not_held_while_the_next_are_made(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            alive.append(sum(each() is not None for each in made))
            tensor = torch.full((20,), float(number))
            made.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    write_safetensors(tmp_path, make(), max_file_bytes=160)
    assert max(alive) == 2
    with CheckpointReader(tmp_path) as reader:
        assert [reader.read(f"t{number}")[0].item() for number in range(5)] == [0, 1, 2, 3, 4]
