"""How a run that ends before its last iteration says why."""

import json
from pathlib import Path

import pytest
from fakes.run import World

from megarl.config.load import load_config
from megarl.report.page import format_run_page
from megarl.report.record import load_run
from megarl.run import attempts
from megarl.run.limits import Limit, find_limit, format_limit
from megarl.trainer import Summary


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
def test_a_run_that_a_limit_ends_says_how_it_goes_on_and_where_its_model_is(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["algo=lite_ppo", "train.num_iterations=50", "train.max_samples=30"]
    keys += [] if saved else ["checkpoint.save_every=null"]
    summary = World().run_job(monkeypatch, tmp_path, keys)
    assert summary.limit is not None
    assert summary.limit.key == "train.max_samples"
    lines = (tmp_path / "train.log").read_text().splitlines()[-3:]
    go_on = f"; go on with megarl train resume={tmp_path} train.max_samples=..." if saved else ""
    assert lines[0].endswith(f"ended after 48 responses, of at least 30 (train.max_samples): 2 of 50 iterations{go_on}")
    assert "held-out reward: " in lines[1]
    model = tmp_path / "policy"
    evaluation = f"megarl evaluate model=checkpoint model.path={model}"
    assert lines[2].endswith(f"trained model: {model} ({evaluation}); page: megarl report {tmp_path}")


def test_a_run_that_makes_all_its_iterations_names_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["algo=lite_ppo", "train.num_iterations=2", "train.max_samples=48"]
    assert World().run_job(monkeypatch, tmp_path, keys).limit is None
    assert "ended after" not in (tmp_path / "train.log").read_text()


def test_the_limit_is_in_the_outcome_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(*_arguments: object, **_keys: object) -> Summary:
        return Summary(3, 0.5, Limit("train.max_minutes", "after 4 minutes", "train.max_minutes=..."))

    monkeypatch.setattr(attempts, "run_job", run_job)
    attempts.run_recorded(load_config(["train.num_iterations=8"]), tmp_path)
    why = "ended after 4 minutes (train.max_minutes): 3 of 8 iterations"
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["state"], outcome["why"]) == ("done", why)
    assert why in "".join(format_run_page(load_run(tmp_path)))
