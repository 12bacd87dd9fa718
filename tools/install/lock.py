#!/usr/bin/env python3.11
"""Makes the lock files beside it from pyproject.toml: `make lock`.

These come out: PLATFORM.lock (megarl, SGLang, TensorBoard, development tools) and PLATFORM-EXTRA.lock (what the extra
adds to it), for PLATFORM cpu and cuda. Every line is an exact pin; install.py installs them with --no-deps.

- cuda: every package asks for what its metadata says; torch is the one that SGLang pins.
- cpu: torch is what cpu-overrides.txt says, with the needs of its CPU build (cpu-uv.toml), and SGLang loses
  the packages in cpu-excludes.txt.

Existing pins are kept where they still satisfy pyproject.toml; --upgrade takes the newest of everything. The resolver
is uv, installed from PyPI into a temporary environment; it reads metadata and downloads no wheel of torch or CUDA.
"""

import argparse
import re
import subprocess
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
UV = "uv==0.13.9"
PYTHON = "3.11"
WHEEL_PLATFORM = "x86_64-manylinux_2_34"
"""SGLang's wheels are built for it (glibc 2.34: Debian 12, Ubuntu 22.04, RHEL 9)."""
TIME_LIMIT_S = 600
EXTRAS = ("smollm2", "verifiers", "wandb")


@dataclass(frozen=True)
class Target:
    name: str
    extras: tuple[str, ...]
    options: tuple[str, ...]
    other_pythons: tuple[str, ...]
    """Versions besides PYTHON on which the same pins must resolve."""
    own_extras: tuple[str, ...] = ()
    """Extras that have a lock for this platform alone"""


TARGETS = (
    Target(
        name="cpu",
        extras=("sglang", "tensorboard", "dev"),
        options=(
            f"--config-file={HERE}/cpu-uv.toml",
            f"--overrides={HERE}/cpu-overrides.txt",
            f"--excludes={HERE}/cpu-excludes.txt",
        ),
        other_pythons=(),
        # On cuda Transformer Engine's importlib-metadata is newer than mlflow-skinny takes: pip installs it there.
        own_extras=("mlflow",),
    ),
    Target(name="cuda", extras=("cuda", "tensorboard", "dev"), options=("--no-config",), other_pythons=("3.12",)),
)


def parse_pins(text: str) -> dict[str, str]:
    """Package name -> its line, for every requirement line of a lock file's text."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {normalize(re.split(r"[=\[ ]", line)[0]): line for line in lines if line}


def normalize(name: str) -> str:
    """The name as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def compile_lock(uv: Path, target: Target, extras: tuple[str, ...], python: str, *options: str) -> str:
    """The text of a resolved lock. Raises SystemExit with the resolver's words when there is no solution."""
    command = [
        str(uv), "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--annotation-style=line",
        f"--python-version={python}", f"--python-platform={WHEEL_PLATFORM}", *target.options, *options,
        f"--excludes={HERE}/smollm2-excludes.txt",
    ]  # fmt: skip
    command += [f"--extra={extra}" for extra in extras]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"{target.name}: no lock for extras {', '.join(extras)} on Python {python}:\n{done.stderr}")
    return done.stdout


def check_other_python(uv: Path, target: Target, base: str, python: str) -> None:
    """The pins made for PYTHON must be what another version gets as well."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(base)
        constraints.flush()
        other = compile_lock(uv, target, target.extras, python, f"--constraints={constraints.name}")
    different = parse_pins(base).keys() ^ parse_pins(other).keys()
    if different:
        raise SystemExit(f"{target.name}.lock: Python {python} needs another set of packages: {sorted(different)}")


def make_header(target: Target, note: str) -> str:
    pythons = " and ".join((PYTHON, *target.other_pythons))
    return f"# Made by `make lock` for {target.name}, Linux x86_64, Python {pythons}: do not edit. {note}\n"


def lock(uv: Path, target: Target, upgrade: bool) -> None:
    path = HERE / f"{target.name}.lock"
    keep = ["--upgrade"] if upgrade else []
    with tempfile.TemporaryDirectory() as scratch:
        # uv prefers the pins of an existing output file.
        output = Path(scratch) / "base.txt"
        if path.exists():
            output.write_text(path.read_text())
        compile_lock(uv, target, target.extras, PYTHON, f"--output-file={output}", *keep)
        base = output.read_text()
        for python in target.other_pythons:
            check_other_python(uv, target, base, python)
        path.write_text(make_header(target, "Installed with --no-deps.") + base)
        print(f"{path.relative_to(ROOT)}: {len(parse_pins(base))} packages")
        for extra in (*EXTRAS, *target.own_extras):
            everything = compile_lock(uv, target, (*target.extras, extra), PYTHON, f"--constraints={output}")
            added = [line for name, line in parse_pins(everything).items() if name not in parse_pins(base)]
            extra_path = HERE / f"{target.name}-{extra}.lock"
            header = make_header(target, f"What the extra {extra!r} adds to {path.name}.")
            extra_path.write_text(header + "".join(f"{line}\n" for line in added))
            print(f"{extra_path.relative_to(ROOT)}: {len(added)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the lock files from pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest releases instead of the present pins")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        binaries = Path(scratch) / "bin"
        install = [str(binaries / "python"), "-m", "pip", "install", "-qq", UV]
        subprocess.run(install, check=True, timeout=TIME_LIMIT_S)
        for target in TARGETS:
            lock(binaries / "uv", target, arguments.upgrade)


if __name__ == "__main__":
    main()
