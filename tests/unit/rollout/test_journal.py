"""The journal gives back bit by bit what was sampled, and nothing else."""

import pytest
from generation import build_collector

from megarl.reward.scorer import Scorer
from megarl.rollout.event_loop import OnEventLoop
from megarl.rollout.journal import Journal
from megarl.types import FinishReason, Prompt, Response, Sample, Score

PROMPTS = [Prompt("a", "1+1=", (3, 4), "2"), Prompt("b", "2+2=", (5,), "4", {"kind": "sum"})]


def build_samples() -> tuple[Sample, ...]:
    def build(group: int, number: int) -> Sample:
        tokens = tuple(range(number + 1))
        logprobs = tuple(-0.1 / (k + 3) for k in tokens)
        response = Response(tokens, "x", logprobs, (True,) * len(tokens), (7,) * len(tokens), FinishReason.stop)
        return Sample(PROMPTS[group], response, Score(1 / 3, True, {"format": 0.1}, "2"), group)

    return tuple(build(group, number) for group in (0, 1) for number in (0, 1, 2))


def test_what_was_saved_under_a_key_comes_back_bit_by_bit(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert journal.load("iteration-3/round-1", PROMPTS, 3) is None
    journal.save("iteration-3/round-1", build_samples())
    assert Journal(tmp_path / "journal").load("iteration-3/round-1", PROMPTS, 3) == build_samples()
    assert journal.load("iteration-3/round-2", PROMPTS, 3) is None


@pytest.mark.parametrize(("prompts", "num_responses"), [(PROMPTS[::-1], 3), (PROMPTS[:1], 3), (PROMPTS, 2)])
def test_samples_of_other_prompts_are_not_used_and_that_is_said(tmp_path, prompts, num_responses):
    journal = Journal(tmp_path)
    journal.save("iteration-3/round-1", build_samples())
    with pytest.warns(RuntimeWarning, match="sampled again"):
        assert journal.load("iteration-3/round-1", prompts, num_responses) is None


def test_a_file_that_cannot_be_read_is_not_used_and_that_is_said(tmp_path):
    journal = Journal(tmp_path)
    journal.save("iteration-3/round-1", build_samples())
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text().replace("rollout_logprobs", "rollout_logprob"))
    with pytest.warns(RuntimeWarning, match="sampled again"):
        assert journal.load("iteration-3/round-1", PROMPTS, 3) is None


def test_what_a_checkpoint_has_made_superfluous_is_removed(tmp_path):
    journal = Journal(tmp_path)
    for key in ("pretraining-1", "iteration-2/round-1", "iteration-10/round-1", "iteration-11/round-2"):
        journal.save(key, build_samples())
    journal.forget(through=10)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-11-round-2.jsonl"]


def test_of_the_groups_that_ran_ahead_those_that_were_taken_are_removed(tmp_path):
    journal = Journal(tmp_path)
    for place, number in enumerate((2, 0, 10, 1)):
        journal.save_group(place, number, build_samples()[:3])
    journal.forget(through=5, num_groups=2)
    assert journal.list_groups(0) == journal.list_groups(2) == [(2, 10), (3, 1)]
    assert journal.list_groups(3) == [(3, 1)]
    assert journal.load_group(2, 10, PROMPTS[0], 3) == build_samples()[:3]
    with pytest.warns(RuntimeWarning, match="sampled again"):
        assert journal.load_group(3, 1, PROMPTS[1], 3) is None
    assert journal.list_groups(0) == [(2, 10)]


def test_a_checkpoint_of_value_pretraining_makes_the_steps_up_to_it_superfluous(tmp_path):
    journal = Journal(tmp_path)
    for key in ("pretraining-2", "pretraining-9", "pretraining-10", "iteration-1/round-1"):
        journal.save(key, build_samples())
    journal.forget_pretraining(through=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-1-round-1.jsonl", "pretraining-10.jsonl"]
    journal.forget_pretraining()
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-1-round-1.jsonl"]


class CountingEngine(OnEventLoop):
    """Answers each prompt with its first token, and counts the calls."""

    num_servers, num_slots, depends_on_batch, num_calls = 1, 8, True, 0

    async def generate_turns(self, requests, take):
        self.num_calls += 1
        for i, request in enumerate(requests):
            take(i, Response(request.token_ids[:1], "x", (-0.5,), (True,), (0,), FinishReason.stop))

    async def drop_cached_prefixes(self): ...


def test_a_collector_does_not_sample_or_score_again_what_the_journal_holds(tmp_path):
    engine, verdicts = CountingEngine(), iter([0.25, 0.5, 0.75, 1.0])

    def build():
        scorer = Scorer(lambda _prompt, _response: Score(next(verdicts), True))
        return build_collector(engine, scorer=scorer, journal=Journal(tmp_path))

    first = build().sample(PROMPTS, 2, key="iteration-1/round-1")
    assert [sample.score.reward for sample in first] == [0.25, 0.5, 0.75, 1.0]
    assert build().sample(PROMPTS, 2, key="iteration-1/round-1") == first
    assert engine.num_calls == 1


def test_samples_of_other_weights_than_the_trainers_do_not_stay_in_the_journal(tmp_path):
    collector = build_collector(CountingEngine(), journal=Journal(tmp_path))
    with pytest.raises(RuntimeError, match="weight version 0; the trainer's is 3"):
        collector.collect(PROMPTS, 2, weight_version=3, key="pretraining-1")
    assert list(tmp_path.glob("*.jsonl")) == []


def test_dropping_a_key_takes_what_is_below_it_and_no_other(tmp_path):
    journal = Journal(tmp_path)
    for key in ("iteration-1/round-1", "iteration-1/round-2", "iteration-12/round-1"):
        journal.save(key, build_samples())
    journal.drop("iteration-1")
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-12-round-1.jsonl"]
