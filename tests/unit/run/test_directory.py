"""A directory that cannot be written to is named before anything starts."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.run.command import DEFAULT, OF_A_START, RUN_KEY, SWEEP_KEY, check_directory, find_directory, look_before

NOBODY = 65534


def run_as_nobody(arguments: list[str], cwd: Path) -> str:
    """What the check says to a user whom permissions bind, as they do not bind root."""
    code = (
        "import os, sys\n"
        "from megarl.run.command import check_directory\n"
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


def begin(run_dir: Path) -> None:
    """What Hydra and the log of the driver leave in the directory of a run."""
    for folder, names in OF_A_START.items():
        (run_dir / folder).mkdir(parents=True)
        for name in names:
            (run_dir / folder / name).write_text("")


@pytest.mark.parametrize("arguments", [[], ["hydra.run.dir=runs/${now:%H}_x"], ["hydra.run.dir=runs/one"]])
def test_the_directory_of_a_start_that_is_refused_is_removed_with_a_new_parent(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    before, run_dir = look_before(arguments), tmp_path / "runs" / "one"
    begin(run_dir)
    before.remove_unused(run_dir)
    assert not run_dir.exists()
    is_named = arguments[-1:] == ["hydra.run.dir=runs/one"]
    assert sorted(path.name for path in tmp_path.iterdir()) == (["kept", "runs"] if is_named else ["kept"])


def test_a_directory_that_was_there_or_holds_anything_else_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "runs" / "earlier")
    earlier = look_before([])
    begin(tmp_path / "runs" / "begun")
    (tmp_path / "runs" / "begun" / "run.json").write_text("{}")
    begin(tmp_path / "runs" / "logged")
    (tmp_path / "runs" / "logged" / "logs" / "server-0.log").write_text("")
    begin(tmp_path / "runs" / "linked")
    (tmp_path / "runs" / "linked" / "more").symlink_to(tmp_path)
    begin(tmp_path / "elsewhere")
    files = sorted(tmp_path.rglob("*"))
    for name in ("runs/earlier", "runs/begun", "runs/logged", "runs/linked", "elsewhere"):
        earlier.remove_unused(tmp_path / name)
    look_before(["hydra.run.dir=elsewhere"]).remove_unused(tmp_path / "elsewhere")
    assert sorted(tmp_path.rglob("*")) == files


def test_a_refused_command_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def score(prompt, response):\n    return prompt.columns['gold']\n")
    command = [sys.executable, "-m", "megarl.train", "reward=function", "reward.path=bad.py:score"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "KeyError: 'gold'" in ended.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["bad.py"]
