"""One SGLang server: its options, what it needs of a checkpoint, command line, process and health."""

import ast
import contextlib
import functools
import getpass
import glob
import importlib.util
import json
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.cpu.process import CpuServing
from megarl.files import load_json_object, read_tail, write_private
from megarl.interfaces import UNPUBLISHED, DeadlineError
from megarl.models.families import FAMILIES
from megarl.rollout.client import ConnectionLostError, RequestError, SGLangClient
from megarl.signals import GUARD, pick_free_port

OWN_OPTIONS = {
    "model_path": "model.path",
    "host": "cluster.listen_host",
    "port": "no key: a free one is picked",
    "dtype": "rollout.dtype",
    "random_seed": "seed",
    "max_running_requests": "rollout.max_running_requests",
    "max_total_tokens": "rollout.kv_cache_tokens",
    "skip_tokenizer_init": "no key: megarl sends and receives token ids",
    "custom_weight_loader": "no key: weight syncs use it",
    "weight_version": "no key: the trainer sets it",
    "tp_size": "rollout.tp",
    "enable_return_routed_experts": "rollout.router_replay",
    "api_key": "no key: each run makes one",
    "enable_memory_saver": "rollout.offload",
    "admin_api_key": "no key: each run makes one",
}
"""Arguments that megarl sets itself, with the key that determines them"""


REFUSED_VARIABLES = (
    *("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_MAX_THINK_TOKENS", "SGLANG_PLUGINS"),
    *("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "SGLANG_RUST_SERVER"),
    *("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "SGLANG_USE_MODELSCOPE"),
    # With rollout.offload CUDA graphs stay where they are.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
)
"""Variables of the environment by which servers report or generate something else than the trainer takes"""


@functools.cache
def load_options() -> dict[str, str]:
    """The flags of SGLang's server arguments, by field name, read from the installed source.

    Importing SGLang takes seconds and loads its whole runtime, so the source is parsed instead. Raises ConfigError
    where SGLang is not installed or its source has another form.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(["rollout: SGLang is not installed; `make install` brings the pinned release"])
    root = Path(spec.submodule_search_locations[0]) / "srt"
    options: dict[str, str] = {}
    for source in [root / "server_args.py", *sorted(root.glob("arg_groups/fields/*.py"))]:
        if source.is_file():
            options.update(_parse_fields(ast.parse(source.read_text())))
    if "model_path" not in options:
        raise ConfigError([f"rollout.sglang: found no server arguments in {root}; sglang 0.5.23 has them there"])
    return options


def _parse_fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and flag of class-body lines of the form `name: A[type, help or Arg(...)]` that have a flag."""
    for line in (line for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for line in node.body):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if isinstance(line.annotation, ast.Subscript) and ast.unparse(line.annotation.value) == "A":
            calls = (node for node in ast.walk(line.annotation) if isinstance(node, ast.Call))
            arg = next((call for call in calls if ast.unparse(call.func) == "Arg"), None)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in arg.keywords} if arg else {}
            if keywords.get("no_cli") != "True":
                name = line.target.id
                yield name, keywords.get("cli_name", "").strip("'") or "--" + name.replace("_", "-")


def check_options(options: Mapping[str, Any]) -> list[str]:
    """Problems of `rollout.sglang`, one message each: unknown keys, and keys that megarl sets itself. SGLang checks the
    values when it is started."""
    known = load_options()
    problems = []
    for key in options:
        if key in OWN_OPTIONS:
            problems.append(f"rollout.sglang.{key}: megarl sets it (by {OWN_OPTIONS[key]}); remove it here")
        elif key not in known:
            nearest = find_nearest_key(key, known)
            hint = f"; did you mean rollout.sglang.{nearest}?" if nearest else ""
            problems.append(f"rollout.sglang.{key}: SGLang has no such server argument{hint}")
    return problems


def check_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """One message for each variable by which servers would report something else than the policy's log-probs."""
    for name, value in sorted(environment.items()):
        is_refused = name in REFUSED_VARIABLES or name.startswith(("SGLANG_SIMULATE_", "SGLANG_KV_CANARY_PERTURB_"))
        if is_refused and value.strip().lower() not in ("", "0", "false", "no", "off", "-1"):
            yield (
                f"{name}: found {value!r} in the environment, with which servers report or generate something else than"
                " samples of the policy; unset it"
            )


def render_options(options: Mapping[str, Any]) -> list[str]:
    """The options as command-line arguments.

    True: the bare flag. False or None: nothing. Lists: several arguments. Dictionaries: JSON.
    """
    words: list[str] = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        values = list(value) if isinstance(value, list | tuple) else [] if value is True else [value]
        texts = [json.dumps(dict(each)) if isinstance(each, Mapping) else str(each) for each in values]
        words += [load_options()[key], *texts]
    return words


@dataclass(frozen=True)
class GenerationSpec:
    vocab_size: int
    """Rows of the embedding: every token id below it is safe to send."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response; they are its last token."""
    sources: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Those of each file that names any"""


def load_generation_spec(checkpoint: Path) -> GenerationSpec:
    """Read config.json and generation_config.json, of both of which servers take the end-of-sequence tokens. Raises
    ConfigError naming file and key, also where the server would load a class of the family that does not generate.
    """
    file, generation = checkpoint / "config.json", checkpoint / "generation_config.json"
    config = load_json(file)
    family, found = FAMILIES.get(str(config.get("model_type"))), config.get("architectures")
    if family is not None and found != [usual := f"{family.hf_class}ForCausalLM"]:
        raise ConfigError(
            [
                f"{file}: architectures is {found!r}; servers choose the class by it, and to generate it must be"
                f' "architectures": ["{usual}"]'
            ]
        )
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise ConfigError([f"{file}: vocab_size is {vocab_size!r}; a number was expected"])
    sources: dict[str, tuple[int, ...]] = {}
    for path, content in ((generation, load_json(generation) if generation.is_file() else {}), (file, config)):
        value = content.get("eos_token_id")
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        # true is a number to Python.
        if any(type(token) is not int or not 0 <= token < vocab_size for token in tokens):
            raise ConfigError(
                [f"{path}: eos_token_id is {value!r}; one or several of {vocab_size} tokens were expected"]
            )
        sources |= {path.name: tuple(tokens)} if tokens else {}
    if not sources:
        raise ConfigError(
            [f"{checkpoint}: no eos_token_id in generation_config.json or config.json; without it no response ends"]
        )
    return GenerationSpec(vocab_size, tuple(dict.fromkeys(chain(*sources.values()))), sources)


def find_stop_tokens(config: RolloutConfig, spec: GenerationSpec, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a response, those of rollout.stop and rollout.stop_token_ids included.

    Raises ConfigError for a text that is not one token of the tokenizer, and a number outside of the vocabulary.
    """
    found = dict.fromkeys(spec.stop_token_ids)
    for text in config.stop:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or tokenizer.decode(ids) != text:
            pieces = [tokenizer.decode([each]) for each in ids]
            raise ConfigError(
                [
                    f"rollout.stop: found {text!r}, which the model's tokenizer writes as {pieces}; servers are"
                    " sent and send tokens, so that a response can end at one token only"
                ]
            )
        found[ids[0]] = None
    found |= dict.fromkeys(config.stop_token_ids)
    if outside := [token for token in found if not 0 <= token < spec.vocab_size]:
        raise ConfigError(
            [f"rollout.stop or rollout.stop_token_ids: found {outside}, outside the vocabulary of {spec.vocab_size}"]
        )
    return tuple(found)


def load_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError naming the file."""
    try:
        return load_json_object(file)
    except (OSError, ValueError) as error:
        raise ConfigError([str(error)]) from error


ANSWER_S = 30.0
"""For the first token, for which kernels may have to be compiled: a try that is given up leaves its request behind"""
TRACKER_WARNINGS = "ignore::UserWarning:multiprocessing.resource_tracker"
LONGEST_TMPDIR = 42
"""Bytes of TMPDIR with which unix sockets in a scratch folder, torch's above all, keep to 107 bytes of path"""
WEIGHT_LOADER = "megarl.sync.ends.receive"
"""The function that servers call for the requests of a weight sync"""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of torch's allocator, by their old and their new name"""


class ServerError(RuntimeError):
    """A server did not start or has ended; the message has its exit status and the end of its log."""


class GpuServing:
    """What a server needs on a GPU; without one `megarl.cpu.process.CpuServing` has the same attributes."""

    depends_on_batch = False
    default_tokens: int | None = None
    folders: tuple[str, ...] = ()

    def check(self, config: RolloutConfig) -> Iterator[str]:
        return iter(())

    def list_options(self, config: RolloutConfig) -> dict[str, Any]:
        # By default SGLang replays prefill from graphs that keep their inputs by weak references, whose memory later
        # ones may have taken: wrong numbers (sglang issue 37606). Their memory would also never be given back.
        options: dict[str, Any] = {"cuda_graph_backend_prefill": "disabled"}
        if config.offload is not None:
            # Without it, as on a CPU, SGLang takes the same calls and keeps the memory.
            options["enable_memory_saver"] = True
        if config.dtype is Dtype.float32:
            # On Hopper SGLang takes FlashAttention 3, whatever the dtype.
            options["attention_backend"] = "triton"
        return options

    def prepare(self, environment: dict[str, str], config: RolloutConfig) -> dict[str, str]:
        # What the job's environment has of these settings stays.
        # An idle server would end over what it takes for a leak, which the aborts and flushes of a rollout may look
        # like.
        environment.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "false")
        # SGLang binds its processes itself, not by a script that every user of the machine may write to and that stays.
        environment.setdefault("SGLANG_NUMA_BIND_V2", "false")
        # What torch has compiled outlives the scratch folder.
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        if config.dtype is Dtype.float32:
            # The RMSNorm of sgl_kernel is compiled for 16-bit numbers alone; this is SGLang's switch for PyTorch's
            # operations.
            environment.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
            # Triton would round the float32 numbers of a product to TF32, whose fraction has 10 bits.
            environment.setdefault("TRITON_F32_DEFAULT", "ieee")
        if config.offload is not None:
            prepare_memory_saver(environment)
        return environment


@functools.cache
def find_serving() -> GpuServing | CpuServing:
    # Of NVIDIA's driver on Linux, and in WSL; without it CUDA is not asked.
    has_driver = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
    return GpuServing() if has_driver and torch.cuda.is_available() else CpuServing()


def build_command(
    config: RolloutConfig,
    checkpoint: Path,
    *,
    host: str,
    port: int,
    seed: int,
    weight_version: int = 0,
    is_policy: bool = True,
) -> list[str]:
    """The command line of one server. weight_version: the version of the checkpoint's weights. is_policy: False for a
    server that takes messages, and whose weights stay what they are.

    Raises ConfigError for keys of `rollout.sglang` that SGLang does not have, and what else it cannot start with.
    """
    serving = find_serving()
    problems = [*check_options(config.sglang), *serving.check(config), *check_variables(os.environ)]
    if problems:
        raise ConfigError(problems)
    path = checkpoint / "config.json"
    family = FAMILIES.get(str(load_json(path).get("model_type"))) if path.is_file() else None
    options = {
        "model_path": str(checkpoint),
        "host": host,
        "port": port,
        "dtype": config.dtype.value,
        "random_seed": seed,
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.kv_cache_tokens,
        "skip_tokenizer_init": is_policy,
        "weight_version": str(weight_version),
        "tp_size": config.tp,
        "skip_server_warmup": True,
        # Executes the trainer's requests inside each rank: see megarl.sync.ends.
        "custom_weight_loader": [WEIGHT_LOADER] if is_policy else None,
        # Without it an idle scheduler spins and takes a core from the trainer.
        "sleep_on_idle": True,
        # Verification of a weight sync and evaluations do not wait for prefetched responses.
        "enable_priority_scheduling": config.max_staleness > 0,
        "enable_return_routed_experts": config.router_replay,
        # Requests that share cached tokens are all told the experts of the one that computed them last, which near a
        # tie are not those with which each sampled its first token.
        "disable_radix_cache": config.router_replay,
        **(family.server_options if family else {}),
        **serving.list_options(config),
        **(family.cpu_options if family and isinstance(serving, CpuServing) else {}),
    }
    return [sys.executable, "-m", "sglang.launch_server", *render_options(options | config.sglang)]


def build_environment(config: RolloutConfig, scratch: Path, *, shares_gpus: bool = False) -> dict[str, str]:
    """The server's environment: private temporary files, loopback listeners, stand-ins without CUDA.

    shares_gpus: with processes of training roles.
    """
    environment = dict(os.environ)
    serving = find_serving()
    path = list(serving.folders)
    environment |= {
        "TMPDIR": str(scratch),
        # SGLang compiles kernels with the `ninja` that it finds there; a wheel of ours brings it.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        # A file instead of torch's TCP store, which would listen on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
        # Plain decoder models are found without importing all 200 of SGLang's model files.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "megarl.rollout.models",
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
    environment = serving.prepare(environment, config)
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    return environment | {"PYTHONPATH": os.pathsep.join(path)}


def prepare_memory_saver(environment: dict[str, str]) -> None:
    """Change the environment of a server whose processes preload torch_memory_saver, as rollout.offload has them do.

    Its library is linked against libcudart, which in wheels lies where only torch's own libraries look; without it none
    of those processes starts. It takes part in cudaMalloc, which expandable segments do without: for them it refuses to
    run, or, under the variable's new name, would give nothing back.
    """
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    # The folders of libcudart among NVIDIA's wheels, such as site-packages/nvidia/cu13/lib.
    runtimes = {str(path.parent) for place in places or () for path in Path(place).glob("*/lib/libcudart.so.*")}
    if folders := [*sorted(runtimes), *filter(None, [environment.get("LD_LIBRARY_PATH")])]:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    for name in ALLOCATOR_SETTINGS:
        settings = environment.pop(name, "").split(",")
        if kept := [each for each in settings if each and not each.strip().startswith("expandable_segments")]:
            environment[name] = ",".join(kept)


def make_scratch() -> Path:
    """A new folder for the server's temporary files, which this user alone can read: in TMPDIR or, where a socket's
    path in it would be too long, in /tmp.
    """
    parent = tempfile.gettempdir()
    fits = len(os.fsencode(parent)) <= LONGEST_TMPDIR
    return Path(tempfile.mkdtemp(prefix=f"megarl-sglang-{os.getpid()}-", dir=parent if fits else "/tmp"))


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


class SGLangServer:
    """A server process that ends with its owner.

    `start` returns at once; `wait_healthy` waits for the first healthy answer. The process tree is owned by
    `megarl/signals.py`, which ends it when this object is stopped or this process dies.
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
        is_policy: bool = True,
    ):
        """port: None picks a free one. weight_version, is_policy: of `build_command`. api_key: required of callers,
        also on loopback, where other users of the machine can call; None: a new one. shares_gpus: whether training
        roles use the same GPUs.

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
        own: dict[str, Any] = {"weight_version": weight_version, "is_policy": is_policy}
        self._command = build_command(config, Path(checkpoint), host=host, port=self.port, seed=seed, **own)
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
            # In a file, since every user of the machine sees command lines.
            key = write_private(self._scratch / "key.yaml", f"api-key: {self.api_key}\n")
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-I", str(GUARD), str(self._scratch), *command, "--config", str(key)],
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
        return self._process is not None and self.exit_status is None

    def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server generates a token.

        Raises ServerError at once where it exits, DeadlineError where it is late; both show the end of the log.
        """
        deadline = time.monotonic() + deadline_s
        client = SGLangClient(self.url, vocab_size=1, deadline_s=ANSWER_S, api_key=self.api_key)
        with contextlib.closing(client):
            while True:
                self.check_alive()
                if client.is_healthy(max(1.0, min(ANSWER_S, deadline - time.monotonic())), generating=True):
                    return
                if time.monotonic() > deadline:
                    waited = f"SGLang server {self.url} gave no healthy answer within {deadline_s:g} s"
                    raise DeadlineError(f"{waited}; {self._describe_log()}")
                time.sleep(0.2)

    def check_alive(self) -> None:
        """Raise ServerError with the exit status and the end of the log where the server is down."""
        if not self.is_alive():
            ended = f"exited with status {self.exit_status}" if self._process else "was not started or was stopped"
            raise ServerError(f"SGLang server {self.url} {ended}; {self._describe_log()}")

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


CALL_DEADLINE_S = 60.0
"""The deadline of each call; the first may have to wait for a weight load that was abandoned."""
NUM_CALLS = 6
EXIT_DEADLINE_S = 5.0
"""How long to wait for an exit status: a connection breaks before the process behind it has been reaped."""


def find_loss(server: SGLangServer) -> str | None:
    """Why the server is lost, in one line: its exit status, or the call that it did not answer within CALL_DEADLINE_S.

    None where it answers and generates (where it may have given memory back, answers); it then has no requests, no open
    update session, and is not paused.
    """
    unanswered = None
    if server.is_alive():
        client = SGLangClient(server.url, vocab_size=1, deadline_s=CALL_DEADLINE_S, api_key=server.api_key)
        with contextlib.closing(client):
            try:
                client.reset()
                # Its memory may be with the roles then, and a token would be its end.
                is_away = server.config.offload is not None and client.load_weight_version() == UNPUBLISHED
                # A token covers every rank, where /health covers the HTTP server alone.
                if client.is_healthy(CALL_DEADLINE_S, generating=not is_away):
                    return None
                unanswered = f"{client.url}/health{'' if is_away else '_generate'} gave no healthy answer"
            except (RequestError, ConnectionLostError, DeadlineError) as error:
                unanswered = str(error)
    end = time.monotonic() + EXIT_DEADLINE_S
    while server.is_alive() and time.monotonic() < end:
        time.sleep(0.1)
    if server.is_alive():
        return f"{unanswered} (its log: {server.log_file})"
    return f"it exited with status {server.exit_status} (its log: {server.log_file})"
