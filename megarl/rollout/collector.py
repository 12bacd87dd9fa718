"""From prompts to scored responses: episodes and rewards, as one Rollout, and that as tensors.

B is the number of samples, T the length of the longest response.
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megarl.algo.statistics import allocate_zeros
from megarl.config.schema.mix import Source
from megarl.cpu.process import Lockstep
from megarl.interfaces import DeadlineError, Sampling, TurnRequest
from megarl.report.evaluation import compute_set_metrics
from megarl.report.timeline import RESPONSES, span
from megarl.rollout.client import ConnectionLostError, gather_all
from megarl.rollout.conversation import Episode, EpisodeRequest, Runner, draw_seed
from megarl.rollout.engine import ATTEMPT_PAUSE_S, MAX_ATTEMPTS, SGLangEngine, compute_sampling_seed
from megarl.rollout.rollout_file import Journal
from megarl.task.render import CriticPrompt
from megarl.task.scorer import Scorer
from megarl.types import FinishReason, Metrics, Prompt, Response, Rollout, RolloutTensors, Sample, Score, Sequences


@dataclass(frozen=True)
class EvalSet:
    name: str
    prompts: tuple[Prompt, ...]
    num_samples: int
    """Responses to each prompt"""
    sampling: Sampling
    notes: tuple[str, ...] = ()
    """How the data were read"""


@dataclass
class Group:
    """Episodes of one prompt."""

    server: int | None = None
    """The server that has the prompt in its cache: which took the last of them; None: none has begun"""


class Independent:
    """Sends each turn by itself, as many at a time as keep the servers full: the first turn of an episode to the server
    of its group or, where that is full or there is none yet, to the one with the fewest turns, the others after it.

    Where more wait, the turns of the episodes with the lowest numbers are sent first. Otherwise the second turn of an
    episode would wait for the first turns of all that have been begun since.
    """

    SHARE_QUEUED = 0.25
    """Requests that wait at the servers, as a share of those that run there: the next one is there when one ends."""

    def __init__(self, engine: SGLangEngine):
        self._engine = engine
        self._num_free = int(engine.num_slots * (1 + self.SHARE_QUEUED)) + 1
        self._most = -(-self._num_free // engine.num_servers)
        """Turns at a server that is full"""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap: episode, order of the turns that wait, what gives the turn its slot"""
        self._order = itertools.count()
        self._running = [0] * engine.num_servers
        """Turns at each server"""
        self._groups: dict[int, Group] = {}
        self._servers: dict[int, int] = {}
        """Of the episodes that have begun"""

    def admit(self, first: int, num_episodes: int, size: int) -> None:
        """These episodes come, `size` of each group."""
        for start in range(first, first + num_episodes, size):
            self._groups |= dict.fromkeys(range(start, start + size), Group())

    async def send(self, episode: int, request: TurnRequest) -> Response:
        """The generated turn of this episode."""
        found: list[Response] = []
        if not request.sampling.urgent:
            await self._take_slot(episode)
        server = self._choose(episode)
        self._running[server] += 1
        try:
            given = [replace(request, server=server)]
            await self._engine.generate_turns(given, lambda _index, response: found.append(response))
        finally:
            self._running[server] -= 1
            if not request.sampling.urgent:
                self._free_slot()
        return found[0]

    def leave(self, episode: int) -> None:
        """The episode asks for no further turn."""
        self._groups.pop(episode, None)
        self._servers.pop(episode, None)

    def _choose(self, episode: int) -> int:
        if episode in self._servers:
            return self._servers[episode]
        group = self._groups.get(episode) or Group()
        if group.server is None or self._running[group.server] >= self._most:
            group.server = min(range(len(self._running)), key=self._running.__getitem__)
        self._servers[episode] = group.server
        return group.server

    async def _take_slot(self, episode: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (episode, next(self._order), given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # It was given to a turn that is broken off.
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        while self._waiting:
            given = heapq.heappop(self._waiting)[-1]
            if not given.done():
                given.set_result(None)
                return
        self._num_free += 1


class Meeting:
    """Has the episodes of a group scored: each as soon as it has ended, or all together once the last one has."""

    def __init__(self, scorer: Scorer, num_episodes: int):
        self._scorer, self._num_episodes = scorer, num_episodes
        self._ended: dict[int, Episode] = {}
        self._scores: asyncio.Future[dict[int, Score]] | None = None

    async def score(self, number: int, episode: Episode) -> Score:
        """Of the episode with this number. The reward sees a group in their order, without those that failed."""
        if not self._scorer.sees_group:
            return await self._score_one(episode)
        self._scores = self._scores or asyncio.get_running_loop().create_future()
        self._ended[number] = episode
        if len(self._ended) == self._num_episodes:
            self._scores.set_result(await self._score_all())
        return (await self._scores)[number]

    async def _score_one(self, episode: Episode) -> Score:
        if episode.failure is not None:
            return Score(0.0, False, failure=episode.failure)
        return await self._scorer.score(episode.prompt, episode.response)

    async def _score_all(self) -> dict[int, Score]:
        scores = {n: Score(0.0, False, failure=it.failure) for n, it in self._ended.items()}
        whole = {n: it for n, it in sorted(self._ended.items()) if it.failure is None}
        if whole:
            prompt, responses = next(iter(whole.values())).prompt, [it.response for it in whole.values()]
            scores |= zip(whole, await self._scorer.score_group(prompt, responses), strict=True)
        return scores


Evaluated = tuple[Rollout, Metrics]
"""The held-out responses, and what further sets say"""


class Collector:
    """Runs the episodes of groups of responses, and scores each as soon as it has ended. Thread-safe."""

    def __init__(
        self,
        engine: SGLangEngine,
        scorer: Scorer,
        runner: Runner,
        *,
        seed: int,
        temperature: float,
        in_lockstep: bool = True,
        journal: Journal | None = None,
        eval_sets: Sequence[EvalSet] = (),
    ):
        """Arguments that need a word:

        seed: of the run. in_lockstep: calls with a key are sent in the same batches in every run, where the engine
        depends on it; not with max_staleness > 0, where nothing repeats exactly. journal: stores the samples of calls
        with a key; what it holds already is not sampled again.
        """
        self._engine = engine
        self.scorer = scorer
        self._runner = runner
        self._seed = seed
        self._sampling = Sampling(temperature)
        self._in_lockstep = in_lockstep and runner.keeps_step and engine.depends_on_batch
        self.journal = journal
        self._eval_sets = tuple(eval_sets)
        self._independent: Independent | None = None
        self._num_begun = 0
        """Episodes that were begun independently of others"""
        self.num_running = 0
        """Episodes that have begun and are not scored yet; may be read from any thread"""

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_responses: int,
        *,
        key: str | None = None,
        weight_version: int | None = None,
    ) -> tuple[Sample, ...]:
        """One group of `num_responses` samples per prompt, groups numbered from 0 in the order of `prompts`.

        key: names the call; its random numbers follow from the run's seed and this name, so that it is reproducible.
        None: they are fresh. weight_version: the trainer's current one; raises RuntimeError where a server generated a
        token with other weights. None: the versions are not checked.
        """
        journal = self.journal
        found = journal.load(key, prompts, num_responses) if journal and key else None
        if found is not None:
            return found
        samples = self._engine.run(self._collect(prompts, num_responses, key, self._sampling))
        if weight_version is not None:
            check_versions(samples, weight_version)
        if journal and key:
            journal.save(key, samples)
        return samples

    def start_group(self, prompt: Prompt, num_responses: int, *, key: str) -> "Future[tuple[Sample, ...]]":
        """Begin the episodes of one group; the future has its samples, of group 0. Nothing is journaled.

        Cancelling the future breaks off its requests.
        """
        return self._engine.start(self._run_independent([prompt], num_responses, key, self._sampling))

    def evaluate(self, prompts: Sequence[Prompt], *, weight_version: int, key: str) -> Evaluated:
        """The greedy response to each prompt, of the weights of `weight_version` alone, ahead of other requests; and
        eval/* of train.eval_sets.
        """
        return self._engine.run(self._evaluate(prompts, weight_version, key))

    def begin_evaluation(self, prompts: Sequence[Prompt], *, weight_version: int, key: str) -> Future[Evaluated]:
        """The same, which goes on while the caller does."""
        return self._engine.start(self._evaluate(prompts, weight_version, key))

    async def _evaluate(self, prompts: Sequence[Prompt], weight_version: int, key: str) -> Evaluated:
        samples = await self._collect(prompts, 1, key, Sampling(0.0, urgent=True))
        check_versions(samples, weight_version)
        metrics: Metrics = {}
        for each in self._eval_sets:
            found = await self._collect(each.prompts, each.num_samples, f"{key}-{each.name}", each.sampling)
            check_versions(found, weight_version)
            metrics |= compute_set_metrics(each.name, found)
        return Rollout(samples, weight_version), metrics

    def close(self) -> None:
        """End what episodes have started."""
        self._engine.run(self._runner.close())

    async def _collect(
        self, prompts: Sequence[Prompt], num_responses: int, key: str | None, sampling: Sampling
    ) -> tuple[Sample, ...]:
        if num_responses < 1 or sampling.temperature < 0:
            raise ValueError(f"num_responses {num_responses} (>= 1), temperature {sampling.temperature} (>= 0)")
        if not prompts:
            return ()
        if key is None or not self._in_lockstep:
            return await self._run_independent(prompts, num_responses, key, sampling)
        return await self._run_in_lockstep(prompts, num_responses, key, sampling)

    async def _run_in_lockstep(
        self, prompts: Sequence[Prompt], num_responses: int, key: str, sampling: Sampling
    ) -> tuple[Sample, ...]:
        """A lost connection makes all begin anew: what is computed beside what decides the last bits."""
        servers = [row % self._engine.num_servers for row in range(len(prompts))]
        for attempt in range(MAX_ATTEMPTS):
            await asyncio.sleep(ATTEMPT_PAUSE_S if attempt else 0.0)
            sender = Lockstep(self._engine.generate_turns, len(prompts) * num_responses)
            try:
                # Nothing else runs then, and nothing is cached.
                await self._engine.drop_cached_prefixes()
                return await self._run_all(prompts, num_responses, key, sampling, servers, sender)
            except ConnectionLostError:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
            finally:
                await sender.close()
        raise AssertionError("unreachable")

    async def _run_independent(
        self, prompts: Sequence[Prompt], num_responses: int, key: str | None, sampling: Sampling
    ) -> tuple[Sample, ...]:
        if self._independent is None:
            self._independent = Independent(self._engine)
        first, number = self._num_begun, len(prompts) * num_responses
        self._num_begun += number
        self._independent.admit(first, number, num_responses)
        servers = [0] * len(prompts)
        return await self._run_all(prompts, num_responses, key, sampling, servers, self._independent, first)

    async def _run_all(
        self,
        prompts: Sequence[Prompt],
        num_responses: int,
        key: str | None,
        sampling: Sampling,
        servers: Sequence[int],
        sender: Lockstep | Independent,
        first: int = 0,
    ) -> tuple[Sample, ...]:
        """servers: of each prompt, where the sender chooses none. first: number of the first episode, for it."""
        requests = []
        meetings = [Meeting(self.scorer, num_responses) for _ in prompts]
        for row, (prompt, server) in enumerate(zip(prompts, servers, strict=True)):
            for k in range(num_responses):
                name = None if key is None else f"{key}/{row}/{k}"
                seed = draw_seed() if name is None else compute_sampling_seed(f"{self._seed}/{name}/environment")
                requests.append(EpisodeRequest(prompt, name, seed, sampling, server))
        samples = await gather_all(
            self._run_one(first + number, request, sender, number // num_responses, meetings[number // num_responses])
            for number, request in enumerate(requests)
        )
        return tuple(samples)

    async def _run_one(
        self, number: int, request: EpisodeRequest, sender: Lockstep | Independent, group: int, meeting: "Meeting"
    ) -> Sample:
        self.num_running += 1
        try:
            with span("episode", process=RESPONSES, track="episodes", prompt=request.prompt.id) as details:
                try:
                    episode = await self._runner.run(request, lambda turn: sender.send(number, turn))
                finally:
                    sender.leave(number)
                details["tokens"] = len(episode.response)
            return Sample(episode.prompt, episode.response, await self._score(number, episode, meeting), group)
        except DeadlineError as error:
            # All episodes that shared a call may have the same error.
            if not hasattr(error, "__notes__"):
                error.add_note(f"in the episode {request.name or 'without a name'} of prompt {request.prompt.id!r}")
            raise
        finally:
            self.num_running -= 1

    async def _score(self, number: int, episode: Episode, meeting: "Meeting") -> Score:
        with span("score", process=RESPONSES, track="rewards", prompt=episode.prompt.id):
            score = await meeting.score(number, episode)
        rewards = [turn.reward for turn in episode.response.turns]
        if score.failure is not None or not any(rewards):
            return score
        return replace(score, reward=score.reward + math.fsum(rewards))


def check_versions(samples: Sequence[Sample], weight_version: int | None = None, *, may_be_older: bool = False) -> None:
    """Check that the weights of `weight_version`, the trainer's, generated every token; None: any of the trainer's.

    may_be_older: earlier weights of the trainer may have done so too. Raises RuntimeError naming prompt and versions.
    """
    for sample in samples:
        used = sample.response.weight_versions.find_used(sample.response.generated)
        if used and min(used) < 0:
            raise RuntimeError(
                f"a response to prompt {sample.prompt.id!r} was generated by a server without the trainer's weights,"
                " as it has none when it is started and after a weight sync that failed"
            )
        is_old = not may_be_older and weight_version is not None and used and min(used) < weight_version
        if is_old or (used and weight_version is not None and max(used) > weight_version):
            raise RuntimeError(
                f"a response to prompt {sample.prompt.id!r} was generated with the servers' weight version"
                f" {', '.join(map(str, sorted(set(used))))}; the trainer's is {weight_version}: the servers missed a"
                " weight sync, or it took place during the rollout"
            )


def compute_staleness(samples: Sequence[Sample], weight_version: int, max_staleness: float) -> Metrics:
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


def build_sequences(rollout: Rollout, critic_prompt: CriticPrompt | None = None) -> Sequences:
    """Prompt and response of every sample, concatenated.

    critic_prompt: for the critic, which reads its text before the prompt and routes its tokens itself; None: for all.
    """
    prompts = [critic_prompt.extend(s.prompt) if critic_prompt else s.prompt.token_ids for s in rollout.samples]
    pairs = [(p, s.response.token_ids) for p, s in zip(prompts, rollout.samples, strict=True)]
    segments = [_build_segments(s, critic_prompt) if s.response.segment_prompts else () for s in rollout.samples]
    tokens = np.empty(sum(len(ids) for pair in pairs for ids in pair), np.int64)
    end = 0
    for ids in (ids for pair in pairs for ids in pair):
        tokens[end : end + len(ids)] = ids
        end += len(ids)
    return Sequences(
        tokens=torch.from_numpy(tokens),
        lengths=torch.tensor([len(p) + len(r) for p, r in pairs], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(p) for p, _ in pairs], dtype=torch.int64),
        routed_experts=None if critic_prompt else build_routed_experts(rollout.samples),
        segments=tuple(segments) if any(segments) else None,
    )


def _build_segments(sample: Sample, critic_prompt: CriticPrompt | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """The row of `Sequences.segments` of a sample with several."""
    prompts: list[Prompt] = [sample.prompt]
    for ids in sample.response.segment_prompts:
        prompts.append(replace(sample.prompt, token_ids=tuple(ids.tolist())))
    before = [torch.tensor(critic_prompt.extend(p) if critic_prompt else p.token_ids) for p in prompts]
    return tuple(zip(map(torch.from_numpy, sample.response.find_segments()), before, strict=True))


def build_tensors(
    rollout: Rollout,
    critic_prompt: CriticPrompt | None = None,
    max_staleness: float | None = None,
    parts: Collection[str] = (),
    sources: Mapping[str, Source] | None = None,
) -> RolloutTensors:
    """All tensors of a rollout, on the CPU.

    critic_prompt: None without data.critic_prompt. max_staleness: of which tokens are too old; None: none is. parts:
    names of `RolloutTensors.reward_parts`. sources: of data=mix.
    """
    samples = rollout.samples
    longest = max((len(s.response) for s in samples), default=0)
    mask, scored, too_stale = (allocate_zeros((len(samples), longest), torch.bool) for _ in range(3))
    logprobs = allocate_zeros((len(samples), longest), torch.float32)
    has_first_old = any(sample.first_old_logprobs is not None for sample in samples)
    first_old = allocate_zeros((len(samples), longest), torch.float32) if has_first_old else None
    for row, sample in enumerate(samples):
        length, generated = len(sample.response), torch.from_numpy(sample.response.generated)
        # Each iteration raises the version by one: what was sampled n iterations ago was first scored, and learned
        # from, by the weights n versions ago.
        behind = rollout.weight_version - sample.age - torch.from_numpy(sample.response.weight_versions.expand())
        if max_staleness is not None:
            too_stale[row, :length] = generated & (behind > max_staleness)
        if first_old is not None and sample.first_old_logprobs is not None:
            first_old[row, :length] = torch.from_numpy(sample.first_old_logprobs)
        if sample.score.failure is None:
            own = mask[row, :length]
            own.copy_(generated)
            np.copyto(logprobs[row, :length].numpy(), sample.response.rollout_logprobs, where=own.numpy())
            if sample.age == 0 or sample.first_old_logprobs is not None:
                scored[row, :length] = own & (behind == 0)
    return RolloutTensors(
        sequences=build_sequences(rollout),
        groups=torch.tensor([s.group for s in samples], dtype=torch.int64),
        ages=torch.tensor([s.age for s in samples], dtype=torch.int64),
        rewards=torch.tensor([s.score.reward for s in samples], dtype=torch.float32),
        reward_parts=torch.tensor([[s.score.details.get(name, 0.0) for name in parts] for s in samples])
        if parts
        else None,
        failed=torch.tensor([s.score.failure is not None for s in samples], dtype=torch.bool),
        truncated=torch.tensor([s.response.finish_reason is FinishReason.length for s in samples], dtype=torch.bool),
        **({} if sources is None else build_source_tensors([sources[s.prompt.source] for s in samples])),
        turn_rewards=build_turn_rewards(samples, longest),
        mask=mask,
        rollout_logprobs=logprobs,
        first_old_logprobs=first_old,
        scored=scored,
        too_stale=too_stale if bool(too_stale.any()) else None,
        masked=torch.tensor([s.masked for s in samples]) if any(s.masked for s in samples) else None,
        critic_sequences=build_sequences(rollout, critic_prompt) if critic_prompt else None,
    )


def build_source_tensors(sources: Sequence[Source]) -> dict[str, Tensor]:
    """`RolloutTensors.reward_scales` and `length_limits`, of the source of each sample."""
    return {
        "reward_scales": torch.tensor([each.reward_scale for each in sources], dtype=torch.float64),
        "length_limits": torch.tensor([each.config.rollout.response_length for each in sources]),
    }


def build_turn_rewards(samples: Sequence[Sample], longest: int) -> Tensor | None:
    """`Score.token_rewards`, and the rewards of the turns before the last at their actions' last tokens, float32 [B,
    longest]; None: there are none. What the last turn gave stands at the end, with the rest of `Score.reward`, as does
    the reward of a turn whose action has no token.
    """
    places = [
        (row, turn.end - 1, turn.reward)
        for row, sample in enumerate(samples)
        for turn in sample.response.turns[:-1]
        if turn.reward and turn.end > turn.start and sample.score.failure is None
    ]
    placed = [row for row, sample in enumerate(samples) if sample.score.token_rewards and sample.score.failure is None]
    if not places and not placed:
        return None
    turn_rewards = torch.zeros(len(samples), longest, dtype=torch.float32)
    for row in placed:
        found = torch.tensor(samples[row].score.token_rewards, dtype=torch.float32)
        turn_rewards[row, : len(found)] = found
    for row, column, reward in places:
        turn_rewards[row, column] += reward
    return turn_rewards


def build_routed_experts(samples: Sequence[Sample]) -> Tensor | None:
    """`Sequences.routed_experts` of these samples: 0 for each one's last token, and for samples without; None where
    no sample has any.
    """
    first = next((x for s in samples if (x := s.response.routed_experts)), None)
    if first is None:
        return None
    lengths = [len(s.prompt.token_ids) + len(s.response.token_ids) for s in samples]
    packed = torch.zeros(sum(lengths), first.num_layers, first.top_k, dtype=first.dtype)
    for sample, rows in zip(samples, torch.split(packed, lengths), strict=True):
        if sample.response.routed_experts is not None:
            rows[:-1] = sample.response.routed_experts.to_tensor() + 1
    return packed
