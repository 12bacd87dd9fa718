"""Addresses by which processes of several nodes find each other."""

import os
import socket

import psutil
import ray

from megarl.config.schema.cluster import AUTO


def resolve_host(listen_host: str) -> str:
    """The address that `cluster.listen_host` means for this process; `auto` needs a running Ray."""
    return str(ray.util.get_node_ip_address()) if listen_host == AUTO else listen_host  # type: ignore[no-untyped-call]


def find_interface(host: str) -> str | None:
    """The network interface of this machine that has the address; None where none has."""
    address = socket.gethostbyname(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


def use_interface(host: str) -> None:
    """Make gloo listen on the interface of `host`, whatever the machine's name resolves to."""
    interface = find_interface(host)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def agree_on_nccl() -> None:
    """NCCL's memory, alike in training ranks and servers, which split and several nodes join in one communicator.

    SGLang turns both off in its processes (engine.py, _set_envs_and_config) unless they are set; ranks that differ in
    them cannot connect. What the job's environment sets counts for both sides.
    """
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        os.environ.setdefault(name, "0")
