"""A scalar reward model behind an SGLang server."""

import math

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import ScalarModelRewardConfig
from megarl.reward.conversation import list_messages
from megarl.reward.interface import AsyncReward, RewardFailedError
from megarl.reward.server_calls import ScoringServer
from megarl.types import Prompt, Response, Score


class ScalarModelReward(AsyncReward):
    """reward = offset + scale * y, y what the model's head gives at the last token of the conversation.

    The server renders prompt and response with the chat template of its model. Correct from reward.correct_at on.
    details: {"logit": y}.
    """

    def __init__(self, config: ScalarModelRewardConfig):
        """Raises ConfigError where the server at reward.url does not answer or serves no reward model."""
        self._config = config
        self._server = ScoringServer(config)
        info = self._server.read_info("/model_info")
        if not isinstance(info, dict) or info.get("is_generation") is not False:
            found = info.get("architectures") if isinstance(info, dict) else info
            raise ConfigError(
                [
                    f"reward.url: found {config.url}, which serves {found}; reward=reward_model needs an SGLang server"
                    " with a model that scores, such as LlamaForSequenceClassification (python -m megarl.serve)"
                ]
            )

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError where the server gives no score."""
        rendered = await self._server.post(
            "/tokenize", {"messages": list_messages(prompt, response), "add_generation_prompt": False}
        )
        answer = await self._server.post("/classify", {"input_ids": _read(rendered, "tokens")})
        values = _read(answer, "embedding")
        if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], int | float):
            length = len(values) if isinstance(values, list) else "no"
            raise RewardFailedError(f"{self._server.url} answered with {length} numbers; a reward model gives one")
        logit = float(values[0])
        if not math.isfinite(logit):
            raise RewardFailedError(f"{self._server.url} gave the score {logit}")
        reward = self._config.offset + self._config.scale * logit
        return Score(reward, reward >= self._config.correct_at, {"logit": logit})


def _read(answer: object, key: str) -> object:
    if not isinstance(answer, dict) or key not in answer:
        raise RewardFailedError(f"the reward model's server answered without {key!r}")
    return answer[key]
