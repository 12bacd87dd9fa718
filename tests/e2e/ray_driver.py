"""A driver that opens Ray and calls an actor until it is ended: python ray_driver.py PROGRESS RAY_DEADLINE_S.

PROGRESS: a file with a line for each step. It exits as the commands do: 128 + the signal's number, 1 for an error.
"""

import sys
import time
import traceback
from pathlib import Path

import ray

from megarl.cluster.calls import PendingCall, ask
from megarl.cluster.opened import open_ray
from megarl.config.schema.root import ClusterConfig
from megarl.signals import Stopped, stopping_on_signals

PERIOD_S = 0.2


@ray.remote(num_cpus=0, max_restarts=0)
class Worker:
    def store(self, array: bytes) -> bytes:
        time.sleep(PERIOD_S)
        return array


def main() -> None:
    progress, deadline_s = Path(sys.argv[1]), float(sys.argv[2])

    def note(text: str) -> None:
        with progress.open("a") as file:
            file.write(f"{text}\n")

    with stopping_on_signals():
        note("begun")
        with open_ray(ClusterConfig(ray_deadline_s=deadline_s), 1) as cluster:
            note("opened")
            worker = ask("start of the worker", Worker.remote)
            while True:
                # Results above 100 KiB pass through the object store, which is the raylet's.
                refs = ask("store", lambda: (worker.store.remote(ray.put(b"x" * 2**20)),))
                PendingCall(refs, ("worker",), "store", 600.0, list).result()
                note(f"called in {cluster.scratch}")


if __name__ == "__main__":
    try:
        main()
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
