"""What roles export: a policy as its checkpoint was, a critic as what transformers calls a sequence classifier with one
label; whole or not at all.
"""

import contextlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import build_samples, build_spec, write_checkpoint

from megarl.config.schema.roles import OptimizerConfig, RandomModelConfig
from megarl.mcore import checkpoints
from megarl.mcore.checkpoints import CheckpointReader, write_hf_checkpoint, write_safetensors
from megarl.mcore.spec import Role
from megarl.mcore.worker import MegatronWorker
from megarl.models.checkpoint import build_random_checkpoint
from megarl.types import Sequences

FAMILIES = pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False)])


@contextlib.contextmanager
def open_worker(checkpoint: Path, role: Role, scratch: Path) -> Iterator[MegatronWorker]:
    spec = build_spec(checkpoint, role, optimizer=OptimizerConfig(lr=1e-2))
    worker = MegatronWorker(spec, 0, 1, f"file://{scratch}/{checkpoint.name}.init")
    try:
        yield worker
    finally:
        worker.close()


@FAMILIES
def test_a_trained_policys_export_in_many_files_says_in_transformers_what_the_policy_says(
    tmp_path: Path, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = RandomModelConfig(
        family=family, alphabet="abcdef", hidden_size=64, ffn_size=96, num_layers=2, tie_embeddings=tied
    )
    source = build_random_checkpoint(config, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    GenerationConfig(temperature=0.6, top_k=7, do_sample=True, eos_token_id=[1, 2]).save_pretrained(source)
    monkeypatch.setattr(checkpoints, "MAX_FILE_BYTES", 40_000)
    with open_worker(source, Role.policy, tmp_path) as worker:
        samples = build_samples()
        samples.sequences.tokens.remainder_(worker.arch.vocab_size)
        worker.update(samples, [torch.arange(12)] * 3)
        worker.export_weights(tmp_path / "export")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
        prompt = torch.tensor([[4, 5, 3]])
        greedy = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None)[0]
        tokens = greedy.tolist()
        # Of each token of the greedy text, and of each other one in the place of the last.
        rows = [[*tokens[:-1], last] for last in range(worker.arch.vocab_size)]
        sequences = Sequences(
            torch.tensor(rows).flatten(), torch.tensor([len(tokens)] * len(rows)), torch.tensor([3] * len(rows))
        )
        logprobs = worker.logprobs(sequences, 1.0).values
    with torch.no_grad():
        expected = torch.log_softmax(model(greedy[None]).logits[0], -1)
    torch.testing.assert_close(logprobs[tokens[-1]], expected[2:-1].max(-1).values, rtol=0, atol=1e-4)
    assert int(logprobs[:, -1].argmax()) == tokens[-1]
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    stored = {name: (file.name, tensor.nbytes) for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert stored.keys() == load_file(source / "model.safetensors").keys()
    assert index["metadata"]["total_size"] == sum(size for _, size in stored.values())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@FAMILIES
def test_a_critic_begun_without_a_head_is_the_same_critic_where_its_export_is_loaded(
    tmp_path: Path, family: str, tied: bool
) -> None:
    from transformers import AutoModelForSequenceClassification

    write_checkpoint(tmp_path / "policy", family, tied=tied)
    samples = build_samples()
    with open_worker(tmp_path / "policy", Role.critic, tmp_path) as worker:
        assert not worker.values(samples.sequences).values.any()
        worker.update(samples, [torch.arange(12)] * 3)
        expected = worker.values(samples.sequences).values
        worker.export_weights(tmp_path / "critic")
    with open_worker(tmp_path / "critic", Role.critic, tmp_path) as worker:
        assert torch.equal(worker.values(samples.sequences).values, expected)
    assert expected.std() > 0.01
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    tensors, found = load_file(tmp_path / "critic" / "model.safetensors"), model.state_dict()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert (config["num_labels"], config["architectures"]) == (1, [type(model).__name__])


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    target = tmp_path / "run" / "weights"

    def failing() -> Any:
        yield "a", torch.zeros(2)
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        write_hf_checkpoint(target, source, failing())
    assert list(target.parent.iterdir()) == []
    for value in (1.0, 2.0):
        write_hf_checkpoint(target, source, [("a", torch.full((2,), value))])
    assert {file.name for file in target.iterdir()} == {"config.json", "model.safetensors"}
    with CheckpointReader(target) as reader:
        assert reader.read("a").tolist() == [2.0, 2.0]
        with pytest.raises(KeyError, match="has no tensor b"):
            reader.read("b")
    assert [path.name for path in target.parent.iterdir()] == ["weights"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_names_the_dtype_of_the_weights_by_which_transformers_loads_them(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: "float16", "model_type": "llama"}))
    tensors = [("model.norm.weight", torch.ones(2, dtype=torch.bfloat16))]
    write_hf_checkpoint(tmp_path / "written", tmp_path, tensors)
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert written == {key: "bfloat16", "model_type": "llama"}


def test_tensors_of_a_file_that_is_written_are_not_held_while_the_next_are_made(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            alive.append(sum(each() is not None for each in made))
            tensor = torch.full((20,), float(number))
            made.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    write_safetensors(tmp_path, make(), max_file_bytes=160)
    assert max(alive) == 2
    # Who may read the folder may read the model: a server of another user, too.
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.safetensors")} == {0o644}
    with CheckpointReader(tmp_path) as reader:
        assert [reader.read(f"t{number}")[0].item() for number in range(5)] == [0, 1, 2, 3, 4]
