"""The run that disturbed ones are compared with; every metric that a run of these tests logs has a row in the table."""

from pathlib import Path
from typing import Any

import pytest
from fakes.disturbed import RUN, summarize
from fakes.run import Said, World
from metric_table import find_metric

from megarl.report.record import MetricsWriter
from megarl.types import Metrics


@pytest.fixture(autouse=True)
def _every_logged_metric_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    write = MetricsWriter.write

    def write_known(self: MetricsWriter, iteration: int, metrics: Metrics) -> None:
        unknown = [name for name in metrics if find_metric(name) is None]
        assert not unknown, f"not in docs/metrics.md: {unknown}"
        write(self, iteration, metrics)

    monkeypatch.setattr(MetricsWriter, "write", write_known)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("untouched") / "run"
    World().run_job(run_dir, RUN)
    return summarize(run_dir)
