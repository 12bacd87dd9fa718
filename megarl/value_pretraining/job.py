"""Value pretraining as a job of its own: inputs, processes, clean shutdown.

Online it uses the components of a training run, offline the critic's workers alone.
"""

import contextlib
import time
from pathlib import Path

from megarl.algo.registry import name_advantages, needs_critic
from megarl.checkpoint.folder import remove_pretraining
from megarl.checkpoint.manifest import NAME as MANIFEST
from megarl.cluster.opened import open_ray
from megarl.cluster.workers import WorkerGroup
from megarl.config.checks.config import describe_sizes
from megarl.config.errors import ConfigError
from megarl.config.placement import list_groups, place
from megarl.config.schema.root import Config
from megarl.config.threads import describe_threads, settle_threads
from megarl.config.values import list_values
from megarl.interfaces import TrainBackend
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.models.checkpoint import load_tokenizer
from megarl.report.report import Report, build_report
from megarl.rollout.rollout_file import JOURNAL, Journal, SavedRollouts
from megarl.run.inputs import (
    build_critic_prompt,
    describe_start,
    load_inputs,
    load_models,
    load_saved_rollouts,
    load_specs,
)
from megarl.run.job import describe_data, lock_run_dir, open_components, open_resources
from megarl.run.saving import LoopSaver
from megarl.run.terminal import get_terminal, show_warnings
from megarl.task.render import CriticPrompt
from megarl.trainer import Trainer
from megarl.value_pretraining import result as pretrained
from megarl.value_pretraining.checkpoints import ResumePoint, begin_job, load_threads, open_saver
from megarl.value_pretraining.inputs import list_pretraining_inputs
from megarl.value_pretraining.loop import (
    PretrainingSummary,
    ValuePretraining,
    pretrain_critic,
    repeat_rollouts,
    take_until,
)
from megarl.value_pretraining.result import PretrainedState, load_curve, save_pretrained


def run_value_pretraining(config: Config, run_dir: Path) -> PretrainingSummary:
    """Train the critic alone, or resume it where it was not finished in `run_dir`.

    The critic is left in `run_dir`/critic, its curves in value_pretrain.jsonl, and the state that a training run
    starts from in `run_dir`/pretrained. Raises ConfigError, before any process is started, where the configuration
    does not fit; CheckpointError where a value pretraining with other inputs has begun there, where another process
    uses the folder, and for problems of its checkpoint.
    """
    problems = list(check_pretraining(config))
    if problems:
        raise ConfigError(problems)
    if (run_dir / pretrained.NAME / MANIFEST).is_file():
        raise ConfigError(
            [
                f"hydra.run.dir: {run_dir} has a finished value pretraining; training starts from it with"
                f" {pretrained.KEY}={run_dir}, another one needs a folder of its own"
            ]
        )
    run = _run_online if config.algo.value_pretrain.rollouts is None else _run_offline
    with lock_run_dir(run_dir):
        config = settle_threads(config, "pretrain_value", load_threads(run_dir))
        summary = run(config, run_dir)
        remove_pretraining(run_dir)
        return summary


def check_pretraining(config: Config) -> list[str]:
    """The reasons why there is nothing to pretrain, one message each."""
    advantage, settings = config.algo.advantage, config.algo.value_pretrain
    if not needs_critic(config.algo):
        right = f"{name_advantages(needs_critic=True)} (algo=vapo)"
        return [f"algo.advantage: found {advantage}, which has no critic to pretrain; it must be {right}"]
    if not settings.enabled:
        return ["algo.value_pretrain.enabled: found false; it must be true, as under algo=vapo and algo=vc_ppo"]
    if settings.steps == 0:
        return ["algo.value_pretrain.steps: found 0; it must be 1 or more, the rollouts to pretrain the critic on"]
    return []


def _run_online(config: Config, run_dir: Path) -> PretrainingSummary:
    """Pretrain on fresh responses of the policy, which a training run's own processes sample and score."""
    inputs = load_inputs(config)
    spec = inputs.specs[Role.critic]
    journal = Journal(run_dir / JOURNAL) if config.checkpoint.save_every is not None else None
    with contextlib.ExitStack() as stack:
        report = _start_report(stack, config, run_dir)
        report.message(describe_sizes(config))
        report.message(describe_data(config, inputs))
        report.message(describe_start(config, spec, None))
        resume_point = begin_job(config, run_dir, spec, report)
        with report.phase("start"):
            resources = stack.enter_context(open_resources(config, inputs, run_dir / "logs"))
        components = stack.enter_context(open_components(config, inputs, resources, run_dir, report, journal))
        trainer = Trainer(config, components)
        assert components.critic is not None
        assert components.sampler is not None
        saver = stack.enter_context(
            open_saver(config, run_dir, components.critic, spec, report, describe_again(run_dir))
        )
        summary = pretrain_critic(trainer, saver, resume_point)
        state = PretrainedState(
            trainer.num_samples,
            summary.reward_moments,
            components.sampler.state(),
            load_curve(run_dir),
            list_pretraining_inputs(config),
        )
        _leave(run_dir, components.critic, spec, state, saver)
        if journal is not None:
            journal.forget_pretraining()
        return summary


def _run_offline(config: Config, run_dir: Path) -> PretrainingSummary:
    """Pretrain on saved responses with their rewards: no server, no policy, no reward function."""
    models = load_models(config)
    spec = load_specs(config, models)[Role.critic]
    has_text = config.data.critic_prompt is not None
    critic_prompt = build_critic_prompt(config, models, load_tokenizer(models.checkpoint)) if has_text else None
    saved = load_saved_rollouts(config, models, critic_prompt)
    assert saved is not None  # check_pretraining has verified it
    with contextlib.ExitStack() as stack:
        report = _start_report(stack, config, run_dir)
        report.message(describe_start(config, spec, saved))
        resume_point = begin_job(config, run_dir, spec, report)
        with report.phase("start"):
            slots = place(config.cluster, list_groups(config, "pretrain_value"))[Role.critic.value]
            cluster = stack.enter_context(open_ray(config.cluster, len(slots)))
            critic = WorkerGroup(spec, run_dir / "logs", cluster, slots, config.cluster.worker_start_deadline_s)
            stack.callback(critic.close)
            critic.start().result()
        saver = stack.enter_context(open_saver(config, run_dir, critic, spec, report, describe_again(run_dir)))
        summary = pretrain_offline(config, critic, report, saved, saver, resume_point, critic_prompt)
        inputs = list_pretraining_inputs(config)
        state = PretrainedState(0, summary.reward_moments, None, load_curve(run_dir), inputs)
        _leave(run_dir, critic, spec, state, saver)
        return summary


def _leave(run_dir: Path, critic: TrainBackend, spec: WorkerSpec, state: PretrainedState, saver: LoopSaver) -> None:
    """Write the results. A signal or an error meanwhile makes the last step be saved, where it is not."""
    with saver.saving_newest():
        critic.export_weights(run_dir / "critic").result()
        save_pretrained(run_dir, critic, spec, state)


def describe_again(run_dir: Path) -> str:
    return f"the same command with hydra.run.dir={run_dir}"


def pretrain_offline(
    config: Config,
    critic: WorkerGroup,
    report: Report,
    saved: SavedRollouts,
    saver: LoopSaver | None = None,
    resume_point: ResumePoint | None = None,
    critic_prompt: CriticPrompt | None = None,
) -> PretrainingSummary:
    """Pretrain on the saved responses, at most `train.max_minutes` from here.

    saver: None: no checkpoints. resume_point: where to resume; None: it starts. critic_prompt: with data.critic_prompt.
    """
    minutes, started = config.train.max_minutes, time.monotonic()
    pretraining = ValuePretraining(config, critic, report, saver=saver, critic_prompt=critic_prompt)
    if resume_point is not None:
        pretraining.restore(resume_point)
    rollouts = repeat_rollouts(saved.path, report.message, len(pretraining.curve))
    return pretraining.run(
        take_until(lambda: minutes is not None and time.monotonic() - started > 60 * minutes, rollouts)
    )


def _start_report(stack: contextlib.ExitStack, config: Config, run_dir: Path) -> Report:
    num_steps, settings = config.algo.value_pretrain.num_steps, dict(list_values(config))
    report = build_report(config.logger, run_dir, num_steps, get_terminal(), settings=settings)
    stack.callback(report.close)
    stack.enter_context(show_warnings(report.message))
    if threads := describe_threads(config, "pretrain_value"):
        report.message(threads)
    return report
