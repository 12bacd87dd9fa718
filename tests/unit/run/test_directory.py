"""A directory that cannot be written to is named before anything starts."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.run.directory import DEFAULT, RUN_KEY, SWEEP_KEY, check_directory, find_directory

NOBODY = 65534


def run_as_nobody(arguments: list[str], cwd: Path) -> str:
    """What the check says to a user whom permissions bind, as they do not bind root."""
    code = (
        "import os, sys\n"
        "from megarl.run.directory import check_directory\n"
        "from megarl.config.errors import ConfigError\n"
        "os.setuid(int(sys.argv[1]))\n"
        "try: check_directory(sys.argv[2:])\n"
        "except ConfigError as error: print(*error.problems)"
    )
    user = str(NOBODY if os.geteuid() == 0 else os.geteuid())
    command = [sys.executable, "-c", code, user, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run's directory that everybody may write to, and reach, unlike those below pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        for name in ("checkpoints", "logs"):
            Path(parent, "run", name).mkdir(parents=True)
        Path(parent, "run", "metrics.jsonl").touch()
        for path in [Path(parent), *Path(parent).rglob("*")]:
            path.chmod(0o777)
        yield Path(parent, "run")


def test_a_directory_that_can_be_written_to_or_made_passes(run_dir: Path) -> None:
    assert run_as_nobody([f"{RUN_KEY}={run_dir}"], run_dir) == ""
    assert run_as_nobody([f"{RUN_KEY}={run_dir}/a/b"], run_dir) == ""
    assert run_as_nobody([], run_dir) == ""


def test_a_directory_without_write_permission_is_named(run_dir: Path) -> None:
    run_dir.chmod(0o555)
    cases = ([f"{RUN_KEY}={run_dir}"], [f"{RUN_KEY}={run_dir}/new/${{now:%Y}}_x"], [], ["-m", f"{SWEEP_KEY}={run_dir}"])
    for arguments in cases:
        assert f"{run_dir} cannot be written to by user" in run_as_nobody(arguments, run_dir)


@pytest.mark.parametrize("name", ["checkpoints", "logs", "metrics.jsonl"])
def test_what_a_run_writes_within_its_directory_is_checked_too(run_dir: Path, name: str) -> None:
    (run_dir / name).chmod(0o444)
    said = run_as_nobody([f"{RUN_KEY}='{run_dir}'"], run_dir)
    assert said.startswith(f"{RUN_KEY}: found {run_dir}, in which user ")
    assert said.endswith(f"cannot write to {name}")


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"file is there and is not a directory"):
            check_directory([f"{RUN_KEY}={path}"])


@pytest.mark.parametrize(
    ("arguments", "directory"),
    [
        ([], DEFAULT),
        ([f"{RUN_KEY}=a", f"{RUN_KEY}=b/c"], Path("b/c")),
        ([f"{RUN_KEY}='with space'"], Path("with space")),
        ([f"{RUN_KEY}=/data/${{now:%Y}}"], Path("/data")),
        ([f"{RUN_KEY}=/data/run_${{now:%Y}}/x"], Path("/data")),
    ],
)
def test_the_directory_is_what_the_last_override_says_up_to_an_interpolation(
    arguments: list[str], directory: Path
) -> None:
    assert find_directory(arguments, RUN_KEY) == directory


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
def test_a_read_only_file_system_is_said_to_be_one(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(ConfigError, match="its file system is read-only"):
            check_directory([f"{RUN_KEY}={tmp_path / 'run'}"])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
