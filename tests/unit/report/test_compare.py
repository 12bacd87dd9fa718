"""The comparison of several runs: what it reads, what it computes, and that its page is whole and safe; a metrics.jsonl
of any length, read in one pass, as a bounded number of points.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_run import Page

from megarl.report.page import find_parameters, format_comparison, group_settings, sort_values
from megarl.report.record import (
    MFU,
    MOST_POINTS,
    UNFINISHED,
    History,
    Outcome,
    RunRecord,
    State,
    add_mfu,
    derive_metrics,
    format_outcomes,
    load_history,
    load_outcome,
    load_runs,
    load_sweep,
    write_outcome,
)


def build_record(
    name: str, config: dict[str, object], overrides: list[str], state: str = "done", why: str = ""
) -> RunRecord:
    return RunRecord(Path(name), name, state, why, config, overrides, [], History(), [])


def build_run(name: str, **values: object) -> RunRecord:
    config = {key.replace("__", "."): value for key, value in values.items()}
    return build_record(name, config, [f"{key}={value}" for key, value in config.items()])


def write_run(folder: Path, config: dict[str, object], heldout: list[float], outcome: Outcome | None) -> None:
    (folder / ".hydra").mkdir(parents=True)
    overrides = [f"{key}={value}" for key, value in config.items()]
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {json.dumps(text)}\n" for text in overrides))
    (folder / "run.json").write_text(json.dumps({"overrides": overrides, "config": config}))
    lines = [{"iteration": i, "reward/heldout": v, "time/rollout": 1.5} for i, v in enumerate(heldout)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if outcome is not None:
        write_outcome(folder, outcome)


def build_preset_run(name: str, overrides: str, clip: float, **more: object) -> RunRecord:
    config = {"algo.name": name, "algo.clip_high": clip, "cluster.x": name, **more}
    return build_record(f"{name}{overrides}", config, overrides.split())


@pytest.mark.parametrize(
    ("runs", "parameters"),
    [
        (
            [build_run(f"{c}{s}", seed=s, algo__clip=c, algo__name="a") for c in (1, 2) for s in (1, 2)],
            "algo.clip seed",
        ),
        ([build_run("1", seed=1)], ""),
        ([], ""),
        # What a preset sets beside its name is left out, and bookkeeping, too.
        ([build_preset_run("ppo", "algo=ppo", 0.2), build_preset_run("vapo", "algo=vapo", 0.28)], "algo.name"),
        # What an experiment sets is known by nothing else.
        (
            [build_preset_run("a", "experiment=a", 0.2, seed=1), build_preset_run("a", "experiment=b", 0.28, seed=1)],
            "algo.clip_high",
        ),
    ],
)
def test_parameters_are_what_the_command_lines_give_differently_with_the_seed_last(runs, parameters):
    assert find_parameters(runs) == parameters.split()


def test_a_setting_has_the_scores_of_its_seeds_and_the_best_mean_is_first():
    runs = [
        build_run(f"{c}{s}", algo__clip=c, algo__lam=lam, seed=s) for c, lam in ((0.2, "a"), (0.3, 1)) for s in (1, 2)
    ]
    scores = {"0.21": 0.1, "0.22": 0.3, "0.31": 0.6}
    found = group_settings(runs, ["algo.clip", "algo.lam", "seed"], scores)
    assert list(found.items()) == [(("0.3", "1"), [0.6]), (("0.2", "a"), [0.1, 0.3])]
    assert sort_values({"adaptive", "1", "0.95", "10", "9e-1"}) == ["9e-1", "0.95", "1", "10", "adaptive"]


def test_an_outcome_comes_back_and_a_damaged_one_is_named(tmp_path):
    assert load_outcome(tmp_path) is None
    write_outcome(tmp_path, Outcome(State.done, results={"iterations": 3, "reward/heldout": 0.5, "x": float("nan")}))
    assert load_outcome(tmp_path) == Outcome(State.done, results={"iterations": 3, "reward/heldout": 0.5})
    for damaged in ("{", "[]", '{"outcome": {"state": "odd", "why": "", "results": {}}}', '{"outcome": {"why": ""}}'):
        (tmp_path / "run.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"run\.json: is not what a run writes"):
            load_outcome(tmp_path)


def test_a_page_shows_every_run_escapes_all_text_and_names_what_is_missing_or_damaged(tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    done = Outcome(State.done, results={"reward/heldout": 0.5})
    write_run(tmp_path / "a", {"algo.clip_high": 0.2, "seed": 1}, [0.1, 0.5], done)
    write_run(tmp_path / "b", {"algo.clip_high": evil, "seed": 1}, [0.1, 0.7], done)
    write_run(tmp_path / "c", {"algo.clip_high": 0.3, "seed": 1}, [0.1], Outcome(State.failed, f"OSError: {evil}"))
    write_run(tmp_path / "d", {"algo.clip_high": 0.4, "seed": 1}, [], None)
    (tmp_path / "d" / "metrics.jsonl").write_text('{"iteration": 0, "reward/heldout": 0.3}\nnonsense\n{"iteration": 2}')
    write_run(tmp_path / "e", {"algo.clip_high": 0.4, "seed": 1}, [], done)
    (tmp_path / "e" / "metrics.jsonl").unlink()
    (tmp_path / "f" / ".hydra").mkdir(parents=True)
    (tmp_path / "f" / "run.json").write_text("{")
    (tmp_path / "logs").mkdir()
    write_run(tmp_path / "a.aside-1", {"seed": 1}, [0.1], Outcome(State.failed))
    copied = tmp_path / "elsewhere" / "copies" / "a"
    write_run(copied, {"seed": 2}, [0.1], done)
    assert [run.name for run in load_runs([tmp_path / "a", copied])] == ["a", "elsewhere/copies/a"]
    runs = load_sweep(tmp_path)
    assert [run.name for run in runs] == ["a", "b", "c", "d", "e", "f"]
    assert [run.state for run in runs] == ["done", "done", "failed", UNFINISHED, "done", UNFINISHED]
    page = format_comparison("Sweep", runs)
    found = Page(page)
    assert found.loads == []
    assert found.tags.count("script") == 2
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count('<td data-run="') == 6
    for named in ("d/metrics.jsonl:2", "(and 1 lines more)", "e/metrics.jsonl: cannot be read", "f/run.json"):
        assert named in page, named
    assert "http" not in page.replace("http-equiv", "")
    # For the terminal there is a line of each run.
    header, first, *_ = format_outcomes(runs).splitlines()
    assert header.split() == ["run", "state", "iterations", "held-out", "reward", "why"]
    assert first.split() == ["a", "done", "1", "0.5000"]


def build_history(values: list[float]) -> History:
    history = History()
    for iteration, value in enumerate(values, start=1):
        history.add({"iteration": iteration, "x": value})
    return history


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5 * MOST_POINTS))
def test_points_of_a_long_file_keep_its_mean_its_range_and_its_order(values):
    history = build_history(values)
    found = [point.metrics["x"] for point in history.points]
    assert len(found) <= MOST_POINTS
    assert sum(each.count for each in found) == len(values)
    assert sum(each.total for each in found) == pytest.approx(sum(values), abs=1e-3)
    assert (min(each.low for each in found), max(each.high for each in found)) == (min(values), max(values))
    ends = [(point.first, point.last) for point in history.points]
    assert [first for first, _ in ends] == [1, *(last + 1 for _, last in ends[:-1])]
    assert all(point.num_lines == history.width for point in history.points[:-1])


def test_lines_that_cannot_be_read_are_left_out_and_named_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "x": 1.0}\nnonsense\n[]\n{"iteration": 2, "x": 2.0}\n{"iteration": 3')
    problems: list[str] = []
    history = load_history(path, problems)
    assert history.num_lines == 2
    assert len(problems) == 1
    assert f"{path}:2" in problems[0]
    assert "2 lines more" in problems[0]
    assert [line["x"] for line in history.lines] == [1.0, 2.0]
    assert load_history(tmp_path / "none", problems).points == []
    assert "none: cannot be read" in problems[1]


def test_shares_and_mfu_follow_from_the_phases():
    history = History()
    for update in (2.0, 4.0):
        line = {"iteration": int(update), "perf/time_per_step": 10.0, "time/start": 99.0, "time/rollout": 6.0}
        line |= {"time/update": update, "time/evaluate": 2.0}
        line |= {"policy/model_tflop_sum": 3.0, "critic/model_tflop_sum": 1.0}
        history.add(line | derive_metrics(line))
    add_mfu(history, peak_tflops=4.0)
    assert [line[MFU] for line in history.lines] == [0.5, 0.25]
    assert history.last[MFU] == 0.25
    assert history.last["derived/rollout_frac"] == 0.6
    assert history.last["derived/servers_idle_frac"] == pytest.approx(0.2)
    assert derive_metrics({"time/sync": 1.0}) == {}
