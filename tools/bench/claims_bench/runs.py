"""One run of one arm, in this process or with the real loop, and what is kept of it."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from claims_bench.in_process import Backend, Engine, Sync
from claims_bench.model import write_biased_checkpoint
from claims_bench.specs import Arm, Claim
from claims_bench.tasks import LETTERS, NEVER, TASKS, Task, write_prompts
from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.root import Config
from megarl.data.build import build_data
from megarl.data.sampler import PromptSampler
from megarl.hf.cache import build_once
from megarl.hf.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.mcore.worker_spec import Role
from megarl.report.report import Report, build_report
from megarl.reward.scorer import Scorer
from megarl.rollout.collector import build_collector
from megarl.rollout.episodes import build_conversation
from megarl.run.inputs import build_specs, load_inputs
from megarl.run.job import RunResources, open_components
from megarl.trainer import Trainer, TrainerComponents
from megarl.types import Experience, Metrics, Rollout, Sample, TrainingSamples
from megarl.value_pretraining.loop import pretrain_critic

MODEL = ("model=tiny", f"model.random.alphabet={LETTERS}", "model.random.max_length=320")
COMMON = (
    "reward=function",
    "data=jsonl",
    "data.prompt_length=8",
    "policy.optimizer.decay=constant",
    "policy.optimizer.decay_iterations=null",
    "policy.optimizer.min_lr=0",
    "rollout.kv_cache_tokens=65536",
    "train.eval_every=1000",
    "logger.terminal=false",
    "logger.tensorboard=false",
)
SMOLLM2 = "smollm2"
"""Task of arms that say their model and data themselves"""


@dataclass(frozen=True)
class Run:
    """What is kept of a finished run: numbers of each iteration."""

    claim: str
    arm: str
    seed: int
    loop: str
    cpu_seconds: float
    """Of this process, which in the real loop is not where the work is done"""
    seconds: float
    samples: tuple[int, ...]
    """Responses generated up to each iteration, those of value pretraining included"""
    right: tuple[float, ...]
    """Share of right answers among the sampled ones"""
    reward: tuple[float, ...]
    surprise: tuple[float, ...]
    """Mean of -log pi of the sampled tokens: an estimate of the entropy"""
    length: tuple[float, ...]
    snr: tuple[float, ...]
    """Of the tokens' advantages, where the task says which tokens are right"""
    noise_share: tuple[float, ...]
    """Share of |advantage| in groups of which at least 7 in 8 responses are paid, and not all"""
    metrics: dict[str, tuple[float | None, ...]]
    """Some of the product's own, by name"""


KEPT = (
    "critic/explained_variance",
    "policy/grad_norm",
    "policy/clip_frac",
    "rollout/staleness_mean",
    "topr/taper_mean",
)


def save_run(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(run)))
    os.replace(partial, path)


def load_run(path: Path) -> Run:
    fields = json.loads(path.read_text())
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Run(**fields | lists | {"metrics": {name: tuple(value) for name, value in fields["metrics"].items()}})


class RecordingTrainer(Trainer):
    """Keeps what `Run` wants; with a frozen arm every iteration learns from the first one's responses."""

    def __init__(self, config: Config, components: TrainerComponents, arm: Arm):
        super().__init__(config, components)
        self.arm, self.task = arm, TASKS.get(arm.task)
        self.frozen: Rollout | None = None
        self.first_old_logprobs: Tensor | None = None
        self.series: dict[str, list[Any]] = {
            name: [] for name in ("samples", "right", "reward", "surprise", "length", "snr", "noise_share")
        }

    def collect(self, iteration: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = super().collect(iteration)
        found, add = rollout.samples, self.series
        counted = [s for s in found if s.score.details.get("counted", 1.0)]
        right = [s.score.details.get("right", float(s.score.correct)) for s in counted]
        add["samples"].append(self.num_samples)
        add["right"].append(sum(right) / max(1, len(right)))
        add["reward"].append(sum(s.score.reward for s in found) / len(found))
        num_tokens = sum(len(s.response) for s in found)
        add["surprise"].append(-sum(float(s.response.rollout_logprobs.sum()) for s in found) / num_tokens)
        add["length"].append(num_tokens / len(found))
        if not self.arm.frozen:
            return rollout, metrics
        self.frozen = self.frozen or rollout
        return self._age(self.frozen, iteration - 1), metrics

    def _age(self, rollout: Rollout, age: int) -> Rollout:
        if age == 0:
            return rollout
        assert self.first_old_logprobs is not None
        samples = [
            replace(sample, age=age, first_old_logprobs=row[: len(sample.response)].numpy())
            for sample, row in zip(rollout.samples, self.first_old_logprobs, strict=True)
        ]
        return Rollout(tuple(samples), self.version)

    def build_experience(self, rollout: Rollout) -> tuple[Experience, Metrics]:
        experience, metrics = super().build_experience(rollout)
        if self.arm.frozen:
            if self.first_old_logprobs is None:
                self.first_old_logprobs = experience.old_logprobs
            if self.arm.keeps_old_logprobs:
                experience = replace(experience, old_logprobs=self.first_old_logprobs)
        return experience, metrics

    def build_targets(self, experience: Experience, algo: AlgoConfig) -> tuple[TrainingSamples, Metrics]:
        samples, metrics = super().build_targets(experience, algo)
        self.series["noise_share"].append(measure_noise_share(experience, samples.advantages))
        return samples, metrics

    def build_and_measure(self, rollout: Rollout, samples: TrainingSamples) -> None:
        if self.task is not None and self.task.bits is not None:
            self.series["snr"].append(measure_snr(rollout.samples, samples.advantages, self.task))

    def train(self, iteration: int) -> None:
        """As the product's; the advantages are measured in between."""
        kept: list[Rollout] = []
        collect, build = self.collect, self.build_targets

        def collect_kept(number: int) -> tuple[Rollout, Metrics]:
            found = collect(number)
            kept.append(found[0])
            return found

        def build_measured(experience: Experience, algo: AlgoConfig) -> tuple[TrainingSamples, Metrics]:
            samples, metrics = build(experience, algo)
            self.build_and_measure(kept[-1], samples)
            return samples, metrics

        vars(self).update(collect=collect_kept, build_targets=build_measured)
        try:
            super().train(iteration)
        finally:
            del vars(self)["collect"], vars(self)["build_targets"]


def measure_snr(samples: Sequence[Sample], advantages: Tensor, task: Task) -> float:
    """Half the difference of the mean advantages of right and wrong tokens, over their pooled standard deviation.

    At each position by itself, then the mean over the positions that have both. advantages: float [B, T].
    """
    assert task.bits is not None
    right = torch.zeros(advantages.shape, dtype=torch.bool)
    inside = torch.zeros(advantages.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        bits = task.bits(sample.prompt, sample.response)[: advantages.shape[1]]
        right[row, : len(bits)] = torch.tensor(bits)
        inside[row, : len(bits)] = True
    found = []
    for column in range(advantages.shape[1]):
        values, is_right = advantages[inside[:, column], column].double(), right[inside[:, column], column]
        good, bad = values[is_right], values[~is_right]
        if len(good) < 2 or len(bad) < 2:
            continue
        pooled = ((len(good) - 1) * good.var() + (len(bad) - 1) * bad.var()) / (len(values) - 2)
        if pooled > 0:
            found.append(float((good.mean() - bad.mean()) / 2 / pooled.sqrt()))
    return sum(found) / len(found) if found else 0.0


def measure_noise_share(experience: Experience, advantages: Tensor) -> float:
    """The share of sum |A| that is in groups with at least 7 of 8 rewards of 1, and not all."""
    per_row = (advantages.abs() * experience.mask).sum(1).double()
    solved = torch.zeros(len(per_row), dtype=torch.bool)
    for group in set(experience.groups.tolist()):
        rows = experience.groups == group
        solved[rows] = bool(7 / 8 <= experience.rewards[rows].mean() < 1)
    return float(per_row[solved].sum() / per_row.sum()) if float(per_row.sum()) else 0.0


SCORES_FIRST = "train.reuse_logprobs=false"
"""The backends here have no `updated_logprobs`, and some arms replace old_logprobs before the update"""


def build_overrides(arm: Arm, seed: int, out: Path) -> list[str]:
    """The whole configuration of a run; writes the prompts and the checkpoint of its task where they are missing."""
    if arm.task == SMOLLM2:
        return [*arm.keys, SCORES_FIRST, f"seed={seed}", "logger.terminal=false", "logger.tensorboard=false"]
    task = TASKS[arm.task]
    train, heldout = write_prompts(out / "prompts")
    source = resolve_checkpoint(load_config(MODEL).model, default_cache_dir())

    def build(directory: Path) -> None:
        write_biased_checkpoint(source, directory, dict(task.biases), NEVER)

    checkpoint = build_once(out / "checkpoints" / arm.task, build)
    return [
        *("model=tiny", "model.name=biased", "model.source=path", f"model.path={checkpoint}"),
        *COMMON,
        f"reward.path=claims_bench.tasks:{task.score.__name__}",
        f"data.path={train}",
        f"data.heldout_path={heldout}",
        f"rollout.response_length={task.response_length}",
        *arm.keys,
        SCORES_FIRST,
        f"seed={seed}",
    ]


@contextlib.contextmanager
def open_in_process(config: Config, arm: Arm, report: Report) -> Iterator[TrainerComponents]:
    """The components of the loop over the tiny model in plain torch, on one thread."""
    torch.set_num_threads(1)
    assert config.model.path is not None
    checkpoint = Path(config.model.path)
    tokenizer = load_tokenizer(checkpoint)
    data = build_data(config.data, tokenizer, config.seed)
    roles = {role: Backend(spec) for role, spec in build_specs(config, checkpoint).items()}
    engine = Engine(checkpoint, config.seed, tokenizer)
    with contextlib.closing(engine):
        yield TrainerComponents(
            policy=roles[Role.policy],
            critic=roles.get(Role.critic),
            reference=None,
            engine=engine,
            collector=build_collector(
                config, engine, Scorer(TASKS[arm.task].score), build_conversation(config, tokenizer)
            ),
            sync=Sync(roles[Role.policy], engine),
            sampler=PromptSampler(data.train, config.seed),
            heldout=data.heldout[: config.train.num_eval_prompts],
            report=report,
        )


def train_once(claim: Claim, name: str, seed: int, out: Path, hosts: RunResources | None = None) -> Run:
    """One run; hosts: Ray and the servers of the real loop, None: in this process. Raises TimeoutError."""
    arm, started, cpu = claim.arms[name], time.monotonic(), time.process_time()
    config = load_config(build_overrides(arm, seed, out))
    run_dir = out / "runs" / f"{claim.name}_{name}_{seed}{'' if hosts is None else '_real'}"
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_deadline(claim.deadline_s))
        report = stack.enter_context(
            contextlib.closing(build_report(config.logger, run_dir, config.train.num_iterations))
        )
        if hosts is None:
            components = stack.enter_context(open_in_process(config, arm, report))
        else:
            components = stack.enter_context(open_components(config, load_inputs(config), hosts, run_dir, report))
        trainer = RecordingTrainer(config, components, arm)
        pretrain_critic(trainer)
        trainer.run()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = {key: tuple(line.get(key) for line in lines) for key in KEPT if any(key in line for line in lines)}
    series = {key: tuple(values) for key, values in trainer.series.items()}
    loop, cpu = "in_process" if hosts is None else "real", time.process_time() - cpu
    return Run(claim.name, name, seed, loop, cpu, time.monotonic() - started, metrics=metrics, **series)


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after so long."""

    def expire(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"the run has taken longer than its deadline of {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
