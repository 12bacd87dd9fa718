"""Checkpoints against files that are missing, changed, added, cut off: what has a name is whole, what may go goes;
and what a damaged JSON file may hold ends in one ValueError that names it."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from generation import load_rollouts

from megarl.config.errors import ConfigError
from megarl.files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    Folder,
    check_space,
    load_json_object,
    load_manifest,
    locking,
    naming_file,
    parse_strict_json,
    verify_files,
    write_manifest,
)
from megarl.mcore.spec import read_architecture
from megarl.report.record import load_metrics, load_outcome
from megarl.run.command import load_run
from megarl.task.data import read_jsonl


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a file of its own and one below that has its own manifest."""
    role = tmp_path / "policy"
    (role / "hf").mkdir(parents=True)
    (role / "__0_0.distcp").write_bytes(bytes(1000))
    (role / "hf" / "config.json").write_text("{}")
    (tmp_path / "state.json").write_text('{"iteration": 3}')
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "replay.jsonl").write_text("x")
    write_manifest(role, {"kind": "megatron"})
    write_manifest(tmp_path, {"kind": "training"})
    return tmp_path


def test_a_manifest_lists_size_and_sha256_of_every_file_and_of_manifests_below(checkpoint: Path):
    manifest = load_manifest(checkpoint)
    assert dict(manifest.about) == {"kind": "training"}
    assert sorted(manifest.files) == ["more/replay.jsonl", f"policy/{MANIFEST}", "state.json"]
    assert manifest.files["state.json"] == (16, hashlib.sha256(b'{"iteration": 3}').hexdigest())
    assert sorted(load_manifest(checkpoint / "policy").files) == ["__0_0.distcp", "hf/config.json"]
    verify_files(checkpoint)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("policy/__0_0.distcp", flip, "policy: damaged: __0_0.distcp"),
        ("policy/__0_0.distcp", lambda p: p.write_bytes(bytes(999)), "policy: damaged: __0_0.distcp"),
        ("policy/hf/config.json", Path.unlink, "policy: missing: hf/config.json"),
        (f"policy/{MANIFEST}", flip, f"damaged: policy/{MANIFEST}"),
        (f"policy/{MANIFEST}", Path.unlink, f"missing: policy/{MANIFEST}"),
    ],
)
def test_a_file_that_is_not_as_written_is_named(checkpoint: Path, name: str, damage, message: str):
    damage(checkpoint / name)
    with pytest.raises(CheckpointError, match=message):
        verify_files(checkpoint)


@pytest.mark.parametrize("name", ["policy/.DS_Store", "notes.txt"])
def test_a_file_that_is_not_listed_is_named_and_left_alone(checkpoint: Path, name: str):
    (checkpoint / name).write_text("?")
    with pytest.warns(RuntimeWarning, match=f"not in the manifest, left alone: {Path(name).name}"):
        verify_files(checkpoint)
    assert (checkpoint / name).is_file()


def test_a_file_that_nfs_leaves_for_an_open_one_is_neither_listed_nor_named(checkpoint: Path, recwarn):
    (checkpoint / "policy" / ".nfs0000000000a1").write_text("?")
    write_manifest(checkpoint / "policy", {"kind": "megatron"})
    write_manifest(checkpoint, {"kind": "training"})
    (checkpoint / "policy" / ".nfs0000000000a1").unlink()
    (checkpoint / ".nfs0000000000b2").write_text("?")
    verify_files(checkpoint)
    assert not recwarn.list


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, "{}", '{"format": 1, "about": {}, "files": {"a": 3}}'])
def test_what_is_no_manifest_is_an_error_that_names_it(tmp_path: Path, content: str):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: is not a manifest"):
        load_manifest(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints", keep_last=3)


def publish(folder: Folder, *iterations: int, score: float | None = None) -> None:
    for iteration in iterations:
        building = folder.begin(iteration)
        (building / "state.json").write_text(f"{iteration}")
        write_manifest(building, {"kind": "training"})
        folder.publish(iteration)
        if score is not None:
            folder.score(iteration, score)


def refuse(text: str) -> None:
    raise AssertionError(f"nothing was to be said, but: {text}")


def test_the_newest_complete_checkpoint_is_found_and_latest_names_it(folder: Folder):
    assert folder.find_newest(refuse) is None
    publish(folder, 20, 40)
    assert folder.find_newest(refuse) == (40, folder.path / "iteration-000040")
    assert (folder.path / LATEST).read_text() == "iteration-000040\n"
    shutil.rmtree(folder.path)
    with pytest.raises(CheckpointError, match="found no checkpoint, but the run had saved iteration-000040: put it"):
        folder.find_newest(refuse)


def test_what_is_being_built_is_no_checkpoint_and_is_cleaned_away(folder: Folder):
    publish(folder, 20)
    (folder.begin(40) / "state.json").write_text("half")
    assert folder.list_complete() == [20]
    with pytest.raises(CheckpointError, match="was not completed"):
        folder.publish(40)
    folder.clean()
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["iteration-000020", LATEST]


def test_a_damaged_checkpoint_is_said_put_aside_and_the_one_before_is_taken(folder: Folder):
    said: list[str] = []
    publish(folder, 20, 40, 60)
    (folder.path / "iteration-000060" / "state.json").write_text("other")
    (folder.path / "iteration-000040" / "state.json").unlink()
    assert folder.find_newest(said.append) == (20, folder.path / "iteration-000020")
    assert "damaged: state.json" in said[0]
    assert "missing: state.json" in said[1]
    assert (folder.path / LATEST).read_text() == "iteration-000020\n"
    publish(folder, 40)
    assert folder.list_complete() == [20, 40]
    assert (folder.path / "iteration-000060.damaged" / "state.json").read_text() == "other"


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_and_all_is_left_as_it_is(folder: Folder):
    publish(folder, 20, 40)
    (folder.path / "iteration-000020" / "state.json").unlink()
    manifest = folder.path / "iteration-000040" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"no checkpoint is intact: .*format 2; this .*000020: missing: state"):
        folder.find_newest(refuse)
    assert folder.list_complete() == [20, 40]


def test_the_newest_and_the_best_stay_and_of_equal_ones_the_later(tmp_path: Path):
    folder = Folder(tmp_path, keep_last=2, keep_best=2)
    for iteration, score in ((20, 0.9), (30, 0.7), (40, 0.1), (60, 0.7), (80, 0.2), (100, None), (120, 0.3)):
        publish(folder, iteration, score=score)
    assert folder.list_complete() == [20, 60, 100, 120]


def test_only_one_process_at_a_time_may_write_to_a_directory(tmp_path: Path):
    holder = rf"process {os.getpid()} on \S+ uses it"
    with locking(tmp_path):
        for patience_s, waited in ((0.0, ";"), (0.2, ", even after 0.2 s;")):
            with pytest.raises(CheckpointError, match=holder + waited), locking(tmp_path, patience_s):
                pass
    with locking(tmp_path):
        pass


def test_a_lock_that_becomes_free_in_time_is_taken_and_the_wait_is_told_once(tmp_path: Path):
    held = ["import pathlib, sys, time", "from megarl.files import locking"]
    held += ["with locking(pathlib.Path(sys.argv[1])):", "    print('held', flush=True)", "    time.sleep(1.5)"]
    told: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "\n".join(held), str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with locking(tmp_path, 60.0, told.append):
            assert other.wait(10) == 0
    (text,) = told
    assert text.startswith(f"waiting up to 60 s for the lock of {tmp_path}, which process {other.pid} on ")


def test_a_checkpoint_that_has_no_room_is_refused_with_both_sizes(tmp_path: Path):
    check_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(CheckpointError, match=r"takes about 1048576.00 GiB and its file system has .* free"):
        check_space(tmp_path, 2**50)


DEEP = '{"a": ' * 200_000


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "holds a JSON list"), ("{", "a JSON object was expected"), (DEEP, "nested")]
)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"a.json: .*{message}"):
        load_json_object(tmp_path / "a.json")


def test_strict_json_has_no_nan():
    assert parse_strict_json('{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    with pytest.raises(ValueError, match="NaN is not JSON"):
        parse_strict_json('{"a": NaN}')


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_architecture),
        ("metrics.jsonl", lambda folder: load_metrics(folder / "metrics.jsonl")),
        ("rollouts.jsonl", lambda folder: load_rollouts(folder / "rollouts.jsonl")),
        ("data.jsonl", lambda folder: list(read_jsonl(folder / "data.jsonl"))),
        ("run.json", load_run),
        ("run.json", load_outcome),
    ],
)
def test_a_deeply_nested_file_is_an_error_of_its_reader(tmp_path: Path, name: str, read):
    (tmp_path / name).write_text(DEEP + "\n")
    with pytest.raises((ValueError, ConfigError), match="nested too deeply"):
        read(tmp_path)


def test_a_write_that_finds_no_room_names_its_file():
    full = Path("/dev/full")
    found = pytest.raises(OSError, match="No space left on device: '/dev/full'")
    with found, naming_file(full), full.open("w") as file:
        file.write("x" * 100_000)
