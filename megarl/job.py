"""One training run from a checked configuration: find the inputs, start the processes, train, end everything."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megarl.algo.objective import format_objective
from megarl.cluster.local import local_ray
from megarl.cluster.servers import running_servers
from megarl.cluster.workers import WorkerGroup
from megarl.config.algo import needs_critic, needs_reference
from megarl.config.check import describe_sizes
from megarl.config.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.config.schema import Config
from megarl.data.build import build_data
from megarl.data.sampler import PromptSampler
from megarl.hf.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.mcore.spec import Role, WorkerSpec
from megarl.pretraining import pretrain_critic
from megarl.report.report import Report, build_report
from megarl.reward.build import build_reward
from megarl.rollout.checkpoint import load_generation_spec
from megarl.rollout.collector import Collector
from megarl.rollout.engine import SGLangEngine
from megarl.sync.disk import DiskSync
from megarl.sync.probe import build_probe_tokens
from megarl.trainer import Parts, Summary, Trainer


def run_job(config: Config, run_dir: Path) -> Summary:
    """Train as configured; everything the run writes is under `run_dir`.

    Raises ConfigError for what only the inputs can tell (a missing checkpoint, an unreadable data file).
    """
    with contextlib.closing(build_report(config.logger, run_dir, config.train.num_iterations)) as report:
        report.message(describe_sizes(config))
        report.message(format_objective(config.algo, config.train.responses_per_prompt))
        with open_parts(config, run_dir, report) as parts:
            trainer = Trainer(config, parts)
            trainer.start()
            pretrain_critic(trainer)
            return trainer.run()


@contextlib.contextmanager
def open_parts(config: Config, run_dir: Path, report: Report) -> Iterator[Parts]:
    """The inputs, and every process of the run started side by side; all processes end on leaving."""
    checkpoint = resolve_checkpoint(config.model, default_cache_dir())
    tokenizer = load_tokenizer(checkpoint)
    data = build_data(config.data, tokenizer, config.seed)
    specs = build_specs(config, checkpoint)
    log_dir, cluster, rollout = run_dir / "logs", config.cluster, config.rollout
    num_actors = rollout.num_servers + sum(spec.parallel.num_processes for spec in specs.values())
    with contextlib.ExitStack() as stack:
        with report.phase("start"):
            stack.enter_context(local_ray(cluster, num_actors))
            servers = stack.enter_context(
                running_servers(
                    rollout,
                    checkpoint,
                    log_dir,
                    seed=config.seed,
                    host=cluster.listen_host,
                    stop_deadline_s=cluster.shutdown_deadline_s / 3,
                )
            )
            groups = {
                role: WorkerGroup(spec, log_dir, cluster.listen_host, cluster.worker_start_deadline_s)
                for role, spec in specs.items()
            }
            for building in [group.start() for group in groups.values()]:
                building.result()
            urls = servers.wait()
        engine = SGLangEngine(urls, checkpoint, rollout, tokenizer, check_processes=servers.check_alive)
        stack.callback(engine.close)
        probe = build_probe_tokens(data.heldout, load_generation_spec(checkpoint).vocab_size)
        sync = DiskSync(groups[Role.policy], engine.clients, rollout, run_dir / "sync", probe)
        stack.callback(sync.close)
        yield Parts(
            policy=groups[Role.policy],
            critic=groups.get(Role.critic),
            reference=groups.get(Role.reference),
            collector=Collector(engine, build_reward(config.reward), temperature=rollout.temperature),
            sync=sync,
            sampler=PromptSampler(data.train, config.seed),
            heldout=data.heldout[: config.train.num_eval_prompts],
            report=report,
        )


def build_specs(config: Config, checkpoint: Path) -> dict[Role, WorkerSpec]:
    """What each role's workers are told; only the roles that the algorithm needs."""

    def build(role: Role, parallel: ParallelConfig, optimizer: OptimizerConfig | None, dtype: Dtype) -> WorkerSpec:
        return WorkerSpec(
            role=role,
            checkpoint=str(checkpoint),
            parallel=parallel,
            optimizer=optimizer,
            dtype=dtype,
            algo=config.algo,
            temperature=config.rollout.temperature,
            response_length=config.rollout.response_length,
            tokens_per_microbatch=config.train.tokens_per_microbatch,
            seed=config.seed,
            megatron=config.model.megatron,
            num_threads=config.cluster.cpu_threads_per_worker,
            deadline_s=config.cluster.call_deadline_s,
        )

    policy, critic, reference = config.policy, config.critic, config.reference
    specs = {Role.policy: build(Role.policy, policy.parallel, policy.optimizer, policy.dtype)}
    if needs_critic(config.algo):
        specs[Role.critic] = build(Role.critic, critic.parallel, critic.optimizer, critic.dtype)
    if needs_reference(config.algo):
        specs[Role.reference] = build(Role.reference, reference.parallel, None, reference.dtype)
    return specs
