"""Runs that are killed, fail, lose a process or are asked to stop end as the one that nobody touched, bit for bit.

Over the fakes (tests/fakes), in one process: a kill is an exception that nothing catches, raised where the kill would
come, and what is left in the run's folder is what the next start finds. tests/e2e/test_faults.py kills real processes.
"""

import contextlib
import errno
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.disturbed import RUN, Disturbance, Killed, check_disturbed, check_resumed, run_disturbed, stop, summarize
from fakes.run import Said, World, reward_length

from megarl.cluster.calls import WorkerError
from megarl.config.errors import ConfigError
from megarl.files import CheckpointError, Folder
from megarl.interfaces import DeadlineError, SyncError
from megarl.report.record import load_metrics
from megarl.rollout.rollout_file import Journal
from megarl.signals import Stopped, stopping_on_signals
from megarl.task.reward import AsyncReward
from megarl.types import Prompt, Response, Score


def test_the_untouched_run_has_learned_and_kept_its_newest_checkpoints(untouched: dict[str, Any]) -> None:
    assert [line["iteration"] for line in untouched["metrics.jsonl"]] == [-3, -2, -1, 0, 1, 2, 3, 4]
    assert len(untouched["rollouts.jsonl"].splitlines()) == (3 + 4) * 24


Place = tuple[str] | tuple[str, str, int]
"""The key of a call to the servers; or a role, its verb, and at which of these calls"""
PLACES: dict[str, Place] = {
    "rollout of value pretraining": ("pretraining-2",),
    "update of value pretraining": ("critic", "update", 2),
    "save of value pretraining": ("critic", "begin_save", 1),
    "files of value pretraining": ("critic", "finish_save", 1),
    "start's checkpoint": ("policy", "begin_save", 1),
    "rollout": ("iteration-3/round-1",),
    "evaluation": ("evaluation-2",),
    "experience": ("policy", "logprobs", 3),
    "values": ("critic", "values", 5),
    "update of the critic": ("critic", "update", 6),
    "update of the policy": ("policy", "update", 3),
    "begin of a checkpoint": ("policy", "begin_save", 2),
    "files of a checkpoint": ("critic", "finish_save", 3),
    "sync": ("servers", "publish", 3),
    "export": ("policy", "export_weights", 1),
}
STOPS = {"rollout": 2, "experience": 2, "evaluation": 2, "sync": 2, "rollout of value pretraining": -2}
STOPS |= {"update of the policy": 3, "update of value pretraining": -1}  # They wait for the update's end.
"""The iteration of the newest checkpoint then, whether or not checkpoint.save_every=2 asks for it"""
EVENTS: dict[str, Callable[[], BaseException | None]] = {
    "driver": Killed,
    "worker": lambda: WorkerError("rank 0/1 died", lost=True),
    "signal": stop,
}
ENDING = {"driver": Killed, "signal": Stopped}
CASES = [
    *(("driver", place) for place in PLACES),
    *(("worker", place) for place, at in PLACES.items() if at[0] in ("policy", "critic")),
    *(("signal", place) for place in STOPS),
]


def disturb(error: Callable[[], BaseException | None], place: Place) -> Disturbance:
    return Disturbance(error, key=place[0]) if len(place) == 1 else Disturbance(error, *place)


@pytest.mark.parametrize(("event", "place"), CASES)
def test_a_driver_or_worker_that_dies_and_a_run_that_is_asked_to_stop_go_on_to_the_same_end(
    event: str, place: str, untouched: dict[str, Any], run_dir: Path, said: Said
) -> None:
    disturbance = disturb(EVENTS[event], PLACES[place])
    world = World(watch=disturbance.watch, on_token=disturbance.on_token)
    ends = contextlib.nullcontext() if event == "worker" else pytest.raises(ENDING[event])
    with ends as caught, stopping_on_signals():
        world.run_job(run_dir, [*RUN, "logger.terminal=true"])
    assert disturbance.has_come
    if event == "worker":
        assert "restart 1 of at most 3 (checkpoint.max_restarts)" in said()
        assert len(world.components) == 2
        assert summarize(run_dir) == untouched
        return
    if event == "signal":
        assert caught.value.exit_code == 128 + signal.SIGUSR1
        assert f"saved: resume={run_dir} resumes it" in said()
        assert read_latest(run_dir) == STOPS[place]
    check_resumed(run_dir, untouched)


def read_latest(run_dir: Path) -> int:
    """The iteration of the newest checkpoint."""
    return int((run_dir / "checkpoints" / "latest").read_text().removeprefix("iteration-"))


def test_attempts_without_a_new_checkpoint_end(run_dir: Path) -> None:
    def lose(role: str, verb: str) -> None:
        if (role, verb) == ("policy", "update"):
            raise WorkerError("policy rank 0/1 died", lost=True)

    world = World(watch=lose)
    with pytest.raises(WorkerError) as caught:
        world.run_job(run_dir, [*RUN, "checkpoint.max_restarts=2"])
    assert caught.value.__notes__[-1] == "checkpoint.max_restarts=2 have been made without a new checkpoint"
    # The first, and two in a row after the checkpoint of the start, which the first had written.
    assert len(world.components) == 3


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_gone_on_from(
    untouched: dict[str, Any], run_dir: Path, said: Said
) -> None:
    with pytest.raises(Killed):
        run_disturbed(run_dir, Disturbance(Killed, "policy", "update", 4), "checkpoint.save_every=1")
    newest = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    damaged = newest / "critic" / "state.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    World().run_job(run_dir, [*RUN, "logger.terminal=true"])
    out = said()
    assert f"renamed to {newest.name}.damaged" in out
    assert "resuming from" in out
    assert summarize(run_dir) == untouched


def test_a_folder_of_another_run_is_refused_and_so_are_other_data(run_dir: Path) -> None:
    World().run_job(run_dir, RUN)
    with pytest.raises(ConfigError, match=r"hydra.run.dir: .* has run.json, metrics.jsonl"):
        World().run_job(run_dir, RUN, is_resumed=False)
    with pytest.raises(CheckpointError, match="the data have changed"):
        World().run_job(run_dir, [*RUN, "seed=2"])


EACH = ("train.num_iterations=5", "train.eval_every=5", "checkpoint.save_every=1")
FROZEN = (*RUN, "policy.frozen_iterations=2", "checkpoint.save_every=1")
KEPT = {
    "replay": ["algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5", "train.num_minibatches=1"],
    "dynamic sampling": ["algo=dapo", "algo.dynamic_sampling.enabled=true"],
    "adaptive KL": ["algo=reinforce_pp", "algo.kl.target=0.1", "train.num_minibatches=1"],
    "running reward moments": ["algo=ppo", "algo.reward_norm.mean=running", "algo.reward_norm.std=running"],
    "tether": ["algo=ppo", "algo.advantage=tether", "algo.tether.decay=0.5", "critic.optimizer.lr=0.2"],
    "critic's replay": [
        *("algo=vapo", "algo.value_pretrain.steps=1", "critic.replay_iterations=2", "critic.optimizer.lr=0.1"),
        "train.epochs_per_iteration=2",
    ],
    "critic's prompt": [
        *("algo=vapo", "algo.value_pretrain.steps=1", "algo.dynamic_sampling.enabled=true", "reward=exact"),
        *("data=guess", "data.prompt_length=8", "data.critic_prompt='{answer}|'"),
        "model.random.alphabet=abcdef1234567-|",
    ],
    "mix": [
        *("algo=grpo", "algo.dynamic_sampling.enabled=true", "data=mix", "data.share_by=tokens"),
        "data.prompt_length=32",
        "data.sources.long={kind: letter_count, share: 2, num_heldout: 4, options: {letters: abc, max_dots: 4}}",
        "data.sources.short={kind: letter_count, share: 1, num_heldout: 4, options: {letters: def, max_dots: 3}}",
        "data.sources.short.response_length=6",
    ],
    "own estimator": ["algo=lite_ppo", "algo.advantage=fakes.own_estimator:SLOW", "algo.advantage_std=none"],
}


@pytest.mark.parametrize(
    ("run", "place"),
    [
        *(pytest.param((*given, *EACH), ("policy", "update", 4), id=name) for name, given in KEPT.items()),
        pytest.param(FROZEN, ("critic", "update", 5), id="frozen policy, update"),
        pytest.param(FROZEN, ("critic", "values", 6), id="frozen policy, values"),
    ],
)
def test_what_an_algorithm_keeps_over_the_iterations_goes_on_too(
    run: tuple[str, ...], place: tuple[str, str, int], tmp_path: Path
) -> None:
    check_disturbed(tmp_path, run, Disturbance(Killed, *place))


def test_a_run_resumed_twice_from_the_same_checkpoint_ends_as_if_once(untouched: dict[str, Any], run_dir: Path) -> None:
    for number in (4, 1):  # of the updates of the policy in that start: both times in iteration 4
        with pytest.raises(Killed):
            run_disturbed(run_dir, Disturbance(Killed, "policy", "update", number))
        assert read_latest(run_dir) == 2
    check_resumed(run_dir, untouched)


class CountingReward(AsyncReward):
    """Keeps how many responses it has scored."""

    num_scored = 0

    async def score(self, prompt: Prompt, response: Response) -> Score:
        self.num_scored += 1
        return reward_length(prompt, response)

    def state(self) -> Any:
        return {"num_scored": self.num_scored}

    def load_state(self, state: Any) -> None:
        self.num_scored = state["num_scored"]


def test_a_reward_goes_on_from_the_state_that_the_checkpoint_has(tmp_path: Path) -> None:
    run = ["algo=grpo", "train.eval_every=9", "checkpoint.save_every=1", "train.num_iterations=2"]
    first = CountingReward()
    watch = Disturbance(Killed, "policy", "update", 2).watch
    with pytest.raises(Killed):
        World(watch=watch, reward=first).run_job(tmp_path, run)
    # Within the second update: 8 held-out prompts and twice 6 x 4 responses.
    assert first.num_scored == 8 + 2 * 24
    second = CountingReward()
    World(reward=second).run_job(tmp_path, run)
    # Those of the checkpoint of the first iteration; the journal has the others' scores; the last evaluation.
    assert second.num_scored == 8 + 24 + 8


STALE = (
    *("algo=vapo", "algo.value_pretrain.steps=0", "algo.mismatch.correction=tis", "rollout.max_staleness=2"),
    *("critic.optimizer.lr=0.1", "train.num_iterations=6", "train.eval_every=2", "checkpoint.save_every=2"),
    *("logger.save_rollouts=true",),
)
STALE_PLACES: dict[str, Place] = {
    "a group": ("group-20",),
    "experience": ("policy", "logprobs", 4),
    "update of the critic": ("critic", "update", 5),
    "update of the policy": ("policy", "update", 3),
    "files of a checkpoint": ("critic", "finish_save", 2),
    "sync": ("servers", "publish", 4),
}


def check_stale(run_dir: Path) -> dict[int, list[int]]:
    """Each iteration is there once, each group in one iteration, and nothing is older than allowed.

    Returns each iteration's group numbers, in the order in which they were complete.
    """
    taken: dict[int, list[int]] = {}
    for line in (run_dir / "rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        numbers = taken.setdefault(record["iteration"], [])
        if record["group_number"] not in numbers:
            numbers.append(record["group_number"])
        assert record["weight_version"] == record["iteration"] - 1
        assert min(record["response"]["weight_versions"]) >= 0
        assert max(record["response"]["weight_versions"]) < record["iteration"]
    lines = load_metrics(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(7))
    assert [line["iteration"] for line in lines if "reward/heldout" in line] == [0, 2, 4, 6]
    assert list(taken) == list(range(1, 7))
    assert sorted(number for numbers in taken.values() for number in numbers) == list(range(6 * 6))
    for line in lines[1:]:
        assert line["rollout/staleness_max"] <= 2
    return taken


@pytest.mark.parametrize("place", STALE_PLACES)
@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_with_staleness_a_disturbed_run_learns_from_each_group_once_and_repeats_what_was_complete(
    place: str, victim: str, run_dir: Path
) -> None:
    disturbance = disturb(EVENTS[victim], STALE_PLACES[place])
    complete = []

    def watch(role: str, verb: str) -> None:
        try:
            disturbance.watch(role, verb)
        finally:
            if disturbance.has_come and not complete:
                complete.extend(Journal(run_dir / "journal").list_groups(0))

    world = World(watch=watch, on_token=disturbance.on_token)
    with contextlib.suppress(Killed):
        world.run_job(run_dir, STALE)
    assert disturbance.has_come
    if victim == "driver":
        World().run_job(run_dir, STALE)
    taken = check_stale(run_dir)
    places = [number for numbers in taken.values() for number in numbers]
    # What was journaled before is learned from at its place, and not sampled again.
    assert all(places[place] == number for place, number in complete)
    assert complete or place == "a group"


def test_with_staleness_a_run_that_is_asked_to_stop_goes_on_with_what_was_complete(run_dir: Path) -> None:
    disturbance = disturb(stop, STALE_PLACES["experience"])
    with pytest.raises(Stopped), stopping_on_signals():
        World(watch=disturbance.watch).run_job(run_dir, STALE)
    state = json.loads((run_dir / "checkpoints" / "iteration-000003" / "state.json").read_text())
    groups = state["source"]["groups"]
    assert groups["next_place"] == 18 == groups["first"] + len(groups["taken"])
    World().run_job(run_dir, STALE)
    check_stale(run_dir)
    # The oldest checkpoint that is kept is that of iteration 4: no group is needed that was taken before.
    assert all(place >= 24 for place, _ in Journal(run_dir / "journal").list_groups(0))


LAST = "evaluation-6"
ENDS: dict[str, tuple[str, ...]] = {
    "train.num_iterations": (),
    "train.max_samples": ("train.num_iterations=9", "train.max_samples=144"),
    "train.stop_at_heldout_reward": ("train.num_iterations=9", "train.stop_at_heldout_reward=0.9"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("event", ["nothing", "a signal", "a lost server"])
@pytest.mark.parametrize("end", ENDS)
def test_with_staleness_a_run_ends_where_its_last_iteration_is_evaluated_and_saved_whatever_comes_in_between(
    end: str, event: str, run_dir: Path
) -> None:
    updates, came = list[str](), list[str]()
    before = set(threading.enumerate())

    def watch(role: str, verb: str) -> None:
        updates.extend([role] if (role, verb) == ("policy", "update") else [])

    def reward(_prompt: Prompt, response: Response) -> Score:
        return Score(1.0 if len(updates) >= 6 else len(response.token_ids) / 32, True)

    def on_token(key: str | None, number: int) -> None:
        if (key, number) != (LAST, 0) or came:
            return
        came.append(event)
        if event == "a lost server":
            world.components[-1].servers.lose(0)
        elif event == "a signal":
            stop()

    world = World(watch=watch, reward=reward, on_token=on_token)
    with contextlib.suppress(Stopped), stopping_on_signals():
        world.run_job(run_dir, [*STALE, *ENDS[end]])
    assert came == [event]
    # What an evaluation says is known while the next iteration is under way.
    last = 7 if end == "train.stop_at_heldout_reward" else 6
    saved = read_latest(run_dir)
    assert saved == last or (event == "a signal" and saved == 6)
    if event == "a signal":
        world.run_job(run_dir, [*STALE, *ENDS[end]])
    lines = load_metrics(run_dir / "metrics.jsonl")
    evaluated = [line["iteration"] for line in lines if "reward/heldout" in line]
    if event == "a signal" and saved == 7:
        # The stop came after the seventh update, and the evaluation before it is lost.
        assert evaluated == [0, 2, 4, 8, 9]
    else:
        assert evaluated == sorted({0, 2, 4, 6, last})
    assert [line["iteration"] for line in lines] == list(range(evaluated[-1] + 1))
    assert not {"megarl-ahead", "megarl-rollout"} & {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.timeout(120)
def test_with_staleness_an_episode_without_an_answer_ends_the_run_by_its_deadline_and_is_named(run_dir: Path) -> None:
    def on_token(key: str | None, number: int) -> None:
        if (key, number) == ("group-35", 0):
            raise DeadlineError("http://here/generate gave no answer within 600 s")  # As SGLangClient does.

    with pytest.raises(DeadlineError) as caught:
        World(on_token=on_token).run_job(run_dir, STALE)
    assert re.fullmatch(r"in the episode group-35/0/\d of prompt '.+'", caught.value.__notes__[0])
    World().run_job(run_dir, STALE)
    check_stale(run_dir)


@pytest.mark.timeout(120)
def test_with_staleness_a_signal_ends_a_run_that_waits_for_an_episode_which_never_ends(run_dir: Path) -> None:
    released = threading.Event()

    def on_token(key: str | None, number: int) -> None:
        if (key, number) == ("group-35", 0) and not released.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            released.wait(600)

    with pytest.raises(Stopped), stopping_on_signals():
        World(on_token=on_token).run_job(run_dir, STALE)
    released.set()
    World().run_job(run_dir, STALE)
    check_stale(run_dir)


SELDOM = ("checkpoint.save_every=100", "checkpoint.max_restarts=0")
"""Only the start has a checkpoint that the loop itself asks for."""

FAILURES: list[tuple[BaseException, Place, int]] = [
    (ValueError("no tokens"), ("pretraining-3",), -1),
    (DeadlineError("no answer within 600 s"), ("iteration-3/round-1",), 2),
    (RuntimeError("refused"), ("evaluation-2",), 2),
    (WorkerError("out of memory"), ("policy", "logprobs", 4), 3),
    (WorkerError("critic rank 0/1 died", lost=True), ("critic", "values", 6), 2),
    (FloatingPointError("the gradient norm is nan"), ("critic", "update", 6), 0),
    (FloatingPointError("the gradient norm is nan"), ("policy", "update", 3), 0),
    (SyncError("wrong weights"), ("servers", "publish", 3), 2),
    (WorkerError("disk"), ("policy", "export_weights", 1), 4),
]
"""The error; where; the iteration of the newest checkpoint then"""


def get_notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize(("error", "place", "reached"), FAILURES)
def test_a_failure_stays_the_error_and_leaves_the_newest_whole_state_from_which_a_run_ends_as_untouched(
    error: BaseException, place: Place, reached: int, untouched: dict[str, Any], run_dir: Path
) -> None:
    with pytest.raises(type(error)) as caught:
        run_disturbed(run_dir, disturb(lambda: error, place), *SELDOM)
    assert caught.value is error
    assert read_latest(run_dir) == reached
    if "export_weights" not in place:  # All is saved before it begins.
        newest = f"{run_dir}/checkpoints/iteration-{reached:06}"
        assert f"resume={run_dir} resumes after iteration {reached}: {newest}" in get_notes(caught.value)
    if "update" in place:
        assert "the update of iteration 3 was not finished: its weights are not saved" in get_notes(caught.value)
    check_resumed(run_dir, untouched, [*RUN, *SELDOM])


def test_a_checkpoint_in_progress_is_completed_when_the_update_beside_it_fails(
    untouched: dict[str, Any], run_dir: Path
) -> None:
    failing = Disturbance(lambda: FloatingPointError("nan"), "policy", "update", 3)
    # Each iteration but the last ends with a checkpoint that is written beside the next one.
    with pytest.raises(FloatingPointError):
        run_disturbed(run_dir, failing, "checkpoint.save_every=1")
    assert read_latest(run_dir) == 2
    check_resumed(run_dir, untouched)


def test_a_failure_before_anything_is_learned_writes_no_checkpoint_and_says_so(run_dir: Path) -> None:
    failing = Disturbance(lambda: ValueError("no tokens"), key="iteration-1/round-1")
    world = World(on_token=failing.on_token)
    with pytest.raises(ValueError, match="no tokens") as caught:
        world.run_job(run_dir, ["algo=grpo", "train.num_iterations=2", "train.eval_every=2"])
    assert get_notes(caught.value) == [f"resume={run_dir} begins anew: there is no checkpoint yet"]
    assert not (run_dir / "checkpoints").exists()


def test_a_failed_save_is_a_note_and_hides_nothing(run_dir: Path) -> None:
    first = Disturbance(lambda: ValueError("no tokens"), key="iteration-3/round-1")
    # The first save is that of the start.
    second = Disturbance(lambda: WorkerError("policy rank 0/1 died", lost=True), "policy", "begin_save", 2)
    with pytest.raises(ValueError, match="no tokens") as caught:
        World(watch=second.watch, on_token=first.on_token).run_job(run_dir, [*RUN, *SELDOM])
    assert get_notes(caught.value) == [
        "iteration 2 was not saved: policy rank 0/1 died",
        f"resume={run_dir} resumes after iteration 0: {run_dir}/checkpoints/iteration-000000",
    ]


@pytest.mark.parametrize("error", [ValueError("no tokens"), WorkerError("critic rank 0/1 died", lost=True)])
def test_a_signal_while_a_failed_run_is_saved_replaces_no_error_and_no_attempt_follows(
    error: Exception, run_dir: Path
) -> None:
    failing = Disturbance(lambda: error, key="iteration-3/round-1")
    again = Disturbance(stop, "policy", "finish_save", 2)
    world = World(watch=again.watch, on_token=failing.on_token)
    with pytest.raises(type(error), match=str(error)), stopping_on_signals():
        world.run_job(run_dir, [*RUN, *SELDOM])
    assert again.has_come
    assert len(world.components) == 1


def test_what_failed_to_be_written_is_not_written_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Folder.publish

    def refuse(folder: Folder, iteration: int) -> Path:
        if iteration >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return publish(folder, iteration)

    world = World()
    monkeypatch.setattr(Folder, "publish", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        world.run_job(run_dir, [*RUN, "checkpoint.save_every=4"])
    (note,) = get_notes(caught.value)
    assert note.startswith(f"resume={run_dir} resumes after iteration 0: ")
    assert world.log.count(("policy", "begin_save")) == 2


def test_a_step_that_spoils_the_policy_is_said_at_once(tmp_path: Path, said: Said) -> None:
    given = ["algo=grpo", "train.num_iterations=1", "logger.terminal=true", "policy.optimizer.lr=10"]
    World().run_job(tmp_path, given)
    text = r"this iteration moved the policy by a KL of 11\.4 per token.*lower policy\.optimizer\.lr"
    assert re.search(text, said())
