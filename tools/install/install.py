"""Installs megarl and its pinned needs into .venv; started by install.sh, on Python's standard library only.

    tools/install/install.sh cpu            a laptop, CI: never downloads a CUDA package, under 3 GB on disk
    tools/install/install.sh cuda           a machine with NVIDIA GPUs
    tools/install/install.sh cpu smollm2    an extra: what PLATFORM-EXTRA.lock adds

Order: pip, torch, the lock with --no-deps, the extras likewise, megarl itself (editable). A step that is done
leaves a stamp in .venv/.megarl with the hash of what it installed; a step whose stamp is right is skipped, so
that a second call takes well under a second.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Sequence
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
BUILT_AGAINST_TORCH = ("transformer-engine-torch",)
"""Published as sources only and compiled against the torch of .venv, so without build isolation."""
BUILT_FROM_C = "pycosat"
"""Published as C sources only; reasoning-gym imports it."""


def main(arguments: Sequence[str]) -> None:
    platform, extras = read_arguments(arguments)
    make_venv()
    lock = HERE / f"{platform}.lock"
    start = time.monotonic()
    pins = read_pins(lock)
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


def step(name: str, content: str, install: Callable[[], object]) -> bool:
    """Run `install` unless it was run for the same content. Returns whether it ran."""
    stamp = STAMPS / name
    digest = hashlib.sha256(content.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return False
    start = time.monotonic()
    say(f"{name} ...")
    stamp.unlink(missing_ok=True)
    install()
    stamp.write_text(digest)
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
    if BUILT_FROM_C in pins:
        require_compiler()
    from_source = [pins.pop(name) for name in BUILT_AGAINST_TORCH if name in pins]
    pins.pop("torch", None)
    pip("install", "--no-deps", *pins.values())
    if from_source:
        pip("install", "--no-deps", "--no-build-isolation", *from_source)


def require_compiler() -> None:
    """Ends the program where a C extension cannot be built, with what to install."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = [what for what, there in (("cc", shutil.which("cc")), (str(header), header.exists())) if not there]
    if missing:
        fail(
            f"{BUILT_FROM_C} is compiled here and {' and '.join(missing)} cannot be found.\n"
            f"On Debian: apt-get install gcc libc6-dev python{version}-dev"
        )


def install_megarl() -> None:
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def read_pins(lock: Path) -> dict[str, str]:
    """Package name -> `name==version`, of a lock file's lines."""
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {line.split("==")[0]: line for line in lines if line}


def pip(*arguments: str) -> None:
    """Run pip in .venv; its output is shown only when it fails, which ends the program."""
    command = [str(PYTHON), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    log = STAMPS / "pip.log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=STEP_LIMIT_S)
    if done.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        fail(f"{' '.join(command[:6])} ... ended with {done.returncode}:\n{tail}")


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def fail(text: str) -> NoReturn:
    sys.exit(f"install: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
