"""What a run says of its time and of how it went."""

import io
from pathlib import Path

from megarl.config.schema.logger import LoggerConfig
from megarl.report.pace import Pace, format_heldout, format_pace
from megarl.report.report import build_report


def test_the_pace_says_when_the_iterations_end_and_how_many_of_them_the_limit_of_time_allows() -> None:
    text = "pace: 30 s an iteration; the other 11 take about 5 min 30 s"
    assert format_pace(30.0, 11) == text
    assert format_pace(30.0, 11, 540.0) == text
    # Two minutes are left: four whole iterations, and the one in which the limit is passed.
    assert format_pace(30.0, 11, 120.0) == f"{text}; train.max_minutes leaves time for about 5 of them"
    assert format_pace(30.0, 11, -1.0) == f"{text}; train.max_minutes leaves time for about 1 of them"


def test_the_pace_is_said_once_after_the_first_iteration_with_responses() -> None:
    pace, step = Pace(9), {"perf/time_per_step": 2.0}
    assert list(pace.check(0, {})) == []
    assert list(pace.check(1, step)) == ["pace: 2.0 s an iteration; the other 8 take about 16 s"]
    assert list(pace.check(2, step)) == []
    assert list(Pace(1).check(1, step)) == []


def test_a_report_knows_the_limit_of_time_of_its_run(tmp_path: Path) -> None:
    stream, logger = io.StringIO(), LoggerConfig(tensorboard=False)
    report = build_report(logger, tmp_path, 1000, stream, settings={"train.max_minutes": 1e-6})
    for iteration in (1, 2):
        with report.phase("rollout"):
            pass
        report.log(iteration, {"length/sum": 8.0, "length/mean": 2.0})
    report.close()
    (line,) = [line for line in (tmp_path / "train.log").read_text().splitlines() if "pace: " in line]
    assert line.endswith("leaves time for about 1 of them")


def test_the_end_says_how_the_held_out_reward_went() -> None:
    start, middle, end = (0, 0.0143), (12, 0.28), (17, 0.2733)
    text = "held-out reward: 0.0143 before training, 0.273 after iteration 17; best 0.28 after iteration 12"
    assert format_heldout([start, middle, end]) == text
    text = "held-out reward: 0.0143 before training, 0.28 after iteration 12"
    assert format_heldout([start, middle]) == text
    assert format_heldout([start]) == "held-out reward: 0.0143 before training"
