"""Limits and places with which no run works are named before anything starts."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.models.checkpoint import build_once
from megarl.run.machine import LEAST_OPEN_FILES, check_surroundings

CODE = """
import resource, sys
from megarl.run.machine import check_surroundings
limit, soft, hard = (int(word) for word in sys.argv[1:])
resource.setrlimit(limit, (soft, hard))
print(*check_surroundings(), sep="\\n")
print(resource.getrlimit(limit)[0])
"""


def limit(kind: int, soft: int, hard: int) -> list[str]:
    """The messages under this limit, and the soft limit afterwards."""
    command = [sys.executable, "-c", CODE, str(kind), str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_nothing_is_said_of_the_surroundings_of_these_tests() -> None:
    assert list(check_surroundings()) == []


def test_few_open_files_are_named() -> None:
    assert limit(resource.RLIMIT_NOFILE, 64, 64)[0] == (
        f"ulimit -n: found 64 open files; Ray and the servers need {LEAST_OPEN_FILES}"
    )


def test_the_soft_limit_of_open_files_is_raised_where_the_hard_one_allows_it() -> None:
    assert limit(resource.RLIMIT_NOFILE, 256, LEAST_OPEN_FILES) == ["", str(LEAST_OPEN_FILES)]


@pytest.mark.parametrize(("kind", "option"), [(resource.RLIMIT_FSIZE, "-f"), (resource.RLIMIT_AS, "-v")])
def test_a_limit_of_sizes_is_named(kind: int, option: str) -> None:
    (message, _) = limit(kind, 2**35, 2**35)
    assert message.startswith(f"ulimit {option}: found {2**25} KiB for a ")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_tmpdir_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    (message,) = check_surroundings()
    assert message.startswith(f"TMPDIR: found {tmp_path / name}, which is no directory that user ")


def test_a_home_that_is_a_file_is_named_with_the_variable_that_names_another_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MEGARL_CACHE", raising=False)
    (tmp_path / "home").touch()
    with pytest.raises(
        ConfigError, match=r"MEGARL_CACHE: found nothing, which is ~/.cache/megarl; the model cannot be"
    ):
        build_once(tmp_path / "home" / ".cache" / "model", lambda _directory: None)
