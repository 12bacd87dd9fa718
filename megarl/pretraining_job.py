"""Value pretraining as a job of its own: inputs, processes, clean end; online with the parts of a training run, or
offline with the critic's workers alone.
"""

import contextlib
import time
from pathlib import Path

from megarl.cluster.opened import open_ray
from megarl.cluster.workers import WorkerGroup
from megarl.config.algo import needs_critic
from megarl.config.check import describe_sizes
from megarl.config.errors import ConfigError
from megarl.config.placement import list_groups, place
from megarl.config.schema import Config
from megarl.inputs import describe_start, load_inputs, load_models, load_saved_rollouts, load_specs
from megarl.job import describe_data, open_hosts, open_parts, show_warnings
from megarl.mcore.spec import Role
from megarl.pretraining import (
    PretrainingSummary,
    ValuePretraining,
    pretrain_critic,
    repeat_rollouts,
    take_until,
)
from megarl.report.report import Report, build_report
from megarl.rollout.rollout_file import SavedRollouts
from megarl.trainer import Trainer


def run_value_pretraining(config: Config, run_dir: Path) -> PretrainingSummary:
    """Train the critic alone; it is left in `run_dir`/critic, its curves in value_pretrain.jsonl.

    Raises ConfigError, before any process is started, for what does not fit.
    """
    problems = list(check_pretraining(config))
    if problems:
        raise ConfigError(problems)
    if config.algo.value_pretrain.rollouts is None:
        return _run_online(config, run_dir)
    return _run_offline(config, run_dir)


def check_pretraining(config: Config) -> list[str]:
    """Why there is nothing to pretrain, one message each."""
    advantage, steps = config.algo.advantage, config.algo.value_pretrain.steps
    if not needs_critic(config.algo):
        return [f"algo.advantage: found {advantage.name}, which has no critic to pretrain; it must be gae (algo=vapo)"]
    if steps == 0:
        return ["algo.value_pretrain.steps: found 0; it must be 1 or more, the rollouts to pretrain the critic on"]
    return []


def _run_online(config: Config, run_dir: Path) -> PretrainingSummary:
    """On fresh responses of the policy, which a training run's own processes sample and score."""
    inputs = load_inputs(config)
    with contextlib.ExitStack() as stack:
        report = _start_report(stack, config, run_dir)
        report.message(describe_sizes(config))
        report.message(describe_data(inputs))
        report.message(describe_start(config, inputs.specs[Role.critic], None))
        with report.phase("start"):
            hosts = stack.enter_context(open_hosts(config, inputs, run_dir / "logs"))
        parts = stack.enter_context(open_parts(config, inputs, hosts, run_dir, report))
        trainer = Trainer(config, parts)
        summary = pretrain_critic(trainer)
        assert parts.critic is not None
        parts.critic.export_weights(run_dir / "critic").result()
        return summary


def _run_offline(config: Config, run_dir: Path) -> PretrainingSummary:
    """On saved responses with their rewards: no server, no policy, no reward function."""
    models = load_models(config)
    spec = load_specs(config, models)[Role.critic]
    saved = load_saved_rollouts(config, models)
    assert saved is not None  # check_pretraining has seen to it
    with contextlib.ExitStack() as stack:
        report = _start_report(stack, config, run_dir)
        report.message(describe_start(config, spec, saved))
        with report.phase("start"):
            seats = place(config.cluster, list_groups(config, "pretrain_value"))[Role.critic.value]
            cluster = stack.enter_context(open_ray(config.cluster, len(seats)))
            critic = WorkerGroup(spec, run_dir / "logs", cluster, seats, config.cluster.worker_start_deadline_s)
            stack.callback(critic.close)
            critic.start().result()
        summary = pretrain_offline(config, critic, report, saved)
        critic.export_weights(run_dir / "critic").result()
        return summary


def pretrain_offline(config: Config, critic: WorkerGroup, report: Report, saved: SavedRollouts) -> PretrainingSummary:
    """`train.max_minutes` counts from here."""
    minutes, started = config.train.max_minutes, time.monotonic()
    rollouts = repeat_rollouts(saved.path, report.message)
    return ValuePretraining(config, critic, report).run(
        take_until(lambda: minutes is not None and time.monotonic() - started > 60 * minutes, rollouts)
    )


def _start_report(stack: contextlib.ExitStack, config: Config, run_dir: Path) -> Report:
    report = build_report(config.logger, run_dir, config.algo.value_pretrain.steps)
    stack.callback(report.close)
    stack.enter_context(show_warnings(report))
    return report
