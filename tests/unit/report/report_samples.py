"""A scored response, as the tests of the terminal and of the report print it."""

from megarl.types import FinishReason, Prompt, Response, Sample, Score


def make_sample(text: str, *, name: str = "task-1", correct: bool = True) -> Sample:
    token_ids = tuple(range(len(text)))
    response = Response(
        token_ids=token_ids,
        text=text,
        rollout_logprobs=tuple(0.0 for _ in token_ids),
        generated=tuple(True for _ in token_ids),
        weight_versions=tuple(0 for _ in token_ids),
        finish_reason=FinishReason.stop,
    )
    return Sample(Prompt(name, "2+2=", (1, 2), "4"), response, Score(float(correct), correct, {"format": 0.5}), 0)
