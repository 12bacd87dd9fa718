"""The run that disturbed ones are compared with."""

from typing import Any

import pytest
from fakes.disturbed import RUN, summarize
from fakes.run import World


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("untouched") / "run"
    with pytest.MonkeyPatch.context() as patch:
        World().run_job(patch, run_dir, RUN)
    return summarize(run_dir)
