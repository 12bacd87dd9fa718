"""From prompts to scored responses: generation and rewards, as one Rollout."""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError

from megarl.interfaces import RolloutEngine
from megarl.rollout.journal import Journal
from megarl.types import Metrics, Prompt, Response, RewardFunction, Rollout, Sample, Score


class Collector:
    """Has the engine generate groups of responses and scores each response. Thread-safe."""

    def __init__(
        self, engine: RolloutEngine, reward: RewardFunction, *, temperature: float, journal: Journal | None = None
    ):
        """journal: stores the samples of calls with a key; what it holds already is not sampled again."""
        self._engine = engine
        self.journal = self._journal = journal
        self._reward = reward
        self._temperature = temperature
        self._scoring = threading.Lock()

    def sample(self, prompts: Sequence[Prompt], num_responses: int, *, key: str | None = None) -> tuple[Sample, ...]:
        """One group of `num_responses` samples per prompt, groups numbered from 0 in the order of `prompts`.

        key: as in `RolloutEngine.generate`. The weight versions are not checked. Raises ValueError where a reward is
        not finite.
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

    def start_group(self, prompt: Prompt, num_responses: int, *, key: str) -> "Future[tuple[Sample, ...]]":
        """Begin one group and return at once; the future has its scored samples (group 0), or what failed.

        The journal and the check of versions are the caller's. Thread-safe.
        """
        future: Future[tuple[Sample, ...]] = Future()

        def work() -> None:
            try:
                groups = self._engine.generate(
                    [prompt], num_responses=num_responses, temperature=self._temperature, key=key
                )
                samples = score_groups([prompt], groups, self._score)
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(samples)

        threading.Thread(target=work, name="megarl-group", daemon=True).start()
        return future

    def collect(
        self, prompts: Sequence[Prompt], num_responses: int, *, weight_version: int, key: str | None = None
    ) -> Rollout:
        """As `sample`, from the current weights alone.

        weight_version: the trainer's current one. Raises RuntimeError where a server generated a token with other
        weights.
        """
        samples = self.sample(prompts, num_responses, key=key)
        with self.forgetting_failures(key):
            check_versions(samples, weight_version)
        return Rollout(samples, weight_version)

    @contextlib.contextmanager
    def forgetting_failures(self, key: str | None) -> Iterator[None]:
        """Where the block fails, removes what the journal has under keys that begin with `key`: it would fail again."""
        try:
            yield
        except Exception:
            if self._journal and key:
                self._journal.drop(key)
            raise

    def collect_greedy(self, prompts: Sequence[Prompt], *, weight_version: int, key: str | None = None) -> Rollout:
        """The greedy response to each prompt, for evaluation, ahead of prefetched requests; otherwise as `collect`."""
        groups = self._engine.generate(prompts, num_responses=1, temperature=0.0, urgent=True, key=key)
        samples = score_groups(prompts, groups, self._score)
        check_versions(samples, weight_version)
        return Rollout(samples, weight_version)

    def _score(self, prompt: Prompt, response: Response) -> Score:
        with self._scoring:  # A user's function need not be thread-safe.
            return self._reward(prompt, response)


def check_versions(samples: Sequence[Sample], weight_version: int, *, may_be_older: bool = False) -> None:
    """Check that the weights of `weight_version`, the trainer's, generated every token.

    may_be_older: earlier weights of the trainer may have done so too. Raises RuntimeError naming prompt and versions.
    """
    oldest = 0 if may_be_older else weight_version  # A negative version denotes no weights of the trainer.
    for sample in samples:
        used = sample.response.weight_versions.find_used(sample.response.generated)
        if used and not oldest <= min(used) <= max(used) <= weight_version:
            versions = ", ".join(str(version) for version in sorted(set(used)))
            raise RuntimeError(
                f"a response to prompt {sample.prompt.id!r} was generated with the servers' weight version {versions}; "
                f"the trainer's is {weight_version}: the servers missed a weight sync, or it took place during the"
                " rollout"
            )


def compute_staleness(samples: Sequence[Sample], weight_version: int, max_staleness: int) -> Metrics:
    """Metrics of how old the weights were that generated the samples; empty where there is no token.

    rollout/staleness_mean, _max: versions behind `weight_version`, over the generated tokens that are learned from,
    those of at most `max_staleness`. rollout/too_stale_frac: share of the generated tokens that are older and not
    learned from. rollout/mixed_frac: share of the responses whose tokens have more than one version.
    """
    behind: Counter[int] = Counter()
    num_used = []
    for sample in samples:
        generated, versions = sample.response.generated, sample.response.weight_versions
        num_used.append(len(set(versions.find_used(generated))))
        for version, start, end in versions.list_runs():
            behind[weight_version - version] += int(generated[start:end].sum())
    num_tokens = behind.total()
    if not num_tokens:
        return {}
    fresh = {age: num for age, num in behind.items() if age <= max_staleness and num}
    num_fresh = sum(fresh.values())
    return {
        "rollout/staleness_mean": sum(age * num for age, num in fresh.items()) / max(1, num_fresh),
        "rollout/staleness_max": float(max(fresh, default=0)),
        "rollout/mixed_frac": sum(num > 1 for num in num_used) / sum(num > 0 for num in num_used),
        "rollout/too_stale_frac": 1 - num_fresh / num_tokens,
    }


def score_groups(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Response]], reward: RewardFunction
) -> tuple[Sample, ...]:
    """A scored Sample for every response. Raises ValueError naming the prompt where a reward is not finite."""
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
