import json

import pytest

from megarl.task.data import PromptSampler
from megarl.types import Prompt


def make_prompts(n: int, name: str = "p") -> list[Prompt]:
    return [Prompt(f"{name}{i}", "text", (1,), "answer") for i in range(n)]


def test_an_epoch_holds_every_prompt_once_though_batches_span_epochs() -> None:
    sampler = PromptSampler(make_prompts(10), seed=3)
    drawn = [prompt.id for _ in range(10) for prompt in sampler.next_batch(7)]
    epochs = [drawn[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(epoch) == sorted(p.id for p in make_prompts(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7


def test_a_batch_may_be_larger_than_the_data() -> None:
    batch = PromptSampler(make_prompts(3), seed=0).next_batch(8)
    assert sorted(p.id for p in batch).count("p0") in (2, 3)
    assert len(batch) == 8


@pytest.mark.parametrize("num_batches", [0, 1, 4, 5, 13])
def test_a_restored_sampler_goes_on_as_the_first_would(num_batches: int) -> None:
    first = PromptSampler(make_prompts(20), seed=5)
    for _ in range(num_batches):
        first.next_batch(4)
    state = json.loads(json.dumps(first.state()))
    second = PromptSampler(make_prompts(20), seed=5)
    second.next_batch(3)
    second.restore(state)
    assert [first.next_batch(6) for _ in range(10)] == [second.next_batch(6) for _ in range(10)]


def test_the_order_depends_on_the_seed_alone() -> None:
    def draw(seed: int) -> list[Prompt]:
        return PromptSampler(make_prompts(30), seed).next_batch(60)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 8}, "seed"),
        ({"prompts": "other"}, "prompts"),
        ({"position": 11}, "position 11"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, int | str], expected: str) -> None:
    sampler = PromptSampler(make_prompts(10), seed=7)
    with pytest.raises(ValueError, match=expected):
        sampler.restore(sampler.state() | change)


def test_an_incomplete_state_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="lacks position, prompts, seed"):
        PromptSampler(make_prompts(2), seed=7).restore({"epoch": 1})


def test_a_state_of_other_prompts_is_refused() -> None:
    state = PromptSampler(make_prompts(10, "q"), seed=7).state()
    with pytest.raises(ValueError, match="another run"):
        PromptSampler(make_prompts(10), seed=7).restore(state)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSampler([], seed=0)
    with pytest.raises(ValueError, match="asked for 0"):
        PromptSampler(make_prompts(1), seed=0).next_batch(0)
