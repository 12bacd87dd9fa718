"""data=mix: the order in which prompts of several sources are drawn, and the reward of each source."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from megarl.config.schema.mix import list_sources, naming_source, split_config
from megarl.config.schema.root import Config
from megarl.config.schema.task import MixDataConfig, ShareBy
from megarl.task.data import PromptSampler
from megarl.task.reward import AsyncReward
from megarl.task.scorer import Scorer, build_reward
from megarl.types import Prompt, Response, Sample, Score

UNIT = 10**6
"""A share of 1, in whole numbers: sums of them are exact, however long a run is"""
KEPT = 0.9
"""With data.share_by=tokens: weight of a source's lengths so far beside those of a further iteration"""


class MixSampler:
    """Draws prompts of several sources, each without replacement within an epoch of its own, as `PromptSampler`.

    Shares are exact, not drawn at random: every draw adds each source's share to what is owed to it, and takes the
    source to which most is owed, at the cost of 1. After any number n of draws each source has had n times its share,
    but for less than the number of sources. With shares of tokens, the share of the draws is that of the tokens over
    the mean length of a source's responses so far, all alike before the first.
    """

    def __init__(self, prompts: Mapping[str, Sequence[Prompt]], shares: Mapping[str, float], seed: int, by: ShareBy):
        """prompts, shares: by the source's name; shares in any unit."""
        self._samplers = {name: PromptSampler(each, f"{seed}/{name}") for name, each in prompts.items()}
        self._sizes = {name: len(each) for name, each in prompts.items()}
        self._shares, self._by = {name: share / sum(shares.values()) for name, share in shares.items()}, by
        self._owed = dict.fromkeys(shares, 0)
        self._num_drawn = 0
        self._lengths: dict[str, list[float]] = {}
        """By source: tokens and number of its responses, those of past iterations with less weight"""
        self._changes: list[dict[str, Any]] = []
        """Lengths that count from a draw on, in order; those of a saved run may be ahead of what is drawn again"""
        self._lock = threading.Lock()

    def next_batch(self, n: int) -> list[Prompt]:
        """The next `n` prompts (1 or more)."""
        with self._lock:
            return [self._draw() for _ in range(n)]

    def note(self, samples: Sequence[Sample]) -> None:
        """Take in the lengths of the responses of an iteration."""
        if self._by is ShareBy.samples:
            return
        with self._lock:
            latest = self._changes[-1]["lengths"] if self._changes else self._lengths
            lengths = {name: [KEPT * value for value in pair] for name, pair in latest.items()}
            for sample in samples:
                pair = lengths.setdefault(sample.prompt.source, [0.0, 0.0])
                pair[0] += int(sample.response.generated.sum())
                pair[1] += 1
            at = max(self._num_drawn, self._changes[-1]["at"] if self._changes else 0)
            self._changes.append({"at": at, "lengths": lengths})

    def skip(self, prompts: Iterable[Prompt], num_epochs: int) -> int:
        """As `PromptSampler.skip`, in the epochs of each prompt's source."""
        own: dict[str, list[Prompt]] = {name: [] for name in self._samplers}
        for prompt in prompts:
            own[prompt.source].append(prompt)
        with self._lock:
            return sum(self._samplers[name].skip(each, num_epochs) for name, each in own.items())

    def count_epochs(self) -> dict[str, float]:
        """source/NAME/epochs: passes over its prompts so far."""
        with self._lock:
            states = {name: sampler.state() for name, sampler in self._samplers.items()}
        return {
            f"source/{name}/epochs": int(state["epoch"]) + int(state["position"]) / self._sizes[name]
            for name, state in states.items()
        }

    def state(self) -> dict[str, Any]:
        """Where the sampler stands, as plain values; without the lengths that come to count later (`complete`)."""
        with self._lock:
            return {
                "shares": dict(self._shares),
                "by": self._by.name,
                "owed": dict(self._owed),
                "num_drawn": self._num_drawn,
                "lengths": dict(self._lengths),
                "sources": {name: sampler.state() for name, sampler in self._samplers.items()},
            }

    def complete(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of this sampler, of now or earlier, with the lengths that have come to count since, so that whoever
        restores it draws the same prompts again."""
        with self._lock:
            self._changes = [change for change in self._changes if change["at"] >= state["num_drawn"]]
            return {**state, "changes": list(self._changes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `complete` of a state was taken. Raises ValueError where it is of other sources, shares,
        prompts or another seed."""
        for key, own in (("shares", self._shares), ("by", self._by.name)):
            if state.get(key) != own:
                found = f"its {key} is {state.get(key)!r}, here it is {own!r}"
                raise ValueError(f"the sampler's state is of another run: {found}")
        for name, sampler in self._samplers.items():
            sampler.restore(state["sources"][name])
        self._owed, self._num_drawn = dict(state["owed"]), state["num_drawn"]
        self._lengths, self._changes = dict(state["lengths"]), list(state["changes"])

    def _draw(self) -> Prompt:
        for change in self._changes:
            if change["at"] <= self._num_drawn:
                self._lengths = change["lengths"]
        weights = self._weigh()
        for name, weight in weights.items():
            self._owed[name] += weight
        chosen = max(self._owed, key=self._owed.__getitem__)
        self._owed[chosen] -= sum(weights.values())
        self._num_drawn += 1
        (prompt,) = self._samplers[chosen].next_batch(1)
        return prompt

    def _weigh(self) -> dict[str, int]:
        """The share of the draws, in whole numbers above 0."""
        tokens, number = (sum(pair[i] for pair in self._lengths.values()) for i in (0, 1))
        mean = tokens / number if tokens else 1.0
        means = {name: max(1.0, pair[0] / pair[1]) for name, pair in self._lengths.items()}
        shares = {name: share / means.get(name, mean) for name, share in self._shares.items()}
        total = sum(shares.values())
        return {name: max(1, round(UNIT * share / total)) for name, share in shares.items()}


def build_sampler(config: Config, prompts: Sequence[Prompt]) -> "PromptSampler[Prompt] | MixSampler":
    """What draws these prompts of a run, those of a source together."""
    sources = list_sources(config)
    if not sources:
        return PromptSampler(prompts, config.seed)
    assert isinstance(config.data, MixDataConfig)
    by_source = {name: list(each) for name, each in groupby(prompts, key=lambda prompt: prompt.source)}
    shares = {name: source.share or float(len(by_source[name])) for name, source in sources.items()}
    return MixSampler(by_source, shares, config.seed, config.data.share_by)


class SourceReward(AsyncReward):
    """Scores a response by the reward of its prompt's source."""

    def __init__(self, rewards: Mapping[str, AsyncReward]):
        self._rewards = dict(rewards)
        self.is_users = any(reward.is_users for reward in rewards.values())
        self.sees_group = any(reward.sees_group for reward in rewards.values())

    async def score(self, prompt: Prompt, response: Response) -> Score:
        return await self._rewards[prompt.source].score(prompt, response)

    async def score_group(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score | BaseException]:
        return await self._rewards[prompt.source].score_group(prompt, responses)

    async def check(self, prompt: Prompt, response: Response) -> Score:
        return await self._rewards[prompt.source].check(prompt, response)

    def state(self) -> Any:
        found = {name: reward.state() for name, reward in self._rewards.items()}
        return None if all(state is None for state in found.values()) else found

    def load_state(self, state: Any) -> None:
        for name, reward in self._rewards.items():
            if state.get(name) is not None:
                reward.load_state(state[name])

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()


def build_run_scorer(config: Config) -> Scorer:
    """The scorer of a run, by source with data=mix. Raises ConfigError."""
    rewards: dict[str, AsyncReward] = {}
    for name, each in split_config(config).items():
        with naming_source(name):
            rewards[name] = build_reward(each.reward)
    return Scorer(SourceReward(rewards) if list_sources(config) else rewards[""])
