"""Prompts -> responses -> rewards, as one Rollout."""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

from megarl.interfaces import RolloutEngine
from megarl.rollout.journal import Journal
from megarl.types import Metrics, Prompt, Response, RewardFunction, Rollout, Sample, Score


class Collector:
    """Asks the engine for groups of responses and has each one scored. Thread-safe."""

    def __init__(
        self, engine: RolloutEngine, reward: RewardFunction, *, temperature: float, journal: Journal | None = None
    ):
        """journal: keeps what is sampled under a key; what it holds already is not sampled again."""
        self._engine = engine
        self._journal = journal
        self._reward = reward
        self._temperature = temperature
        self._scoring = threading.Lock()

    def sample(self, prompts: Sequence[Prompt], num_responses: int, *, key: str | None = None) -> tuple[Sample, ...]:
        """One group of `num_responses` samples per prompt, groups numbered from 0 in the order of `prompts`.

        key: as in `RolloutEngine.generate`. Which weights generated them is not looked at. Raises ValueError where a
        reward is not finite.
        """
        journal = self._journal
        found = journal.load(key, prompts, num_responses) if journal and key else None
        if found is not None:
            return found
        groups = self._engine.generate(prompts, num_responses=num_responses, temperature=self._temperature, key=key)
        samples = score_groups(prompts, groups, self._score)
        if journal and key:
            journal.save(key, samples)
        return samples

    def collect(
        self, prompts: Sequence[Prompt], num_responses: int, *, weight_version: int, key: str | None = None
    ) -> Rollout:
        """As `sample`, of the present weights.

        weight_version: of the trainer's weights now. Raises RuntimeError where a server generated a token with
        other weights.
        """
        samples = self.sample(prompts, num_responses, key=key)
        with self.forgetting_failures(key):
            check_versions(samples, weight_version)
        return Rollout(samples, weight_version)

    @contextlib.contextmanager
    def forgetting_failures(self, key: str | None) -> Iterator[None]:
        """What is in the journal under keys that begin with `key` goes where the block fails: it would fail again."""
        try:
            yield
        except Exception:
            if self._journal and key:
                self._journal.drop(key)
            raise

    def collect_greedy(self, prompts: Sequence[Prompt], *, weight_version: int, key: str | None = None) -> Rollout:
        """The most likely response of each prompt, for evaluation, before what runs ahead; else as `collect`."""
        groups = self._engine.generate(prompts, num_responses=1, temperature=0.0, urgent=True, key=key)
        samples = score_groups(prompts, groups, self._score)
        check_versions(samples, weight_version)
        return Rollout(samples, weight_version)

    def _score(self, prompt: Prompt, response: Response) -> Score:
        with self._scoring:  # A user's function need not stand two threads.
            return self._reward(prompt, response)


def list_versions(response: Response) -> list[int]:
    """The version of the weights behind each token that the policy generated."""
    return [v for v, own in zip(response.weight_versions, response.generated, strict=True) if own]


def check_versions(samples: Sequence[Sample], weight_version: int, max_staleness: int = 0) -> None:
    """Raise RuntimeError, naming prompt and versions, for a token that was generated with other weights than those of
    the versions from `weight_version - max_staleness` to `weight_version`.
    """
    for sample in samples:
        used = set(list_versions(sample.response))
        oldest = max(0, weight_version - max_staleness)  # Below 0 no weights of the trainer's are meant.
        if used and not oldest <= min(used) <= max(used) <= weight_version:
            versions = ", ".join(str(version) for version in sorted(used))
            behind = f", and rollout.max_staleness is {max_staleness}" if max_staleness else ""
            raise RuntimeError(
                f"a response to prompt {sample.prompt.id!r} was generated with the servers' weight version {versions}; "
                f"the trainer's is {weight_version}{behind}: the servers missed a weight sync, or it came during the"
                " rollout"
            )


def compute_staleness(samples: Sequence[Sample], weight_version: int) -> Metrics:
    """rollout/staleness_mean, _max: versions behind `weight_version`, over the generated tokens;
    rollout/mixed_frac: share of the responses that are of more than one version. Empty where there is no token.
    """
    used = [versions for sample in samples if (versions := list_versions(sample.response))]
    behind = [weight_version - version for versions in used for version in versions]
    if not behind:
        return {}
    return {
        "rollout/staleness_mean": sum(behind) / len(behind),
        "rollout/staleness_max": float(max(behind)),
        "rollout/mixed_frac": sum(len(set(versions)) > 1 for versions in used) / len(used),
    }


def score_groups(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Response]], reward: RewardFunction
) -> tuple[Sample, ...]:
    """A scored Sample for every response. Raises ValueError, naming the prompt, for a reward not finite."""
    samples = []
    for group, (prompt, responses) in enumerate(zip(prompts, groups, strict=True)):
        for response in responses:
            score = reward(prompt, response)
            if not math.isfinite(score.reward):
                raise ValueError(
                    f"the reward of a response to prompt {prompt.id!r} is {score.reward}; it must be a finite number"
                )
            samples.append(Sample(prompt, response, score, group))
    return tuple(samples)
