"""Whole runs over the fakes: what `megarl.run.job` opens, in this process."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.backend import FakeBackend
from fakes.rollout import FakeClient, FakeEngine, FakeServers, FakeSync
from megarl.cluster.opened import Cluster
from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.mcore.spec import Role, read_architecture
from megarl.models.checkpoint import default_cache_dir, resolve_checkpoint
from megarl.report.record import load_metrics
from megarl.report.report import Report, build_report
from megarl.rollout.client import ServerOffloader
from megarl.rollout.rollout_file import Journal
from megarl.run import job
from megarl.run.components import TrainerComponents
from megarl.run.inputs import Inputs, load_inputs
from megarl.run.job import Resources, build_collector, build_components
from megarl.task.reward import AsyncReward
from megarl.task.scorer import Scorer
from megarl.trainer import Trainer
from megarl.types import Prompt, Response, RewardFunction, Score

SMALL = (
    *("model=tiny", "rollout.response_length=16", "train.prompts_per_iteration=6", "train.responses_per_prompt=4"),
    *("train.num_minibatches=2", "train.num_eval_prompts=8", "policy.optimizer.lr=0.1", "logger.terminal=false"),
    "logger.tensorboard=false",
)
"""Few samples, and a learning rate for a table"""


def reward_length(_prompt: Prompt, response: Response) -> Score:
    """Nearly every group's rewards differ, which those of random letters do not."""
    return Score(len(response.token_ids) / 16, len(response.token_ids) > 4)


Said = Callable[[], str]
"""What has been printed since the last call, in one line"""


def load_untimed(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what clocks decide, which differs from run to run."""
    measured = ("time/", "perf/", "sync/seconds", "sync/verify_share")
    lines = load_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


def build_teacher() -> Path:
    """A checkpoint of another size than model=tiny, with the same tokenizer."""
    model = load_config(["model=tiny", "model.random.num_layers=1"]).model
    return resolve_checkpoint(model, default_cache_dir())


@functools.cache
def _load(overrides: tuple[str, ...]) -> tuple[Config, Inputs]:
    # What evaluates has no effect on saved responses, and what trains the policy none where there is none.
    is_saved = any(text.startswith("rollout.file=") for text in overrides)
    is_alone = "train.num_iterations=0" in overrides and any("value_pretrain.rollouts=" in text for text in overrides)
    is_alone |= "experiment=reward_model" in overrides
    dead = ("eval",) * is_saved + ("policy.",) * is_alone
    if "algo=distill" in overrides:
        overrides += (f"reference.init={build_teacher()}",)
    config = load_config([*(text for text in SMALL if not any(name in text for name in dead)), *overrides])
    return config, load_inputs(config)


def load(overrides: Sequence[str]) -> tuple[Config, Inputs]:
    """The configuration and its inputs; composing takes longer than a run."""
    config, inputs = _load(tuple(overrides))
    return copy.deepcopy(config), inputs


@dataclass
class World:
    """What the fakes of one run have in common, for a test to look at and to disturb."""

    watch: Callable[[str, str], None] = lambda _role, _verb: None
    """told (role, verb) before each verb is done, ("servers", "publish") too; what it raises, the verb raises"""
    on_token: Callable[[str | None, int], None] = lambda _key, _number: None
    """as `FakeEngine`'s"""
    reward: RewardFunction | AsyncReward = reward_length
    log: list[tuple[str, str]] = field(default_factory=list)
    """every (role, verb), in order"""
    components: list[TrainerComponents] = field(default_factory=list)
    """of each attempt"""

    def note(self, role: str, verb: str) -> None:
        self.log.append((role, verb))
        self.watch(role, verb)

    def note_after(self, offloader: ServerOffloader) -> Callable[[str, str], None]:
        """`note` after the servers have given their memory back, as before each call of a role that needs a GPU."""

        def note(role: str, verb: str) -> None:
            if verb != "finish_save":
                offloader.release()
            self.note(role, verb)

        return note

    @contextlib.contextmanager
    def open_resources(self, config: Config, checkpoint: Path, log_dir: Path) -> Iterator[Resources]:
        vocab_size = read_architecture(checkpoint).vocab_size
        yield Cluster.__new__(Cluster), FakeServers(config.rollout.num_servers, vocab_size)

    @contextlib.contextmanager
    def open_components(
        self,
        config: Config,
        inputs: Inputs,
        resources: Resources,
        run_dir: Path,
        report: Report,
        journal: Journal | None = None,
    ) -> Iterator[TrainerComponents]:
        _, servers = resources
        assert isinstance(servers, FakeServers)
        with contextlib.ExitStack() as stack:
            offloader = ServerOffloader([FakeClient(servers, name) for name in servers.names], config.rollout.offload)
            note = self.note_after(offloader) if inputs.saved_groups is None else self.note
            roles = {role: FakeBackend(spec, note) for role, spec in inputs.specs.items()}
            built = build_components(stack, config, inputs, run_dir, report, roles)
            if inputs.saved_groups is None:
                servers.start().result()
                engine = FakeEngine(
                    servers,
                    seed=config.seed,
                    decode=lambda tokens: inputs.tokenizer.decode(tokens, skip_special_tokens=True),
                    on_token=lambda key, number: self.on_token(key, number),
                )
                stack.enter_context(contextlib.closing(engine))
                collector = build_collector(config, inputs, engine, Scorer(self.reward), journal)
                sync = FakeSync(roles[Role.policy], servers, self.note, offloader)
                parts = {"engine": engine, "collector": collector, "sync": sync, "offloader": offloader}
                built = replace(built, servers=servers, **parts)
            self.components.append(built)
            yield built

    @contextlib.contextmanager
    def open_trainer(self, run_dir: Path, overrides: Sequence[str], **replaced: Any) -> Iterator[Trainer]:
        """A trainer of this configuration, not started. replaced: components in place of the world's."""
        config, inputs = load(overrides)
        with (
            contextlib.closing(build_report(config.logger, run_dir, config.train.num_iterations)) as report,
            self.open_resources(config, inputs.checkpoint, run_dir / "logs") as resources,
            self.open_components(config, inputs, resources, run_dir, report) as components,
        ):
            yield Trainer(config, replace(components, **replaced))

    def run_job(self, run_dir: Path, overrides: Sequence[str], **keys: Any) -> Any:
        """`megarl.run.job.run_job` of this configuration over the fakes."""
        config, inputs = load(overrides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "open_resources", self.open_resources)
            patch.setattr(job, "open_components", self.open_components)
            patch.setattr(job, "load_inputs", lambda _config: inputs)
            patch.setattr(job, "check_changes", lambda _before, _config: [])
            return job.run_job(config, run_dir, **keys)


def pretrain(trainer: Trainer) -> list[float]:
    """The iterations up to 0; the explained variance of each."""
    trainer.publish_and_evaluate()
    while trainer.iteration < 0:
        trainer.train(trainer.iteration + 1)
        trainer.publish_and_evaluate()
    return list(trainer.algorithm.explained)
