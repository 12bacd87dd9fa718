"""Whether the servers' memory is free after they have given it back."""

import pytest

from megarl.config.schema.run import ServerOffload
from megarl.rollout.client import ConnectionLostError, SGLangClient
from megarl.rollout.offload import GIB, ServerOffloader


class Server(SGLangClient):
    """A client of a server with 16 GiB of weights and 40 GiB of KV cache, which gives back `share` of them."""

    def __init__(self, share: float, is_lost: bool = False) -> None:
        self.url, self.used, self.share, self.is_lost = "http://n1:5", 70 * GIB, share, is_lost

    def set_weight_version(self, version, *, deadline_s=None) -> None: ...

    def abort_requests(self) -> None: ...

    def flush_cache(self, wait_s: float = 30.0) -> None: ...

    def release_memory(self, tags) -> None:
        use = self.load_memory_use()
        self.used -= int(self.share * sum(use[tag] for tag in tags) * GIB)

    def resume_memory(self, tags) -> None: ...

    def load_memory_use(self) -> dict[str, float]:
        if self.is_lost:
            raise ConnectionLostError("gone")
        return {"weights": 16.0, "kv_cache": 40.0}


def release(servers: list[Server], offload: ServerOffload = ServerOffload.all) -> tuple[ServerOffloader, list[str]]:
    said: list[str] = []
    offloader = ServerOffloader(servers, offload, lambda: [[each.used] for each in servers], said.append)
    offloader.release()
    return offloader, said


def test_what_was_freed_is_said_once_with_what_was_expected() -> None:
    servers = [Server(1.0), Server(0.9)]
    offloader, said = release(servers)
    assert said == ["servers: gave back 50.4 GiB of a GPU; 56.0 GiB were expected"]
    offloader.resume_weights()
    offloader.resume_cache()
    servers[0].share = 0.0
    offloader.release()
    assert len(said) == 1


def test_a_release_that_frees_nothing_ends_the_run_with_both_numbers() -> None:
    with pytest.raises(RuntimeError, match=r"http://n1:5 has given back 0.0 GiB of a GPU; 56.0 GiB of kv_cache and"):
        release([Server(1.0), Server(0.0)])
    with pytest.raises(RuntimeError, match=r"4.0 GiB of a GPU; 40.0 GiB of kv_cache were expected"):
        release([Server(0.1)], ServerOffload.kv_cache)


def test_a_server_that_is_lost_and_gpus_that_nobody_measures_are_passed_over() -> None:
    assert release([Server(0.0, is_lost=True)])[1] == []
    ServerOffloader([Server(0.0)], ServerOffload.all, lambda: [[]]).release()
