"""Ports, CPUs and temporary files of a server, and what a failed call leaves behind."""

import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import DeadlineError
from megarl.ports import LOCAL_PORTS, pick_free_port
from megarl.rollout.calls import run_in_parallel, wait_left_over
from megarl.rollout.server import (
    LONGEST_IN_SCRATCH,
    ServerError,
    SGLangServer,
    bind_ranks,
    make_scratch,
)


def test_a_picked_port_is_free_and_none_that_the_kernel_gives_away():
    first, last = map(int, LOCAL_PORTS.read_text().split())
    for _ in range(20):
        port = pick_free_port("127.0.0.1")
        assert not first <= port <= last
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_every_rank_has_a_cpu_and_ranks_share_where_there_are_fewer():
    assert bind_ranks([4, 7, 9], 2) == "4|7"
    assert bind_ranks([0, 1], 4) == "0|1|0|1"


def test_a_port_taken_meanwhile_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = RolloutConfig(kv_cache_tokens=1)
        server = SGLangServer(config, tmp_path, log_file=tmp_path / "log", seed=1, port=port)
        with pytest.raises(ServerError, match=rf"127.0.0.1:{port}: port {port} is taken"):
            server.start(port_deadline_s=0.5)
    assert not server.is_alive()
    assert server.exit_status is None


def test_calls_that_were_given_up_are_waited_for():
    released, ended = threading.Event(), threading.Event()

    def close_slowly(_stop):
        released.wait(20)
        ended.set()

    def fail(_stop):
        raise RuntimeError("a server was lost")

    with pytest.raises(RuntimeError, match="a server was lost"):
        run_in_parallel([close_slowly, fail], lambda: None)
    with pytest.raises(DeadlineError, match=r"1 abandoned calls to SGLang servers have not ended within 0.1 s"):
        wait_left_over(0.1)
    threading.Timer(0.3, released.set).start()
    wait_left_over(20)
    assert ended.is_set()
    wait_left_over(0.0)


@pytest.mark.parametrize("num_characters", [8, 20, 33, 34, 35, 60, 200])
def test_every_socket_of_a_server_fits_its_scratch_folder_however_long_tmpdir_is(num_characters, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        parent = Path(short) / ("x" * num_characters)
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        scratch = make_scratch()
        try:
            assert scratch.parent in (parent, Path("/tmp"))
            assert scratch.parent == parent or num_characters > 8
            longest = scratch / LONGEST_IN_SCRATCH.partition("/")[2]
            longest.parent.mkdir()
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(longest))
        finally:
            shutil.rmtree(scratch)
