"""Installs megarl and its pinned needs into .venv; started by install.sh, on Python's standard library only.

    tools/install/install.sh cpu            a laptop, CI: never downloads a CUDA package, under 3 GB on disk
    tools/install/install.sh cuda           a machine with NVIDIA GPUs
    tools/install/install.sh cpu smollm2    an extra: what PLATFORM-EXTRA.lock adds

Order: pip, torch, the lock with --no-deps, the extras likewise, megarl itself (editable). A step that is done
leaves a stamp in .venv/.megarl with the hash of what it installed; a step whose stamp is right is skipped, so
that a second call takes well under a second. The compilers and the CUDA toolkit are looked for before anything is
downloaded.

Transformer Engine's extension for torch is published as sources and compiled here, once per machine: its wheel is kept
in $MEGARL_CACHE/wheels (~/.cache/megarl/wheels) under the versions that it depends on. Variables that may be set:
CUDA_HOME (the toolkit), MAX_JOBS (compilers at once), NVTE_CUDA_ARCHS (90, which is Hopper; the kernels of all GPUs
are in NVIDIA's own wheel, and this only decides about NCCL's expert parallelism, from 90 on).
"""

import hashlib
import json
import os
import platform as machine
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / ".megarl"
PIP = "pip==26.3"
"""Older ones download every wheel for a dry run."""
PLATFORMS = ("cpu", "cuda")
CPU_INDEX = os.environ.get("MEGARL_TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
CPU_INDEX_PATIENCE = ("--timeout=15", "--retries=1")
STEP_LIMIT_S = 3600
CUDA_MARKS = ("nvidia", "cuda", "triton")
BUILT_AGAINST_TORCH = "transformer-engine-torch"
"""Published as sources only and compiled against the torch of .venv, so without build isolation."""
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13", BUILT_AGAINST_TORCH)
"""Installed together: with a part of them `import megatron.core` fails."""
TRY_TRANSFORMER_ENGINE = "import torch, transformer_engine.pytorch"
"""torch first: it loads NCCL, which Transformer Engine does not find by itself."""
CACHE = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache" / "megarl").expanduser()
BUILD_LIMIT_S = 4 * 3600
GIB_PER_JOB = 2
"""A compiler of Transformer Engine's extension takes up to 1.3 GiB."""
CUDA_ARCHS = "90"
BUILT_FROM_C = "pycosat"
"""Published as C sources only; reasoning-gym imports it."""


def main(arguments: Sequence[str]) -> None:
    platform, extras = read_arguments(arguments)
    lock = HERE / f"{platform}.lock"
    start = time.monotonic()
    pins = read_pins(lock)
    if not is_done(lock.name, lock.read_text()):
        require_compilers(pins)
        if BUILT_AGAINST_TORCH in pins:
            find_toolkit(os.environ, read_cuda_version(pins))
    make_venv()
    changed = step("pip", PIP, lambda: pip("install", PIP))
    changed |= step("torch", f"{platform} {pins['torch']}", lambda: install_torch(platform, pins["torch"]))
    changed |= step(lock.name, lock.read_text(), lambda: install_lock(lock))
    for extra in extras:
        extra_lock = HERE / f"{platform}-{extra}.lock"
        changed |= step(extra_lock.name, extra_lock.read_text(), partial(install_lock, extra_lock))
    project = (ROOT / "pyproject.toml").read_text() + str(ROOT)
    changed |= step("megarl", project, install_megarl)
    if changed:
        size = int(subprocess.check_output(["du", "-sm", str(VENV)], text=True).split()[0])
        say(f"done in {time.monotonic() - start:.0f} s; .venv takes {size * 2**20 / 1e9:.2f} GB")


def read_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The platform and the extras. Ends the program with the choices where one is unknown."""
    if not arguments or arguments[0] not in PLATFORMS:
        given = " ".join(arguments) or "nothing"
        fail(f"first argument: {' or '.join(PLATFORMS)}; given: {given}")
    platform, *extras = arguments
    known = [path.stem.removeprefix(f"{platform}-") for path in HERE.glob(f"{platform}-*.lock")]
    for extra in extras:
        if extra not in known:
            fail(f"unknown extra {extra!r} for {platform}; known: {', '.join(sorted(known))}")
    return platform, extras


def make_venv() -> None:
    """A .venv of this interpreter's version, made where there is none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not PYTHON.exists():
        say(f"making {VENV.relative_to(ROOT)} with Python {version}")
        venv.create(VENV, with_pip=True)
    command = [str(PYTHON), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    found = subprocess.check_output(command, text=True).strip()
    if found != version:
        fail(f"{VENV} has Python {found}, and {version} is needed: remove it (make clean) and install again")
    STAMPS.mkdir(exist_ok=True)


def is_done(name: str, content: str) -> bool:
    """Whether the step `name` was run for the same content."""
    stamp = STAMPS / name
    return stamp.exists() and stamp.read_text() == compute_digest(content)


def compute_digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def step(name: str, content: str, install: Callable[[], object]) -> bool:
    """Run `install` unless it was run for the same content. Returns whether it ran."""
    if is_done(name, content):
        return False
    stamp = STAMPS / name
    start = time.monotonic()
    say(f"{name} ...")
    stamp.unlink(missing_ok=True)
    install()
    stamp.write_text(compute_digest(content))
    say(f"{name}: {time.monotonic() - start:.0f} s")
    return True


def install_torch(platform: str, pin: str) -> None:
    if platform == "cuda":
        pip("install", pin)
        return
    if is_cpu_build(pin):
        pip("install", "--no-deps", pin)
        return
    say(f"pip's own sources have no CPU build of {pin}; asking {CPU_INDEX}")
    try:
        pip("install", "--no-deps", f"{pin}+cpu", f"--index-url={CPU_INDEX}", *CPU_INDEX_PATIENCE)
    except SystemExit:
        fail(
            f"no CPU build of {pin}: neither in pip's own sources nor at {CPU_INDEX}.\n"
            f"Put its wheel ({pin.replace('==', '-')}+cpu-...whl) into a directory and name that in "
            "PIP_FIND_LINKS, or name another index in MEGARL_TORCH_CPU_INDEX.\n"
            "The CUDA build is several GB and is not taken instead."
        )


def is_cpu_build(pin: str) -> bool:
    """Whether what pip would install for `pin` needs no CUDA package. Reads metadata only."""
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run([*command, "--report=-", pin], capture_output=True, text=True, timeout=STEP_LIMIT_S)
    if done.returncode != 0:
        return False
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    needs = [need for need in metadata.get("requires_dist", []) if need.startswith(CUDA_MARKS)]
    return not needs


def install_lock(lock: Path) -> None:
    """Exactly the pins of a lock, but torch: it is there already, on a CPU as the build 2.13.0+cpu."""
    pins = read_pins(lock)
    rest = [pin for name, pin in pins.items() if name not in ("torch", *TRANSFORMER_ENGINE)]
    pip("install", "--no-deps", *rest)
    if BUILT_AGAINST_TORCH in pins:
        install_transformer_engine(pins)


def install_transformer_engine(pins: dict[str, str]) -> None:
    """All parts of it or none, so that an interrupted build leaves nothing that looks installed."""
    # What is there was compiled against another torch, and pip takes a wheel of the same version for the same.
    uninstall_transformer_engine()
    wheel = build_wheel_once(pins)
    pip("install", "--no-deps", *(pins[name] for name in TRANSFORMER_ENGINE if name != BUILT_AGAINST_TORCH), str(wheel))
    done = subprocess.run([str(PYTHON), "-W", "ignore", "-c", TRY_TRANSFORMER_ENGINE], capture_output=True, text=True)
    if done.returncode != 0:
        uninstall_transformer_engine()
        fail(f"Transformer Engine cannot be imported; remove {wheel.parent} to build it anew:\n{done.stderr}")


def uninstall_transformer_engine() -> None:
    pip("uninstall", "--yes", *TRANSFORMER_ENGINE)
    # pip leaves an empty folder, which Python takes for a package, and Megatron for Transformer Engine.
    for folder in VENV.glob("lib/python*/site-packages/transformer_engine"):
        shutil.rmtree(folder)


def build_wheel_once(pins: dict[str, str]) -> Path:
    """The wheel of BUILT_AGAINST_TORCH in the cache, built where it is not there. It appears by one rename."""
    archs = os.environ.get("NVTE_CUDA_ARCHS", CUDA_ARCHS)
    folder = CACHE / "wheels" / name_wheel_folder(pins, archs)
    found = sorted(folder.glob("*.whl"))
    if found:
        say(f"{pins[BUILT_AGAINST_TORCH]} from {folder}")
        return found[0]
    environment = build_environment(os.environ, find_toolkit(os.environ, read_cuda_version(pins)), count_jobs())
    say(f"building {pins[BUILT_AGAINST_TORCH]} with {environment['MAX_JOBS']} compilers at once, into {folder}")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch:
        # pip's own cache knows nothing of the torch that a wheel was built against.
        options = ("--no-deps", "--no-build-isolation", "--no-cache-dir", f"--wheel-dir={scratch}")
        pip("wheel", *options, pins[BUILT_AGAINST_TORCH], environment=environment, limit_s=BUILD_LIMIT_S)
        (wheel,) = Path(scratch).glob("*.whl")
        folder.mkdir(exist_ok=True)
        return wheel.rename(folder / wheel.name)


def name_wheel_folder(pins: dict[str, str], archs: str) -> str:
    """The key of a built wheel: whatever its binary depends on. NVIDIA's headers go in as one hash of their pins."""
    te, torch = (pins[name].split("==")[1] for name in (BUILT_AGAINST_TORCH, "torch"))
    headers = compute_digest(" ".join(sorted(pin for name, pin in pins.items() if name.startswith("nvidia-"))))[:8]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{BUILT_AGAINST_TORCH}-{te}_torch{torch}_cuda{read_cuda_version(pins)}_python{python}"
        f"_sm{archs.replace(';', '-')}_glibc{machine.libc_ver()[1]}_{headers}"
    )


def build_environment(environment: Mapping[str, str], toolkit: Path, jobs: int) -> dict[str, str]:
    """The variables of the build of Transformer Engine: its headers are those of NVIDIA's wheels in .venv, since a
    toolkit has neither cuDNN nor NCCL; ninja is the one of .venv.
    """
    return {
        "NVTE_CUDA_ARCHS": CUDA_ARCHS,
        "MAX_JOBS": str(jobs),
        **environment,
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "CUDA_HOME": str(toolkit),
        "PATH": os.pathsep.join([str(PYTHON.parent), environment.get("PATH", os.defpath)]),
    }


def count_jobs() -> int:
    """The number of compilers that the cores and the free memory of this machine allow at once."""
    available = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
    memory_gib = int(available[1]) / 2**20 if available else GIB_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib / GIB_PER_JOB)))


def read_cuda_version(pins: dict[str, str]) -> str:
    """The CUDA version of the locked torch, such as 13.0: that of the package cuda-toolkit, which it asks for."""
    return ".".join(pins["cuda-toolkit"].split("==")[1].split(".")[:2])


def find_toolkit(environment: Mapping[str, str], cuda: str) -> Path:
    """The folder of a CUDA toolkit of the major version of `cuda`: CUDA_HOME, or that of nvcc, or /usr/local/cuda.

    Ends the program where there is none, with what to install. The server needs it later: SGLang, FlashInfer and
    DeepGEMM compile kernels when they start. Transformer Engine's extension for torch has no CUDA code of its own.
    """
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    guesses = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]
    problems = {home: find_toolkit_problem(home, cuda) for home in ([Path(named)] if named else guesses)}
    fitting = [home for home, problem in problems.items() if problem is None]
    if not fitting:
        major, found = cuda.split(".")[0], "; ".join(filter(None, problems.values()))
        fail(
            f"PLATFORM=cuda needs a toolkit of CUDA {major}, as torch is built for CUDA {cuda}: {found}.\n"
            "SGLang and FlashInfer compile kernels with its nvcc when a server starts. Nothing has been downloaded.\n"
            f"On Debian or Ubuntu, with NVIDIA's packages (developer.nvidia.com/cuda-downloads): apt-get install"
            f" cuda-toolkit-{cuda.replace('.', '-')}\n"
            f"On a cluster: module load the one of CUDA {major}. Elsewhere: CUDA_HOME=DIRECTORY make install ..."
        )
    return fitting[0]


def find_toolkit_problem(home: Path, cuda: str) -> str | None:
    """Why the folder is no toolkit for torch's version of CUDA; None where it is one."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return f"{home} has no bin/nvcc"
    if not [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]:
        return f"{home} has no include/cuda_runtime.h"
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None:
        return f"{nvcc} says no version"
    return None if found[1] == cuda.split(".")[0] else f"{home} has version {found[1]}.{found[2]}"


def require_compilers(pins: dict[str, str]) -> None:
    """Ends the program where an extension of `pins` cannot be compiled, with what to install."""
    built = {BUILT_FROM_C: "cc", BUILT_AGAINST_TORCH: "c++"}
    names = [name for name in built if name in pins]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [built[name] for name in names if not shutil.which(built[name])]
    missing += [str(header)] if names and not header.exists() else []
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        compilers = "gcc g++" if BUILT_AGAINST_TORCH in pins else "gcc"
        fail(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} compiled here, and {' and '.join(missing)}"
            f" cannot be found.\nOn Debian: apt-get install {compilers} libc6-dev python{version}-dev"
        )


def install_megarl() -> None:
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def read_pins(lock: Path) -> dict[str, str]:
    """Package name -> `name==version`, of a lock file's lines."""
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {line.split("==")[0]: line for line in lines if line}


def pip(*arguments: str, environment: Mapping[str, str] = os.environ, limit_s: int = STEP_LIMIT_S) -> None:
    """Run pip in .venv; its output is shown only when it fails, which ends the program."""
    command = [str(PYTHON), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    log = STAMPS / "pip.log"
    ended = f"did not end within {limit_s} s"
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=limit_s)
            ended = f"ended with {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            pass
    if ended:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        fail(f"{' '.join(command[:6])} ... {ended}:\n{tail}")


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def fail(text: str) -> NoReturn:
    sys.exit(f"install: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
