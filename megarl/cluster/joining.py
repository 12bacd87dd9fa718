"""This process as the driver of a running Ray."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import ray

from megarl.cluster import ray_calls
from megarl.run.signals import STOPPING_SIGNALS

INIT_S = 10.0
"""How long a connection in progress is waited for when a signal ends the run: Ray crashes where it is cut short."""


@contextmanager
def joined_ray(address: str, leave_s: float) -> Iterator[None]:
    """Ray at HOST:PORT, which ends this driver's actors on leaving, within `leave_s`. Raises RayLostError."""
    # It warns of the missing handler of SIGTERM: the driver has its own, which Ray leaves alone in other threads.
    logging.getLogger("ray").setLevel(logging.ERROR)
    done = threading.Event()

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            hint = "it may have another key (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH) or another version than"
            raise ray_calls.RayLostError(f"{error}: {hint} {ray.__version__} here") from error
        finally:
            done.set()

    try:
        try:
            ray_calls.ask("connecting to it", init)
        except BaseException:
            if not done.wait(0.0 if ray_calls.is_lost() else INIT_S):
                ray_calls.give_up()
            raise
        finally:
            _restore_handlers()
        yield
    finally:
        if done.is_set() and not ray_calls.is_lost():
            if ray_calls.settle(leave_s):
                with suppress(ray_calls.RayLostError):
                    ray_calls.ask("leaving it", ray.shutdown, deadline_s=leave_s)
            else:
                ray_calls.give_up()


def _restore_handlers() -> None:
    """Put this process's handlers of signals back in the place of the native ones that Ray has installed."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING_SIGNALS:
            signal.signal(number, signal.getsignal(number))


def find_own_processes() -> dict[str, psutil.Process]:
    """The processes of the joined Ray on this machine, by name."""
    node = ray._private.worker._global_node
    assert node is not None
    session = str(node.session_name)
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            # Its agents hide their command lines.
            if process.name() in ("gcs_server", ray_calls.RAYLET) and session in " ".join(process.cmdline()):
                found += [process, *process.children()]
    return ray_calls.find_processes(found)
