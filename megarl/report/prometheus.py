"""The newest metrics for Prometheus, on 127.0.0.1, and the file that tells it where to find trainer and servers.

RUN_DIR/prometheus_targets.json is what Prometheus' file_sd_configs reads:
[{"targets": ["127.0.0.1:9400"], "labels": {"job": "megarl_trainer", "run": "2026-..."}}, ...].
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.report.metric_names import find_metric
from megarl.report.sink_checks import LOOPBACK
from megarl.types import Metrics

FILE_NAME = "prometheus_targets.json"
TRAINER, SERVERS = "megarl_trainer", "sglang"


class PrometheusSink:
    """Answers http://127.0.0.1:PORT/metrics with the newest value of each metric, as a gauge `megarl_NAME`."""

    def __init__(self, run_dir: Path, port: int):
        """port: 0 takes a free one. Raises OSError where it is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._run_dir, self._values, self._targets = run_dir, Metrics(), dict[str, list[str]]()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        self.port = int(self._server.server_port)
        self._list_targets(TRAINER, [f"{LOOPBACK}:{self.port}"])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/metrics"

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for, from its own thread."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in dict(self._values).items():
            metric = find_metric(name)
            text = f"{metric.meaning} [{metric.unit}]" if metric else name
            yield GaugeMetricFamily(name_gauge(name), text, value=float(value))

    def show_servers(self, urls: Sequence[str]) -> None:
        """The addresses at which the servers answer /metrics themselves."""
        self._list_targets(SERVERS, [urlsplit(url).netloc for url in urls])

    def write(self, iteration: int, metrics: Metrics) -> None:
        self._values = {**self._values, **metrics, "iteration": iteration, "logged_seconds": time.time()}

    def write_pretraining(self, step: int, metrics: Metrics) -> None:
        self._values = {**self._values, **metrics, "pretrain/step": step, "logged_seconds": time.time()}

    def rewind(self, iteration: int) -> None:
        """Nothing: only the newest values are kept."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        (self._run_dir / FILE_NAME).unlink(missing_ok=True)

    def _list_targets(self, job: str, addresses: list[str]) -> None:
        self._targets[job] = addresses
        labels = {"run": self._run_dir.name}
        content = [{"targets": each, "labels": {"job": job, **labels}} for job, each in self._targets.items()]
        path = self._run_dir / FILE_NAME
        partial = path.with_name(f".{FILE_NAME}.partial")
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        partial.replace(path)


def name_gauge(name: str) -> str:
    """reward/mean -> megarl_reward_mean; other characters that Prometheus does not take become `_`, too."""
    return "megarl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
