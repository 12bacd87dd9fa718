"""reward=reward_model with a real SGLang server, against transformers' own forward of the same weights."""

import asyncio

import httpx
import pytest
import torch
from servers import serving, write_chat_checkpoint

from megarl.config.schema.task import ScalarModelRewardConfig
from megarl.serve import KEY
from megarl.task.scorer import build_scorer
from megarl.types import FinishReason, Message, Prompt, Response

pytestmark = pytest.mark.slow

QUESTIONS = ["what is 2+2?", "name a colour", "why? " * 40]
ANSWERS = ["it is 4.", "", "blue <eos> red", "because " * 60]


def build_response(text):
    return Response((1,), text, (0.0,), (True,), (0,), FinishReason.stop)


def test_scores_are_those_of_transformers(tmp_path):
    model, tokenizer = write_chat_checkpoint(tmp_path / "model", "ForSequenceClassification")
    cases = [(question, answer) for question in QUESTIONS for answer in ANSWERS]

    def compute(question, answer):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item()

    with serving(tmp_path / "model", tmp_path / "server.log") as url:
        config = ScalarModelRewardConfig(
            url=url, api_key_env=KEY, scale=2.0, offset=-1.0, correct_at=-1.0, max_concurrency=4
        )
        scorer = build_scorer(config)

        async def score_all():
            prompts = [Prompt("p", "", (), "", messages=(Message("user", question),)) for question, _ in cases]
            calls = [scorer.score(p, build_response(answer)) for p, (_, answer) in zip(prompts, cases, strict=True)]
            return await asyncio.gather(*calls)

        scores = asyncio.run(score_all())
    assert [score.failure for score in scores] == [None] * len(cases)
    expected = [compute(*case) for case in cases]
    assert max(expected) - min(expected) > 0.1
    assert [score.details["logit"] for score in scores] == pytest.approx(expected, abs=2e-5)
    assert [score.reward for score in scores] == pytest.approx([2 * logit - 1 for logit in expected], abs=4e-5)
    assert [score.correct for score in scores] == [score.reward >= -1.0 for score in scores]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=5)
