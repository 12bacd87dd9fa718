"""Groups gathered ahead of their use, over a fake engine whose weights the test moves."""

import threading

import pytest

from megarl.config.load import load_config
from megarl.data.sampler import PromptSampler
from megarl.rollout.collector import Collector
from megarl.rollout.source import GroupSource
from megarl.types import FinishReason, Prompt, Response, Score

PROMPTS = [Prompt(str(i), str(i), (i + 1,), "") for i in range(20)]
SIZES = ["model=tiny", "train.num_iterations=6", "train.prompts_per_iteration=4", "train.responses_per_prompt=2"]
SIZES += ["train.samples_per_minibatch=2"]


class Engine:
    """Each response has one token of the version at its beginning and one of that at its end."""

    def __init__(self):
        self.version = 0
        self.asked = []

    def generate(self, prompts, *, num_responses, temperature, urgent=False, key=None):
        self.asked.append((key, [p.id for p in prompts]))
        first = self.version
        return [
            [
                Response((5, 2), p.id, (-0.5, -0.5), (True, True), (first, self.version), FinishReason.stop)
                for _ in range(num_responses)
            ]
            for p in prompts
        ]

    def check_health(self):
        pass

    def cancel(self):
        pass


def build_source(engine, *overrides):
    corrected = [] if "algo=topr" in overrides else ["algo.mismatch.correction=tis"]
    config = load_config([*SIZES, *corrected, *overrides])
    verdicts = iter(range(10**6))
    collector = Collector(engine, lambda p, r: Score(float(next(verdicts) % 3 == 0), False), temperature=1.0)
    return GroupSource(config, engine, collector, PromptSampler(PROMPTS, 1))


def take_all(staleness, *overrides):
    """Prompts and ages of the six iterations, and what the engine was asked."""
    engine = Engine()
    source = build_source(engine, f"rollout.max_staleness={staleness}", *overrides)
    taken = []
    for iteration in range(1, 7):
        batch = source.take(iteration, engine.version)
        groups = batch.fresh + batch.replayed
        taken.append([(group[0].prompt.id, group[0].age, group[0].score.reward) for group in groups])
        engine.version += 1
    assert source.close() == 0
    return taken, engine.asked


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algo=dapo", "algo.dynamic_sampling.enabled=true"),
        ("algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5"),
    ],
    ids=["plain", "dynamic sampling", "replay"],
)
@pytest.mark.parametrize("staleness", [1, 3])
def test_the_same_prompts_are_learned_from_in_the_same_iterations_at_any_staleness(staleness, overrides):
    assert take_all(staleness, *overrides) == take_all(0, *overrides)


def test_every_call_has_a_key_of_its_iteration_and_round():
    _, asked = take_all(0, "algo=dapo", "algo.dynamic_sampling.enabled=true")
    keys = [key for key, _ in asked]
    assert len(set(keys)) == len(keys)
    rounds = [[key for key in keys if key.startswith(f"iteration-{i}/")] for i in range(1, 7)]
    assert [key for names in rounds for key in names] == keys
    assert any(len(names) > 1 for names in rounds)
    for i, names in enumerate(rounds, start=1):
        assert names == [f"iteration-{i}/round-{n}" for n in range(1, len(names) + 1)]


def test_a_call_that_is_repeated_keeps_its_key():
    engine = Engine()
    source = build_source(engine)
    source._guard = lambda ask: (ask(), ask())[1]
    source.take(1, 0)
    assert [key for key, _ in engine.asked] == ["iteration-1/round-1"] * 2
    assert engine.asked[0] == engine.asked[1]


def test_a_token_older_than_the_staleness_is_refused():
    engine = Engine()
    source = build_source(engine, "rollout.max_staleness=1")
    source.take(1, 0)
    with pytest.raises(RuntimeError, match=r"weight version 0; the trainer's is 2, and rollout.max_staleness is 1"):
        source.take(2, 2)
    source.close()


def test_what_ran_ahead_and_was_not_taken_is_counted_and_its_thread_ends():
    engine = Engine()
    source = build_source(engine, "rollout.max_staleness=2")
    batch = source.take(1, 0)
    assert batch.metrics == {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0, "rollout/mixed_frac": 0.0}
    num_dropped = source.close()
    # Whether it had begun one or two further iterations of 4 prompts x 2 responses is a matter of timing.
    assert num_dropped == 8 * (len(engine.asked) - 1) <= 16
    assert source.close() == 0
    assert not any(thread.name == "megarl-ahead" for thread in threading.enumerate())


def test_without_staleness_nothing_runs_ahead():
    engine = Engine()
    source = build_source(engine)
    source.take(1, 0)
    assert len(engine.asked) == 1
    assert source.close() == 0
