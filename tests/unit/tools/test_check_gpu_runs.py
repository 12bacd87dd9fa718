"""tools/check_gpu.py with real workers and processes: planted faults, and the whole of it on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tool_loading import TOOLS, load_tool

from megarl.tools.gpu import training, transfer
from megarl.tools.gpu.lines import Verdict
from megarl.tools.gpu.setting import CPU, Setting

tool = load_tool("check_gpu.py")


@pytest.mark.slow
def test_a_weight_that_is_perturbed_after_a_load_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import megarl.mcore  # noqa: F401
    from megarl.mcore.worker import MegatronWorker

    stock = MegatronWorker.load

    def load(self: MegatronWorker, directory: Path) -> None:
        stock(self, directory)
        if directory.name == "state-2":
            next(iter(self.shards().values()))[0, 0] += 1e-3

    monkeypatch.setattr(MegatronWorker, "load", load)
    found = list(training.check_checkpoint(Setting(CPU, (), tmp_path)))
    saved = [line for line in found if line.what.endswith("loaded")]
    assert [line.verdict for line in saved] == [Verdict.holds, Verdict.fails]


@pytest.mark.slow
def test_a_byte_that_changes_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = transfer.fill

    def fill(bucket: Any, message: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        stock(bucket, message, tensors)
        message[5] += bucket.copies[0].source.row == 0

    monkeypatch.setattr(transfer, "fill", fill)
    line = transfer.move(CPU, 1 << 20, 1 << 18)
    assert (line.verdict, line.value) == (Verdict.fails, 1.0)


BLOCKED = """
import os, sys
FREE = "MEGARL_TEST_WITH_SERVER"
if "logprobs" in sys.orig_argv or FREE in os.environ:
    os.environ[FREE] = "1"
else:
    blocked = ["ray", "transformer_engine", "httpx", "transformers", "pyarrow", "datasets"]
    if "megarl.tools.gpu.machine" not in sys.orig_argv:
        blocked.append("sglang")
    for name in blocked:
        sys.modules[name] = None
"""
"""sitecustomize.py of every process: of the whole tool only the check with a server can import these packages."""


@pytest.mark.slow
def test_the_whole_tool_runs_on_a_cpu_and_needs_ray_and_sglang_for_its_last_check_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = tmp_path / "found.json"
    command = [sys.executable, str(TOOLS / "check_gpu.py"), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    verdicts: dict[str, set[str]] = {}
    for line in found["lines"]:
        verdicts.setdefault(line["check"], set()).add(line["verdict"])
    assert set(verdicts) == {check.name for check in tool.CHECKS}
    assert verdicts.pop("fp8") == {"skipped"}
    assert all("holds" in each and "fails" not in each for each in verdicts.values())
    assert found["machine"]["versions"]["megatron-core"] == "0.16.1"
    assert "nothing fails" in done.stdout
    assert "says nothing of a GPU" in done.stdout
