"""What a process of a run sets up before its first work: its log file, its addresses, its GPUs and the cores near them.

A process has its GPUs by the environment that it is started with: CUDA reads it once, at the first call of any kind,
such as whether there is CUDA, and what is set later has no effect. Copies to and from a GPU of another socket cross
the link between them.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from megarl.config.errors import ConfigError
from megarl.config.placement import format_numbers
from megarl.config.schema.run import AUTO


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
    stays on all of them. Raises RuntimeError where its environment shows CUDA others.
    """
    for name, expected in build_variables(gpus).items() if gpus else ():
        found = os.environ.get(name)
        if found != expected:
            raise RuntimeError(
                f"{socket.gethostname()}: a process that was to be started with {name}={expected} has {found}:"
                " something between Ray and this process changes it"
            )
    near = set[int]()
    for gpu in ask_nvidia_smi() if gpus else ():
        if any(gpu.is_meant_by(each.name) for each in gpus):
            # A list of the kernel's, such as 0-3,8.
            with suppress(OSError, ValueError):
                text = (devices / gpu.bus / "local_cpulist").read_text()
                for first, _, last in (part.partition("-") for part in text.strip().split(",")):
                    near |= {*range(int(first), int(last or first) + 1)}
    near &= os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
