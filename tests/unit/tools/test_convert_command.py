"""tools/convert_checkpoint.py as it is called: what it prints, its exit codes, and the memory that it takes.

The memory: the kernel's own record of the command's largest resident set, VmHWM of its process, read every 5 ms until
it ends. It counts every tensor and every mapped page of the source's files. That of a model of seven layers less
that of a model of a few kilobytes is what the model's size costs.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tool_loading import TOOLS, load_tool

from megarl.config.schema.model import RandomModelConfig
from megarl.mcore.model.architecture import read_architecture
from megarl.mcore.weights.entries import list_entries
from megarl.mcore.weights.safetensors_writer import TensorSpec, write_safetensors
from megarl.models.checkpoint import build_random_checkpoint

FILE = "convert_checkpoint.py"
COMMAND = [sys.executable, str(TOOLS / FILE)]
NUM_LAYERS = 7
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

    done = call("hf-to-megatron", checkpoint, tmp_path / "megatron", "--pp", 2)
    assert (done.returncode, "100%" in done.stderr) == (0, True), done.stderr
    done = call("verify", checkpoint, tmp_path / "megatron", "--text", "12+34=46")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "equal"), done.stderr
    assert "equal bit by bit" in done.stdout
    assert "logits of 8 tokens" in done.stdout


def test_the_tokenizer_comes_along_and_info_says_what_is_there(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert run("hf-to-megatron", checkpoint, megatron, "--tp", 2)[0] == 0
    assert run("megatron-to-hf", megatron, back)[0] == 0
    assert (back / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    code, out, _ = run("info", megatron)
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (code, found["layout"], found["role"], found["optimizer"]) == (
        *(0, "tp2 pp1 dp1 cp1 ep1", "policy", "none, weights alone"),
    )
    num_bytes = (back / "model.safetensors").stat().st_size
    assert int(found["parameters"].replace(",", "")) * 4 == pytest.approx(num_bytes, rel=0.01)


def test_info_lists_the_roles_of_an_iteration(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    for role in ("policy", "critic"):
        code, _, error = run("hf-to-megatron", checkpoint, tmp_path / "iteration" / role, "--role", role)
        assert (code, "one of zeros" in error) == (0, role == "critic")
    code, out, _ = run("info", tmp_path / "iteration")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("role")] == ["policy", "critic"]
    code, _, error = run("megatron-to-hf", tmp_path / "iteration", tmp_path / "back")
    assert (code, "give one of them" in error) == (2, True)
    code, _, error = run("verify", tmp_path / "iteration" / "policy", tmp_path / "iteration" / "critic")
    assert (code, "is a policy" in error, "a critic" in error) == (2, True, True)


def test_verify_says_which_tensors_differ_and_fails(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    for dtype in ("float32", "bfloat16"):
        assert run("hf-to-megatron", checkpoint, tmp_path / dtype, "--dtype", dtype)[0] == 0
    code, out, _ = run("verify", tmp_path / "float32", tmp_path / "bfloat16")
    assert (code, out.splitlines()[-1]) == (1, "DIFFERENT")
    assert "float32 against bfloat16" in out


def test_what_is_no_checkpoint_is_refused_with_its_path(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    code, _, error = run("info", tmp_path / "absent")
    assert (code, error.startswith(f"error: {tmp_path / 'absent'}: ")) == (2, True)
    code, _, error = run("hf-to-megatron", checkpoint, tmp_path)
    assert (code, "--overwrite" in error) == (2, True)


def write_model(directory: Path, hidden: int) -> tuple[Path, int]:
    """A Llama of seven layers written tensor by tensor; and the bytes of one layer, its largest."""
    directory.mkdir()
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 8, "vocab_size": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": NUM_LAYERS, **sizes}
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32", "max_position_embeddings": 64}))
    arch = read_architecture(directory)
    entries = list_entries(arch, False)
    pairs = [pair for entry in entries for pair in zip(entry.hf_names, entry.shapes, strict=True)]
    specs = [TensorSpec(name, shape, torch.float32) for name, shape in pairs]
    write_safetensors(directory, specs, ((spec.name, torch.randn(spec.shape)) for spec in specs))
    return directory, sum(spec.num_bytes for spec in specs if ".layers.0." in spec.name)


def measure_peak(*args: object) -> int:
    """Largest resident set of the command, in bytes."""
    process = subprocess.Popen([*COMMAND, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        # A process that has just ended has no memory any more.
        if found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):
            peak = int(found[1]) * 1024
        time.sleep(0.005)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
def test_memory_is_at_most_twice_the_largest_layer(tmp_path: Path) -> None:
    large, layer = write_model(tmp_path / "large", 768)
    small, _ = write_model(tmp_path / "small", 16)
    for command in ("hf-to-megatron", "megatron-to-hf"):
        peaks = []
        for source in (large, small):
            start = source if command == "hf-to-megatron" else source.with_name(f"{source.name}-megatron")
            target = source.with_name(f"{source.name}-{'megatron' if command == 'hf-to-megatron' else 'back'}")
            peaks.append(measure_peak(command, start, target, *(("--tp", 2) if start == source else ())))
        growth = peaks[0] - peaks[1]
        print(f"{command}: {growth / layer:.2f} layers of {layer / 1e6:.0f} MB")
        assert growth <= 2 * layer, (command, growth, layer)
