"""A server's command line and environment: SGLang's passed-through arguments, the device, and what is refused; the
process that owns a server: real processes, a plain Python program in SGLang's place.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megarl import cli, signals
from megarl.config.errors import ConfigError
from megarl.config.schema.roles import Dtype, RandomModelConfig
from megarl.config.schema.root import RolloutConfig, ServerOffload
from megarl.cpu.process import STANDINS, CpuServing
from megarl.models.checkpoint import build_random_checkpoint
from megarl.rollout import server
from megarl.rollout.client import RequestError, ServerOffloader
from megarl.rollout.server import (
    OWN_OPTIONS,
    ServerError,
    SGLangServer,
    build_command,
    load_generation_spec,
    load_options,
    make_scratch,
)
from megarl.signals import LOCAL_PORTS, pick_free_port

SRT = Path(importlib.util.find_spec("sglang").origin).with_name("srt")
FLOAT32 = {"dtype": Dtype.float32}
GRAPHS = "cuda_graph_backend_prefill"
SHARED = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
LEAK_CHECK = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"


def serve_on(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    monkeypatch.setattr(server, "find_serving", server.GpuServing if cuda else CpuServing)


def build_words(directory: Path, **keys) -> list[str]:
    config = RolloutConfig(**{"kv_cache_tokens": 1, **keys})
    return build_command(config, directory, host="127.0.0.1", port=5, seed=11)


def test_the_installed_sglang_has_the_arguments_variables_and_backends_that_servers_are_given():
    """A release that has renamed one would do without it."""
    options = load_options()
    assert len(options) > 300
    assert options["max_total_tokens"] == "--max-total-tokens"
    assert options["ep_join_mode"] == "--elastic-ep-join-mode"
    assert set(OWN_OPTIONS) <= set(options)
    variables = (SRT / "environ.py").read_text()
    given = ("SGLANG_FORCE_FUSED_OP_BACKEND", SHARED, LEAK_CHECK, *server.REFUSED_VARIABLES[:2])
    assert all(name in variables for name in given)
    assert 'TORCH = "torch"' in (SRT.parent / "kernels" / "spec.py").read_text()


@pytest.mark.parametrize(
    ("keys", "variable", "message"),
    [
        (
            {"sglang": {"mem_fraction_statik": 0.5}},
            "",
            r"no such server argument; did you mean .*\.mem_fraction_static\?",
        ),
        ({"sglang": {"random_seed": 3}}, "", r"rollout\.sglang\.random_seed: megarl sets it \(by seed\)"),
        ({"kv_cache_tokens": None}, "", r"rollout\.kv_cache_tokens: null; on a CPU it must be a number"),
        ({}, "SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_RETURN_ORIGINAL_LOGPROB: found '3' in the environment"),
        ({}, "SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_LEN: found '3' in the environment"),
    ],
)
def test_what_a_server_cannot_start_with_or_would_do_something_else_is_refused(
    tmp_path, monkeypatch, keys, variable, message
):
    serve_on(monkeypatch, False)
    if variable:
        monkeypatch.setenv(variable, "0")
        build_words(tmp_path, **keys)
        monkeypatch.setenv(variable, "3")
    with pytest.raises(ConfigError, match=message):
        build_words(tmp_path, **keys)


@pytest.mark.parametrize(
    ("cuda", "keys", "flags"),
    [
        (
            False,
            {
                "dtype": Dtype.bfloat16,
                "kv_cache_tokens": 512,
                "sglang": {"chunked_prefill_size": 64, "lora_paths": ["x"]},
            },
            {
                "--random-seed": "11",
                "--dtype": "bfloat16",
                "--max-total-tokens": "512",
                "--chunked-prefill-size": "64",
                "--lora-paths": "x",
            },
        ),
        (False, {}, {"--device": "cpu", "--cuda-graph-backend-prefill": None, "--enable-priority-scheduling": None}),
        # Only where generation runs ahead.
        (False, {"max_staleness": 1}, {"--enable-priority-scheduling": ...}),
        (True, {}, {"--device": None, "--cuda-graph-backend-prefill": "disabled"}),
        (True, {"sglang": {GRAPHS: "breakable"}}, {"--cuda-graph-backend-prefill": "breakable"}),
        (True, FLOAT32, {"--attention-backend": "triton"}),
        (True, {"dtype": Dtype.bfloat16}, {"--attention-backend": None}),
        (True, {"sglang": {"json_model_override_args": {"a": 1}}}, {"--json-model-override-args": '{"a": 1}'}),
        (True, {"sglang": {"disable_radix_cache": True}}, {"--disable-radix-cache": ...}),
        (True, {"sglang": {"disable_radix_cache": False}}, {"--disable-radix-cache": None}),
    ],
)
def test_the_command_has_the_configurations_options_and_those_of_the_device(tmp_path, monkeypatch, cuda, keys, flags):
    serve_on(monkeypatch, cuda)
    words = build_words(tmp_path, **keys)
    assert words[words.index("--model-path") + 1] == str(tmp_path)
    found = dict(itertools.pairwise(words))
    for flag, value in flags.items():
        assert flag in words if value is ... else found.get(flag) == value


@pytest.mark.parametrize("name", ["a[1]", "Mistral-Large-3-distilled"])
def test_a_model_in_whose_path_sglang_would_not_find_files_is_served_through_a_link(tmp_path, name):
    (tmp_path / name).mkdir()
    words = ["python", "--model-path", str(tmp_path / name), "--port", "5"]
    assert server.link_model(words, tmp_path) == [*words[:2], str(tmp_path / "model"), *words[3:]]
    assert (tmp_path / "model").resolve() == (tmp_path / name).resolve()
    assert server.link_model([*words[:2], "/models/plain", *words[3:]], tmp_path)[2] == "/models/plain"


@pytest.mark.parametrize("classes", [None, ["Qwen3Model"], ["LlamaForCausalLM"]])
def test_a_model_whose_class_does_not_generate_is_refused_with_the_class_that_does(tmp_path, classes):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": classes}))
    with pytest.raises(ConfigError, match=r'architectures is .*"architectures": \["Qwen3ForCausalLM"\]'):
        load_generation_spec(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"not a checkpoint directory: it has no config.json"):
        SGLangServer(RolloutConfig(kv_cache_tokens=1), tmp_path, log_file=tmp_path / "log", seed=1)


def test_servers_find_the_programs_of_the_environment_that_starts_them_and_without_cuda_the_stand_ins(
    tmp_path, monkeypatch
):
    """Although it is not activated."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for cuda in (True, False):
        serve_on(monkeypatch, cuda)
        environment = server.build_environment(RolloutConfig(), tmp_path)
        assert environment["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
        assert (str(STANDINS) in environment["PYTHONPATH"].split(":")) == (not cuda)


@pytest.mark.parametrize(
    ("cuda", "keys", "options", "name", "expected", "own"),
    [
        (True, FLOAT32, {}, "SGLANG_FORCE_FUSED_OP_BACKEND", "torch", None),
        (True, FLOAT32, {}, "TRITON_F32_DEFAULT", "ieee", "tf32"),
        (True, {"dtype": Dtype.bfloat16}, {}, "TRITON_F32_DEFAULT", None, None),
        (True, {}, {}, SHARED, None, None),
        (True, {}, {"shares_gpus": True}, SHARED, "false", "true"),
        # On a GPU a server does not end over a suspected leak.
        (False, {}, {}, LEAK_CHECK, None, None),
        (True, {}, {}, LEAK_CHECK, "false", "true"),
    ],
)
def test_the_environment_has_the_settings_of_the_device_where_the_job_has_none(
    tmp_path, monkeypatch, cuda, keys, options, name, expected, own
):
    serve_on(monkeypatch, cuda)
    monkeypatch.delenv(name, raising=False)
    assert server.build_environment(RolloutConfig(**keys), tmp_path, **options).get(name) == expected
    if own is not None:
        monkeypatch.setenv(name, own)
        assert server.build_environment(RolloutConfig(**keys), tmp_path, **options)[name] == own


def test_on_a_gpu_servers_write_no_script_for_others_to_change_and_keep_what_is_compiled(tmp_path, monkeypatch):
    for name in ("SGLANG_NUMA_BIND_V2", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)  # Importing a compiler sets the latter.
    for cuda in (True, False):
        serve_on(monkeypatch, cuda)
        found = server.build_environment(RolloutConfig(), tmp_path / "scratch")
        assert found.get("SGLANG_NUMA_BIND_V2") == ("false" if cuda else None)
        cache = found.get("TORCHINDUCTOR_CACHE_DIR")
        assert (cache is not None) == cuda
        assert cache is None or not Path(cache).is_relative_to(tmp_path / "scratch")


class Releasing:
    """A server's client, as far as a release goes."""

    def __init__(self):
        self.tags = []

    def set_weight_version(self, version):
        pass

    abort_requests = flush_cache = wait_left_over = lambda self: None

    def release_memory(self, tags):
        self.tags.append(list(tags))


@pytest.mark.parametrize(("freed", "fails"), [(0, True), (63 << 20, True), (1 << 30, False)])
def test_a_release_that_frees_nothing_on_the_roles_gpus_is_noticed_the_first_time(freed, fails):
    client, free = Releasing(), [70 << 30, 70 << 30]
    offloader = ServerOffloader([client], ServerOffload.all)
    measured = []

    def measure():
        measured.append(None)
        return free if len(measured) == 1 else [free[0] + freed, free[1]]

    offloader.measure = measure
    with pytest.raises(RequestError, match="MiB became free") if fails else contextlib.nullcontext():
        offloader.release()
    offloader.forget()
    offloader.release()
    assert (len(client.tags), len(measured)) == (2, 2)
    # Without a GPU there is nothing to measure.
    offloader = ServerOffloader([client], ServerOffload.all)
    offloader.measure = lambda: [0, 0]
    offloader.release()


@pytest.mark.parametrize("offload", [None, *ServerOffload])
def test_servers_with_offload_find_the_cuda_runtime_of_the_wheels_and_have_no_expandable_segments(
    tmp_path, monkeypatch, offload
):
    """As of a pip install of CUDA, where libcudart is in NVIDIA's wheel and nowhere else."""
    wheels = tmp_path / "nvidia" / "cu13" / "lib"
    wheels.mkdir(parents=True)
    (wheels / "libcudart.so.13").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    old, new = server.ALLOCATOR_SETTINGS
    own = {
        "LD_LIBRARY_PATH": "/site/lib",
        old: "expandable_segments:True",
        new: "max_split_size_mb:64,expandable_segments:True",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for cuda in (True, False):
        serve_on(monkeypatch, cuda)
        is_changed = cuda and offload is not None
        found = server.build_environment(RolloutConfig(offload=offload), tmp_path)
        folders = found["LD_LIBRARY_PATH"].split(":")
        assert folders[-1] == "/site/lib"
        assert (str(wheels) in folders[:-1]) == is_changed
        expected = (None, "max_split_size_mb:64") if is_changed else (own[old], own[new])
        assert (found.get(old), found.get(new)) == expected
    assert {name: os.environ[name] for name in own} == own


def test_a_picked_port_is_free_and_none_that_the_kernel_gives_away():
    first, last = map(int, LOCAL_PORTS.read_text().split())
    for _ in range(20):
        port = pick_free_port("127.0.0.1")
        assert not first <= port <= last
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_taken_meanwhile_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, config = taken.getsockname()[1], RolloutConfig(kv_cache_tokens=1)
        made = SGLangServer(config, tmp_path, log_file=tmp_path / "log", seed=1, port=port)
        with pytest.raises(ServerError, match=rf"127.0.0.1:{port}: port {port} is taken"):
            made.start(0.5)
    assert (made.is_alive(), made.exit_status) == (False, None)


@pytest.mark.parametrize("num_characters", [8, 30, 31, 32, 33, 34, 35, 200])
def test_every_socket_of_a_server_fits_its_scratch_folder_however_long_tmpdir_is(num_characters, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        parent = Path(short) / ("x" * num_characters)
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        scratch = make_scratch()
        try:
            assert scratch.parent in (parent, Path("/tmp"))
            assert scratch.parent == parent or num_characters > 8
            longest = scratch / "torch-shm-dir-abcdef/manager.sock"  # torch's; SGLang's are /tmpabcdefgh
            longest.parent.mkdir()
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(longest))
        finally:
            shutil.rmtree(scratch)


def test_a_server_by_hand_takes_messages_and_keeps_its_weights(tmp_path):
    checkpoint = build_random_checkpoint(RandomModelConfig(), tmp_path)
    words = [str(checkpoint), "--port=0", "--dtype=float32", f"--log={tmp_path / 'server.log'}"]
    made, _ = cli._build_server(words, tmp_path)
    of_rollouts = build_command(made.config, checkpoint, host=made.host, port=made.port, seed=1)
    assert set(of_rollouts) - set(made._command) == {
        "--skip-tokenizer-init",
        "--custom-weight-loader",
        server.WEIGHT_LOADER,
    }
    assert [word for word in of_rollouts if word in made._command] == made._command


@pytest.mark.parametrize(("words", "code"), [(["nowhere"], 2), ([], 2), (["--help"], 0)])
def test_a_server_by_hand_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch, words, code):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.serve(words)
    assert ended.value.code == code
    assert not list(tmp_path.iterdir())


# A server with a child in a session of its own, which ignores SIGTERM and holds a file and a semaphore in
# shared memory; nothing cleans up after it, as after an SGLang scheduler that was killed.
CHILD = """
import _multiprocessing, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open(sys.argv[1], "w")
name = "/" + sys.argv[1].rpartition("/")[2]
semaphore = _multiprocessing.SemLock(1, 1, 1, name, False)
print("up", flush=True)
time.sleep(100)
"""
PROGRAM = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]], start_new_session=True)
time.sleep(100)
"""


@pytest.fixture
def held():
    """The file, and the name under which glibc keeps the program's semaphore."""
    path = Path(f"/dev/shm/megarl-test-{os.getpid()}")
    files = [path, path.with_name(f"sem.{path.name}")]
    yield files
    for file in files:
        file.unlink(missing_ok=True)


def start(scratch: Path, *command: str) -> subprocess.Popen:
    scratch.mkdir()
    words = [sys.executable, "-S", "-I", signals.__file__, str(scratch), *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def wait_gone(processes: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert len(gone) == len(processes)


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_nothing_outlives_the_owners_end(tmp_path, held, end):
    process = start(tmp_path / "scratch", sys.executable, "-c", PROGRAM, str(held[0]))
    assert process.stdout.readline() == b"up\n"
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) == 2
    assert [file.exists() for file in held] == [True, True]
    # Ctrl-C, which the terminal sends to all, does not end it.
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.stdin.close() if end == "close" else process.terminate()
    wait_gone(processes)
    assert process.wait(10) == 0
    assert not any(file.exists() for file in (*held, tmp_path / "scratch"))


def test_a_killed_owner_takes_its_server_along(tmp_path, held):
    words = [sys.executable, "-S", "-I", signals.__file__, str(tmp_path / "s"), sys.executable, "-c", PROGRAM]
    owner = f"""
import subprocess, time
subprocess.Popen({[*words, str(held[0])]!r}, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) == 3
    process.kill()
    process.wait()
    wait_gone(processes)
    assert not any(file.exists() for file in held)


def test_a_killed_guard_takes_the_servers_first_process_along(tmp_path):
    process = start(tmp_path / "s", sys.executable, "-c", "print('up', flush=True); import time; time.sleep(100)")
    assert process.stdout.readline() == b"up\n"
    (server,) = psutil.Process(process.pid).children()
    process.kill()
    wait_gone([server])
    process.wait()


@pytest.mark.parametrize(("code", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_status_is_the_servers(tmp_path, code, status):
    assert start(tmp_path / "s", sys.executable, "-c", code).wait(10) == status
