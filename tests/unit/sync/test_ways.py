"""Which way the weights of each pair of ranks take."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.schema.run import RolloutConfig, Transport
from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.ranks import Session
from megarl.sync.sync import ShardSync

COPY = Copy("w", TensorSlice(0, 0, 1, 10), "w", TensorSlice(0, 0, 1, 10), 4)


def make_session(nodes: tuple[Sequence[str], Sequence[str]], pairs: Sequence[tuple[int, int]]) -> Session:
    buckets = [Bucket(source, target, (COPY,)) for source, target in pairs]
    num_ranks = len(nodes[0]), len(nodes[1])
    pids = [100 + source for source in range(num_ranks[0])]
    return Session(dict.fromkeys(pairs, (COPY,)), buckets, 40, num_ranks, nodes, pids)


TWO_NODES = make_session((["a", "b"], ["a", "b"]), [(0, 0), (0, 1), (1, 0), (1, 1)])
ONE_NODE = make_session((["a", "a"], ["a"]), [(1, 0)])


def test_pairs_of_ranks_on_two_nodes_are_far_and_those_of_a_node_of_servers_together() -> None:
    assert (TWO_NODES.near, TWO_NODES.far) == ([(0, 0), (1, 1)], [[(0, 1)], [(1, 0)]])
    three = make_session((["a", "b", "c"], ["b", "b", "c"]), [(s, t) for s in range(3) for t in range(3)])
    assert three.far == [[(0, 0), (0, 1), (2, 0), (2, 1)], [(0, 2), (1, 2)]]
    for pairs in three.far:
        training, serving = ({three.nodes[side][pair[side]] for pair in pairs} for side in range(2))
        assert not training & serving


@pytest.mark.parametrize(
    ("session", "transport", "kind", "owners", "far"),
    [
        (ONE_NODE, Transport.colocated, "memory", [None, "101"], []),
        (TWO_NODES, Transport.colocated, "memory", ["100", "101"], [[(0, 1)], [(1, 0)]]),
        (ONE_NODE, Transport.split, "group", [], None),
    ],
)
def test_ranks_of_a_node_use_memory_named_after_its_process_others_a_group_and_split_ranks_always_a_group(
    session: Session, transport: Transport, kind: str, owners: list[str | None], far: list[Any] | None
) -> None:
    config = RolloutConfig(transport=transport, sync_deadline_s=7.0)
    sync: Any = SimpleNamespace(_config=config, _host="127.0.0.1", _scratch=Path("/scratch"), _directories=[])
    sync._remove_memory = lambda: None
    sync._describe_group = lambda: ShardSync._describe_group(sync)
    spec = ShardSync._describe_transport(sync, session)
    assert (spec["kind"], spec["deadline_s"], spec.get("far")) == (kind, 7.0, far)
    found = [path and path.rpartition("/dev/shm/megarl-sync-")[2].split("-")[0] for path in spec.get("directories", [])]
    assert found == owners
    assert spec.get("slot_bytes", 64) == 64
    assert str(spec.get("file")).startswith("/scratch/sync-") is (far != [])
