"""Addresses that this machine listens on."""

import contextlib
import errno
import random
import socket
from ipaddress import ip_address
from pathlib import Path

LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20000
"""Ray's own ports are below this one."""


def pick_free_port(host: str) -> int:
    """A TCP port that nothing listens on now, outside the kernel's ephemeral range where there is one.

    A server binds it tens of seconds later, and again when it is restarted; meanwhile every connection and every
    listener of torch and Ray takes an ephemeral port. Raises OSError where there is none.
    """
    first, last = (int(word) for word in LOCAL_PORTS.read_text().split()) if LOCAL_PORTS.is_file() else (0, 0)
    kept = [port for port in range(FIRST_PORT, 65536) if not first <= port <= last]
    for port in [*random.SystemRandom().sample(kept, min(len(kept), 100)), 0]:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return int(listener.getsockname()[1])
    raise OSError(errno.EADDRNOTAVAIL, f"no free port on {host}")


def is_loopback(host: str) -> bool:
    return ip_address(socket.gethostbyname(host)).is_loopback
