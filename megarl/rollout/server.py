"""One SGLang server: command line, process and health."""

import contextlib
import functools
import glob
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import DeadlineError
from megarl.ports import pick_free_port
from megarl.rollout.served_model import load_family_options
from megarl.rollout.server_options import check_attention, check_options, check_variables, render_options

STANDINS = Path(__file__).parent / "standins"
MODELS = Path(__file__).parent / "models"
GUARD = Path(__file__).parent / "guard.py"
TRACKER_WARNINGS = "ignore::UserWarning:multiprocessing.resource_tracker"
GPU_DEVICES = Path("/dev/nvidiactl"), Path("/dev/dxg")
"""Of NVIDIA's driver on Linux, and in WSL"""
LOG_TAIL_LINES = 25
PRELOAD_S = 10.0
"""How long a program that does nothing may take"""
WEIGHT_LOADER = "megarl.sync.receiver.receive"
"""The function that servers call for the requests of a weight sync"""
LONGEST_SOCKET_PATH = 107
"""Bytes of a unix socket's path, without the final zero of sockaddr_un"""
LONGEST_IN_SCRATCH = "abcdefgh/torch-shm-dir-abcdef/manager.sock"
"""The random end of a scratch folder's name, and the longest socket in it: torch's; SGLang's are /tmpabcdefgh"""
FLOAT32_ON_GPU = {
    # The RMSNorm of sgl_kernel is compiled for 16-bit numbers alone; this is SGLang's switch for PyTorch's operations.
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    # Triton would round the float32 numbers of a product to TF32, whose fraction has 10 bits.
    "TRITON_F32_DEFAULT": "ieee",
}
"""What a server with rollout.dtype=float32 needs on a GPU, beside an attention backend that takes float32"""


ON_GPU = {
    # An idle server would end over what it takes for a leak, which the aborts and flushes of a rollout may look like.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false"
}
"""The settings of servers on GPUs, where the job's environment has none"""
GRAPH_SAVER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of torch's allocator, by their old and their new name"""


class ServerError(RuntimeError):
    """A server did not start or has ended; the message has its exit status and the end of its log."""


@functools.cache
def has_cuda() -> bool:
    if not any(path.exists() for path in GPU_DEVICES):
        return False  # without the seconds that the import of torch takes
    import torch

    return torch.cuda.is_available()


def build_command(
    config: RolloutConfig, checkpoint: Path, *, host: str, port: int, seed: int, weight_version: int = 0
) -> list[str]:
    """The command line of one server. weight_version: the version of the checkpoint's weights.

    Raises ConfigError for keys of `rollout.sglang` that SGLang does not have, or that do not take the dtype.
    """
    problems = [*check_options(config.sglang), *(check_attention(config) if has_cuda() else ())]
    problems += check_variables(os.environ)
    if not has_cuda() and config.kv_cache_tokens is None:
        # By default SGLang takes most of the machine's memory and zero-fills it for minutes.
        problems.append("rollout.kv_cache_tokens: null; on a CPU it must be a number of tokens")
    if config.offload is not None and os.environ.get(GRAPH_SAVER, "").lower() in ("1", "true", "yes", "y"):
        problems.append(
            f"{GRAPH_SAVER}: found {os.environ[GRAPH_SAVER]} in the environment; with rollout.offload servers give back"
            " weights and KV cache, and CUDA graphs stay where they are: it must not be set"
        )
    if problems:
        raise ConfigError(problems)
    options = {
        "model_path": str(checkpoint),
        "host": host,
        "port": port,
        "dtype": config.dtype.value,
        "random_seed": seed,
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.kv_cache_tokens,
        "skip_tokenizer_init": True,
        "weight_version": str(weight_version),
        "tp_size": config.tp,
        "skip_server_warmup": True,
        # Executes the trainer's requests inside each rank: see megarl.sync.receiver.
        "custom_weight_loader": [WEIGHT_LOADER],
        # Without it an idle scheduler spins and takes a core from the trainer.
        "sleep_on_idle": True,
    }
    if config.max_staleness > 0:
        # Verification of a weight sync and evaluations do not wait for prefetched responses.
        options |= {"enable_priority_scheduling": True}
    if has_cuda():
        # By default SGLang replays prefill from graphs that keep their inputs by weak references, whose memory later
        # ones may have taken: wrong numbers (sglang issue 37606). Their memory would also never be given back.
        options |= {"cuda_graph_backend_prefill": "disabled"}
        if config.offload is not None:
            # Without it, as on a CPU, SGLang takes the same calls and keeps the memory.
            options |= {"enable_memory_saver": True}
    if config.router_replay:
        # Requests that share cached tokens are all told the experts of the one that computed them last, which near a
        # tie are not those with which each sampled its first token.
        options |= {"enable_return_routed_experts": True, "disable_radix_cache": True}
    options |= load_family_options(checkpoint) | choose_attention(config.dtype)
    return [sys.executable, "-m", "sglang.launch_server", *render_options(options | config.sglang)]


def choose_attention(dtype: Dtype) -> dict[str, str]:
    """The options of the device and of its attention, where SGLang's own choice would not do."""
    if not has_cuda():
        return {"device": "cpu", "attention_backend": "torch_native"}
    # On Hopper SGLang takes FlashAttention 3, whatever the dtype.
    return {"attention_backend": "triton"} if dtype is Dtype.float32 else {}


def build_environment(config: RolloutConfig, scratch: Path, *, shares_gpus: bool = False) -> dict[str, str]:
    """The server's environment: private temporary files, loopback listeners, stand-ins without CUDA.

    shares_gpus: with processes of training roles.
    """
    environment = dict(os.environ)
    path = [str(MODELS)]
    environment |= {
        "TMPDIR": str(scratch),
        # SGLang compiles kernels with the `ninja` that it finds there; a wheel of ours brings it.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        # A file instead of torch's TCP store, which would listen on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
        # Plain decoder models are found without importing all 200 of SGLang's model files.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "megarl_sglang_models",
        # /health answers at once; it would wait a second for a token, as /health_generate does.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Semaphores of processes that were stopped are removed without a line that looks like an error.
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), TRACKER_WARNINGS])),
    }
    if shares_gpus:
        # Roles use more of some GPUs than of others. SGLang, which counts with the least that is free on any, takes
        # that for processes of somebody else and would refuse; where the GPUs are the server's own it is right.
        environment.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    if has_cuda():
        environment = ON_GPU | (FLOAT32_ON_GPU if config.dtype is Dtype.float32 else {}) | environment
        if config.offload is not None:
            prepare_memory_saver(environment)
    else:
        path.insert(0, str(STANDINS))
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.num_threads or 1)}
        # Threads that spin while they wait slow down other processes on the same cores.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        # A split embedding would be compiled, for which torch needs Triton, of which there is only a stand-in.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if config.tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind_ranks(sorted(os.sched_getaffinity(0)), config.tp)
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    return environment | {"PYTHONPATH": os.pathsep.join(path)}


def prepare_memory_saver(environment: dict[str, str]) -> None:
    """Change the environment of a server whose processes preload torch_memory_saver, as rollout.offload has them do.

    Its library is linked against libcudart, which in wheels lies where only torch's own libraries look; without it none
    of those processes starts. It takes part in cudaMalloc, which expandable segments do without: for them it refuses to
    run, or, under the variable's new name, would give nothing back.
    """
    folders = [*map(str, find_cuda_runtimes()), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    if folders:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    for name in ALLOCATOR_SETTINGS:
        settings = [each for each in environment.pop(name, "").split(",") if each]
        kept = [each for each in settings if not each.strip().startswith("expandable_segments")]
        if kept:
            environment[name] = ",".join(kept)


def find_cuda_runtimes() -> list[Path]:
    """The folders of libcudart among NVIDIA's wheels, such as site-packages/nvidia/cu13/lib."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    return sorted({path.parent for place in places or () for path in Path(place).glob("*/lib/libcudart.so.*")})


def find_preload_problem() -> str | None:
    """What the dynamic loader says of torch_memory_saver in a server's environment; None: it loads, or is not there."""
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    import torch

    major = str(torch.version.cuda).partition(".")[0]
    pattern = f"torch_memory_saver_hook_mode_preload_cu{major}.*so"
    libraries = [*package.glob(pattern), *package.parent.glob(pattern)]
    if not libraries:
        return f"it has no library for CUDA {major}"
    environment = dict(os.environ)
    prepare_memory_saver(environment)
    done = subprocess.run(
        ["true"], env=environment | {"LD_PRELOAD": str(libraries[0])}, capture_output=True, text=True, timeout=PRELOAD_S
    )
    # A library that is not found is left out with a word on stderr; one that it needs and lacks ends the program.
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode or done.stderr else None


def make_scratch() -> Path:
    """A new folder for the server's temporary files, which this user alone can read: in TMPDIR or, where a socket's
    path in it would be too long, in /tmp.
    """
    prefix, parent = f"megarl-sglang-{os.getpid()}-", tempfile.gettempdir()
    if len(os.fsencode(f"{parent}/{prefix}{LONGEST_IN_SCRATCH}")) > LONGEST_SOCKET_PATH:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def write_private(path: Path, text: str) -> Path:
    """Write a new file that this user alone can read; returns its path."""
    path.touch(0o600)
    path.write_text(text)
    return path


def write_key(scratch: Path, api_key: str) -> list[str]:
    """The arguments that tell a server its key: in a file, since every user of the machine sees command lines."""
    return ["--config", str(write_private(scratch / "key.yaml", f"api-key: {api_key}\n"))]


def link_model(command: Sequence[str], scratch: Path) -> list[str]:
    """The command with a link in `scratch` for the model where SGLang would not find the files in its path, in which it
    takes brackets for a pattern, or would take a name of Mistral's in it for another form of config.json.
    """
    place = command.index("--model-path") + 1
    path = command[place]
    if glob.escape(path) == path and not re.search("mistral|leanstral", path.lower()):
        return list(command)
    link = scratch / "model"
    link.symlink_to(path)
    return [*command[:place], str(link), *command[place + 1 :]]


def bind_ranks(cpus: Sequence[int], tp: int) -> str:
    """The value of SGLANG_CPU_OMP_THREADS_BIND: one CPU per rank of a server, round robin where CPUs are fewer."""
    return "|".join(str(cpus[rank % len(cpus)]) for rank in range(tp))


class SGLangServer:
    """A server process that ends with its owner.

    `start` returns at once; `wait_healthy` waits for the first healthy answer. The process tree is owned by
    `guard.py`, which ends it when this object is stopped or this process dies.
    """

    def __init__(
        self,
        config: RolloutConfig,
        checkpoint: Path,
        *,
        log_file: Path,
        seed: int,
        host: str = "127.0.0.1",
        port: int | None = None,
        weight_version: int = 0,
        api_key: str | None = None,
        shares_gpus: bool = False,
    ):
        """port: None picks a free one. weight_version: of the checkpoint's weights. api_key: required of callers, also
        on loopback, where other users of the machine can call; None: a new one. shares_gpus: whether training roles
        use the same GPUs.

        Raises ConfigError for bad options or a checkpoint without config.json.
        """
        if not (Path(checkpoint) / "config.json").is_file():
            raise ConfigError([f"rollout: {checkpoint} is not a checkpoint directory: it has no config.json"])
        self.config = config
        self.host = host
        self.port = pick_free_port(host) if port is None else port
        self.log_file = log_file
        self.api_key = api_key or secrets.token_hex(32)
        self.shares_gpus = shares_gpus
        self._command = build_command(
            config, Path(checkpoint), host=host, port=self.port, seed=seed, weight_version=weight_version
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the guard; the server's processes are below it."""
        return self._process.pid if self._process else None

    def start(self, port_deadline_s: float = 0.0) -> None:
        """Start the processes. Raises ServerError where the port is still taken after `port_deadline_s`."""
        if self._process is not None:
            raise ServerError(f"SGLang server {self.url} was already started")
        self._wait_for_port(port_deadline_s)
        self._scratch = make_scratch()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_file, "ab") as log:
            # SGLang writes its arguments there, and the key is one of them.
            self.log_file.chmod(0o600)
            log.write((" ".join(self._command) + "\n").encode())
            log.flush()
            command = link_model(self._command, self._scratch)
            words = [str(self._scratch), *command, *write_key(self._scratch, self.api_key)]
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(GUARD), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=build_environment(self.config, self._scratch, shares_gpus=self.shares_gpus),
                start_new_session=True,
            )

    def _wait_for_port(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while True:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, self.port))
                    return
                except OSError as error:
                    if time.monotonic() >= end:
                        reason = f"port {self.port} is taken ({error.strerror})"
                        raise ServerError(f"SGLang server {self.url}: {reason}") from error
            time.sleep(0.2)

    @property
    def exit_status(self) -> int | None:
        """The exit status, 128 + signal number where a signal ended it; None while it runs and before its start."""
        return self._process.poll() if self._process else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server generates a token.

        Raises ServerError at once where it exits, DeadlineError where it is late; both show the end of the log.
        """
        deadline = time.monotonic() + deadline_s
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while True:
                self.check_alive()
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health_generate").status_code == 200:
                        return
                if time.monotonic() > deadline:
                    waited = f"SGLang server {self.url} gave no healthy answer within {deadline_s:g} s"
                    raise DeadlineError(f"{waited}; {self._describe_log()}")
                time.sleep(0.2)

    def check_alive(self) -> None:
        """Raise ServerError with the exit status and the end of the log where the server is down."""
        if self._process is None:
            raise ServerError(f"SGLang server {self.url} was not started or was stopped")
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"SGLang server {self.url} exited with status {status}; {self._describe_log()}")

    def stop(self, deadline_s: float = 10.0) -> None:
        """End every process of the server and remove its temporary files; returns when that is done.

        Raises DeadlineError where it takes longer.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(5.0)
            raise DeadlineError(f"SGLang server {self.url} did not end within {deadline_s:g} s; killed") from None
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _describe_log(self) -> str:
        return f"the end of its log {self.log_file}:\n{read_tail(self.log_file)}"


def read_tail(file: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a text file; where it does not exist, a sentence that says so."""
    if not file.is_file():
        return f"({file} does not exist)"
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - 65536))
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])
