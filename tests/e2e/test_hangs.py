"""A rank that stops or dies in the middle of a collective ends the wait, with a word of who waits where."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from loop_parts import build_policy

from megarl.cluster.actors import WorkerGroup
from megarl.cluster.calls import PendingCall, WorkerError
from megarl.cluster.opened import Cluster, open_ray
from megarl.cluster.process import CallState, CallTracker, RankStacks, dump_on_signal, identify, redirect_output
from megarl.config.placement import DeviceSlot
from megarl.config.schema.roles import ParallelConfig
from megarl.config.schema.root import ClusterConfig
from megarl.interfaces import DeadlineError
from megarl.types import Sequences

pytestmark = pytest.mark.slow

DEADLINE_S = 15.0
START_DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    before = set(psutil.Process().children(recursive=True))
    with open_ray(ClusterConfig(), num_actors=5) as opened:
        yield opened
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
def group(cluster: Cluster, tiny_checkpoint: Path, tmp_path: Path) -> Iterator[WorkerGroup]:
    """Two tensor-parallel ranks: every forward pass has collectives."""
    parallel = ParallelConfig(num_processes=2, tp=2)
    spec = replace(build_policy(tiny_checkpoint), parallel=parallel, deadline_s=DEADLINE_S)
    running = WorkerGroup(spec, tmp_path, cluster, (DeviceSlot(), DeviceSlot()), START_DEADLINE_S)
    assert "in float32" in running.start().result()
    yield running
    running.close()


def find_pid(group: WorkerGroup, rank: int) -> int:
    _, pid = ray.get(group._ranks.identities[rank])
    return pid


def build_sequences() -> Sequences:
    return Sequences(torch.arange(12) % 9, torch.tensor([6, 6]), torch.tensor([2, 3]))


def start_call(group: WorkerGroup) -> PendingCall[torch.Tensor]:
    return group.logprobs(build_sequences(), 1.0)


def test_a_stopped_and_a_killed_rank_are_named_and_the_others_say_where_they_wait(group: WorkerGroup) -> None:
    pid = find_pid(group, 1)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError) as late:
        start_call(group).result()
    message = str(late.value)
    names = "reference rank 0/2, reference rank 1/2"
    assert message.startswith(f"reference.logprobs: no answer from {names} within {DEADLINE_S:g} s:\n")
    waiting, stopped = re.split(r"\n(?=reference rank 1)", message)
    assert re.search(r"reference rank 0/2: in logprobs for \d+ s, at(\n    .*)+ all_reduce: ", waiting)
    assert re.search(rf"^reference rank 1/2: gives no stack; its process {pid} on \S+ is stopped$", stopped)

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError) as dead:
        start_call(group).result()
    message = str(dead.value)
    assert message.startswith("reference.logprobs: reference rank 1/2 died: ")
    assert re.search(r"reference rank 0/2(.*\n)+.*all_reduce", message)


def test_a_rank_that_fails_alone_is_named_and_the_other_says_where_it_waits_for_it(group: WorkerGroup) -> None:
    good, pending = build_sequences(), start_call(group)
    assert [result is None for result in ray.get(list(pending.refs))] == [False, True]
    bad = replace(good, tokens=good.tokens + 10**6)
    refs = [actor.call.remote("logprobs", part, 1.0) for actor, part in zip(group._actors, (good, bad), strict=True)]
    with pytest.raises(WorkerError) as caught:
        replace(pending, refs=tuple(refs)).result()
    message = str(caught.value)
    assert message.startswith("reference.logprobs: reference rank 1/2 failed:\n")
    assert "token 1000008 is outside the vocabulary" in message
    assert re.search(r"reference rank 0/2: in logprobs for \d+ s, at(\n    .*)+ all_reduce: ", message)


@ray.remote(num_cpus=1, max_restarts=0, concurrency_groups={"watch": 1})
class Rank:
    """A rank whose calls are not Megatron's."""

    def __init__(self, log: Path):
        redirect_output(log)
        dump_on_signal()
        self.tracker = CallTracker()

    def hold_the_lock(self) -> int:
        with self.tracker.enter("hold_the_lock"):
            # One native loop: no other thread of this process can run Python meanwhile.
            return sum(range(10**11))

    @ray.method(concurrency_group="watch")
    def find_state(self) -> CallState | None:
        return self.tracker.find_state()

    @ray.method(concurrency_group="watch")
    def identify(self) -> tuple[str, int]:
        return identify()


def test_a_rank_that_cannot_answer_leaves_its_stack_in_its_log(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    actor = Rank.remote(log)
    ranks = RankStacks([actor], ["rank 0/1"], [actor.identify.remote()], [log])
    _, pid = ray.get(ranks.identities[0])
    assert ranks.explain([0]) == "rank 0/1: in no call"
    ref = actor.hold_the_lock.remote()
    deadline = time.monotonic() + 60
    while (text := ranks.explain([0])) == "rank 0/1: in no call" and time.monotonic() < deadline:
        assert not ray.wait([ref], timeout=0.1)[0]
    assert text.startswith(f"rank 0/1: its stack is at the end of {log}; its process {pid} on ")
    while "in hold_the_lock" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "in hold_the_lock" in log.read_text()
    ray.kill(actor)
