"""A process of a run: its log file, addresses, GPUs and the cores near them; what it does, for whoever waits for it
(its stack, its most memory) and for the profile of one iteration.

A process has its GPUs by the environment that it is started with: CUDA reads it once, at the first call of any kind,
such as whether there is CUDA, and what is set later has no effect. Copies to and from a GPU of another socket cross
the link between them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from torch.profiler import profile, record_function

from megarl.cluster.calls import WorkerError, ask, collect, wait_for
from megarl.config.errors import ConfigError
from megarl.config.placement import format_numbers
from megarl.config.schema.root import AUTO
from megarl.interfaces import DeadlineError, wait_all
from megarl.report import timeline
from megarl.report.timeline import Recording, write_timeline


def redirect_output(log_path: Path) -> None:
    """Redirect this process's stdout and stderr, native code included, to a file."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def resolve_host(listen_host: str) -> str:
    """The address that `cluster.listen_host` means for this process; `auto` needs a running Ray."""
    return str(ray.util.get_node_ip_address()) if listen_host == AUTO else listen_host  # type: ignore[no-untyped-call]


def use_interface(host: str) -> None:
    """Make gloo listen on the interface of `host`, if this machine has one, whatever the machine's name resolves to."""
    address = socket.gethostbyname(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = str(name)


def agree_on_nccl() -> None:
    """NCCL's memory, alike in training ranks and servers, which split and several nodes join in one communicator.

    SGLang turns both off in its processes (engine.py, _set_envs_and_config) unless they are set; ranks that differ in
    them cannot connect. What the job's environment sets counts for both sides.
    """
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        os.environ.setdefault(name, "0")


GPUS_VARIABLE = "MEGARL_GPUS"
"""Environment variable of a node's Ray: the ids of the job's GPUs there, where they are not those that CUDA is shown"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_S = 30.0
"""How long nvidia-smi may take"""
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Gpu:
    """A GPU of the job."""

    name: str
    """As in CUDA_VISIBLE_DEVICES: nvidia-smi's number, or the UUID of a GPU or of a part of one (MIG)"""
    uuid: str | None
    """Of the whole GPU; None: nvidia-smi does not tell, or it is a part of one"""


@dataclass(frozen=True)
class SmiGpu:
    """A GPU as nvidia-smi shows it, whatever CUDA_VISIBLE_DEVICES is."""

    number: str
    uuid: str
    bus: str
    """Its PCI address as the kernel writes it, such as 0000:18:00.0"""
    is_parted: bool
    """Whether MIG is on"""

    def is_meant_by(self, name: str) -> bool:
        """CUDA takes the first characters of a UUID for the whole of it."""
        return name == self.number or (name.startswith("GPU-") and self.uuid.startswith(name))


def find_gpus() -> tuple[str, str | None, list[SmiGpu]]:
    """Of the node of this process, without a call of CUDA: the environment variable that names the job's GPUs, its
    value (None: it is not set), and the GPUs that the node has.
    """
    variable = GPUS_VARIABLE if os.environ.get(GPUS_VARIABLE) else VISIBLE
    return variable, os.environ.get(variable), ask_nvidia_smi()


def ask_nvidia_smi() -> list[SmiGpu]:
    """Empty: the node has none, or no nvidia-smi."""
    query = "--query-gpu=index,uuid,pci.bus_id,mig.mode.current"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [words for line in done.stdout.splitlines() if len(words := line.split(", ")) == 4]
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    return [SmiGpu(number, uuid, bus.lower()[4:], mig == "Enabled") for number, uuid, bus, mig in rows]


def choose_gpus(node: str, found: tuple[str, str | None, Sequence[SmiGpu]], number: int) -> tuple[Gpu, ...]:
    """The first `number` GPUs of the job on a node, in the job's order. found: by `find_gpus` there.

    Raises ConfigError where the job has fewer there, or its list names one twice or one that does not exist.
    """
    variable, value, shown = found
    where = f"{variable} on {node}"
    if value is not None and (value.strip() or shown):
        names = [name.strip() for name in value.split(",") if name.strip()]
        listed = f"{where} is {value!r}"
    else:
        # On nodes without GPUs the numbers count processes.
        names = [gpu.number for gpu in shown] or [str(index) for index in range(number)]
        listed = "nvidia-smi shows no more"
    if len(names) < number:
        problem = f"cluster.gpus_per_node: found {number}; the job has {len(names)} GPUs on {node} ({listed})"
        raise ConfigError([problem])
    chosen: list[Gpu] = []
    for name in names[:number]:
        meant = [gpu for gpu in shown if gpu.is_meant_by(name)]
        is_known = bool(shown) and not name.startswith("MIG-")
        if is_known and len(meant) != 1:
            numbers = format_numbers([int(gpu.number) for gpu in shown])
            problem = f"{where}: found {name!r}; nvidia-smi shows the GPUs {numbers}, or their UUIDs may be given"
            raise ConfigError([problem])
        uuid = meant[0].uuid if is_known and not meant[0].is_parted else None
        for other in chosen:
            if name == other.name or (uuid is not None and uuid == other.uuid):
                problem = f"{where}: found {value!r}, which names one GPU twice: {other.name} and {name}"
                raise ConfigError([problem])
        chosen.append(Gpu(name, uuid))
    return tuple(chosen)


def build_variables(gpus: Sequence[Gpu]) -> dict[str, str]:
    """The environment that a process of these GPUs is started with."""
    return {
        VISIBLE: ",".join(gpu.name for gpu in gpus),
        # The numbers are nvidia-smi's. CUDA's own begin with the fastest GPU.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # With 1 Ray would hide all GPUs from an actor that Ray itself counts no GPUs for.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def use_gpus(gpus: Sequence[Gpu], devices: Path = PCI_DEVICES) -> None:
    """Keep this thread and what it starts on the cores near these GPUs, which this process must see alone.

    Where nvidia-smi or the kernel does not say which cores are near, or none of those that this process may use is, it
    stays on all of them. torch computes with this GPU's part of its cores: reading, saving and summing up a checkpoint
    take all of them, where Ray has said 1. Raises RuntimeError where its environment shows CUDA others.
    """
    for name, expected in build_variables(gpus).items() if gpus else ():
        found = os.environ.get(name)
        if found != expected:
            raise RuntimeError(
                f"{socket.gethostname()}: a process that was to be started with {name}={expected} has {found}:"
                " something between Ray and this process changes it"
            )
    near, shown = set[int](), ask_nvidia_smi() if gpus else []
    for gpu in shown:
        if any(gpu.is_meant_by(each.name) for each in gpus):
            # A list of the kernel's, such as 0-3,8.
            with suppress(OSError, ValueError):
                text = (devices / gpu.bus / "local_cpulist").read_text()
                for first, _, last in (part.partition("-") for part in text.strip().split(",")):
                    near |= {*range(int(first), int(last or first) + 1)}
    cores = os.sched_getaffinity(0)
    if shown:
        torch.set_num_threads(max(1, len(cores) * len(gpus) // len(shown)))
    if near := near & cores:
        os.sched_setaffinity(0, near)


ANSWER_S = 10.0
"""How long a rank may take to report its state: a thread of its own does nothing else."""
NUM_FRAMES = 14
"""The number of innermost frames shown of a stack."""


@dataclass(frozen=True)
class CallState:
    """The call that a rank is executing."""

    verb: str
    """As `in logprobs`"""
    seconds: float
    """Since the call began"""
    frames: tuple[str, ...]
    """Innermost last"""


class CallTracker:
    """Records which call this process executes. `enter` runs in the thread of the calls, `find_state` in another."""

    def __init__(self) -> None:
        self._current: tuple[str, float, int] | None = None

    @contextmanager
    def enter(self, verb: str) -> Iterator[None]:
        self._current = (verb, time.monotonic(), threading.get_ident())
        try:
            yield
        finally:
            self._current = None

    def find_state(self) -> CallState | None:
        """The state of the current call; None between calls."""
        if self._current is None:
            return None
        verb, since, thread = self._current
        frames: list[str] = []
        frame = sys._current_frames().get(thread)
        while frame is not None and len(frames) < NUM_FRAMES and frame.f_code.co_filename != __file__:
            path, line = frame.f_code.co_filename, frame.f_lineno
            code = linecache.getline(path, line).strip()
            frames.append(f"{'/'.join(Path(path).parts[-3:])}:{line} {frame.f_code.co_name}: {code}")
            frame = frame.f_back
        return CallState(f"in {verb}", time.monotonic() - since, tuple(reversed(frames)))


def dump_on_signal() -> None:
    """Make SIGUSR1 write the stacks of all threads to stderr, even while native code holds Python's lock."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def identify() -> tuple[str, int]:
    """(host, process id) of this process."""
    return socket.gethostname(), os.getpid()


@dataclass(frozen=True)
class RankStacks:
    """Collects the stacks of a role's actors, whose methods `find_state` and `identify` run beside other calls."""

    actors: Sequence[ray.actor.ActorHandle[Any]]
    names: Sequence[str]
    identities: Sequence[ray.ObjectRef[tuple[str, int]]]
    """The results of each actor's `identify`, called at its start, after `dump_on_signal`"""
    logs: Sequence[Path]
    """The log file of each rank"""

    def explain(self, numbers: Sequence[int]) -> str:
        """Describe what the ranks with these numbers are doing; ranks with the same stack share a paragraph.

        It takes at most `ANSWER_S` for all of them together.
        """
        states = collect([self.actors[number].find_state.remote() for number in numbers], ANSWER_S)
        together: dict[tuple[str, tuple[str, ...]], dict[str, float]] = defaultdict(dict)
        for number, state in zip(numbers, states, strict=True):
            if isinstance(state, ray.exceptions.GetTimeoutError):
                state = CallState(self._describe_silent(number), 0.0, ())
            elif isinstance(state, ray.exceptions.RayActorError):
                state = CallState("its process has died", 0.0, ())
            elif isinstance(state, ray.exceptions.RayError):
                raise state
            state = state or CallState("in no call", 0.0, ())
            together[state.verb, state.frames][self.names[number]] = state.seconds
        return "\n".join(
            f"{', '.join(ranks)}: {verb}"
            + (f" for {max(ranks.values()):.0f} s, at" if frames else "")
            + "".join(f"\n    {frame}" for frame in frames)
            for (verb, frames), ranks in together.items()
        )

    def _describe_silent(self, number: int) -> str:
        """The state of a rank that does not answer: that of its process, where it runs on this machine."""
        try:
            host, pid = ray.get(self.identities[number], timeout=0)
            if host != socket.gethostname():
                return f"gives no stack; its process {pid} on {host} cannot be seen from here"
            state = psutil.Process(pid).status()
            if state == psutil.STATUS_STOPPED:
                return f"gives no stack; its process {pid} on {host} is {state}"
            os.kill(pid, signal.SIGUSR1)
        except ray.exceptions.GetTimeoutError:
            return "its process has not started"
        except (ray.exceptions.RayActorError, psutil.NoSuchProcess, ProcessLookupError):
            return "its process has died"
        return f"its stack is at the end of {self.logs[number]}; its process {pid} on {host} is {state}"


DEADLINE_S = 10.0
"""Of an answer, which a thread of its own gives; without one the number is left out"""
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def find_own_peak() -> int:
    """Bytes: of this process's tensors on its GPU, where it uses one, else of its resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return _read_peak(psutil.Process().pid)


def find_peak_of_tree(pid: int) -> int:
    """Bytes of resident memory of this process and those that it has started, each at its own most."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return sum(_read_peak(each.pid) for each in (first, *first.children(recursive=True)))
    return 0


def _read_peak(pid: int) -> int:
    with suppress(OSError):
        found = PEAK.search(Path(f"/proc/{pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0
    return 0


def measure_peaks(groups: Mapping[str, Any]) -> dict[str, float]:
    """perf/NAME_peak_memory_gb of each role or the servers: that of its process with the most, since that started.

    Raises RayLostError.
    """
    metrics: dict[str, float] = {}
    for name, group in groups.items():
        what = f"memory of the {name} processes"
        # A process that is gone or late is named by the loop's own calls, which know what to do about it.
        with suppress(WorkerError, DeadlineError):
            refs = ask(what, group.ask_peaks)
            peak = max(wait_for(refs, [name] * len(refs), what, DEADLINE_S))
            metrics[f"perf/{name}_peak_memory_gb"] = peak / 2**30
    return metrics


DIRECTORY = "profile"
TIMELINE = "timeline.json.gz"


class RankProfiler:
    """Rank-local half of the profiler: records the calls of one rank and, on some ranks, torch's operators in them."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def begin(self, process: str, with_operators: bool) -> None:
        """Record from here on, in the calling thread. process: what this one is called in the timeline."""
        if self._profile is not None:  # of an iteration that failed
            self._profile.stop()
            self._profile = None
        if with_operators:
            # Otherwise Python's object of each event is built too, which takes minutes and gigabytes.
            fast = torch.profiler._ExperimentalConfig(trace_only=True)
            self._profile = profile(experimental_config=fast)
            self._profile.start()
        timeline.start(process, record_function if with_operators else contextlib.nullcontext)

    def end(self, path: Path) -> Recording:
        """End the recording, and write torch's trace to `path` (.json.gz), which appears atomically."""
        recording = timeline.stop()
        if self._profile is not None:
            self._profile.stop()
            building = path.with_name(f".{path.name}")
            self._profile.export_chrome_trace(str(building))
            building.rename(path)
            self._profile = None
        return recording


class Profiler:
    """Profiles one iteration into RUN_DIR/profile."""

    def __init__(
        self,
        iteration: int | None,
        roles: Iterable[Any],
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """iteration: train.profile; None: nothing is profiled. roles: `WorkerGroup`s."""
        self._iteration, self._roles, self._directory, self._say = iteration, list(roles), run_dir / DIRECTORY, say
        self._started: float | None = None

    def after_log(self, iteration: int) -> None:
        """Begin before the iteration to profile, and end after it; `Report.after_log` is to call this."""
        if self._iteration is None:
            return
        if self._started is not None and iteration == self._iteration:
            timeline.note(f"iteration {iteration}", self._started, time.monotonic())
            self._write(timeline.stop())
        if iteration == self._iteration - 1:
            wait_all([role.begin_profile() for role in self._roles])
            timeline.start("trainer")
            self._started = time.monotonic()

    def _write(self, own: Recording) -> None:
        self._directory.mkdir(exist_ok=True)
        ends = [role.end_profile(self._directory) for role in self._roles]
        wait_all(ends)
        recordings = [own, *(recording for each in ends for recording in each.result())]
        write_timeline(self._directory / TIMELINE, recordings, {"iteration": self._iteration})
        names = ", ".join(sorted(path.name for path in self._directory.glob("*.json.gz")))
        self._say(f"profile of iteration {self._iteration}: {names} in {self._directory}; ui.perfetto.dev opens them")

    def close(self) -> None:
        """Say where the iteration to profile was not run: a resumed run is past it, or the run ended before."""
        if self._iteration is not None and not (self._directory / TIMELINE).is_file():
            self._say(f"train.profile={self._iteration}: this iteration was not run to its end; there is no profile")
