"""One SGLang server for the whole session, on a tiny random checkpoint with a character-level tokenizer."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import running_server, write_tiny_checkpoint

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for a run's TMPDIR, short enough that its servers have their temporary files in it."""
    with tempfile.TemporaryDirectory(prefix="short-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def rollout_config() -> RolloutConfig:
    return RolloutConfig(
        response_length=48,
        dtype=Dtype.float32,
        max_running_requests=128,
        kv_cache_tokens=16384,
        startup_deadline_s=float(os.environ.get("MEGARL_TEST_STARTUP_DEADLINE_S", "180")),
        request_deadline_s=60.0,
        sync_deadline_s=60.0,
    )


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory):
    """A healthy server on `tiny_checkpoint`; tests that change its weights put the checkpoint's back.

    It is started under a TMPDIR in which a socket's path would be too long.
    """
    log_file = tmp_path_factory.mktemp("sglang") / "server.log"
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("x" * 100)))
            running = stack.enter_context(running_server(rollout_config, tiny_checkpoint, log_file, seed=7))
        yield running
