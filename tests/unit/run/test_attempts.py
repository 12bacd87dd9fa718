"""When an attempt or a call is worth another one, who is started when, and how a run says what ended it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.backend import Done
from fakes.run import World

from megarl.cluster.calls import WorkerError
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.interfaces import DeadlineError, SyncError
from megarl.report.page import format_run_page
from megarl.report.record import State, load_outcome, load_run
from megarl.run.components import Recovery
from megarl.run.job import is_loss, run_job, wait_started
from megarl.trainer import find_limit, format_limit


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (WorkerError("critic rank 0/1 died", lost=True), True),
        (DeadlineError("policy.update: no answer"), True),
        (caused_by(SyncError("the policy's ranks"), WorkerError("policy rank 1/2 died", lost=True)), True),
        # These would fail again.
        (WorkerError("policy rank 0/1 failed: FloatingPointError"), False),
        (SyncError("the servers do not hold the weights"), False),
        (caused_by(RuntimeError("a"), ValueError("b")), False),
    ],
)
def test_a_dead_process_or_one_that_gives_no_answer_is_a_loss(error: Exception, is_one: bool):
    assert is_loss(error) is is_one


def test_a_job_that_does_not_fit_its_gpus_is_refused_before_it_takes_its_folder(tmp_path: Path) -> None:
    gpu = ["cluster=h100x8", "cluster.hardware.memory_gib=1"]
    config = load_config(["algo=grpo", "model=tiny", *gpu])
    with pytest.raises(ConfigError) as caught:
        run_job(config, tmp_path / "run")
    assert any("GiB of 1.0" in problem for problem in caught.value.problems)
    assert caught.value.problems[-1].startswith("cluster.hardware: the job does not fit H100 SXM5 80 GB; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("roles_first", [True, False])
def test_servers_that_share_gpus_start_once_every_role_is_ready_and_others_beside_them(roles_first: bool) -> None:
    events: list[str] = []

    class Role:
        def wait(self, timeout_s: float) -> bool:
            events.append("role ready")
            return True

    class FailingRole:
        def wait(self, timeout_s: float) -> bool:
            raise RuntimeError("policy failed")

    def start_servers() -> Done[list[str]]:
        events.append("servers begin")
        return Done([])

    wait_started([Role(), Role()], SimpleNamespace(start=start_servers), roles_first=roles_first)
    assert events[:3] == (["role ready"] * 2 + ["servers begin"] if roles_first else ["servers begin", *events[1:3]])
    del events[:]
    with pytest.raises(RuntimeError, match="policy failed"):
        wait_started([FailingRole()], SimpleNamespace(start=start_servers), roles_first=roles_first)
    assert events == ["servers begin"] * (not roles_first)


LOSS = "server 1/2 was lost: it exited with status 137"
RESTART = ["restart server 1/2", "reconnect"]


class Servers:
    """Counts down: the first `num_losses` looks find a lost server. Everything that happens goes into `events`."""

    def __init__(self, num_losses: int, num_failures: int, starts: bool = True):
        self.num_losses, self.num_failures, self.starts, self.events = num_losses, num_failures, starts, []

    def find_lost(self):
        self.events.append("find")
        self.num_losses -= 1
        return {"server 1/2": "it exited with status 137"} if self.num_losses >= 0 else {}

    def restart(self, names):
        self.events.append(f"restart {' '.join(names)}")
        if not self.starts:
            raise RuntimeError("port 5 is taken")

    def ask(self):
        """Fails `num_failures` times."""
        self.events.append("ask")
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise RuntimeError("no answer")
        return "answer"

    def refill(self):
        self.events.append("refill")

    def recover(self, max_restarts: int = 3) -> Recovery:
        return Recovery(self, self.events.append, max_restarts, lambda: self.events.append("reconnect"))


def test_a_call_is_repeated_after_a_loss_once_the_servers_are_filled():
    servers = Servers(1, 1)
    assert servers.recover().run(servers.ask, servers.refill) == "answer"
    assert servers.events == ["ask", "find", f"{LOSS}; restart 1 of at most 3", *RESTART, "refill", "ask"]


@pytest.mark.parametrize(
    ("num_losses", "max_restarts", "starts", "message", "num_refills", "notes"),
    [
        (0, 3, True, "no answer", 0, []),  # an error that no loss explains
        (9, 2, True, "no answer", 2, [f"{LOSS}; rollout.max_server_restarts=2 have been made in a row"]),
        (9, 0, True, "no answer", 0, []),
        (1, 3, False, "port 5 is taken", 0, []),
    ],
)
def test_what_ends_a_run(num_losses, max_restarts, starts, message, num_refills, notes):
    servers = Servers(num_losses, 9, starts)
    with pytest.raises(RuntimeError, match=message) as caught:
        servers.recover(max_restarts).run(servers.ask, servers.refill)
    assert getattr(caught.value, "__notes__", []) == notes
    assert servers.events.count("refill") == num_refills


def test_a_server_lost_while_the_weights_come_back_counts_as_another_loss():
    servers = Servers(2, 1)

    def refill():
        servers.refill()
        if servers.events.count("refill") == 1:
            raise RuntimeError("lost again")

    assert servers.recover().run(servers.ask, refill) == "answer"
    second = f"{LOSS}; restart 2 of at most 3"
    assert servers.events[3:] == [*RESTART, "refill", "find", second, *RESTART, "refill", "ask"]


def test_restarts_of_one_call_do_not_count_for_the_next_and_other_errors_are_not_looked_into():
    servers = Servers(2, 1)
    recovery = servers.recover(1)
    assert recovery.run(servers.ask) == "answer"
    servers.num_failures = 1
    assert recovery.run(servers.ask) == "answer"
    del servers.events[:]
    with pytest.raises(ValueError, match="99"):
        recovery.run(lambda: int("token 99"))
    assert servers.events == []


@pytest.mark.parametrize(
    ("minutes", "num_samples", "heldout_reward", "reached"),
    [
        (4.01, 0, 0.1, "after 4 minutes (train.max_minutes)"),
        (1.0, 48, 0.1, "after 48 responses, of at least 30 (train.max_samples)"),
        (1.0, 0, 0.625, "at the held-out reward 0.6250, of at least 0.5 (train.stop_at_heldout_reward)"),
        (3.9, 29, float("nan"), None),
    ],
)
def test_each_limit_is_named_by_its_key_with_what_was_reached(
    minutes: float, num_samples: int, heldout_reward: float, reached: str | None
) -> None:
    keys = ["train.max_minutes=4", "train.max_samples=30", "train.stop_at_heldout_reward=0.5"]
    limit = find_limit(load_config(keys).train, minutes, num_samples, heldout_reward)
    found = None if limit is None else format_limit(limit, 3, 8)
    assert found == (None if reached is None else f"ended {reached}: 3 of 8 iterations")
    assert find_limit(load_config([]).train, 1e9, 10**9, 1.0) is None


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_a_limit_ends_says_how_it_goes_on_and_where_its_model_is(saved: bool, tmp_path: Path) -> None:
    keys = ["algo=lite_ppo", "train.num_iterations=50", "train.max_samples=30"]
    keys += [] if saved else ["checkpoint.save_every=null"]
    summary = World().run_job(tmp_path, keys)
    assert summary.limit is not None
    assert summary.limit.key == "train.max_samples"
    *lines, done = (tmp_path / "train.log").read_text().splitlines()[-4:]
    assert "done: iterations=2 reward/heldout=" in done
    outcome, why = (
        load_outcome(tmp_path),
        "ended after 48 responses, of at least 30 (train.max_samples): 2 of 50 iterations",
    )
    assert (outcome.state, outcome.why) == (State.done, why)
    assert why in "".join(format_run_page(load_run(tmp_path)))
    go_on = f"; go on with megarl train resume={tmp_path} train.max_samples=null" if saved else ""
    assert lines[0].endswith(f"ended after 48 responses, of at least 30 (train.max_samples): 2 of 50 iterations{go_on}")
    assert "held-out reward: " in lines[1]
    model = tmp_path / "policy"
    evaluation = f"megarl evaluate model=checkpoint model.path={model}"
    assert lines[2].endswith(f"trained model: {model} ({evaluation}); report: megarl report {tmp_path}")


def test_a_run_that_makes_all_its_iterations_names_no_limit(tmp_path: Path) -> None:
    keys = ["algo=lite_ppo", "train.num_iterations=2", "train.max_samples=48"]
    assert World().run_job(tmp_path, keys).limit is None
    assert "ended after" not in (tmp_path / "train.log").read_text()
