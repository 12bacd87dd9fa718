"""The length of a response against a range."""

from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.types import Prompt, Response, Score


@dataclass(frozen=True)
class LengthReward:
    """1 for a response of min_length to max_length tokens, falling linearly to 0 at `falloff` tokens outside.

    Tokens are those that the policy generated. Correct within the range. details: {"tokens": their number}.
    """

    min_length: int
    max_length: int
    falloff: int

    def __post_init__(self) -> None:
        """Raises ConfigError for an empty range."""
        if self.min_length > self.max_length:
            allowed = f"at most reward.max_length ({self.max_length})"
            raise ConfigError([f"reward.min_length: found {self.min_length}; it must be {allowed}"])

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        length = int(response.generated.sum())
        outside = max(self.min_length - length, length - self.max_length, 0)
        # Without a falloff everything outside is 0.
        reward = max(0.0, 1.0 - outside / self.falloff) if self.falloff else float(outside == 0)
        return Score(reward, outside == 0, {"tokens": float(length)})
