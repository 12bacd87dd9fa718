"""The trainer on a CPU with the torch of the GPU lock, which is another minor release than that of the CPU lock."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_install import read_lock
from tool_loading import load_tool

ROOT = Path(__file__).resolve().parents[3]
SELECTION = ("tests/unit/mcore", "tests/unit/algo/test_algo_loss_reference.py", "tests/parallel/test_one_process.py")
INSTALL_S, SELECTION_S = 900, 900


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """An environment with that torch, and everything else from the one of this process.

    Its CPU build where there is one for pip, else its CUDA build, which computes on a CPU too.
    """
    folder, installer = tmp_path / "venv", load_tool("install/install.py")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = folder / "bin" / "python"
    pin = f"torch=={read_lock('cuda.lock')['torch']}"
    pip = [str(found), "-m", "pip", "install", "-q", "--no-compile"]
    cpu = ["--no-deps", f"{pin}+cpu", f"--extra-index-url={installer.CPU_INDEX}", *installer.CPU_INDEX_PATIENCE]
    try:
        if subprocess.run([*pip, *cpu], capture_output=True, timeout=INSTALL_S).returncode != 0:
            done = subprocess.run([*pip, pin], capture_output=True, text=True, timeout=INSTALL_S)
            if done.returncode != 0:
                pytest.skip(f"pip installs no {pin}: {done.stderr.strip().splitlines()[-1]}")
        own = subprocess.check_output(
            [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        others = sysconfig.get_path("purelib")
        (Path(own.strip()) / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
        yield found
    finally:
        # Gigabytes, where pytest keeps the folders of the last runs.
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_S + SELECTION_S)
def test_the_trainer_computes_the_same_with_the_torch_of_the_gpu_lock(python: Path) -> None:
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str, limit_s: float = SELECTION_S) -> str:
        command = [str(python), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    version = run("-c", "import torch, megarl.mcore.worker; print(torch.__version__)").split("+")[0].strip()
    assert version == read_lock("cuda.lock")["torch"]
    last = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTION).strip().splitlines()[-1]
    (passed,) = re.findall(r"(\d+) passed", last)
    assert int(passed) > 300
