"""The loop's real parts around the session's one server."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
from fakes.backend import Done

from megarl.cluster.opened import open_ray
from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import ClusterConfig
from megarl.mcore.spec import Role, WorkerSpec
from megarl.report.report import build_report
from megarl.rollout.server import SGLangServer
from megarl.run.inputs import load_inputs
from megarl.run.job import Resources, open_components, open_resources
from megarl.trainer import Trainer

SIZES = (
    *("model=tiny", "model.name=mine", "model.source=path", "rollout.response_length=48"),
    *("rollout.kv_cache_tokens=16384", "rollout.max_running_requests=128", "logger.terminal=false"),
)
"""What the session's server was started with; the sizes of model=tiny otherwise. `model.path` is still to be given."""


@contextlib.contextmanager
def hosts_of(server: SGLangServer, num_workers: int, config: ClusterConfig | None = None) -> Iterator[Resources]:
    """The running server, which nobody restarts, and a Ray cluster for the workers."""
    own = {"names": (), "find_lost": dict, "start": lambda: Done([server.url])}
    with open_ray(config or ClusterConfig(), num_workers) as cluster:
        yield cluster, SimpleNamespace(api_key=server.api_key, check_alive=server.check_alive, **own)


@contextlib.contextmanager
def open_trainer(hosts: Resources | None, run_dir: Path, overrides: Sequence[str]) -> Iterator[Trainer]:
    """A trainer of this configuration, not started. hosts: None: Ray and servers of its own, of model=tiny."""
    config = load_config([*(SIZES if hosts else ("model=tiny", "logger.terminal=false")), *overrides])
    inputs, logs = load_inputs(config), run_dir / "logs"
    with (
        contextlib.closing(build_report(config.logger, run_dir, config.train.num_iterations)) as report,
        contextlib.nullcontext(hosts) if hosts else open_resources(config, inputs.checkpoint, logs) as resources,
        open_components(config, inputs, resources, run_dir, report) as components,
    ):
        yield Trainer(config, components)


def build_policy(checkpoint: Path) -> WorkerSpec:
    """A policy of two float32 shards that is published and not trained."""
    return WorkerSpec(
        role=Role.reference,
        checkpoint=str(checkpoint),
        parallel=ParallelConfig(num_processes=2, tp=2, sp=True),
        optimizer=None,
        dtype=Dtype.float32,
        algo=AlgoConfig(),
        temperature=1.0,
        response_length=8,
        tokens_per_microbatch=128,
        deadline_s=120.0,
    )


def find_server(url: str) -> psutil.Process | None:
    """The main process of the SGLang server at `url`."""
    port = url.rpartition(":")[2]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[1:3] == ["-m", "sglang.launch_server"] and words[words.index("--port") + 1] == port:
                return process
    return None
