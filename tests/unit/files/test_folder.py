"""The folder of a run's checkpoints: what has a name is whole, what is damaged is passed over, what may go goes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    Folder,
    FormatError,
    check_space,
    locking,
    write_manifest,
)


def publish(folder: Folder, iteration: int, score: float | None = None) -> None:
    building = folder.begin(iteration)
    (building / "state.json").write_text(f"{iteration}")
    write_manifest(building, {"kind": "training"})
    folder.publish(iteration)
    if score is not None:
        folder.score(iteration, score)


def refuse(text: str) -> None:
    raise AssertionError(f"nothing was to be said, but: {text}")


def test_the_newest_complete_checkpoint_is_found_and_latest_names_it(tmp_path: Path):
    folder = Folder(tmp_path / "checkpoints", keep_last=2)
    assert folder.find_newest(refuse) is None
    publish(folder, 20)
    publish(folder, 40)
    assert folder.find_newest(refuse) == (40, folder.path / "iteration-000040")
    assert (folder.path / LATEST).read_text() == "iteration-000040\n"


@pytest.mark.parametrize("is_emptied", [False, True])
def test_checkpoints_that_were_removed_are_missed_and_named(tmp_path: Path, is_emptied: bool):
    folder = Folder(tmp_path / "checkpoints", keep_last=2)
    folder.check_kept()
    publish(folder, 20)
    publish(folder, 40)
    folder.check_kept()
    shutil.rmtree(folder.path)
    if is_emptied:
        folder.path.mkdir()
    with pytest.raises(CheckpointError, match="found no checkpoint, but the run had saved iteration-000040: put it"):
        folder.check_kept()


def test_what_is_being_built_is_no_checkpoint_and_is_cleaned_away(tmp_path: Path):
    folder = Folder(tmp_path, keep_last=2)
    publish(folder, 20)
    (folder.begin(40) / "state.json").write_text("half")
    assert folder.list_complete() == [20]
    with pytest.raises(CheckpointError, match="was not completed"):
        folder.publish(40)
    folder.clean()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iteration-000020", LATEST]


def test_a_damaged_checkpoint_is_said_put_aside_and_the_one_before_is_taken(tmp_path: Path):
    folder, said = Folder(tmp_path, keep_last=3), []
    for iteration in (20, 40, 60):
        publish(folder, iteration)
    (tmp_path / "iteration-000060" / "state.json").write_text("other")
    (tmp_path / "iteration-000040" / "state.json").unlink()
    assert folder.find_newest(said.append) == (20, tmp_path / "iteration-000020")
    assert "damaged: state.json" in said[0]
    assert "missing: state.json" in said[1]
    assert (tmp_path / LATEST).read_text() == "iteration-000020\n"
    publish(folder, 40)
    assert folder.list_complete() == [20, 40]
    assert (tmp_path / "iteration-000060.damaged" / "state.json").read_text() == "other"


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_and_all_is_left_as_it_is(tmp_path: Path):
    folder = Folder(tmp_path, keep_last=2)
    publish(folder, 20)
    publish(folder, 40)
    for name in ("iteration-000020", "iteration-000040"):
        (tmp_path / name / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is intact: .*000040: missing: state.json.*000020: missing"
    ):
        folder.find_newest(refuse)
    assert folder.list_complete() == [20, 40]


def test_a_checkpoint_of_another_release_is_not_taken_for_a_damaged_one(tmp_path: Path):
    folder = Folder(tmp_path, keep_last=2)
    publish(folder, 20)
    publish(folder, 40)
    manifest = tmp_path / "iteration-000040" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(FormatError, match="format 2; this release reads format 1"):
        folder.find_newest(refuse)
    assert folder.list_complete() == [20, 40]


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


def test_the_newest_and_the_best_stay_and_of_equal_ones_the_later(tmp_path: Path):
    folder = Folder(tmp_path, keep_last=2, keep_best=2)
    for iteration, score in ((20, 0.9), (30, 0.7), (40, 0.1), (60, 0.7), (80, 0.2), (100, None), (120, 0.3)):
        publish(folder, iteration, score)
    assert folder.list_complete() == [20, 60, 100, 120]


def test_a_checkpoint_that_has_no_room_is_refused_with_both_sizes(tmp_path: Path):
    check_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(CheckpointError, match=r"takes about 1048576.00 GiB and its file system has .* free"):
        check_space(tmp_path, 2**50)
