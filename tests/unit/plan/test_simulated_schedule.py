"""The simulated schedule: spans of time, and what follows from the loop's rules."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tool_loading import load_tool

from megarl.plan.schedule import (
    Durations,
    Idle,
    Setting,
    Timeline,
    find_idle,
    measure,
    measure_filled,
    simulate,
    subtract,
    unite,
)

ONE = Setting(num_iterations=12, num_prompts=1, num_responses=1, max_staleness=0, num_servers=1, num_places=4)


def run(setting: Setting, lengths: Sequence[float], training: float, sync: float = 0.0, host: float = 0.0) -> Idle:
    """Ten tokens a second of each response, whatever runs beside it."""
    timeline = simulate(setting, lengths, lambda _running, _training: 10.0, Durations([training], host, sync))
    return find_idle(timeline, setting.num_places * setting.num_servers)


def test_overlapping_spans_count_once() -> None:
    assert unite([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == [(0.0, 3.0), (4.0, 5.0)]


def test_holes_are_cut_out_of_spans_wherever_they_lie() -> None:
    holes = [(-1.0, 1.0), (2.0, 3.0), (3.5, 5.0), (9.0, 9.5)]
    assert subtract([(0.0, 4.0), (9.0, 10.0)], holes) == [(1.0, 2.0), (3.0, 3.5), (9.5, 10.0)]


def test_a_share_is_of_the_window_alone() -> None:
    assert measure([(0.0, 3.0), (2.0, 4.0), (9.0, 20.0), (30.0, 40.0)], (1.0, 11.0)) == pytest.approx(0.5)


def test_filled_places_are_averaged_over_the_time_without_pauses() -> None:
    # Of two places: two filled until 2, one until 4, paused from 4 to 6, one until 8, none until 10.
    spans = [(-1.0, 2.0), (0.0, 8.0), (0.0, 2.0)]
    found = measure_filled(spans, [(4.0, 6.0)], (0.0, 10.0), 2)
    assert found == pytest.approx((2 * 2 + 1 * 2 + 1 * 2) / 2 / 8)


def test_on_policy_servers_and_trainer_wait_for_each_other() -> None:
    idle = run(ONE, [10], training=2.0, sync=1.0)
    assert (idle.servers, idle.trainer, idle.iteration_s) == pytest.approx((3 / 4, 2 / 4, 4.0))


def test_one_iteration_ahead_a_fast_server_waits_and_a_slow_one_never_does() -> None:
    ahead = replace(ONE, max_staleness=1)
    slow_training = run(ahead, [10], training=2.0, sync=1.0)
    assert (slow_training.trainer, slow_training.iteration_s) == pytest.approx((1 / 3, 3.0))
    assert slow_training.servers == pytest.approx(2 / 3)
    # A response begins when the one before is waited for: every second iteration takes 2 s, every other one 4 s.
    slow_servers = run(replace(ahead, num_iterations=13), [40], training=2.0)
    assert (slow_servers.servers, slow_servers.iteration_s) == pytest.approx((0.0, 3.0))


def test_what_is_no_training_leaves_the_trainer_idle() -> None:
    assert run(ONE, [10], training=1.0, host=2.0).trainer == pytest.approx(3 / 4)


def test_responses_beyond_the_places_wait_and_a_further_server_halves_the_rounds() -> None:
    many = replace(ONE, num_prompts=4, num_responses=4)
    assert run(many, [10], training=1.0).iteration_s == pytest.approx(5.0)
    assert run(replace(many, num_servers=2), [10], training=1.0).iteration_s == pytest.approx(3.0)
    assert run(replace(many, num_servers=4), [10], training=1.0).iteration_s == pytest.approx(2.0)


def test_on_policy_all_wait_for_the_longest_response_and_ahead_nobody_does() -> None:
    setting = replace(ONE, num_iterations=40, num_prompts=4, num_places=8)
    lengths = [10, 10, 10, 100]
    on_policy, ahead = (run(replace(setting, max_staleness=n), lengths, training=1.0) for n in (0, 4))
    assert on_policy.iteration_s == pytest.approx(11.0)
    assert on_policy.places == pytest.approx(1 - 13 / 88)
    assert ahead.iteration_s < 4.0


def test_no_more_groups_are_under_way_or_wait_than_the_staleness_allows() -> None:
    setting = replace(ONE, num_prompts=3, num_places=100, max_staleness=2, num_iterations=8)
    timeline = simulate(setting, [10, 37, 5, 61], lambda _running, _training: 10.0, Durations([50.0]))
    assert len(timeline.requests) == 8 * 3
    for number, (_, end) in enumerate(timeline.iterations[:-3], start=1):
        sent = sum(start < end for start, _ in timeline.requests)
        assert sent == 3 * (number + 2)


def test_a_pace_is_found_again_in_the_requests_that_it_made() -> None:
    bench = load_tool("bench/schedule.py")
    pace = bench.Pace(step=0.02, each=0.003, slower=1.5, extra=2.0)
    setting = Setting(8, 6, 4, max_staleness=1, num_servers=1, num_places=8)
    lengths = [10 + 37 * k % 91 for k in range(24)]
    made = simulate(setting, [length + pace.extra for length in lengths], pace, Durations([3.0], 0.5, 0.2))
    clock = bench.overlap.Clock(**{name: getattr(made, name) for name in Timeline.__dataclass_fields__})
    clock.answers = [(0, int(lengths[number % len(lengths)])) for number in made.numbers]
    found = bench.fit_pace([bench.build_log(clock, 0, setting.num_places)])
    assert (found.step, found.each, found.slower) == pytest.approx((pace.step, pace.each, pace.slower), rel=0.05)
