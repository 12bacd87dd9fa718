"""The trainer on a CPU with the torch of the GPU lock, which is another minor release than that of the CPU lock."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_install import ROOT, read_lock
from tool_loading import load_tool

FILES = [f"tests/unit/mcore/test_{name}.py" for name in ("step", "layers", "microbatches")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_trainer_computes_the_same_with_the_torch_of_the_gpu_lock(tmp_path: Path) -> None:
    """That torch is pip's CPU build where there is one, else the CUDA build; everything else is this process's."""
    version, installer = read_lock("cuda.lock")["torch"], load_tool("install/install.py")
    folder = tmp_path / "venv"
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str, limit_s: float = 600) -> "subprocess.CompletedProcess[str]":
        command = [str(folder / "bin" / "python"), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)

    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = ("-m", "pip", "install", "-q", "--no-compile")
        index = (f"--extra-index-url={installer.CPU_INDEX}", *installer.CPU_INDEX_PATIENCE)
        if run(*pip, "--no-deps", f"torch=={version}+cpu", *index).returncode != 0:
            done = run(*pip, f"torch=={version}", limit_s=900)
            if done.returncode != 0:
                pytest.skip(f"pip installs no torch=={version}: {done.stderr.strip().splitlines()[-1]}")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        assert run("-c", "import torch; print(torch.__version__)").stdout.partition("+")[0].strip() == version
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    finally:
        # Gigabytes, where pytest keeps the folders of the last runs.
        shutil.rmtree(folder)
