"""A model's name on the hub: downloaded where the machine may, by huggingface_hub, without what is not needed."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megarl.config.errors import ConfigError
from megarl.models.checkpoint import NEEDED_FILES, find_checkpoint

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The calls of snapshot_download; `found["error"]` ends those that may download."""
    calls, found, cache = [], {"error": None}, tmp_path / "snapshot"

    def download(name, *, local_files_only=False, allow_patterns):
        calls.append((name, local_files_only, tuple(allow_patterns)))
        if local_files_only and not cache.exists():
            raise LocalEntryNotFoundError("not in the cache")
        if found["error"] is not None:
            raise found["error"]
        cache.mkdir(exist_ok=True)
        for file in FILES:
            (cache / file).write_text("{}")
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return calls, found


def test_a_name_that_is_not_in_the_cache_is_downloaded_once_without_what_is_not_needed(hub, capsys):
    calls, _ = hub
    for _ in range(2):
        assert sorted(file.name for file in find_checkpoint("owner/small", "model.path").iterdir()) == list(FILES)
    own = ("owner/small", True, NEEDED_FILES)
    assert calls == [own, ("owner/small", False, NEEDED_FILES), own]
    assert capsys.readouterr().out.count("model.path: owner/small is not in the Hugging Face cache") == 1


def test_where_nothing_may_be_downloaded_the_command_is_said(hub, monkeypatch):
    _, found = hub
    found["error"] = OSError("no network")
    with pytest.raises(
        ConfigError, match=r"could not be downloaded \(no network\); .*`hf download owner/small` does it"
    ):
        find_checkpoint("owner/small", "model.path")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids to download it; .* `hf download owner/small`"):
        find_checkpoint("owner/small", "model.path")
