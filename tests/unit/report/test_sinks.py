"""Each sink with its real package, offline; a missing one is an error that names the key. Without the package of an
extra its tests are skipped."""

import re
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema.run import LoggerConfig, WandbMode
from megarl.report import record
from megarl.report.record import load_ids
from megarl.report.report import Report, build_report

QUIET = {"tensorboard": False, "terminal": False}
SETTINGS = {"algo.name": "vapo", "algo.clip_high": 0.28, "data.system": None}
NEEDS_WANDB = pytest.mark.skipif(not record.is_installed("wandb"), reason="make install EXTRAS=wandb")
NEEDS_MLFLOW = pytest.mark.skipif(not record.is_installed("mlflow"), reason="make install EXTRAS=mlflow")


def build(run_dir: Path, **options: object) -> Report:
    return build_report(LoggerConfig(**{**QUIET, **options}), run_dir, 9, settings=SETTINGS)


def log_and_resume(run_dir: Path, **options: object) -> None:
    """Iterations -1, of value pretraining, to 2, then a second start that repeats iteration 2."""
    report = build(run_dir, **options)
    report.log(-1, {"critic/loss": 2.5})
    report.log(0, {"sync/bytes": 12})
    for iteration in (1, 2):
        report.log(iteration, {"reward/mean": iteration / 4, "length/mean": 3.0})
    report.close()
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    report = build(run_dir, **options)
    report.rewind(2)
    report.log(2, {"reward/mean": 0.75, "length/mean": 3.0, "reward/heldout": 0.5})
    report.close()


@NEEDS_WANDB
def test_wandb_has_every_metric_at_its_iteration_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    lines: list[dict[str, float]] = []
    log = wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, line: (lines.append(line), log(run, line)))
    log_and_resume(tmp_path, wandb=WandbMode.offline)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = load_ids(tmp_path)["wandb"]
    assert folders
    assert all(folder.name.endswith(f"-{run_id}") for folder in folders)
    assert [line["iteration"] for line in lines] == [-1, 0, 1, 2, 2]
    assert lines[-1].items() >= {"reward/mean": 0.75, "length/mean": 3.0, "reward/heldout": 0.5}.items()


@NEEDS_MLFLOW
def test_mlflow_has_every_metric_and_setting_in_one_run_that_ends_finished(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    log_and_resume(tmp_path / "run", mlflow=uri)
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    assert run.info.run_id == load_ids(tmp_path / "run")["mlflow"]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
    found = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert found == [(1, 0.25), (2, 0.5), (2, 0.75)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "sync/bytes")] == [(0, 12)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "critic/loss")] == [(-1, 2.5)]


@NEEDS_MLFLOW
def test_a_run_that_fails_is_failed_in_mlflow_and_a_server_that_is_away_ends_no_training(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    report = build(tmp_path / "run", mlflow=uri)
    sink = report._sinks[0]
    client, sink._client = sink._client, None
    with pytest.warns(RuntimeWarning, match=r"logger\.mlflow: AttributeError: .*; 1 values wait"):
        report.log(1, {"reward/mean": 0.25})
    sink._client = client
    try:
        raise RuntimeError("a worker died")
    except RuntimeError:
        report.close()
    run = MlflowClient(uri).get_run(load_ids(tmp_path / "run")["mlflow"])
    assert run.info.status == "FAILED"
    assert run.data.metrics == {"reward/mean": 0.25}


@pytest.mark.parametrize(
    ("options", "key", "found"),
    [
        (["logger.wandb=offline"], "wandb", "offline"),
        (["logger.mlflow=sqlite:///x.db"], "mlflow", "sqlite:///x.db"),
        (["logger.tensorboard=true"], "tensorboard", "true"),
    ],
)
def test_a_missing_package_is_an_error_that_names_key_package_and_remedy(
    options: list[str], key: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "is_installed", lambda _package: False)
    (problem,) = record.check_sinks(load_config(options).logger)
    assert re.match(rf"logger\.{key}: found {re.escape(found)}, which needs the package {key}", problem)
    assert "pip install" in problem
    assert f"or logger.{key}=" in problem


def test_with_tensorboard_null_it_is_written_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(record, "is_installed", lambda _package, found=is_there: found)
        assert len(list(record.open_sinks(LoggerConfig(), tmp_path, {}))) == is_there
