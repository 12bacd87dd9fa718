"""The report room: metrics.jsonl, TensorBoard, and what a person reads of a run: the live display, lines of at most 80
columns, samples, durations; each sink with its real package, offline (without the package of an extra its tests are
skipped), and a missing one is an error that names the key.
"""

import contextlib
import io
import math
import os
import pty
import re
import select
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_run import make_sample

from megarl.config.load import load_config
from megarl.config.schema.root import LoggerConfig, WandbMode
from megarl.report import record
from megarl.report.record import load_ids, load_metrics, load_record
from megarl.report.report import Report, build_report
from megarl.report.text import INDENT, LOG_WIDTH, LONGEST_TEXT, MOST_LINES, format_sample, format_samples, wrap
from megarl.types import FinishReason, Response, Sample, Score, Turn

TEXT_ONLY = LoggerConfig(tensorboard=False, terminal=True, num_logged_samples=2)


def build_text_report(run_dir: Path, num_iterations: int = 3) -> tuple[Report, io.StringIO]:
    stream = io.StringIO()
    return build_report(TEXT_ONLY, run_dir, num_iterations, stream=stream), stream


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"policy/loss": math.nan}, "metric 'policy/loss' is nan"),
        ({"policy/loss": True}, "metric 'policy/loss' is bool, not an int or a float"),
        ({"iteration": 2.0}, "may not be named 'iteration'"),
        ({"time/sync": 1.0}, "'time/sync' has the name of a phase"),
    ],
)
def test_a_metric_that_is_no_number_or_has_a_taken_name_is_refused_and_nothing_is_written(
    tmp_path: Path, metrics: dict[str, float], problem: str
) -> None:
    report, stream = build_text_report(tmp_path)
    with report.phase("sync"):
        pass
    with pytest.raises((TypeError, ValueError), match=re.escape(problem)):
        report.log(1, {"reward/mean": 0.5, **metrics})
    report.close()
    assert (tmp_path / "metrics.jsonl").read_text() == stream.getvalue() == ""


def test_a_resumed_run_appends_after_cutting_off_a_half_written_line_and_a_line_is_on_disk_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "reward/mean": 0.5}\n{"iteration": 2, "rew')
    report, stream = build_text_report(tmp_path)
    report.log(2, {"reward/mean": 0.1 + 0.2, "sync/bytes": 12})
    assert load_metrics(path)[1] == {"iteration": 2, "reward/mean": 0.1 + 0.2, "sync/bytes": 12}
    report.close()
    report.close()
    assert "unfinished last line of 21 bytes" in stream.getvalue()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metrics.jsonl", "train.log"]


def test_phases_are_timed_summed_over_the_iteration_also_one_that_fails_and_are_in_the_record(tmp_path: Path) -> None:
    report, _ = build_text_report(tmp_path)
    start, seen = time.perf_counter(), [load_record(tmp_path)]
    for _ in range(2):
        with contextlib.suppress(RuntimeError), report.phase("rollout"):
            seen.append(load_record(tmp_path)["status"])
            time.sleep(0.02)
            raise RuntimeError("a server died")
    seconds = time.perf_counter() - start
    seen.append(load_record(tmp_path)["status"])
    report.log(1, {})
    report.rewind(1)
    with report.phase("sync"):
        seen.append(load_record(tmp_path)["status"])
    report.log(2, {})
    report.close()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert 0.04 <= lines[0]["time/rollout"] <= seconds
    assert "time/rollout" not in lines[1]
    empty, *seen = seen
    assert empty == {}
    assert [status["phase"] for status in seen] == ["rollout", "rollout", None, "sync"]
    assert [status["iteration"] for status in seen] == [0, 0, 0, 1]
    assert all(status["pid"] == os.getpid() for status in seen)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json\n", "Expecting value"),
        ("[1, 2]\n", 'not a JSON object with a whole "iteration"'),
        ('{"iteration": 1.5}\n', 'not a JSON object with a whole "iteration"'),
        ('{"iteration": 2, "reward/mean": NaN}\n', "NaN is not JSON"),
        ('{"iteration": 2, "reward/mean": "0.5"}\n', "metric 'reward/mean' is str"),
        ('{"iteration": 2}', "the line is incomplete"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)):
        load_metrics(path)


def test_tensorboard_holds_every_metric_at_its_iteration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = build_report(LoggerConfig(tensorboard=True, terminal=False), tmp_path, 4)
    for iteration in (1, 2):
        with report.phase("update"):
            pass
        report.log(iteration, {"reward/mean": iteration / 4})
    report.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/mean", "time/update"}
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_text_that_the_stream_cannot_encode_is_escaped_not_an_error(tmp_path: Path) -> None:
    raw = io.BytesIO()
    report = build_report(TEXT_ONLY, tmp_path, 1, stream=io.TextIOWrapper(raw, encoding="ascii"))
    report.message("α = 1")
    report.samples([make_sample("✓")])
    report.close()
    assert raw.getvalue().startswith(b"\\u03b1 = 1\n")
    assert rb"response  \u2713" in raw.getvalue()


WORDS = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=60)


@given(st.lists(st.lists(WORDS, max_size=12), max_size=5), st.integers(20, 100))
def test_no_line_is_too_long_unless_it_is_one_word_and_no_word_is_lost(lines: list[list[str]], width: int) -> None:
    text = "\n".join(" ".join(words) for words in lines)
    wrapped = wrap(text, width).split("\n")
    assert " ".join(wrapped).split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in wrapped)


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_in_a_pipe_have_80_columns_and_the_log_has_them_whole_with_the_time(
    tmp_path: Path, terminal: bool
) -> None:
    stream = io.StringIO()
    report = build_report(LoggerConfig(tensorboard=False, terminal=terminal), tmp_path, 2, stream=stream)
    path = "/a/rather/long/path/of/a/run/that/nobody/wants/to/see/broken/at/a/column/of/eighty"
    report.message(f"warning: {'word ' * 40}")
    report.message(f"resuming from {path}")
    metrics = {"reward/mean": 0.5, "length/mean": 0.125, "length/sum": 1.0, "time/one": 2.0, "mismatch/kl": 0.125}
    with report.phase("rollout"):
        pass
    report.log(1, metrics)
    report.close()
    assert [line for line in stream.getvalue().splitlines() if len(line) > LOG_WIDTH] == [INDENT + path] * terminal
    log = (tmp_path / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in log)
    warning, resuming, iteration, pace = [line[20:] for line in log]
    assert (warning, resuming) == (f"warning: {'word ' * 40}", f"resuming from {path}")
    start = "iteration 1/2  reward 0.5 | length 0.125 | mismatch kl 0.125 | seconds: one 2, rollout "
    assert iteration.startswith(start)
    assert pace == "pace: 0.0 s an iteration; the other 1 take about 0.0 s"
    shown = " ".join(" ".join(line[20:] for line in log).split()) if terminal else ""
    assert " ".join(stream.getvalue().split()) == shown


@pytest.mark.parametrize(("left", "timely"), [(29, 3), (99, None), (-5, 0)])
def test_the_pace_says_whether_the_time_limit_ends_the_run_before_its_last_iteration(
    tmp_path: Path, left: float, timely: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.report.report.measure_speed", lambda *_: {"perf/time_per_step": 10.0})
    deadline, stream = time.monotonic() + left, io.StringIO()
    with contextlib.closing(build_report(TEXT_ONLY, tmp_path, 10, stream=stream, deadline=deadline)) as report:
        report.log(1, {"reward/mean": 0.5})
    end = "" if timely is None else f", but train.max_minutes ends the run after about {timely} of them"
    expected = f"pace: 10 s an iteration; the other 9 take about 90 s{end}"
    assert " ".join(stream.getvalue().split()).endswith(expected)


def read_until(descriptor: int, wanted: str) -> str:
    seen, deadline = b"", time.monotonic() + 10
    while wanted.encode() not in seen and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.1)[0]:
            seen += os.read(descriptor, 65536)
    return seen.decode()


def test_a_terminal_shows_progress_rewards_warnings_and_processes_until_the_display_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    control, terminal = pty.openpty()
    try:
        with os.fdopen(terminal, "w", encoding="utf-8") as stream:
            report = build_report(LoggerConfig(tensorboard=False), tmp_path, 4, stream=stream)
            report.show_processes(lambda: "2 servers, 7 responses under way")
            report.log(1, {"reward/mean": 0.25, "reward/heldout": 0.125})
            report.log(2, {"reward/mean": 0.5})
            report.message("warning: a server\x1b[2J was lost")
            with report.phase("rollout"):
                shown = read_until(control, "was lost (iteration 3)")
                report.rewind(1)
                again = read_until(control, "\nrollout ...")
            report.close()
            again += read_until(control, "\x1b[?25h")
    finally:
        os.close(control)
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    for text in (
        *("iteration 2/4  reward 0.5", "iteration 3/4  rollout ...", " 50% ", "2 servers, 7 responses under way"),
        r"last warning: a server\x1b[2J was lost (iteration 3)",
    ):
        assert text in plain
    assert "\x1b[?25h" in again


def test_a_sample_cannot_send_control_codes_to_the_terminal_and_loses_its_middle() -> None:
    shown = format_sample(make_sample("[bold]one\x1b[2J\ntwo"))
    assert r"response  [bold]one\x1b[2J\ntwo" in shown
    assert shown.splitlines()[0] == "sample task-1: correct, reward 1, format 0.5, 17 tokens, ended by stop"
    assert len(shown.splitlines()) == 4
    assert "[... 5 characters ...]" in format_sample(make_sample("a" * LONGEST_TEXT + "b" * 5))


def test_printed_samples_show_both_a_correct_and_a_wrong_one_where_there_are_both() -> None:
    right = [make_sample("4", name=f"right-{i}") for i in range(3)]
    wrong = make_sample("5", name="wrong-9", correct=False)
    failed = replace(make_sample("4"), score=Score(0.0, False, failure="TimeoutError: 5 s\n"))
    assert re.findall(r"sample (\S+):", format_samples([*right, failed, wrong], 2)) == ["right-0", "wrong-9"]
    assert re.findall(r"sample (\S+):", format_samples(right, 2)) == ["right-0", "right-1"]
    assert format_sample(failed).startswith(r"sample task-1: no reward, TimeoutError: 5 s\n, 1 tokens, ended by stop")


def make_conversation(num_turns: int, reward: float = 0.0) -> Sample:
    """Turns of one token each, with an observation of two tokens after each."""
    generated = [True, False, False] * num_turns
    turns = [Turn(3 * i, 3 * i + 1, f"guess {i}", reward) for i in range(num_turns)]
    zeros = [0] * len(generated)
    response = Response(zeros, "", zeros, generated, zeros, FinishReason.max_turns, turns=turns)
    return replace(make_sample(""), response=response)


def test_a_conversation_has_a_line_for_each_action_and_observation_but_those_in_the_middle_of_a_long_one() -> None:
    shown = format_sample(make_conversation(2, 0.5), lambda tokens: f"{len(tokens)}\nhigher").splitlines()
    assert shown[0].endswith("2 turns, 2 of 6 tokens generated, ended by max_turns")
    assert shown[1:] == [
        "  prompt        2+2=",
        "  action (0.5)  guess 0",
        r"  observation   2\nhigher",
        "  action (0.5)  guess 1",
        r"  observation   2\nhigher",
        "  expected      4",
    ]
    assert "  observation  [2 tokens]" in format_sample(make_conversation(1))
    shown = format_sample(make_conversation(20)).splitlines()
    assert len(shown) == 1 + 1 + MOST_LINES + 1 + 1
    assert "  ...          [24 actions and observations]" in shown


QUIET = {"tensorboard": False, "terminal": False}
SETTINGS = {"algo.name": "vapo", "algo.clip_high": 0.28, "data.system": None}
NEEDS_WANDB = pytest.mark.skipif(not record.is_installed("wandb"), reason="make install EXTRAS=wandb")
NEEDS_MLFLOW = pytest.mark.skipif(not record.is_installed("mlflow"), reason="make install EXTRAS=mlflow")


def build(run_dir: Path, **options: object) -> Report:
    return build_report(LoggerConfig(**{**QUIET, **options}), run_dir, 9, settings=SETTINGS)


def log_and_resume(run_dir: Path, **options: object) -> None:
    """Iterations -1, of value pretraining, to 2, then a second start that repeats iteration 2."""
    report = build(run_dir, **options)
    report.log(-1, {"critic/loss": 2.5})
    report.log(0, {"sync/bytes": 12})
    for iteration in (1, 2):
        report.log(iteration, {"reward/mean": iteration / 4, "length/mean": 3.0})
    report.close()
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    report = build(run_dir, **options)
    report.rewind(2)
    report.log(2, {"reward/mean": 0.75, "length/mean": 3.0, "reward/heldout": 0.5})
    report.close()


@NEEDS_WANDB
def test_wandb_has_every_metric_at_its_iteration_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    lines: list[dict[str, float]] = []
    log = wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, line: (lines.append(line), log(run, line)))
    log_and_resume(tmp_path, wandb=WandbMode.offline)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = load_ids(tmp_path)["wandb"]
    assert folders
    assert all(folder.name.endswith(f"-{run_id}") for folder in folders)
    assert [line["iteration"] for line in lines] == [-1, 0, 1, 2, 2]
    assert lines[-1].items() >= {"reward/mean": 0.75, "length/mean": 3.0, "reward/heldout": 0.5}.items()


@NEEDS_MLFLOW
def test_mlflow_has_every_metric_and_setting_in_one_run_that_ends_finished(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    log_and_resume(tmp_path / "run", mlflow=uri)
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    assert run.info.run_id == load_ids(tmp_path / "run")["mlflow"]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
    found = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert found == [(1, 0.25), (2, 0.5), (2, 0.75)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "sync/bytes")] == [(0, 12)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "critic/loss")] == [(-1, 2.5)]


@NEEDS_MLFLOW
def test_a_run_that_fails_is_failed_in_mlflow_and_a_server_that_is_away_ends_no_training(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    report = build(tmp_path / "run", mlflow=uri)
    sink = report._sinks[0]
    client, sink._client = sink._client, None
    with pytest.warns(RuntimeWarning, match=r"logger\.mlflow: AttributeError: .*; 1 values wait"):
        report.log(1, {"reward/mean": 0.25})
    sink._client = client
    try:
        raise RuntimeError("a worker died")
    except RuntimeError:
        report.close()
    run = MlflowClient(uri).get_run(load_ids(tmp_path / "run")["mlflow"])
    assert run.info.status == "FAILED"
    assert run.data.metrics == {"reward/mean": 0.25}


@pytest.mark.parametrize(
    ("options", "key", "found"),
    [
        (["logger.wandb=offline"], "wandb", "offline"),
        (["logger.mlflow=sqlite:///x.db"], "mlflow", "sqlite:///x.db"),
        (["logger.tensorboard=true"], "tensorboard", "true"),
    ],
)
def test_a_missing_package_is_an_error_that_names_key_package_and_remedy(
    options: list[str], key: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "is_installed", lambda _package: False)
    (problem,) = record.check_sinks(load_config(options).logger)
    assert re.match(rf"logger\.{key}: found {re.escape(found)}, which needs the package {key}", problem)
    assert "pip install" in problem
    assert f"or logger.{key}=" in problem


def test_with_tensorboard_null_it_is_written_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(record, "is_installed", lambda _package, found=is_there: found)
        assert len(list(record.open_sinks(LoggerConfig(), tmp_path, {}))) == is_there
