"""The manifest of a checkpoint directory against files that are as written, missing, changed, added, cut off."""

import hashlib
from pathlib import Path

import pytest

from megarl.files import (
    MANIFEST,
    CheckpointError,
    load_manifest,
    verify_files,
    write_manifest,
)


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
        ("state.json", Path.unlink, "missing: state.json"),
    ],
)
def test_a_file_that_is_not_as_written_is_named(checkpoint: Path, name: str, damage, message: str):
    damage(checkpoint / name)
    with pytest.raises(CheckpointError, match=message):
        verify_files(checkpoint)


@pytest.mark.parametrize("name", ["policy/.DS_Store", "policy/__9_9.distcp", "notes.txt"])
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


@pytest.mark.parametrize(
    "content", ["", "[]", "[" * 100_000, "{}", '{"format": 1, "about": {}, "files": {"a": 3}}', '{"format": 1']
)
def test_what_is_no_manifest_is_an_error_that_names_it(tmp_path: Path, content: str):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: is not a manifest"):
        load_manifest(tmp_path)
