"""How buckets travel from training ranks to server ranks: over a process group, through memory, or by pair over either.

`megarl.sync.reshard` describes the transport of a session to all ranks in JSON; see `open_transport`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megarl.sync.buckets import BucketTransport, Empty, Fill
from megarl.sync.group import GroupTransport
from megarl.sync.memory import MemoryTransport
from megarl.sync.plan import Bucket


class MixedTransport(BucketTransport):
    """Through memory within a node, over a process group between nodes; buckets keep their common order."""

    def __init__(
        self, memory: BucketTransport, groups: Sequence[tuple[BucketTransport, Iterable[tuple[int, int]]]]
    ) -> None:
        """groups: each with its pairs (training rank, server rank); all other pairs use memory."""
        self._memory = memory
        self._ways = {pair: group for group, pairs in groups for pair in pairs}
        self._parts = (memory, *(group for group, _ in groups))

    def sending(self, buckets: Sequence[Bucket], fill: Fill) -> Iterator[None]:
        return self._walk(buckets, lambda part, own: part.sending(own, fill))

    def receiving(self, buckets: Sequence[Bucket], empty: Empty) -> Iterator[None]:
        return self._walk(buckets, lambda part, own: part.receiving(own, empty))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _walk(
        self, buckets: Sequence[Bucket], begin: Callable[[BucketTransport, Sequence[Bucket]], Iterator[None]]
    ) -> Iterator[None]:
        """One step for each bucket: out of the common order, ranks would wait for each other in a circle."""
        steps = [begin(part, [each for each in buckets if self._pick(each) is part]) for part in self._parts]
        for bucket in buckets:
            next(steps[self._parts.index(self._pick(bucket))])
            yield
        for rest in steps:
            yield from rest

    def _pick(self, bucket: Bucket) -> BucketTransport:
        return self._ways.get((bucket.source, bucket.target), self._memory)


def open_transport(
    spec: Mapping[str, Any],
    rank: int,
    *,
    is_source: bool,
    device: torch.device,
    peers: Iterable[int] = (),
) -> BucketTransport:
    """This process's end of a transport; both ends open theirs at the same time. Raises TransportError.

    rank: within its side, training ranks or server ranks. peers: the training ranks from which a server rank receives.

    spec, the same for all ranks, is JSON. Always: `kind`, `num_sources` (training ranks), `num_targets` (server ranks),
    `deadline_s` (of each wait). By kind:

    - `memory`: `way` (a value of `Way`: "ipc", "pinned", or "pageable", which is also the only one between CPUs),
      `directories` (one for each training rank, in /dev/shm, that it creates) and `slot_bytes` (of the largest bucket).
    - `group`: `host`, and `file` (the rendezvous, which all ranks see) or else `port` (of a TCPStore at `host`).
    - `mixed`: the keys of both; `far`: the pairs [training rank, server rank] that use a group, in a list for each
      group. No two ranks of a group may be on the same GPU, which NCCL refuses.
    """
    if spec["kind"] == "group":
        return GroupTransport(spec, rank, is_source=is_source, device=device)
    far = [[(source, target) for source, target in pairs] for pairs in spec.get("far", ())]
    near = [peer for peer in peers if not any((peer, rank) in pairs for pairs in far)]
    memory = MemoryTransport(spec, rank, is_source=is_source, device=device, peers=near)
    if spec["kind"] == "memory":
        return memory
    groups: list[tuple[BucketTransport, list[tuple[int, int]]]] = []
    try:
        for number, pairs in enumerate(far):
            if rank in {pair[0 if is_source else 1] for pair in pairs}:
                group = GroupTransport(spec, rank, is_source=is_source, device=device, pairs=pairs, name=str(number))
                groups.append((group, pairs))
    except BaseException:
        MixedTransport(memory, groups).close()
        raise
    return MixedTransport(memory, groups)
