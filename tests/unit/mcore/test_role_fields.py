"""What recompute and fp8 ask of the model and of the machine."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_spec, write_checkpoint

from megarl.config.schema.roles import Dtype, Fp8, Fp8Recipe, ParallelConfig, Recompute, RecomputeMethod
from megarl.mcore.spec import (
    COMPUTE_CAPABILITIES,
    ROLE_KEYS,
    build_role_fields,
    check_engine,
    check_role_fields,
    find_token_multiple,
    has_transformer_engine,
    read_architecture,
)
from megarl.models.architecture import Architecture

ON_CPU_WITHOUT_TE = not torch.cuda.is_available() and not has_transformer_engine()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("six_layers")
    write_checkpoint(path, num_hidden_layers=6)
    return path


@pytest.fixture(scope="module")
def arch(checkpoint: Path) -> Architecture:
    return read_architecture(checkpoint)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
TENSORWISE = {"fp8": Fp8.e4m3, "fp8_recipe": Fp8Recipe.tensorwise}


@pytest.mark.parametrize(
    ("keys", "gpu", "expected"),
    [
        ({"recompute": Recompute.full, **TENSORWISE}, False, {**FULL, "fp8": "e4m3", "fp8_recipe": "tensorwise"}),
        ({"recompute": Recompute.selective}, False, {"recompute_granularity": "selective"}),
        ({"recompute": Recompute.none}, True, {}),
        ({"recompute": Recompute.none, "deterministic": True}, True, {"deterministic_mode": True}),
        ({"recompute": Recompute.none, "deterministic": True}, False, {}),
    ],
)
def test_the_keys_become_fields_of_megatron(
    keys: dict[str, Any], gpu: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert set(ROLE_KEYS) <= {field.name for field in dataclasses.fields(TransformerConfig)}
    fields = build_role_fields(build_spec(recompute_num_layers=3, **keys))
    assert {key: value for key, value in fields.items() if value not in (None, False)} == {
        "fp8_recipe": fields["fp8_recipe"],
        **expected,
    }


@pytest.mark.parametrize(
    ("method", "number", "parallel", "message"),
    [
        ("uniform", 4, {}, "recompute_num_layers: found 4, which does not divide the 6 layers; 3 does"),
        ("uniform", 8, {}, "recompute_num_layers: found 8, which does not divide the 6 layers; 6 does"),
        ("uniform", 2, {"pp": 2}, "does not divide the 3 layers of each of the 2 pipeline stages; 1 does"),
        ("block", 7, {}, "recompute_num_layers: found 7; there are 6 layers"),
        ("uniform", 3, {}, None),
        ("uniform", 3, {"pp": 2}, None),
        ("uniform", 1, {"pp": 3, "vpp": 2}, None),
        ("block", 5, {}, None),
    ],
)
def test_recomputed_blocks_must_fit_the_layers(
    arch: Architecture, method: str, number: int, parallel: dict[str, int], message: str | None
) -> None:
    layout = ParallelConfig(num_processes=parallel.get("pp", 1), **parallel)
    spec = build_spec(
        parallel=layout,
        recompute=Recompute.full,
        recompute_method=RecomputeMethod(method),
        recompute_num_layers=number,
    )
    problems = list(check_role_fields(arch, spec))
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


H100, B200, ADA, A100 = (9, 0), (10, 0), (8, 9), (8, 0)


FP8 = "reference.fp8: found hybrid; it needs"
FLOAT32 = "reference.dtype: found float32 with reference.parallel.cp=2;"


@pytest.mark.parametrize(
    ("recipe", "dtype", "cp", "with_te", "capability", "message"),
    [
        ("tensorwise", "bfloat16", 1, False, H100, f"{FP8} Transformer Engine, which is not installed"),
        ("tensorwise", "bfloat16", 1, True, None, f"{FP8} a GPU and there is none here"),
        ("tensorwise", "bfloat16", 1, True, A100, "8.9 or more, and this one has 8.0; null computes without it"),
        ("blockwise", "bfloat16", 1, True, ADA, "reference.fp8_recipe may be tensorwise here"),
        ("mxfp8", "bfloat16", 1, True, H100, "has 9.0; reference.fp8_recipe may be tensorwise or blockwise here"),
        ("tensorwise", "bfloat16", 1, True, H100, None),
        ("tensorwise", "bfloat16", 1, True, ADA, None),
        ("blockwise", "bfloat16", 1, True, H100, None),
        ("mxfp8", "bfloat16", 1, True, B200, None),
        (None, "float32", 2, True, H100, FLOAT32),
        (None, "bfloat16", 2, True, H100, None),
        (None, "float32", 1, True, H100, None),
        (None, "float32", 2, False, H100, None),
        (None, "float32", 2, True, None, None),
    ],
)
def test_what_transformer_engine_cannot_compute_here_is_refused(
    recipe: str | None, dtype: str, cp: int, with_te: bool, capability: tuple[int, int] | None, message: str | None
) -> None:
    fp8 = {"fp8": Fp8.hybrid, "fp8_recipe": Fp8Recipe(recipe)} if recipe else {}
    spec = build_spec(dtype=Dtype(dtype), parallel=ParallelConfig(num_processes=cp, cp=cp), **fp8)
    problems = list(check_engine(spec, with_te, capability, in_worker=True))
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def test_every_recipe_has_a_least_gpu_and_a_multiple_of_tokens() -> None:
    assert set(COMPUTE_CAPABILITIES) == set(Fp8Recipe)
    multiples = [find_token_multiple(build_spec(fp8=Fp8.hybrid, fp8_recipe=recipe)) for recipe in Fp8Recipe]
    assert all(multiple % 16 == 0 for multiple in multiples)
    assert find_token_multiple(build_spec()) == 1


def test_a_broken_transformer_engine_is_an_error_and_not_its_absence(tmp_path: Path) -> None:
    """With its extension for torch missing it is found as ever, and importing it raises FileNotFoundError."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise FileNotFoundError('no shared object file')")
    code = """
import torch
torch.cuda.is_available = lambda: True
from megarl.mcore.spec import has_transformer_engine
try:
    has_transformer_engine()
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[3]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    broken = "Transformer Engine is installed and broken (FileNotFoundError: no shared object file); make clean install"
    assert done.stdout.startswith(broken), done.stderr


@pytest.mark.skipif(not ON_CPU_WITHOUT_TE, reason="this machine may be able to compute in FP8")
def test_without_transformer_engine_fp8_is_an_error_before_and_in_the_worker(
    arch: Architecture, checkpoint: Path, tmp_path: Path
) -> None:
    from megarl.mcore.worker import MegatronWorker

    spec = build_spec(checkpoint, fp8=Fp8.hybrid, dtype=Dtype.bfloat16)
    message = "reference.fp8: found hybrid; it needs Transformer Engine"
    assert next(check_role_fields(arch, spec)).startswith(message)
    with pytest.raises(ValueError, match=message):
        MegatronWorker(spec, 0, 1, f"file://{tmp_path}/init")
