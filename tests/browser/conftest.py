"""The browser of these tests: Debian's Chromium, driven by node with playwright-core."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
INSTALL = "apt-get install chromium nodejs npm && npm ci --prefix tests/browser"
TIMEOUT_S = 600

Look = Callable[..., dict[str, Any]]


def find_missing() -> list[str]:
    missing = [] if shutil.which("node") else ["node"]
    chromium = [os.environ.get("CHROMIUM", ""), "/usr/bin/chromium", "/usr/bin/chromium-browser"]
    missing += [] if any(path and Path(path).exists() for path in chromium) else ["chromium"]
    return missing + ([] if (HERE / "node_modules" / "playwright-core").is_dir() else ["playwright-core"])


@pytest.fixture(scope="session")
def look() -> Look:
    """look(file, steps, width=1280, scheme="light"): what look.mjs prints of the page."""
    if missing := find_missing():
        pytest.skip(f"needs {', '.join(missing)}: {INSTALL}")

    def run(
        file: Path, steps: Sequence[Sequence[Any]] = (), width: int = 1280, scheme: str = "light"
    ) -> dict[str, Any]:
        asked = {"file": str(file), "steps": steps, "width": width, "scheme": scheme}
        command = ["node", str(HERE / "look.mjs"), json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return run
