"""SGLang's passed-through server arguments."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig, ServerOffload
from megarl.rollout import server
from megarl.rollout.served_model import check_served_class, load_family_options
from megarl.rollout.server import ServerError, SGLangServer, build_command
from megarl.rollout.server_options import (
    FLOAT32_ATTENTION,
    OWN_OPTIONS,
    check_attention,
    check_options,
    load_options,
    render_options,
)


def test_the_installed_releases_arguments_are_found_with_their_flags():
    options = load_options()
    assert len(options) > 300
    assert options["max_total_tokens"].flag == "--max-total-tokens"
    assert options["tp_size"].flag == "--tp-size"
    assert set(OWN_OPTIONS) <= set(options)


@pytest.mark.parametrize(
    ("key", "wrong", "right", "expected"),
    [
        ("chunked_prefill_size", "much", 4096, "an integer"),
        ("chunked_prefill_size", True, -1, "an integer"),
        ("chunked_prefill_size", 0.5, None, "an integer"),
        ("mem_fraction_static", "most", 0.8, "a number"),
        ("watchdog_timeout", [1], 300, "a number"),
        ("disable_radix_cache", 3, False, "true or false"),
        ("enable_metrics", "yes", True, "true or false"),
        ("attention_backend", True, "triton", "a text"),
        ("schedule_policy", "zzz", "fcfs", "one of lpm, random"),
        ("log_requests_level", 9, 2, "one of 0, 1, 2, 3"),
        ("context_length", "much", "64K", "an integer"),
        ("cuda_graph_bs_decode", ["x"], [1, 2], "a list, each an integer"),
        ("json_model_override_args", True, {"a": 1}, "a text"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_what_sglang_takes(key, wrong, right, expected):
    (problem,) = check_options({key: wrong})
    assert problem.startswith(f"rollout.sglang.{key}: found {wrong!r}; SGLang takes {expected}")
    assert check_options({key: right}) == []


def test_an_unknown_key_is_refused_with_the_nearest_right_one():
    (problem,) = check_options({"mem_fraction_statik": 0.5, "chunked_prefill_size": 64})
    assert problem.startswith("rollout.sglang.mem_fraction_statik: SGLang has no such server argument")
    assert "did you mean rollout.sglang.mem_fraction_static?" in problem


def test_a_key_that_megarl_sets_is_refused_with_the_key_that_decides_it():
    (problem,) = check_options({"random_seed": 3})
    assert problem == "rollout.sglang.random_seed: megarl sets it (by seed); remove it here"


def test_values_are_written_as_command_line_words():
    options = {
        "disable_radix_cache": True,
        "sleep_on_idle": False,
        "chunked_prefill_size": 64,
        "schedule_policy": None,
        "json_model_override_args": {"a": 1},
        "lora_paths": ["x", "y"],
    }
    assert render_options(options) == [
        *["--disable-radix-cache", "--chunked-prefill-size", "64"],
        *["--json-model-override-args", '{"a": 1}', "--lora-paths", "x", "y"],
    ]


def test_the_command_holds_model_seed_dtype_and_the_passed_through_options(tmp_path):
    config = RolloutConfig(dtype=Dtype.bfloat16, kv_cache_tokens=512, sglang={"chunked_prefill_size": 64})
    words = build_command(config, tmp_path, host="127.0.0.1", port=5, seed=11)
    pairs = dict(itertools.pairwise(words))
    assert pairs["--model-path"] == str(tmp_path)
    assert pairs["--random-seed"] == "11"
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--max-total-tokens"] == "512"
    assert pairs["--chunked-prefill-size"] == "64"


@pytest.mark.parametrize("name", ["a[1]", "what?", "Mistral-Large-3-distilled"])
def test_a_model_in_whose_path_sglang_would_not_find_files_is_served_through_a_link(tmp_path, name):
    model, scratch = tmp_path / name, tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    words = ["python", "--model-path", str(model), "--port", "5"]
    linked = server.link_model(words, scratch)
    assert linked == [*words[:2], str(scratch / "model"), *words[3:]]
    assert (scratch / "model").resolve() == model.resolve()
    assert server.link_model([*words[:2], "/models/plain", *words[3:]], scratch)[2] == "/models/plain"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SGLANG_RETURN_ORIGINAL_LOGPROB", "1"), ("SGLANG_SIMULATE_ACC_LEN", "3"), ("SGLANG_MAX_NEW_TOKENS_LIMIT", "10")],
)
def test_variables_by_which_servers_report_no_samples_of_the_policy_are_refused(tmp_path, monkeypatch, name, value):
    sglang = Path(importlib.util.find_spec("sglang").origin).parent
    assert name in (sglang / "srt" / "environ.py").read_text()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: found '{value}' in the environment"):
        build_command(RolloutConfig(kv_cache_tokens=1), tmp_path, host="127.0.0.1", port=5, seed=1)
    monkeypatch.setenv(name, "0")
    build_command(RolloutConfig(kv_cache_tokens=1), tmp_path, host="127.0.0.1", port=5, seed=1)


@pytest.mark.parametrize(
    "classes", [None, [], ["Qwen3Model"], ["Qwen3ForSequenceClassification"], ["LlamaForCausalLM"]]
)
def test_a_model_whose_class_does_not_generate_is_refused_with_the_class_that_does(tmp_path, classes):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": classes}))
    with pytest.raises(ConfigError, match=r'architectures is .*"architectures": \["Qwen3ForCausalLM"\]'):
        check_served_class(tmp_path)
    if not classes:
        with pytest.raises(ConfigError, match="architectures is "):
            load_family_options(tmp_path)


def test_on_a_cpu_the_kv_cache_must_have_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "has_cuda", lambda: False)
    with pytest.raises(ConfigError, match=r"rollout.kv_cache_tokens: null; on a CPU it must be a number"):
        build_command(RolloutConfig(), tmp_path, host="127.0.0.1", port=5, seed=1)


def test_the_stand_ins_are_used_only_without_cuda(tmp_path, monkeypatch):
    for cuda in (True, False):
        monkeypatch.setattr(server, "has_cuda", lambda cuda=cuda: cuda)
        path = server.build_environment(RolloutConfig(), tmp_path)["PYTHONPATH"]
        assert (str(server.STANDINS) in path.split(":")) == (not cuda)
        words = build_command(RolloutConfig(kv_cache_tokens=1), tmp_path, host="127.0.0.1", port=5, seed=1)
        assert ("--device" in words) == (not cuda)


def test_servers_find_the_programs_of_the_environment_that_starts_them_although_it_is_not_activated(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = server.build_environment(RolloutConfig(), tmp_path)["PATH"]
    assert path.split(":") == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    found = shutil.which("ninja", path=path)
    assert found is None or Path(found).parent == Path(sys.executable).parent


@pytest.mark.parametrize("dtype", list(Dtype))
def test_float32_servers_on_a_gpu_use_kernels_that_take_float32(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(server, "has_cuda", lambda: True)
    for name in server.FLOAT32_ON_GPU:
        monkeypatch.delenv(name, raising=False)
    config = RolloutConfig(dtype=dtype, kv_cache_tokens=1)
    pairs = dict(itertools.pairwise(build_command(config, tmp_path, host="127.0.0.1", port=5, seed=1)))
    environment = server.build_environment(config, tmp_path)
    is_float32 = dtype is Dtype.float32
    assert pairs.get("--attention-backend") == ("triton" if is_float32 else None)
    assert environment.get("SGLANG_FORCE_FUSED_OP_BACKEND") == ("torch" if is_float32 else None)
    assert environment.get("TRITON_F32_DEFAULT") == ("ieee" if is_float32 else None)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert server.build_environment(config, tmp_path)["TRITON_F32_DEFAULT"] == "tf32"


def test_the_installed_sglang_has_the_switch_and_the_backends_for_float32():
    sglang = Path(importlib.util.find_spec("sglang").origin).parent
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" in (sglang / "srt" / "environ.py").read_text()
    assert 'TORCH = "torch"' in (sglang / "kernels" / "spec.py").read_text()
    choices = (sglang / "srt" / "arg_groups" / "choices.py").read_text()
    assert all(f'"{name}",' in choices for name in FLOAT32_ATTENTION)


@pytest.mark.parametrize("key", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_an_attention_backend_that_takes_no_float32_is_refused_with_those_that_do(key):
    (problem,) = check_attention(RolloutConfig(dtype=Dtype.float32, sglang={key: "fa3"}))
    assert problem.startswith(f"rollout.sglang.{key}: found 'fa3' with rollout.dtype=float32")
    assert "triton or torch_native or flex_attention" in problem
    assert not list(check_attention(RolloutConfig(dtype=Dtype.float32, sglang={key: "triton"})))
    assert not list(check_attention(RolloutConfig(dtype=Dtype.bfloat16, sglang={key: "fa3"})))


def test_only_a_server_that_shares_gpus_bears_that_some_are_fuller_than_others(tmp_path, monkeypatch):
    name = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    monkeypatch.delenv(name, raising=False)
    # A release that has renamed it would refuse again.
    assert name in Path(importlib.util.find_spec("sglang").origin).with_name("srt").joinpath("environ.py").read_text()
    assert name not in server.build_environment(RolloutConfig(), tmp_path)
    assert server.build_environment(RolloutConfig(), tmp_path, shares_gpus=True)[name] == "false"
    monkeypatch.setenv(name, "true")
    assert server.build_environment(RolloutConfig(), tmp_path, shares_gpus=True)[name] == "true"


def test_a_server_has_priorities_only_where_generation_runs_ahead(tmp_path):
    for staleness in (0, 1):
        config = RolloutConfig(kv_cache_tokens=1, max_staleness=staleness)
        words = build_command(config, tmp_path, host="127.0.0.1", port=5, seed=1)
        assert ("--enable-priority-scheduling" in words) == (staleness > 0)


def test_a_directory_without_config_is_not_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"not a checkpoint directory: it has no config.json"):
        SGLangServer(RolloutConfig(kv_cache_tokens=1), tmp_path, log_file=tmp_path / "log", seed=1)


def test_a_taken_port_is_an_error_that_names_it(tmp_path):
    import socket

    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = SGLangServer(RolloutConfig(kv_cache_tokens=1), tmp_path, log_file=tmp_path / "log", seed=1, port=port)
        with pytest.raises(ServerError, match=f"port {port} is taken"):
            made.start()
        assert not made.is_alive()


def test_prefill_graphs_are_off_on_a_gpu_unless_the_user_wants_them(tmp_path, monkeypatch):
    name = "cuda_graph_backend_prefill"
    assert load_options()[name].flag == "--cuda-graph-backend-prefill"
    for cuda, given, expected in ((True, {}, "disabled"), (True, {name: "breakable"}, "breakable"), (False, {}, None)):
        monkeypatch.setattr(server, "has_cuda", lambda cuda=cuda: cuda)
        config = RolloutConfig(kv_cache_tokens=1, sglang=given)
        words = build_command(config, tmp_path, host="127.0.0.1", port=5, seed=1)
        assert dict(itertools.pairwise(words)).get("--cuda-graph-backend-prefill") == expected


def test_a_server_on_a_gpu_does_not_end_over_a_suspected_leak(tmp_path, monkeypatch):
    (name,) = server.ON_GPU
    monkeypatch.delenv(name, raising=False)
    assert name in Path(importlib.util.find_spec("sglang").origin).with_name("srt").joinpath("environ.py").read_text()
    for cuda in (True, False):
        monkeypatch.setattr(server, "has_cuda", lambda cuda=cuda: cuda)
        assert server.build_environment(RolloutConfig(), tmp_path).get(name) == ("false" if cuda else None)
    monkeypatch.setattr(server, "has_cuda", lambda: True)
    monkeypatch.setenv(name, "true")
    assert server.build_environment(RolloutConfig(), tmp_path)[name] == "true"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """site-packages of a pip install of CUDA, where libcudart is in NVIDIA's wheel and nowhere else."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (*server.ALLOCATOR_SETTINGS, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.mark.parametrize("offload", [None, *ServerOffload])
def test_servers_with_offload_find_the_cuda_runtime_of_the_wheels(wheels, tmp_path, monkeypatch, offload):
    config = RolloutConfig(offload=offload)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site/lib")
    for cuda in (True, False):
        monkeypatch.setattr(server, "has_cuda", lambda cuda=cuda: cuda)
        found = server.build_environment(config, tmp_path)["LD_LIBRARY_PATH"].split(":")
        assert found[-1] == "/site/lib"
        assert (str(wheels) in found[:-1]) == (cuda and offload is not None)


@pytest.mark.parametrize("name", server.ALLOCATOR_SETTINGS)
def test_expandable_segments_are_taken_from_servers_with_offload_and_from_nobody_else(
    wheels, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(server, "has_cuda", lambda: True)
    offloading, other = RolloutConfig(offload=ServerOffload.all), RolloutConfig()
    for given, expected in (
        ("expandable_segments:True", None),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
    ):
        monkeypatch.setenv(name, given)
        assert server.build_environment(offloading, tmp_path).get(name) == expected
        assert server.build_environment(other, tmp_path)[name] == given
        assert os.environ[name] == given


def test_graphs_that_nobody_would_ask_back_are_refused_by_the_name_of_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
    config = RolloutConfig(kv_cache_tokens=1, offload=ServerOffload.all)
    with pytest.raises(ConfigError, match="SGLANG_MEMORY_SAVER_CUDA_GRAPH: found true in the environment"):
        build_command(config, tmp_path, host="127.0.0.1", port=5, seed=1)
    build_command(RolloutConfig(kv_cache_tokens=1), tmp_path, host="127.0.0.1", port=5, seed=1)
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "0")
    build_command(config, tmp_path, host="127.0.0.1", port=5, seed=1)


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles two small libraries")
def test_a_memory_saver_whose_libraries_are_not_found_is_told_by_the_loaders_words(tmp_path, monkeypatch):
    """A library that needs another one ends every program that preloads it, and that is the name that is told."""
    runtime, package = tmp_path / "nvidia" / "cu13" / "lib", tmp_path / "torch_memory_saver"
    for folder in (runtime, package):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    # A number that no CUDA of this machine has.
    needed, saver = runtime / "libcudart.so.77", tmp_path / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    subprocess.run(["cc", "-shared", "-o", needed, "-Wl,-soname,libcudart.so.77", source], check=True)
    subprocess.run(["cc", "-shared", "-o", saver, "-Wl,--no-as-needed", source, needed], check=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert server.find_preload_problem() is None
    needed.rename(tmp_path / "elsewhere")
    assert "libcudart.so.77: cannot open shared object file" in server.find_preload_problem()
