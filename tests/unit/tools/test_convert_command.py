"""tools/convert_checkpoint.py as it is called: what it prints, and its exit codes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tool_loading import TOOLS, load_tool

from megarl.config.schema.roles import RandomModelConfig
from megarl.models.checkpoint import build_random_checkpoint

FILE = "convert_checkpoint.py"
COMMAND = [sys.executable, str(TOOLS / FILE)]
Run = Callable[..., tuple[int, str, str]]
"""Arguments -> exit code, stdout, stderr"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        code = load_tool(FILE).run([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_checkpoint(RandomModelConfig(), tmp_path_factory.mktemp("cache"))


def test_there_and_back_in_the_shell_with_logits_by_megatron_and_transformers(checkpoint: Path, tmp_path: Path) -> None:
    def call(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=180)

    done = call("hf-to-megatron", checkpoint, tmp_path / "megatron")
    assert done.returncode == 0, done.stderr
    done = call("verify", checkpoint, tmp_path / "megatron", "--text", "12+34=46")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "equal"), done.stderr
    assert "equal bit by bit" in done.stdout
    assert "logits of 8 tokens" in done.stdout


def test_the_tokenizer_comes_along_and_info_says_what_is_there(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert run("hf-to-megatron", checkpoint, megatron)[0] == 0
    assert run("megatron-to-hf", megatron, back)[0] == 0
    assert (back / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    code, out, _ = run("info", megatron)
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (code, found["layout"], found["role"], found["optimizer"]) == (
        *(0, "tp1 pp1 dp1 cp1 ep1", "policy", "none, weights alone"),
    )
    num_bytes = (back / "model.safetensors").stat().st_size
    assert int(found["parameters"].replace(",", "")) * 4 == pytest.approx(num_bytes, rel=0.01)


def test_what_is_no_checkpoint_is_refused_with_its_path(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    code, _, error = run("info", tmp_path / "absent")
    assert (code, error.startswith(f"error: {tmp_path / 'absent'}: ")) == (2, True)
    code, _, error = run("hf-to-megatron", checkpoint, tmp_path)
    assert (code, "--overwrite" in error) == (2, True)
