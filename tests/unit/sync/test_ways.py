"""Which way the weights of each pair of ranks take: what the ranks are asked, and what they are told."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.run import RolloutConfig, Transport
from megarl.sync.plan import Bucket, Copy, Plan, TensorSlice
from megarl.sync.ranks import Ranks, Session
from megarl.sync.sync import ShardSync
from megarl.sync.transport import GroupTransport, Way

COPY = Copy("w", TensorSlice(0, 0, 1, 10), "w", TensorSlice(0, 0, 1, 10), 4)


def make_session(nodes: tuple[Sequence[str], Sequence[str]], pairs: Sequence[tuple[int, int]]) -> Session:
    buckets = [Bucket(source, target, (COPY,)) for source, target in pairs]
    plan = Plan(dict.fromkeys(pairs, (COPY,)))
    num_ranks = len(nodes[0]), len(nodes[1])
    return Session(plan, buckets, 40, 40, num_ranks, nodes, [100 + source for source in range(num_ranks[0])])


TWO_NODES = make_session((["a", "b"], ["a", "b"]), [(0, 0), (0, 1), (1, 0), (1, 1)])


class AskedRanks(Ranks):
    """Ranks whose answers are given."""

    def __init__(self, offers: list[Any], answers: list[str | None]) -> None:
        self.offers, self.answers = offers, answers
        self.tried: list[Any] = []

    def call_senders(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        assert verb == "offer_memory"
        return self.offers

    def call_receivers(self, verb: str, arguments: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        assert (verb, arguments is None) == ("try_memory", False)
        self.tried = list(arguments or ())
        return self.answers


def test_pairs_of_ranks_on_two_nodes_are_far_and_those_of_a_node_of_servers_together() -> None:
    assert (TWO_NODES.near, TWO_NODES.far) == ([(0, 0), (1, 1)], [[(0, 1)], [(1, 0)]])
    three = make_session((["a", "b", "c"], ["b", "b", "c"]), [(s, t) for s in range(3) for t in range(3)])
    assert three.far == [[(0, 0), (0, 1), (2, 0), (2, 1)], [(0, 2), (1, 2)]]
    for pairs in three.far:
        training, serving = ({three.nodes[side][pair[side]] for pair in pairs} for side in range(2))
        assert not training & serving


def test_server_ranks_try_the_memory_of_training_ranks_of_their_node() -> None:
    offers = [{"handle": "0", "pattern": ""}, {"handle": "1", "pattern": ""}]
    ranks = AskedRanks(offers, [None, None])
    assert ranks.try_memory(TWO_NODES)[0] is Way.ipc
    assert ranks.tried == [{"offers": {0: offers[0]}}, {"offers": {1: offers[1]}}]


@pytest.mark.parametrize(
    ("offers", "answers", "way", "why"),
    [
        ([{}, {}], [None, "no"], Way.pinned, "server rank 1: no"),
        ([{"refusal": "full"}, {}], [None, None], Way.pinned, "training rank 0's memory: full"),
        ([None, None], [None, None], Way.pageable, "there is no GPU"),
    ],
)
def test_one_refusal_decides_for_all_and_without_a_gpu_nobody_is_asked(
    offers: list[Any], answers: list[str | None], way: Way, why: str
) -> None:
    assert AskedRanks(offers, answers).try_memory(TWO_NODES) == (way, why)


def describe(session: Session, transport: Transport, offers: list[Any], answers: list[str | None]) -> dict[str, Any]:
    config = RolloutConfig(transport=transport, sync_deadline_s=7.0)
    sync = ShardSync(
        SimpleNamespace(),  # type: ignore[arg-type]
        [],
        config,
        AskedRanks(offers, answers),
        [],
        scratch=Path("/scratch"),
        host="127.0.0.1",
        policy_dtype=Dtype.bfloat16,
    )
    return sync._describe_transport(session)


def test_the_rings_of_a_node_have_the_names_of_the_processes_that_make_them() -> None:
    near = make_session((["a", "a"], ["a"]), [(1, 0)])
    spec = describe(near, Transport.colocated, [{}, {}], [None])
    assert (spec["kind"], spec["way"], spec["slot_bytes"], spec["deadline_s"]) == ("memory", "ipc", 64, 7.0)
    nothing, directory = spec["directories"]
    assert nothing is None
    assert directory.startswith("/dev/shm/megarl-sync-101-")


def test_colocated_ranks_of_several_nodes_use_memory_and_a_group_by_pair() -> None:
    spec = describe(TWO_NODES, Transport.colocated, [None, None], [])
    assert (spec["kind"], spec["way"], spec["far"]) == ("mixed", "pageable", [[(0, 1)], [(1, 0)]])
    assert all(spec["directories"])
    assert spec["file"].startswith("/scratch/sync-")


def test_split_ranks_use_a_group_even_on_one_node() -> None:
    near = make_session((["a"], ["a"]), [(0, 0)])
    spec = describe(near, Transport.split, [], [])
    assert spec["kind"] == "group"
    assert "far" not in spec


def test_page_locked_memory_is_a_warning_that_says_why() -> None:
    with pytest.warns(RuntimeWarning, match="page-locked memory, not from GPU to GPU: server rank 0: not permitted"):
        describe(TWO_NODES, Transport.colocated, [{}, {}], ["not permitted", None])


class PolledWork:
    """NCCL's work as `GroupTransport` polls it: complete when asked for the n-th time."""

    def __init__(self, n: int) -> None:
        self.left, self.has_waited = n, False

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def wait(self) -> None:
        assert self.left <= 0, "torch's own wait would poll every 10 ms"
        self.has_waited = True


def test_nccl_is_polled_until_the_deadline_and_waited_for_once_it_is_complete() -> None:
    transport = GroupTransport.__new__(GroupTransport)
    transport._timeout = timedelta(seconds=0.05)
    transport._device = torch.device("cuda")
    work = PolledWork(5)
    transport._wait((TWO_NODES.buckets[0], work), "sent to")  # type: ignore[arg-type]
    assert work.has_waited
    with pytest.raises(RuntimeError, match=r"a bucket was not sent to server rank 0: not within 0.05 s"):
        transport._wait((TWO_NODES.buckets[0], PolledWork(10**9)), "sent to")  # type: ignore[arg-type]
