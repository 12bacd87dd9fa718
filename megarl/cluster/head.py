"""The process that owns a local Ray, which listens on the loopback interface alone.

    python -m megarl.cluster.head TEMP_DIR CPUS BYTES

Started by `local.py` under `megarl/guard.py`, so that Ray's processes are no children of the driver: neither the
driver's signals nor its end, whatever ends it, leaves one of them behind.
"""

import os
import signal
import sys
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams

ADDRESS_FILE = "address"
"""In TEMP_DIR: HOST:PORT of Ray, once it can be joined"""
HOST = "127.0.0.1"
"""With this address of a node Ray's processes listen on no other interface"""


def main() -> None:
    """Start Ray and wait to be killed; Ray's processes are then killed by the kernel."""
    temp_dir, num_cpus, object_store_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Not ray.init: it takes the machine's public address instead of the loopback's, and starts a monitor, whose
    # metrics answer on all interfaces. Neither the monitor (of nodes to add) nor that of logs is used.
    parameters = RayParams(
        node_ip_address=HOST,
        node_name=HOST,
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray's types are wrong here
        no_monitor=True,
        temp_dir=str(temp_dir),
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
    building = temp_dir / f".{ADDRESS_FILE}"
    building.write_text(node.gcs_address)
    os.replace(building, temp_dir / ADDRESS_FILE)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
