"""Addresses by which processes of several nodes find each other."""

import os
import socket
from collections.abc import Sequence

import psutil
import ray

from megarl.config.schema.cluster import AUTO

GPUS_VARIABLE = "MEGARL_GPUS"
"""Of a node's Ray: the ids of the GPUs that the job has there, where they are not 0, 1, 2 ..."""


def resolve_host(listen_host: str) -> str:
    """`cluster.listen_host` for this process. Only where Ray runs."""
    return str(ray.util.get_node_ip_address()) if listen_host == AUTO else listen_host  # type: ignore[no-untyped-call]


def find_interface(host: str) -> str | None:
    """The network interface of this machine that has the address; None: none has."""
    address = socket.gethostbyname(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


def use_interface(host: str) -> None:
    """From now on gloo listens on the interface of `host`, whatever the machine's name resolves to."""
    interface = find_interface(host)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def use_gpus(gpus: Sequence[int]) -> None:
    """From now on CUDA sees these of the node's GPUs alone; before its first call. None: all of them."""
    if not gpus:
        return
    ids = os.environ.get(GPUS_VARIABLE) or os.environ.get("CUDA_VISIBLE_DEVICES")
    known = ids.split(",") if ids else [str(number) for number in range(max(gpus) + 1)]
    if max(gpus) >= len(known):
        raise RuntimeError(
            f"{socket.gethostname()}: GPU number {max(gpus)} of the job is needed; it has {len(known)} here ({ids})"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(known[number] for number in gpus)
